"""The reports of a job's processes, and what differs between them."""

from __future__ import annotations

from typing import NamedTuple

from shoal.runtime.doctor.comparing import compare
from shoal.runtime.doctor.findings import PROBLEM, Finding, Report


class Diagnosis(NamedTuple):
    """The knowledge of one process at the end: process 0 of a job that met has all reports."""

    reports: tuple[Report, ...]
    differences: tuple[Finding, ...]
    process: int | None
    is_complete: bool  # whether all processes of the job met, and process 0 shows their reports
    has_problem: bool  # in any report of the job, as far as this process knows

    @property
    def findings(self) -> tuple[tuple[Report | None, Finding], ...]:
        """All findings, each with its process; None: it is about several."""
        own = ((report, finding) for report in self.reports for finding in report.findings)
        return (*((None, finding) for finding in self.differences), *own)


def of_processes(reports: tuple[Report, ...]) -> Diagnosis:
    """Return the diagnosis of a whole job."""
    differences = compare(reports)
    found = [*differences, *(finding for report in reports for finding in report.findings)]
    has_problem = any(finding.level == PROBLEM for finding in found)
    return Diagnosis(reports, differences, reports[0].process, True, has_problem)


def of_one(report: Report) -> Diagnosis:
    """Return the diagnosis of a process that met no other."""
    is_complete = report.num_processes == 1
    return of_processes((report,))._replace(is_complete=is_complete)
