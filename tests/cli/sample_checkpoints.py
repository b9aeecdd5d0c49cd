"""Checkpoints for tests of the command line: a run of two steps, and what crashes leave."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys

import ml_dtypes
import numpy as np

from shoal.checkpoint.disk import committing
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.saving import save as saving
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.store.step_names import new_attempt, step_name
from shoal.runtime.client.in_process import LocalJob

KILLED = """
import sys, numpy as np
from shoal.checkpoint.saving.save import save
from shoal.runtime.client.in_process import LocalJob
save.on(LocalJob(1).clients[0], sys.argv[1], {"w": np.arange(6.0)}, step=30)
"""


def tree(step):
    """Return what is saved: many kinds of leaves, most of them other values at other steps."""
    return {
        "params": {"w": np.arange(12.0).reshape(3, 4) + step, "b": np.ones(4, ml_dtypes.bfloat16)},
        "opt": [{"mu": np.full((2, 2), step, np.int8)}],
        "name": "blue\x1b[2J",
        "step": step,
    }


def save(path, value, step=None, **options):
    """Save as a job of one process."""
    saving.save.on(LocalJob(1).clients[0], str(path), value, step=step, **options)


def run_of_two(root):
    """Save two steps of a history."""
    for step in (10, 20):
        options = {"metrics": {"loss": 1 / step}, "user": {"run": "blue"}}
        save(root / step_name(step), tree(step), step, **options)
    return root


def begun(root, step=25, *, num_processes=3):
    """Begin an attempt of several processes that never wrote a part; return its id."""
    like = open_checkpoint(LocalStore(root / step_name(20))).manifest
    attempt = new_attempt()
    manifest = dataclasses.replace(like, attempt=attempt, step=step, num_processes=num_processes)
    folder = LocalFolder(root / step_name(step))
    committing.begin_attempt(folder, manifest, {"host": "h7", "pid": 123})
    return attempt


def killed_before_commit(path, env):
    """Let a process die when all parts are there and COMMIT is not."""
    env = {**env, "SHOAL_FAULTS": "save.assemble:kill"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=env, timeout=120)
    assert done.returncode == -9


def flip(path, offset=-1):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def from_the_future(path):
    """Make a checkpoint one of a newer shoal, whose COMMIT is whole."""
    said = (path / "COMMIT").read_bytes().replace(b"[1, 0]", b"[9, 0]")
    body = said[: said[:-1].rindex(b"\n") + 1]
    (path / "COMMIT").write_bytes(body + hashlib.sha256(body).hexdigest().encode() + b"\n")
