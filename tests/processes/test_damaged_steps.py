"""What one process alone finds damaged, all pass over: they resume from one step, and go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import shoal
from cli.checkpoints import flip
from shoal.testing.cluster import Cluster

KINDS = ("COMMIT", "manifest-*", "index-*", "data-*-00000-of-*", "data-*-00001-of-*")
ROWS = 1 << 17  # of each process: its data lie in blocks of its own


def layout():
    return shoal.Layout(shoal.make_mesh({"data": -1}), "data")


def state(step):
    count = shoal.process_count()
    return {"w": shoal.put(np.full((count * ROWS,), step, np.float32), layout()), "step": step}


def wholly(value):
    """Return the only value that a process's shards have."""
    (found,) = {float(one) for shard in value.addressable_shards for one in np.unique(shard.data)}
    return found


def resumed(path):
    """Damage each kind of file of the newest step; return what this process resumes from."""
    found = []
    for kind in KINDS:
        root = Path(path) / kind.replace("*", "x")
        with shoal.Checkpoints(root) as ckpts:
            for step in (1, 2, 3):
                ckpts.save(step, state(step))
        if shoal.process_index() == 0:
            (file,) = (root / "step_000000000003").glob(kind)
            flip(file, 20 if kind == "COMMIT" else -1)
        shoal.barrier("damaged")
        with shoal.Checkpoints(root, keep=2) as ckpts:
            target = {"w": layout(), "step": 0}
            try:
                ckpts.resume(target, None)
            except shoal.CorruptCheckpoint as error:
                refused = error.exit_code
            back, first = ckpts.resume(target, None, skip_corrupt=True)
            resumed_from = (refused, back["step"], wholly(back["w"]), first)
            for step in range(first, 5):
                ckpts.save(step, state(-step))
        found.append((kind, *resumed_from, list(ckpts.all_steps())))
    return found


def test_all_resume_from_the_step_before_whoever_reads_the_damage(tmp_path, child_env):
    with Cluster(2, start_method="fork", devices=2, env=child_env) as job:
        found = job.run(resumed, str(tmp_path))
    assert found[0] == found[1]
    assert found[0] == [(kind, 76, 2, 2.0, 3, [3, 4]) for kind in KINDS]
