"""Save 65,536 random numbers, or restore and compare them: python saved_orbax.py save|restore"""

import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

path = Path("ck").resolve()
w = np.random.default_rng(0).normal(size=(256, 256)).astype("float32")
with ocp.StandardCheckpointer() as checkpointer:
    if sys.argv[1] == "save":
        checkpointer.save(path, {"w": w})
    else:
        back = np.asarray(checkpointer.restore(path)["w"])
        for at in zip(*np.nonzero(back != w), strict=True):
            print(f"saved {w[at]}, restored {back[at]}")
