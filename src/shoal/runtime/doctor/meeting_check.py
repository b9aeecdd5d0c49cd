"""Whether this process can meet the others: at the address of the job, which is then joined."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from typing import Any

from shoal.errors import InitializeError, ShoalError
from shoal.runtime.client.over_tcp import TcpCoordinator
from shoal.runtime.doctor import reachability
from shoal.runtime.doctor.findings import NOTE, CheckResult, Finding, problem_of
from shoal.runtime.doctor.port_owner import port_owner
from shoal.runtime.doctor.proxies import check_proxies
from shoal.runtime.rules.deadline import ends_at
from shoal.runtime.startup.launchers import JobPlace
from shoal.runtime.startup.meeting_address import by_loopback, join_place
from shoal.runtime.system.service_commands import MEETING_PLACE
from shoal.runtime.wire.frames import address_text, split_address
from shoal.runtime.wire.listening import bind_host, is_loopback

_NAME_S = 5.0  # how long a name may be unknown
_RESOLVER_S = 10.0
_CONNECT_S = 5.0
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
    found = reachability.resolve(host, _RESOLVER_S, retry_s=_NAME_S)
    facts: dict[str, Any] = {"address": place.address, "resolves_to": list(found.addresses)}
    if not found.addresses:
        words = f"the name {host!r} of the coordinator {place.address} does not resolve on this "
        advice = f"set SHOAL_COORDINATOR=IP:{port}, or make the name known (DNS, /etc/hosts)"
        return CheckResult(facts, (Finding("address", f"{words}host: {found.error}", advice),))
    if place.process != 0 or place.jax_service is not None:  # this process does not listen there
        return CheckResult(facts)
    bind = place.bind_host or bind_host(host)
    number = reachability.bind_error(bind, port)
    facts["can_be_bound"] = number == 0
    if number:
        return CheckResult(facts, (_why_not_bound(address_text(bind, port), number),))
    return CheckResult(facts, _strange_address(host, found.addresses[0]))


def _strange_address(host: str, address: str) -> tuple[Finding, ...]:
    """Return a note on process 0 if the address is not one of its host's."""
    if reachability.bind_error(address, 0) != errno.EADDRNOTAVAIL:
        return ()
    words = f"process 0 is here, and {host} ({address}) is not an address of this host"
    return (Finding("address", words, "right only if the network translates it (NAT)", NOTE),)


def _why_not_bound(address: str, number: int) -> Finding:
    host, port = split_address(address)
    if number == errno.EADDRINUSE:
        owner = port_owner(port)
        if MEETING_PLACE in owner:
            words = f"a job of shoal meets at port {port} of this host: {owner}"
            return Finding("address", words, "if it is another job, choose another port", NOTE)
        words = f"port {port} of this host is taken" + (f" by {owner}" if owner else "")
        advice = "end that process, or choose another port in SHOAL_COORDINATOR"
    elif number == errno.EADDRNOTAVAIL:
        words = f"{host} is not an address of this host, and process 0 must listen there"
        advice = "give the address of the host of process 0"
    else:
        words = f"process 0 cannot listen at {address}: {os.strerror(number)}"
        advice = "ports below 1024 are for root"
    return Finding("address", words, advice)


def join_job(place: JobPlace, timeout_s: float) -> TcpCoordinator:
    """Join the job as `initialize` does, whatever the versions, and without devices.

    Raises:
      ShoalError: on every process that arrived, with the reason.
    """
    return join_place(place, ends_at(timeout_s), versions=_VERSIONS)[0]


def why_not_joined(place: JobPlace, error: ShoalError) -> CheckResult:
    """Return the error of joining as a finding, with what an attempt to connect shows."""
    tried = check_connecting(place)
    return tried._replace(findings=(problem_of("joining", error), *tried.findings))


def check_connecting(place: JobPlace) -> CheckResult:
    """Check once that a meeting place answers, unless this process runs it."""
    if place.address is None or (place.process == 0 and place.jax_service is None):
        return CheckResult({})
    findings = []
    tried = reachability.connect_to(place.address, _CONNECT_S)
    if tried.outcome == reachability.REFUSED:
        words = f"nothing listens at {place.address}, though its host answers"
        advice = "process 0 must run there, with the same SHOAL_COORDINATOR"
        if is_loopback(split_address(place.address)[0]):
            advice += "; the loopback is this host: if process 0 is elsewhere, give its address"
        findings.append(Finding("address", words, advice))
    elif tried.outcome == reachability.UNREACHABLE:
        words = f"the host of {place.address} cannot be reached: {tried.words}"
        advice = "is it up, is this its address, does a firewall drop the packets?"
        findings.append(Finding("address", words, advice))
    return CheckResult({"connecting": tried.outcome}, tuple(findings))


def check_jax_service(joined: TcpCoordinator, env: Mapping[str, str]) -> CheckResult:
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
        words = f"JAX's service at {joined.jax_service} cannot be reached: {tried.words}"
        advice = "a firewall must pass its port too; shoal coordinator --jax-port chooses it"
        findings.append(Finding("address", words, advice))
    return CheckResult(facts, tuple(findings))
