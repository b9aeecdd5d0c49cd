"""The job of `shoal doctor -n N`: N processes of the same command, under `shoal run`.

Each writes its report into a directory, so that they are compared even if they cannot meet.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from shoal import settings
from shoal.runtime.doctor.examine import DoctorRequest
from shoal.runtime.doctor.findings import (
    Diagnosis,
    Finding,
    Report,
    of_processes,
    unknown_variable,
    unpacked,
)
from shoal.runtime.system.child_process import own_environment


def diagnose_here(request: DoctorRequest, processes: str, devices: str | None) -> Diagnosis:
    """Run the checks in N processes of this machine; return all reports, compared."""
    options = [] if devices is None else ["--devices", devices]
    shared = [part for folder in request.shared for part in ("--shared", folder)]
    program = [] if request.program is None else [request.program]
    env = own_environment()
    unknown = settings.unknown_variables(env)  # found here; otherwise the launcher reports them
    with tempfile.TemporaryDirectory(prefix="shoal-doctor-") as to:
        run = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "shoal", "run", "-n", processes, *options),
                *("--no-prefix", "-m", "shoal", "doctor", "--to", to),
                *("--timeout", str(request.timeout_s), *shared, *program),
            ],
            env={name: value for name, value in env.items() if name not in unknown},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # what libraries print
        )
        files = sorted(Path(to).iterdir(), key=lambda file: int(file.stem.rpartition("-")[2]))
        reports = tuple(unpacked(file.read_bytes()) for file in files)
    diagnosis = _whole(reports, int(processes), run.returncode)
    notes = map(unknown_variable, unknown.values())
    return diagnosis._replace(differences=(*diagnosis.differences, *notes))


def _whole(reports: tuple[Report, ...], processes: int, code: int) -> Diagnosis:
    missing = sorted(set(range(processes)) - {report.process for report in reports})
    if not missing and code == 0:
        return of_processes(reports)
    finding = Finding("joining", f"shoal run ended with code {code}; its last lines say why")
    diagnosis = of_processes(reports) if reports else Diagnosis((), (), None, False, True)
    return diagnosis._replace(
        differences=(finding, *diagnosis.differences), is_complete=False, has_problem=True
    )
