"""Find the coordinator of a job. Process 0 starts the services, unless a launcher has.

The address comes from one of three sources::

    given       an argument, a variable or the launcher: process 0 binds it
    rendezvous  a directory: process 0 binds a free port and publishes it there
    attached    JAX's key-value store, in a job that `jax.distributed` joined: the same
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from typing import NamedTuple

from shoal.errors import InitializeError
from shoal.runtime.client.over_tcp import TcpJobClient, join
from shoal.runtime.failures.joining_text import REMEDY, not_joined_of
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.rules.deadline import left_of
from shoal.runtime.startup import services
from shoal.runtime.startup.job_token import LACKING_S, JobToken, find_token
from shoal.runtime.startup.launchers import JobPlace
from shoal.runtime.startup.rendezvous import Visit, own_host
from shoal.runtime.system.own_name import ADVICE, is_own, why_unresolved
from shoal.runtime.wire.frames import address_text, split_address
from shoal.runtime.wire.sockets import (
    LOOPBACK_ADVICE,
    bind_host,
    is_loopback,
    moved,
    why_no_loopback,
)

_LOG = logging.getLogger("shoal")
_KEY = "shoal/coordinator"  # in JAX's key-value store
_ASK_S = 2.0  # for an answer of the process that has the port
_LOOPBACK = "127.0.0.1"
_ANY_HOST = ("0.0.0.0", "::")


class Place(NamedTuple):
    """Where the coordinator of a job listens."""

    address: str
    jax_service: str | None  # if this process knows it
    token: JobToken
    services: services.ServiceAddresses | None = None  # if this process started them


def join_coordinator(
    cluster: JobPlace,
    deadline: float,
    *,
    attempt: int | None = None,
    versions: str | None = None,
    before_hello: Callable[[], None] = lambda: None,
    outlasts: bool = True,
) -> tuple[TcpJobClient, str]:
    """Join the job through its coordinator; return the job client and the job's token.

    On process 0 the services run from now on until the last member has left; if it does not join,
    they end soon.

    Args:
      deadline: on the monotonic clock.
      attempt: the number of earlier attempts, in a job that JAX joined; else None.
      versions: what must be equal on all processes; None: the versions of shoal and JAX.
      before_hello: called once the address is known.
      outlasts: whether process 0 stays until its services have ended, if they would end with it.

    Raises:
      InitializeError: on every living process, before the deadline.
    """
    visit, place, joined = None, None, None
    check_loopback(cluster)
    cluster = by_loopback(cluster)
    if cluster.rendezvous is not None:
        visit = Visit(cluster.rendezvous, cluster.process, cluster.num_processes)
    try:
        place = _find_place(cluster, visit, deadline, attempt=attempt, versions=versions)
        before_hello()
        joined = _join(cluster, place, deadline, versions)
        return joined, place.token.secret
    finally:
        if place is not None and place.services is not None:
            if joined is None:
                services.retire(place.services)
            else:
                is_last = outlasts and _ends_with_us(joined)
                services.release(place.services, outlasts=is_last)
        if visit is not None:
            visit.leave(has_begun=joined is not None)


def _join(cluster: JobPlace, place: Place, deadline: float, versions: str | None) -> TcpJobClient:
    token, left_s = place.token, left_of(deadline)
    is_refused = token.lack and cluster.process != 0
    try:
        return join(
            place.address,
            process=cluster.process,
            num_processes=cluster.num_processes,
            token=token.secret,
            timeout_s=min(left_s, LACKING_S) if is_refused else left_s,
            jax_service=place.jax_service,
            versions=versions,
        )
    except InitializeError as error:
        refusal = not_joined_of(error)
        is_of_token = token.lack or refusal.reason == "token" or refusal.strangers
        if refusal.remedy or not is_of_token:
            raise
        why = token.lack or f"that of this process: {token.source}"
        strangers = f"{refusal.strangers}; {why}" if refusal.strangers else ""
        refusal = refusal._replace(strangers=strangers, remedy=REMEDY)
        message = f"{error}; {why}\n{REMEDY}"
        raise InitializeError(message, missing=error.missing, refusal=refusal) from None


def check_loopback(cluster: JobPlace) -> None:
    """Check the loopback, at once: without it nothing would seem to listen, until the deadline.

    Raises:
      InitializeError: it is down.
    """
    problem = why_no_loopback()
    if problem:
        where = f" at {cluster.address}" if cluster.address else ""
        raise InitializeError(
            f"process {cluster.process} of {cluster.num_processes} cannot join the job{where}: "
            f"{problem}\n{LOOPBACK_ADVICE}"
        )


def by_loopback(cluster: JobPlace) -> JobPlace:
    """Return the place with the loopback's address, if that given is this host's own name, which
    does not resolve, and all processes are here.

    Other names may resolve later, as those of pods do.

    Raises:
      InitializeError: others may be elsewhere.
    """
    host, port = split_address(cluster.address) if cluster.address else ("", 0)
    if not is_own(host):
        return cluster
    why = why_unresolved(host)
    if not why:
        return cluster
    if cluster.is_on_one_host:
        return cluster._replace(address=address_text(_LOOPBACK, port))
    raise InitializeError(
        f"process {cluster.process} of {cluster.num_processes} cannot join the job at "
        f"{cluster.address}: {why}\n{ADVICE}; if all processes are on this host, pass "
        f"{address_text(_LOOPBACK, port)}"
    )


def _ends_with_us(joined: TcpJobClient) -> bool:
    """Return whether what process 0 has started may be ended with it, before the others end."""
    is_here = len(joined.keeps) == joined.num_processes
    if not joined.keeps:  # hosts are unknown
        is_here = is_loopback(split_address(joined.address)[0])
    return not is_here or os.getpid() == 1


def _find_place(
    cluster: JobPlace,
    visit: Visit | None,
    deadline: float,
    *,
    attempt: int | None,
    versions: str | None,
) -> Place:
    """Return the coordinator; on process 0 it runs, but is released by the caller.

    Args:
      visit: the rendezvous of a job without an address.

    Raises:
      InitializeError: it cannot be started, or process 0 did not publish it in time.
    """
    if visit is not None:
        return _by_rendezvous(cluster, visit, deadline)
    address = str(cluster.address)
    if cluster.jax_service is not None:
        return Place(address, cluster.jax_service, token_of(cluster))
    if attempt is not None:
        return _of_attached_job(cluster, address, deadline, f"{_KEY}/{attempt}")
    token = token_of(cluster)
    if cluster.process != 0:
        return Place(address, None, token)
    if not (token.secret or token.lack):
        warning = "any program that reaches %s can join this job, read its stacks and end it"
        _LOG.warning(f"SHOAL_INSECURE=1: {warning}", address)
    host, port = split_address(address)
    try:
        return _start(cluster, host, deadline, port=port, token=token)
    except InitializeError as taken:
        raise _probe_taken_port(cluster, token, taken, deadline, versions) from None


def token_of(cluster: JobPlace) -> JobToken:
    """Return the token of a job whose address is given, as this process knows it."""
    here, address = cluster.is_on_one_host, str(cluster.address)
    given, source = cluster.token, cluster.token_source
    return find_token("job", address, given=given, source=source, is_on_one_host=here)


def _start(
    cluster: JobPlace,
    host: str,
    deadline: float,
    *,
    port: int,
    token: JobToken,
    jax_service: str = "",
) -> Place:
    """Start the services on this host, and JAX's unless `jax_service` runs already.

    Args:
      host: by which other processes reach this one.
    """
    bind = cluster.bind_host or bind_host(host)
    certificates = jax_runtime.certificates()
    refusal = token.refusal(str(cluster.address)) if token.lack else ""
    if not jax_service and not refusal:
        problem = certificates.problem()
        if problem:
            refusal = f"JAX's service cannot start with mutual TLS: {problem}"
    started = services.start(
        cluster.num_processes,
        bind=bind,
        port=port,
        token=token.secret,
        timeout_s=left_of(deadline),
        job=cluster.name,
        jax_service=not (jax_service or refusal),
        refusal=refusal,
        lacks_token=bool(token.lack),
        variables=certificates.variables,
    )
    reached = host
    if is_loopback(host) and bind not in _ANY_HOST:
        reached = bind
    address = moved(started.address, reached) if port == 0 else address_text(host, port)
    if started.jax_service:
        jax_service = moved(started.jax_service, reached)
    return Place(address, jax_service, token, started)


def _by_rendezvous(cluster: JobPlace, visit: Visit, deadline: float) -> Place:
    source = "the rendezvous"
    visit.announce()
    if cluster.process != 0:
        published = visit.follow(deadline)
        return Place(published["address"], None, JobToken(published["token"], source))
    on_one_host = cluster.rendezvous is not None and cluster.rendezvous.on_one_host
    host = cluster.bind_host if cluster.bind_host not in _ANY_HOST else None
    host = host or (_LOOPBACK if on_one_host else own_host())
    token = JobToken(cluster.token or secrets.token_hex(16), source)
    place = _start(cluster, host, deadline, port=0, token=token)
    try:
        visit.lead({"address": place.address, "token": token.secret}, deadline)
    except BaseException:
        if place.services is not None:
            services.retire(place.services)
        raise
    return place


def _of_attached_job(cluster: JobPlace, jax_service: str, deadline: float, key: str) -> Place:
    """Each attempt has its own key, so that no process goes to the place of an earlier one."""
    if cluster.process != 0:
        try:
            published = json.loads(jax_runtime.look_up(key, timeout_s=left_of(deadline)))
        except jax_runtime.NothingPublishedError:
            raise InitializeError(
                "process 0 did not publish the coordinator: did it call shoal.initialize() too?",
                missing=[0],
            ) from None
        secret = published["token"] or cluster.token
        lack = "" if secret else "SHOAL_TOKEN is set on process 0, but not on this process"
        token = JobToken(secret, "process 0" if published["token"] else cluster.token_source, lack)
        return Place(published["address"], jax_service, token)
    host = split_address(jax_service)[0]
    made = "" if cluster.token else secrets.token_hex(16)
    if made and not is_loopback(host):
        _LOG.warning(
            "the token of this job is in JAX's key-value store, where any program that reaches %s "
            "can read it: set SHOAL_TOKEN to one secret for all processes",
            jax_service,
        )
    token = JobToken(made or cluster.token, "process 0" if made else cluster.token_source)
    place = _start(cluster, host, deadline, port=0, token=token, jax_service=jax_service)
    jax_runtime.publish(key, json.dumps({"address": place.address, "token": made}))
    return place


def _probe_taken_port(
    cluster: JobPlace,
    token: JobToken,
    taken: InitializeError,
    deadline: float,
    versions: str | None,
) -> InitializeError:
    """Send HELLO to the server that has the port: perhaps another process 0 of this job was faster.

    Its coordinator then reports to all of them that an index is taken twice.
    """
    try:
        join(
            str(cluster.address),
            process=cluster.process,
            num_processes=cluster.num_processes,
            token=token.secret,
            timeout_s=min(_ASK_S, left_of(deadline)),
            versions=versions,
        ).close()
    except InitializeError as error:
        return InitializeError(f"{taken}\nthe process there: {error}")
    return taken
