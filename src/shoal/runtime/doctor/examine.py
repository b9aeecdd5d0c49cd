"""Run all checks in this process, and exchange the reports with the other processes of its job."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from shoal.errors import InitializeError, ShoalError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.over_tcp import TcpJobClient
from shoal.runtime.doctor import host_state, reachability
from shoal.runtime.doctor.device_probe import DeviceProbe
from shoal.runtime.doctor.findings import (
    NOTE,
    CheckResult,
    Diagnosis,
    Finding,
    Report,
    of_one,
    of_processes,
    packed,
    problem_of,
    unknown_variable,
    unpacked,
)
from shoal.runtime.doctor.host_state import FolderMarks
from shoal.runtime.doctor.reachability import port_owner
from shoal.runtime.failures.joining_text import not_joined_of
from shoal.runtime.jax_service.host_agent_link import PROXIES
from shoal.runtime.rules.deadline import ends_at
from shoal.runtime.rules.point import Point
from shoal.runtime.startup.coordinator_address import by_loopback, join_coordinator, token_of
from shoal.runtime.startup.launcher_table import (
    LAUNCHERS,
    Environment,
    Launcher,
    shown,
    variables_of,
)
from shoal.runtime.startup.launchers import JobPlace, decide, innermost
from shoal.runtime.startup.not_joined import refuse_child
from shoal.runtime.startup.options import Arguments
from shoal.runtime.system.service_commands import COORDINATOR
from shoal.runtime.wire.frames import address_text, split_address
from shoal.runtime.wire.sockets import bind_host, is_loopback
from shoal.settings import unknown_variables


class DoctorRequest(NamedTuple):
    """The arguments of the checks."""

    shared: tuple[str, ...] = ()  # folders that all processes must share
    timeout_s: float = 60.0  # for each wait: for the other processes, for the devices
    alone: bool = False  # only this process: without waiting for others
    more: Mapping[str, Callable[[], CheckResult]] = MappingProxyType({})  # checks, by name


@contextlib.contextmanager
def diagnosed(request: DoctorRequest, env: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Yield the diagnosis; at the end, wait until all processes have reached this point.

    Launchers end all processes when the first of them ends with an error: none may end before the
    one that prints has printed.
    """
    report, place = _begin(env)
    probe = DeviceProbe(place, request.timeout_s)
    joined: TcpJobClient | None = None
    try:
        report = _here(report, request)
        if place is not None and place.num_processes > 1:
            report, joined = _meet(report, place, request, env)
        report = report.with_check("devices", probe.result())
        report = report.with_check("host", host_state.check_name(report))
        folders, meets = request.shared, env.get("SHOAL_RENDEZVOUS", "").strip()
        if meets:
            folders = (*folders, meets)
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
    unknown = tuple(unknown_variable(message) for message in unknown_variables(env).values())
    report = Report(
        process=None,
        num_processes=None,
        host=socket.gethostname(),
        pid=os.getpid(),
        facts={},
        findings=unknown,
    )
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
    report = report.with_check("versions", host_state.check_versions(os.environ))
    report = report.with_check("host", host_state.check_host())
    report = report.with_check("memory", host_state.check_memory())
    report = report.with_check("disk", host_state.check_disk())
    report = report.with_check("proxy", check_proxies("", (), os.environ))
    for name, check in request.more.items():
        report = report.with_check(name, check())
    return report.with_check("clock", CheckResult({"time_s": time.time()}))


def _try_folders(report: Report, folders: tuple[str, ...]) -> Report:
    """Add the directories as one process sees them."""
    marks = FolderMarks(folders, secrets.token_hex(8))
    try:
        return report.with_check("folders", marks.write())
    finally:
        marks.remove()


def _meet(
    report: Report, place: JobPlace, request: DoctorRequest, env: Mapping[str, str]
) -> tuple[Report, TcpJobClient | None]:
    checked = check_address(place)
    report = report.with_check("address", checked).with_check("token", check_token(place))
    if "resolves_to" in checked.facts and not checked.facts["resolves_to"]:
        return report, None
    if request.alone:
        return report.with_check("address", check_connecting(place)), None
    try:
        joined = join_job(place, request.timeout_s)
    except ShoalError as error:
        return report.with_check("address", why_not_joined(place, error)), None
    return report.with_check("address", check_jax_service(joined, env)), joined


