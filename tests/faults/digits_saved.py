"""The digits example as its processes run it while saves are requested."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import shoal

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(folder, epochs, every):
    """Train so many epochs, or until a notice; return the saved steps and the exit code."""
    sys.path.insert(0, str(EXAMPLES))
    import digits

    digits.EPOCHS = epochs
    print("serves", os.environ["SHOAL_COORDINATOR"], os.environ["SHOAL_TOKEN"], flush=True)
    mesh = shoal.make_mesh({"data": -1, "model": 2})
    images, _, labels, _ = digits.data_in(Path(folder, "data"))
    with shoal.Checkpoints(Path(folder, "run"), every=every) as ckpts:
        digits.train(ckpts, (images, labels), mesh, print)
        ckpts.wait()
        steps = ckpts.all_steps()
    shoal.shutdown()
    return steps, shoal.preemption.exit_code()
