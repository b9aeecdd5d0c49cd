"""`shoal doctor`: why a job does not start."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.doctor.local_job import diagnose_here
from shoal.cli.doctor.render import print_diagnosis
from shoal.errors import raise_all
from shoal.runtime.doctor.examine import DoctorRequest, diagnosed
from shoal.runtime.doctor.findings import Diagnosis, packed

_HELP = """\
Find why a job does not start: launcher, addresses, versions, devices, clocks, folders.

Start it in place of the program, by the same launcher: the processes meet as those of the program
would, compare what they see, and process 0 prints it. If they cannot meet, each process prints
what it found, with the reason. Alone, it checks this process and this host.

\b
Examples:
  shoal doctor                                    this process, this host
  shoal doctor -n 4                               4 processes here, as under shoal run
  srun shoal doctor --shared /home/me train.py    all tasks; is the folder shared, and is
                                                  train.py the same file everywhere?
  mpirun -n 16 shoal doctor
  torchrun --nproc-per-node 4 -m shoal doctor
  shoal doctor --alone                            one of several, without the others
  shoal doctor --json                             everything, for programs

\b
What it checks:
  launcher   the variables of which launcher are used, and why those of others are not
  address    what it resolves to; that process 0 can listen and the others connect
  versions   Python, JAX, jaxlib, NumPy, shoal, drivers; PROGRAM: a digest of the file
  devices    they start, in a child process, within --timeout
  clock      at one moment, on all hosts
  folders    each process sees the files of all others in --shared and SHOAL_RENDEZVOUS
  memory, disk, proxy

\b
Exit code:
  0      nothing is wrong; notes do not count
  1      a problem was found; under a launcher, on all processes
  2      wrong usage
"""

_FOUND = 1

_Processes = Annotated[
    str | None,
    typer.Option(
        "-n", "--processes", metavar="N", help="Start N processes here, as shoal run does."
    ),
]
_Devices = Annotated[
    str | None, typer.Option(metavar="N", help="With -n: virtual CPU devices per process.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
_Shared = Annotated[
    list[str] | None,
    typer.Option(metavar="DIR", help="A folder that all processes must share; may be repeated."),
]
_Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Limit of each wait: for processes, for devices."
    ),
]
_Alone = Annotated[bool, typer.Option("--alone", help="Do not wait for the other processes.")]
_To = Annotated[str | None, typer.Option(hidden=True)]
_Program = Annotated[str | None, typer.Argument(metavar="PROGRAM", hidden=True)]


def doctor(
    program: _Program = None,
    processes: _Processes = None,
    devices: _Devices = None,
    as_json: _AsJson = False,
    shared: _Shared = None,
    timeout_s: _Timeout = 60.0,
    alone: _Alone = False,
    to: _To = None,
) -> None:
    """Find why a job does not start: launcher, addresses, versions, devices, clocks, folders."""
    _check(processes, devices, timeout_s, alone)
    request = DoctorRequest(program, tuple(shared or ()), timeout_s, alone)
    if processes is not None:
        diagnosis = diagnose_here(request, processes, devices)
        print_diagnosis(diagnosis, as_json=as_json)
        raise typer.Exit(_code(diagnosis))
    with diagnosed(request, os.environ) as diagnosis:
        if to is not None:
            own = [one for one in diagnosis.reports if one.process == diagnosis.process]
            Path(to, f"process-{diagnosis.process}.json").write_bytes(packed(own[0]))
            return
        if diagnosis.process in (0, None) or not diagnosis.is_complete:
            print_diagnosis(diagnosis, as_json=as_json)
    raise typer.Exit(_code(diagnosis))


doctor.__doc__ = _HELP


def _check(processes: str | None, devices: str | None, timeout_s: float, alone: bool) -> None:
    problems = []
    for option, value in (("-n", processes), ("--devices", devices)):
        if value is not None and not (value.isascii() and value.isdigit() and int(value) >= 1):
            problems.append(f"{option} {value} must be a whole number, at least 1")
    if devices is not None and processes is None:
        problems.append(f"--devices {devices} is for the processes of -n N")
    if processes is not None and alone:
        problems.append("--alone is for one of several processes: leave out -n")
    if not 0 < timeout_s < math.inf:
        problems.append(f"--timeout {timeout_s:g} must be a positive number of seconds")
    raise_all("doctor", problems)


def _code(diagnosis: Diagnosis) -> int:
    return _FOUND if diagnosis.has_problem else 0