# ---- Exchange the reports of the processes of a job that all have joined.
#
# Only process 0 receives them, each at a point of two processes: if all were sent to all, the
# bytes would grow with the square of the number of processes.


def exchange(
    joined: JobClient, report: Report, folders: Iterable[str], timeout_s: float
) -> Diagnosis:
    """Check clocks and directories together; return the diagnosis: of all processes on process 0.

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
        joined.arrive(Point("shoal doctor: directories"), timeout_s=timeout_s)
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


def _collect(joined: JobClient, report: Report, timeout_s: float) -> Diagnosis:
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


# ---- Whether this process can meet the others: at the address of the job, which is then joined.


_NAME_S = 5.0  # how long a name may be unknown
_RESOLVER_S = 10.0
_CONNECT_S = 5.0
_SET_TOKEN = "set SHOAL_TOKEN to one secret for all processes (docs/starting.md)"
_VERSIONS = "any"  # different versions are for this command to compare, not a reason to refuse


def check_address(place: JobPlace) -> CheckResult:
    """Check what the address resolves to and, on process 0, that it can be bound."""
    if place.rendezvous is not None:
        meets = place.rendezvous
        return CheckResult({"directory": os.path.join(meets.base, meets.name)})
    if place.address is None:
        return CheckResult({})
    with contextlib.suppress(InitializeError):  # its words say the same as those below
        place = by_loopback(place)
    host, port = split_address(str(place.address))
    resolved = reachability.resolve(host, _RESOLVER_S, retry_s=_NAME_S)
    facts: dict[str, Any] = {"address": place.address, "resolves_to": list(resolved.addresses)}
    if not resolved.addresses:
        problem = f"the name {host!r} of the coordinator {place.address} does not resolve on this "
        advice = f"set SHOAL_COORDINATOR=IP:{port}, or make the name known (DNS, /etc/hosts)"
        return CheckResult(facts, (Finding("address", f"{problem}host: {resolved.error}", advice),))
    if place.process != 0 or place.jax_service is not None:  # this process does not listen there
        return CheckResult(facts)
    bind = place.bind_host or bind_host(host)
    error = reachability.bind_error(bind, port)
    facts["can_be_bound"] = error == 0
    if error:
        return CheckResult(facts, (_why_not_bound(address_text(bind, port), error),))
    return CheckResult(facts, _strange_address(host, resolved.addresses[0]))


def check_token(place: JobPlace) -> CheckResult:
    """Check that there is a token, and where it comes from: processes may have different ones."""
    if place.rendezvous is not None:
        return CheckResult({"source": "the rendezvous: a new one for each job"})
    if place.address is None:
        return CheckResult({})
    token = token_of(place)
    facts = {"source": token.source}
    if not token.lack:
        return CheckResult(facts)
    return CheckResult(facts, (Finding("token", f"there is none: {token.lack}", _SET_TOKEN),))


def _strange_address(host: str, address: str) -> tuple[Finding, ...]:
    """Return a note on process 0 if the address is not one of its host's."""
    if reachability.bind_error(address, 0) != errno.EADDRNOTAVAIL:
        return ()
    problem = f"process 0 is here, and {host} ({address}) is not an address of this host"
    return (Finding("address", problem, "right only if the network translates it (NAT)", NOTE),)


def _why_not_bound(address: str, error: int) -> Finding:
    host, port = split_address(address)
    if error == errno.EADDRINUSE:
        owner = port_owner(port)
        if COORDINATOR in owner:
            problem = f"a shoal job uses port {port} of this host: {owner}"
            return Finding("address", problem, "if it is another job, choose another port", NOTE)
        problem = f"port {port} of this host is taken" + (f" by {owner}" if owner else "")
        advice = "end that process, or choose another port in SHOAL_COORDINATOR"
    elif error == errno.EADDRNOTAVAIL:
        problem = f"{host} is not an address of this host, and process 0 must listen there"
        advice = "pass the address of the host of process 0"
    else:
        problem = f"process 0 cannot listen at {address}: {os.strerror(error)}"
        advice = "ports below 1024 are for root"
    return Finding("address", problem, advice)


