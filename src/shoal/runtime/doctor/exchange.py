"""Exchange the reports of the processes of a job that all have joined.

Only process 0 receives them, each at a point of two processes: if all were sent to all, the bytes
would grow with the square of the number of processes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

from shoal.errors import ShoalError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.doctor.diagnosis import Diagnosis, of_one, of_processes
from shoal.runtime.doctor.findings import CheckResult, Report, packed, problem_of, unpacked
from shoal.runtime.doctor.shared_folders import FolderMarks
from shoal.runtime.rules.point import Point


def exchange(
    joined: Coordinator, report: Report, folders: Iterable[str], timeout_s: float
) -> Diagnosis:
    """Check clocks and folders together; return the diagnosis: of all processes on process 0.

    Args:
      folders: to be shared by all processes.
      timeout_s: for each wait.
    """
    marks = None
    try:
        drawn = secrets.token_hex(8).encode() if joined.process == 0 else b""
        token = joined.arrive(Point("shoal doctor"), drawn, timeout_s=timeout_s)[0].decode()
        names = {process: f"{token}-{process}" for process in range(joined.num_processes)}
        marks = FolderMarks(folders, names[joined.process])
        report = report.with_check("folders", marks.write())
        joined.arrive(Point("shoal doctor: folders"), timeout_s=timeout_s)
        report = report.with_check("clock", CheckResult({"time_s": time.time()}))
        report = report.with_check("hidden", CheckResult(marks.see(names)))
        return _collect(joined, report, timeout_s)
    except ShoalError as error:
        return of_one(
            report.with_check("address", CheckResult({}, (problem_of("joining", error),)))
        )
    finally:
        if marks is not None:
            marks.remove()


def _collect(joined: Coordinator, report: Report, timeout_s: float) -> Diagnosis:
    verdict = Point("shoal doctor: the verdict")
    if joined.process != 0:
        pair = Point("shoal doctor: a report", group=(0, joined.process))
        joined.arrive(pair, packed(report), timeout_s=timeout_s)
        has_problem = joined.arrive(verdict, timeout_s=timeout_s)[0] == b"1"
        return of_one(report)._replace(is_complete=True, has_problem=has_problem)
    reports = [report]
    for process in range(1, joined.num_processes):
        pair = Point("shoal doctor: a report", group=(0, process))
        reports.append(unpacked(joined.arrive(pair, timeout_s=timeout_s)[process]))
    diagnosis = of_processes(tuple(reports))
    joined.arrive(verdict, b"1" if diagnosis.has_problem else b"0", timeout_s=timeout_s)
    return diagnosis
