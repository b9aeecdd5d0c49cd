"""docs/clusters/mpi.md under the launchers themselves."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from processes.clusters.pages import STEPS_WITH_NOTICE, check_went_on


def installed(name):
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install shoal[test])")
    return found


def open_mpi(folder):
    """Start jobs with Open MPI's launcher: the wheels of both have an `mpirun`."""
    prterun = installed("prterun")
    folder.stand_in("mpirun", f'#!/bin/sh\nexec {shlex.quote(prterun)} --personality ompi "$@"\n')
    folder.add("mpi.md", "open-mpi.sh")
    return ["sh", "open-mpi.sh", "--allow-run-as-root", "--oversubscribe", "-n", "2"], "prterun"


def mpich(folder):
    hydra = installed("mpiexec.hydra")
    folder.stand_in("mpiexec", f'#!/bin/sh\nexec {shlex.quote(hydra)} "$@"\n')
    folder.add("mpi.md", "mpich.sh")
    return ["sh", "mpich.sh", "-n", "2"], "mpiexec.hydra"


# MPICH combines 3 and 72, the code of its peer, to 75.
FAILS = """
import sys, shoal
shoal.initialize()
if shoal.process_index() == 0:
    with open("starts", "a") as file:  # Open MPI may drop what was printed just before the end
        file.write("once ")
    sys.exit(3)
shoal.barrier("after")
"""


# Open MPI ends with the code of the process that ended first, which may be the peer.
@pytest.mark.parametrize(("mpi", "codes"), [(open_mpi, (3, 72)), (mpich, (1,))])
def test_a_job_that_fails_is_not_started_again(folder, mpi, codes):
    (folder.path / "train.py").write_text(FAILS)
    job = folder.start(*mpi(folder)[0])
    assert job.code() in codes, job.said
    assert (folder.path / "starts").read_text() == "once ", job.said


@pytest.mark.parametrize("mpi", [pytest.param(open_mpi, marks=pytest.mark.pages), mpich])
def test_mpi_page_runs_and_restarts_after_code_75(folder, mpi):
    command, name = mpi(folder)
    job = folder.start(*command, STEPS=str(STEPS_WITH_NOTICE))
    job.until("from step 0")
    os.kill(job.pids(name)[0], signal.SIGUSR1)
    job.until("from step ", times=2)
    assert job.code() == 0, job.said
    check_went_on(job.said, 2)