def join_job(place: JobPlace, timeout_s: float) -> TcpJobClient:
    """Join the job as `initialize` does, whatever the versions, and without devices.

    Raises:
      ShoalError: on every process that arrived, with the reason.
    """
    return join_coordinator(place, ends_at(timeout_s), versions=_VERSIONS)[0]


def why_not_joined(place: JobPlace, error: ShoalError) -> CheckResult:
    """Return the error of joining as a finding, with what an attempt to connect shows."""
    tried = check_connecting(place)
    remedy = not_joined_of(error).remedy
    reason = str(error).removesuffix(f"\n{remedy}")
    problem = problem_of("joining", reason)._replace(advice=_SET_TOKEN if remedy else "")
    return tried._replace(findings=(problem, *tried.findings))


def check_connecting(place: JobPlace) -> CheckResult:
    """Check once that a coordinator answers, unless this process runs it."""
    if place.address is None or (place.process == 0 and place.jax_service is None):
        return CheckResult({})
    findings = []
    tried = reachability.connect_to(place.address, _CONNECT_S)
    if tried.outcome == reachability.REFUSED:
        problem = f"nothing listens at {place.address}, though its host answers"
        advice = "process 0 must run there, with the same SHOAL_COORDINATOR"
        if is_loopback(split_address(place.address)[0]):
            advice += "; the loopback is this host: if process 0 is elsewhere, pass its address"
        findings.append(Finding("address", problem, advice))
    elif tried.outcome == reachability.UNREACHABLE:
        problem = f"the host of {place.address} cannot be reached: {tried.words}"
        advice = "is it up, is this its address, does a firewall drop the packets?"
        findings.append(Finding("address", problem, advice))
    return CheckResult({"connecting": tried.outcome}, tuple(findings))


def check_jax_service(joined: TcpJobClient, env: Mapping[str, str]) -> CheckResult:
    """Check that JAX's service answers, and that no proxy is in the way."""
    if not joined.jax_service:
        return CheckResult({"connecting": reachability.OPEN})
    host = split_address(joined.jax_service)[0]
    addresses = reachability.resolve(host, _RESOLVER_S).addresses
    tried = reachability.connect_to(joined.jax_service, _CONNECT_S)
    facts = {"jax_service": joined.jax_service, "connecting_to_jax_service": tried.outcome}
    facts["connecting"] = reachability.OPEN  # or it had not joined
    findings = list(check_proxies(host, addresses, env).findings)
    if tried.outcome != reachability.OPEN:
        problem = f"JAX's service at {joined.jax_service} cannot be reached: {tried.words}"
        advice = "a firewall must pass its port too; shoal coordinator --jax-port chooses it"
        findings.append(Finding("address", problem, advice))
    return CheckResult(facts, tuple(findings))


# ---- The rule of the launcher table that applies in an environment, and why the others do not.


class RuleState(NamedTuple):
    """One row of the table, with the reason why it is used or is not."""

    launcher: str
    is_used: bool
    is_seen: bool  # whether any of its variables is set
    why: str


def rule_states(env: Environment) -> tuple[RuleState, ...]:
    """Return the state of each row, in order: at most one is used, the first that can be.

    >>> env = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    >>> [(row.launcher, row.is_used) for row in rule_states(env) if row.is_seen]
    [('torchrun', True), ('Slurm step', False)]
    """
    used, states = "", []
    inner = innermost(env)
    for launcher in LAUNCHERS:
        state = _state(launcher, inner, used)
        outer = {name: env[name] for name in launcher.identity if name in env.keys() - inner.keys()}
        if outer and not state.is_seen:
            why = f"{shown(outer)}: of the job in which a process has started another launcher"
            state = RuleState(launcher.name, False, True, why)
        used = used or (launcher.name if state.is_used else "")
        states.append(state)
    return tuple(states)


