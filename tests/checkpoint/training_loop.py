"""A loop that trains, for the processes of tests: whole numbers, so that every mesh agrees."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import shoal
from shoal.errors import CheckpointError

STEPS = 30


def train(path: str, noticed_at: int = -1) -> list[object]:
    """Train to the end, or to a notice; return the steps, what came out, and the exit code."""
    mesh = shoal.make_mesh({"data": -1, "model": 2})
    layouts = {"w": shoal.Layout(mesh, "data", "model"), "seen": shoal.Layout(mesh, None)}
    zeros = {"w": np.zeros((8, 6), np.int32), "seen": np.zeros(3, np.int64).astype(np.int32)}
    with shoal.Checkpoints(path, keep=2) as ckpts:
        state, first = ckpts.resume(layouts, lambda: shoal.put(zeros, layouts))
        for step in range(first, STEPS):
            state = {name: leaf * 3 + step for name, leaf in state.items()}
            if step == noticed_at and shoal.process_index() == shoal.process_count() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            stop = shoal.preempted(step)
            if stop or step % 10 == 9:
                ckpts.save(step, state)
            if stop:
                break
        saved = ckpts.wait() or list(ckpts.all_steps())
    values = {name: shoal.allgather(leaf, tiled=True).tolist() for name, leaf in state.items()}
    return [first, step, saved, values, shoal.preemption.exit_code()]


def lose_one(path: str) -> list[object]:
    """Save twice; somebody is killed during the second. Return what the survivors see."""
    ckpts = shoal.Checkpoints(path, keep=2)
    for step in (1, 2):
        ckpts.save(step, {"w": np.full(1000, step)})
        try:
            ckpts.wait()
        except CheckpointError as error:
            caught = error
    ckpts.wait()  # it is raised once
    told = type(caught).__name__, caught.exit_code, caught.processes
    return [*told, list(ckpts.all_steps()), list(shoal.live_processes())]


def save_two(path: str) -> None:
    """Save two steps, of which the first goes."""
    with shoal.Checkpoints(path, keep=1) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.full(3, step)})


if __name__ == "__main__":
    save_two(sys.argv[1])
