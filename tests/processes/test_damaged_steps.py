"""Histories of processes of which one finds damage, or each calls the folder otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shoal
from cli.sample_checkpoints import flip
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
            except shoal.errors.CorruptCheckpointError as error:
                refused = error.exit_code
            back, first = ckpts.resume(target, None, skip_corrupt=True)
            resumed_from = (refused, back["step"], wholly(back["w"]), first)
            for step in range(first, 5):
                ckpts.save(step, state(-step))
        found.append((kind, *resumed_from, list(ckpts.all_steps())))
    return found


def under_two_names(path):
    """Save, resume and tidy in a folder that each process knows by another name."""
    own = Path(path) / f"l{shoal.process_index()}" / "run"
    with shoal.Checkpoints(own, keep=2) as ckpts:
        _, first = ckpts.resume({"w": layout(), "step": 0}, lambda: state(-1))
        for step in range(first, 4):
            ckpts.save(step, state(step))
        ckpts.wait()
        back = shoal.restore(ckpts.path_of(3), {"w": layout(), "step": 0})
        shoal.save(own / "best", back)
        return first, list(ckpts.all_steps()), wholly(back["w"])


@pytest.fixture(scope="module")
def job():
    with Cluster(2, start_method="fork", devices=2) as job:
        yield job


def test_one_folder_may_have_a_name_on_each_process(job, tmp_path):
    (tmp_path / "shared").mkdir()
    for name in ("l0", "l1"):
        (tmp_path / name).symlink_to("shared")
    assert job.run(under_two_names, str(tmp_path)) == [(0, [2, 3], 3.0)] * 2


def test_all_resume_from_the_previous_step_whichever_process_reads_the_damage(job, tmp_path):
    found = job.run(resumed, str(tmp_path))
    assert found[0] == found[1]
    assert found[0] == [(kind, 76, 2, 2.0, 3, [3, 4]) for kind in KINDS]