def _state(launcher: Launcher, env: Environment, used: str) -> RuleState:
    try:
        whole = launcher.completed(env, [])
    except InitializeError as error:
        return RuleState(launcher.name, False, True, str(error))
    numbers = (*launcher.indices, *launcher.counts)
    variables = variables_of(whole, (*launcher.needs, *numbers, *launcher.same_index))
    why_not = _why_not(launcher, variables)
    if why_not:
        return RuleState(launcher.name, False, bool(variables), why_not)
    if used:
        return RuleState(
            launcher.name, False, True, f"{shown(variables)}: {used} is further inside"
        )
    return RuleState(launcher.name, True, True, shown(variables))


def _why_not(launcher: Launcher, variables: Mapping[str, str]) -> str:
    """Return why these variables are not this launcher's, or describe no job; else ""."""
    numbers = [name for name in (*launcher.indices, *launcher.counts) if name in variables]
    if not numbers:
        lacking = " and ".join((*launcher.indices[:1], *launcher.counts[:1]))
        return f"{shown(variables)} without {lacking}" if variables else f"{lacking} not set"
    lacking = ", ".join(name for name in launcher.needs if name not in variables)
    if lacking:
        return f"{shown(variables)} without {lacking}"
    half = f"{numbers[0]}={variables[numbers[0]]}"
    if len(numbers) == 1 and half in launcher.no_job:
        return f"{half} without {launcher.counts[0]}: a batch script or a shell, not a step"
    return ""


# ---- Check for a web proxy between JAX's client and its service.
#
# gRPC, by which JAX's client connects, uses the proxy of the first of three variables that is
# set, even for the loopback, unless the first of three others names the host ("*" names none).
# `shoal.initialize` bypasses it; a program that calls only `jax.distributed.initialize` does not.


_SPARING = ("no_grpc_proxy", "no_proxy", "NO_PROXY")


def check_proxies(host: str, addresses: Sequence[str], env: Mapping[str, str]) -> CheckResult:
    """Check the proxy variables for JAX's service on `host`; an empty host: only list them.

    >>> env = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,.cluster"}
    >>> [len(check_proxies(host, [], env).findings) for host in ("node.cluster", "node")]
    [0, 1]
    """
    proxies = {name: _without_password(env[name]) for name in PROXIES if env.get(name)}
    spared_by = next((name for name in _SPARING if env.get(name)), None)
    facts = proxies | ({spared_by: env[spared_by]} if spared_by else {})
    if not proxies or not host:
        return CheckResult(facts)
    entries = env[spared_by].split(",") if spared_by else []
    if any(_spares(entry.strip(), host, addresses) for entry in entries):
        return CheckResult(facts)
    name, value = next(iter(proxies.items()))
    finding = Finding(
        "proxy",
        f"{name}={value} is in the way: JAX's client would connect to {host} through that proxy",
        f"add {host} to {spared_by or 'no_proxy'} (shoal.initialize bypasses the proxy; "
        "jax.distributed.initialize does not)",
    )
    return CheckResult(facts, (finding,))


def _spares(entry: str, host: str, addresses: Sequence[str]) -> bool:
    """Return whether an entry of no_proxy names the host."""
    if not entry:
        return False
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return host.lower().endswith(entry.lower())
    return any(ipaddress.ip_address(address.partition("%")[0]) in network for address in addresses)


def _without_password(url: str) -> str:
    """Return a proxy without all that precedes its host; a password may hold any character.

    >>> [_without_password(f"{start}user:sec/ret@proxy:3128") for start in ("", "http://")]
    ['…@proxy:3128', 'http://…@proxy:3128']
    """
    start, separator, rest = url.rpartition("@")
    if not separator:
        return rest
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", start)
    return f"{scheme[0]}…@{rest}" if scheme else f"…@{rest}"
