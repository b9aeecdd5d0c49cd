"""`shoal save` at work on a job of two processes: it saves, goes on, and computes the same."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import pytest

from processes import saving_on_request
from processes.saving_on_request import undisturbed
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.cli.save import save
from shoal.errors import InitializeError
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.cluster import Cluster


def test_three_saves_at_random_moments_and_one_that_stops(child_env, tmp_path, capsys):
    """Each is committed at a step of its own, and none changes what the job computes."""
    run, chance = tmp_path / "run", random.Random()
    with Cluster(2, start_method="fork", env=child_env) as bench:
        bench.start(saving_on_request.train, str(run))
        _, address, token = bench.wait_for("serves", 0).split()
        bench.wait_for("trains", 0)
        for _ in range(3):
            threading.Event().wait(0.1 * chance.random())
            save(address, token, wait=True)
        requested = [int(line) for line in capsys.readouterr().out.split()]
        save(address, token)
        assert capsys.readouterr().out.startswith("requested: the job saves step ")
        command = [sys.executable, "-m", "shoal", "save", address, "--then-stop", "--wait"]
        env = child_env | {"SHOAL_TOKEN": token}
        stops = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        (saved, code), other = (ended.value for ended in bench.wait())
    assert (other, code) == ((saved, code), 75)
    assert (saved[:3], saved[-1]) == (requested, int(stops.stdout))
    assert len(saved) in (4, 5), "one may be the step of the notice"
    with Checkpoints(run, client=LocalJob(1).clients[0]) as ckpts:
        assert ckpts.all_steps() == tuple(saved)
        for step in saved:
            assert ckpts.restore(step)["w"].tolist() == undisturbed(step + 1)
    with pytest.raises(InitializeError, match="is the job over"):
        save(address, token)
