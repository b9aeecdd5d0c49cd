"""A run in real processes: told to leave, killed, gone on with elsewhere, looked at without JAX."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from checkpoint import training_loop
from cli import sample_checkpoints
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.store.step_names import step_name
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.cluster import Cluster


def python(program, *arguments, env, code=0):
    done = subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout


def undisturbed():
    value = np.int32(0)
    for step in range(training_loop.STEPS):
        value = (value * np.int64(3) + step).astype(np.int32)
    return int(value)


def test_preempted_job_resumes_on_another_mesh(child_env, tmp_path):
    with Cluster(2, start_method="fork", devices=4, env=child_env) as job:
        first, second = job.run(training_loop.train, str(tmp_path / "run"), 13)
    assert first == second
    began, stopped, saved, _, code = first
    assert (began, saved[-1], code) == (0, stopped, 75)
    assert 13 <= stopped <= 20, "the save of step 19 is one at which they meet"
    with Cluster(1, devices=8, env=child_env, start_method="fork") as job:
        ((began, stopped, saved, values, code),) = job.run(
            training_loop.train, str(tmp_path / "run")
        )
    assert (began, stopped, saved, code) == (first[1] + 1, 29, [max(19, first[1]), 29], 0)
    assert values == {"w": [[undisturbed()] * 6] * 8, "seen": [undisturbed()] * 3}


def test_process_killed_during_a_save_loses_only_that_save(child_env, tmp_path):
    with Cluster(3, start_method="fork", env=child_env, faults="save.write@2#2:kill") as job:
        job.start(training_loop.lose_one, str(tmp_path))
        ended = job.wait(only=[0, 1])
    assert [one.value for one in ended] == [["SaveAbortedError", 71, (2,), [1], [0, 1]]] * 2
    with Checkpoints(tmp_path, client=LocalJob(1).clients[0]) as ckpts:
        assert ckpts.restore()["w"].tolist() == [1] * 1000
        assert [path.name for path in tmp_path.iterdir()] == [step_name(1)], "it was abandoned"


@pytest.mark.parametrize("point", ["retain.before", "delete.marked", "delete.half"])
def test_process_killed_while_deleting_old_steps_loses_no_kept_step(point, child_env, tmp_path):
    env = {**child_env, "SHOAL_FAULTS": f"{point}:kill", "PYTHONPATH": "tests"}
    if point == "retain.before":
        env["SHOAL_FAULTS"] = "retain.before#2:kill"
    python([training_loop.__file__], tmp_path, env=env, code=-9)
    alone = LocalJob(1).clients[0]
    with Checkpoints(tmp_path, keep=1, client=alone) as ckpts:
        expected = (1, 2) if point == "retain.before" else (2,)
        assert ckpts.all_steps() == expected
        assert ckpts.restore()["w"].tolist() == [2, 2, 2]
        ckpts.save(3, {"w": np.zeros(1)})
    assert [path.name for path in tmp_path.iterdir()] == [step_name(3)]


WITHOUT_JAX = """
import sys
from shoal.checkpoint.history.checkpoints import Checkpoints
ckpts = Checkpoints(sys.argv[1])
assert (ckpts.latest(), ckpts.all_steps()) == (20, (10, 20))
tree, first = ckpts.resume(None, None)
print(first, tree["params"]["w"].sum(), tree["params"]["b"].dtype, ckpts.restore(10)["step"])
ckpts.pin(10)
"""


def test_a_history_is_listed_and_restored_without_jax(child_env, tmp_path):
    run = sample_checkpoints.run_of_two(tmp_path / "run")
    (tmp_path / "jax.py").write_text("raise ImportError('there is no JAX')")
    env = {**child_env, "PYTHONPATH": str(tmp_path)}
    assert python(["-c", WITHOUT_JAX], run, env=env) == "21 306.0 bfloat16 10\n"
