"""docs/clusters/two-machines.md on two network namespaces, each with an address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from processes.clusters.pages import STEPS_WITH_NOTICE, check_went_on
from shoal.testing import enter
from shoal.testing.network import address_of, why_no_cuts
from shoal.testing.warden import MARK, environment_of, marked
from shoal.testing.warding import Warden

pytestmark = pytest.mark.skipif(bool(why_no_cuts()), reason=why_no_cuts() or "-")


@pytest.fixture(scope="module")
def machines():
    """Return the warden of two machines, each a namespace."""
    warden = Warden(2)
    yield warden
    warden.close()


@pytest.fixture
def start(folder, machines):
    """Return a function that starts the file on both machines."""
    folder.add("two-machines.md", "start.sh")
    inside = [sys.executable, "-I", "-S", enter.__file__]

    def run(**env):
        return [
            folder.start(
                *inside, *machine, shutil.which("sh"), "start.sh", address_of(0), str(index),
                SHOAL_TOKEN="a secret", **{MARK: machines.mark}, **env,
            )
            for index, machine in enumerate(machines.namespaces)
        ]  # fmt: skip

    return run


def test_job_ends_if_the_other_machine_is_missing(start):
    first, second = start(SHOAL_INITIALIZE_TIMEOUT_S="6", SHOAL_WARN_AFTER_S="1")
    os.killpg(second.popen.pid, signal.SIGKILL)
    assert first.code() == 74, first.said
    assert "node 1 of 2 has not joined after 6 s" in first.said


def program(mark, index):
    """Return the pid of a process of the job."""
    env = {b"SHOAL_PROCESS_ID": str(index).encode()}
    (pid,) = [
        pid for pid in marked(mark)
        if environment_of(pid).items() >= env.items()
        and b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    return pid


@pytest.mark.pages
def test_two_machines_page_runs_and_restarts_after_code_75(start, machines):
    both = start(STEPS=str(STEPS_WITH_NOTICE))
    both[0].until("from step 0")
    os.kill(program(machines.mark, 1), signal.SIGTERM)
    both[0].until("from step ", times=2)
    assert [job.code() for job in both] == [0, 0], [job.said for job in both]
    check_went_on(both[0].said, 2)
