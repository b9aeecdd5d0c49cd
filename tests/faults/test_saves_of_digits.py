"""`shoal save` at random moments of the digits example, on a machine that is busy."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from faults import digits_saved
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.cli.save import save
from shoal.runtime.client.in_process import LocalJob

pytest.importorskip("sklearn")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
REQUESTS = 8
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextlib.contextmanager
def load():
    """Keep all cores busy."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            one.wait()


def saved_in(folder):
    """Return a function that returns what was saved of a step, bit for bit."""
    ckpts = Checkpoints(folder / "run", client=LocalJob(1).clients[0], recover=False)
    return lambda step: [np.asarray(x).tobytes() for x in jax.tree.leaves(ckpts.restore(step))]


def test_each_request_is_a_committed_step_and_changes_nothing(cluster, child_env, tmp_path, capsys):
    """A notice ends the job, at a step that is saved as well. A run without requests, which saves
    every epoch, has the same bits at each of these steps."""
    chance = random.Random()

    def start(folder, epochs, every):
        bench = cluster(2, devices=2, start_method="fork", env=child_env, deadline_s=250.0)
        bench.start(digits_saved.train, str(tmp_path / folder), epochs, every)
        return bench

    with load():
        bench = start("requested", 10**6, every=3)
        _, address, token = bench.wait_for("serves", 0).split()
        bench.wait_for("epoch", 0)
        for _ in range(REQUESTS):
            threading.Event().wait(0.3 * chance.random())
            save(address, token, wait=True)
        save(address, token, wait=True, then_stop=True)
        *requested, last = [int(line) for line in capsys.readouterr().out.split()]
        (steps, code), other = (one.value for one in bench.wait())
    assert (other, code) == ((steps, code), 75)
    assert len({*requested}) == REQUESTS
    assert {*requested, last} <= {*steps}
    assert steps[-1] == last
    undisturbed = start("undisturbed", last + 1, every=1)
    assert [one.value for one in undisturbed.wait()] == [(tuple(range(last + 1)), 0)] * 2
    found, expected = saved_in(tmp_path / "requested"), saved_in(tmp_path / "undisturbed")
    for step in [*requested, last]:
        assert found(step) == expected(step), f"step {step} of {last}"
