"""Save 65,536 random numbers, or restore and compare them: python saved_shoal.py save|restore"""

import sys

import numpy as np

import shoal

shoal.initialize()
w = np.random.default_rng(0).normal(size=(256, 256)).astype("float32")
if sys.argv[1] == "save":
    shoal.save("ck", {"w": w})
else:
    back = shoal.restore("ck")["w"]
    for at in zip(*np.nonzero(back != w), strict=True):
        print(f"saved {w[at]}, restored {back[at]}")
