"""Start one job of N processes to be measured, under mpiexec where a peer needs it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 900


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mpiexec() -> str | None:
    """Return the launcher of an MPI that mpi4py can use, if there is one."""
    beside = Path(sys.executable).with_name("mpiexec.hydra")  # MPICH's, also beside Open MPI's
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    with contextlib.suppress(ImportError):
        import mpi4py  # noqa: F401

        return found
    return None


def run_job(program: list[str], count: int, *, with_mpi: bool) -> dict[str, list[float]]:
    """Run `program ADDRESS INDEX COUNT` for each process; return what one of them measured.

    Args:
      program: a script and its arguments; one process prints its samples as a line of JSON.
      with_mpi: under mpiexec, where there is one; then INDEX is "mpi".
    """
    me = [sys.executable, *program, f"127.0.0.1:{free_port()}"]
    launcher = mpiexec() if with_mpi else None
    commands = [[*me, str(i), str(count)] for i in range(count)]
    if launcher:
        commands = [[launcher, "-n", str(count), *me, "mpi", str(count)]]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = "".join(job.communicate(timeout=PATIENCE_S)[0] for job in jobs)
    if any(job.returncode for job in jobs):
        raise SystemExit(f"{program} on {count} processes failed\n{said}")
    return dict(json.loads(next(line for line in said.splitlines() if line.startswith("{"))))
