"""Real processes that save whenever no save runs, while some of them are frozen for a while."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time

import numpy as np

import shoal
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.cluster import Cluster

STEPS = 2000
FROZEN_S = 1.5


def train(path):
    """Save whenever it can; return the steps that were saved, and those that began idle."""
    steps = random.Random(shoal.process_index())
    saved, idle = [], []
    with shoal.Checkpoints(path, keep=2, every="free") as ckpts:
        for step in range(STEPS):
            time.sleep(0.003 * steps.random())
            if step % 500 == 400:
                print("at", step, flush=True)
            was_saving = ckpts.is_saving
            if ckpts.save(step, {"w": np.full(1000, step)}):
                saved.append(step)
            elif not was_saving:
                idle.append(step)
    return saved, idle


def test_2000_steps_of_random_length_are_saved_alike_though_two_processes_freeze(
    child_env, tmp_path
):
    with Cluster(4, start_method="fork", env=child_env, deadline_s=100) as job:
        job.start(train, str(tmp_path))
        for words, frozen in (("at 400", (1, 2)), ("at 1400", (0, 3))):
            job.wait_for(words, frozen[0])
            for process in frozen:
                job.stop(process)
            threading.Event().wait(FROZEN_S)
            for process in frozen:
                job.cont(process)
        results = [ended.value for ended in job.wait()]
    saved = results[0][0]
    assert [one[0] for one in results] == [saved] * 4
    assert len(saved) > 3
    # Between two saves, the process that was farthest when the first ended had no idle step.
    for earlier, later in itertools.pairwise(saved):
        passed = [sum(earlier < step < later for step in idle) for _, idle in results]
        assert min(passed) == 0, (earlier, later, passed)
    with Checkpoints(tmp_path, client=LocalJob(1).clients[0]) as ckpts:
        assert ckpts.all_steps() == (*saved[-2:],)
        assert ckpts.restore()["w"].tolist() == [saved[-1]] * 1000


POLLED = """
import sys
import numpy as np
import shoal

shoal.initialize(virtual_devices=1)
with shoal.Checkpoints(sys.argv[1]) as ckpts:
    for step in range(100):
        if shoal.process_index() == 1 and step == 1:
            while ckpts.is_saving:
                pass
        if not ckpts.is_saving:
            ckpts.save(step, {"w": np.zeros(3)})
        elif shoal.process_index() == 0 and step == 5:
            while ckpts.is_saving:
                pass
"""


def test_the_report_of_saves_chosen_by_is_saving_names_free(tmp_path, child_env):
    script = tmp_path / "polls.py"
    script.write_text(POLLED)
    env = {**child_env, "SHOAL_FAULTS": "save.written@0:delay=0.5"}
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(script), str(tmp_path / "run")]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 70, done.stdout + done.stderr
    assert "processes gave save different steps" in done.stderr
    assert 'If is_saving chose it, use Checkpoints(every="free") instead.' in done.stderr
