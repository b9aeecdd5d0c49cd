"""What the processes do of which saves are requested."""

from __future__ import annotations

import itertools
import os
import random
import time

import numpy as np

import shoal


def undisturbed(steps):
    """Return the parameters after so many steps."""
    params = np.arange(8, dtype="uint32")
    for _ in range(steps):
        params = params * np.uint32(1664525) + np.uint32(1013904223)
    return params.tolist()


def train(path):
    """Train on two processes that differ in pace until a notice; return the steps, the result."""
    say("serves", os.environ["SHOAL_COORDINATOR"], os.environ["SHOAL_TOKEN"])
    layout = shoal.Layout(shoal.make_mesh({"data": -1}), "data")
    pause, saved = random.Random(shoal.process_index()), []
    with shoal.Checkpoints(path, every=10**6) as ckpts:
        init = {"w": shoal.put(np.arange(8, dtype="uint32"), layout)}
        params, first = ckpts.resume(layout, init)
        for step in itertools.count(first):
            time.sleep(0.002 * pause.random())
            params = {"w": params["w"] * 1664525 + 1013904223}
            stop = shoal.preempted(step)
            if ckpts.save(step, params):
                saved.append(step)
            if step == 10:
                say("trains")
            if stop:
                break
    shoal.shutdown()
    return saved, shoal.preemption.exit_code()


def say(*words):
    print(*words, flush=True)
