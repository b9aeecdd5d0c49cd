"""Run all checks in this process, and exchange the reports with the other processes of its job."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.runtime.client.over_tcp import TcpCoordinator
from shoal.runtime.doctor import host_state, installed, meeting_check
from shoal.runtime.doctor.device_probe import DeviceProbe
from shoal.runtime.doctor.diagnosis import Diagnosis, of_one
from shoal.runtime.doctor.exchange import exchange
from shoal.runtime.doctor.findings import CheckResult, Report, problem_of, unknown_variable
from shoal.runtime.doctor.launcher_rules import rule_states
from shoal.runtime.doctor.proxies import check_proxies
from shoal.runtime.doctor.shared_folders import FolderMarks
from shoal.runtime.rules.point import Point
from shoal.runtime.startup.launchers import JobPlace, decide
from shoal.runtime.startup.not_joined import refuse_child
from shoal.runtime.startup.options import Arguments
from shoal.settings import unknown_variables


class DoctorRequest(NamedTuple):
    """The arguments of the checks."""

    program: str | None = None  # a script that must be equal everywhere
    shared: tuple[str, ...] = ()  # folders that all processes must share
    timeout_s: float = 60.0  # for each wait: for the other processes, for the devices
    alone: bool = False  # only this process: without waiting for others


@contextlib.contextmanager
def diagnosed(request: DoctorRequest, env: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Yield the diagnosis; at the end, wait until all processes have reached this point.

    Launchers end all processes when the first of them ends with an error: none may end before the
    one that prints has printed.
    """
    report, place = _begin(env)
    probe = DeviceProbe(place, request.timeout_s)
    joined: TcpCoordinator | None = None
    try:
        report = _here(report, request)
        if place is not None and place.num_processes > 1:
            report, joined = _meet(report, place, request, env)
        report = report.with_check("devices", probe.result())
        report = report.with_check("host", host_state.check_name(report))
        folders = _folders(request, env)
        if joined is None:
            diagnosis = of_one(_try_folders(report, folders))
        else:  # another process may still wait for its devices
            diagnosis = exchange(joined, report, folders, 2 * request.timeout_s)
        yield diagnosis
        if joined is not None and diagnosis.is_complete:
            with contextlib.suppress(ShoalError):
                joined.arrive(Point("shoal doctor: the end"), timeout_s=request.timeout_s)
    finally:
        if joined is not None:
            joined.close()


def _begin(env: Mapping[str, str]) -> tuple[Report, JobPlace | None]:
    """Return a report of the launcher's rule, and this process's place in the job by it."""
    rows = [state._asdict() for state in rule_states(env)]
    unknown = tuple(unknown_variable(words) for words in unknown_variables(env).values())
    report = Report(None, None, socket.gethostname(), os.getpid(), {}, unknown)
    try:
        place = decide(Arguments(), env)
        refuse_child(place)
    except ShoalError as error:
        finding = problem_of("launcher", error)
        return report.with_check("launcher", CheckResult({"rules": rows}, (finding,))), None
    facts: dict[str, Any] = {"rule": place.reason, "rules": rows}
    if place.local_device_ids is not None:
        facts["local_device_ids"] = list(place.local_device_ids)
    report = report._replace(process=place.process, num_processes=place.num_processes)
    return report.with_check("launcher", CheckResult(facts)), place


def _here(report: Report, request: DoctorRequest) -> Report:
    """Add the checks that need no other process."""
    report = report.with_check("versions", installed.check_versions(os.environ))
    if request.program is not None:
        report = report.with_check("program", installed.check_program(request.program))
    report = report.with_check("host", host_state.check_host())
    report = report.with_check("memory", host_state.check_memory())
    report = report.with_check("disk", host_state.check_disk())
    report = report.with_check("proxy", check_proxies("", (), os.environ))
    return report.with_check("clock", CheckResult({"time_s": time.time()}))


def _folders(request: DoctorRequest, env: Mapping[str, str]) -> tuple[str, ...]:
    meets = env.get("SHOAL_RENDEZVOUS", "").strip()
    return (*request.shared, *((meets,) if meets else ()))


def _try_folders(report: Report, folders: tuple[str, ...]) -> Report:
    """Add the folders as one process sees them."""
    marks = FolderMarks(folders, secrets.token_hex(8))
    try:
        return report.with_check("folders", marks.write())
    finally:
        marks.remove()


def _meet(
    report: Report, place: JobPlace, request: DoctorRequest, env: Mapping[str, str]
) -> tuple[Report, TcpCoordinator | None]:
    checked = meeting_check.check_address(place)
    report = report.with_check("address", checked)
    if "resolves_to" in checked.facts and not checked.facts["resolves_to"]:
        return report, None
    if request.alone:
        return report.with_check("address", meeting_check.check_connecting(place)), None
    try:
        joined = meeting_check.join_job(place, request.timeout_s)
    except ShoalError as error:
        return report.with_check("address", meeting_check.why_not_joined(place, error)), None
    return report.with_check("address", meeting_check.check_jax_service(joined, env)), joined
