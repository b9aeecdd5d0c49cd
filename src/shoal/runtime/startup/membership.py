"""Join a job, and wait for unfinished work before leaving it.

All N processes first send HELLO to the coordinator. Every possible mistake of a job (a process is
missing, an index is taken twice, counts or versions differ) is answered there, in Python, on all.
Only then does any process touch JAX's service, which would answer the same mistakes by aborting it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from shoal import settings
from shoal.errors import (
    DeadlineError,
    InitializeError,
    ProcessLostError,
    ShoalError,
)
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.over_tcp import TcpJobClient
from shoal.runtime.exit.unfinished import pause_s
from shoal.runtime.jax_service import device_work, jax_runtime
from shoal.runtime.jax_service.certificates import NO_SHIELD
from shoal.runtime.jax_service.host_agent_link import (
    HostAgent,
    find_host_agent,
    is_likely_leader,
    without_proxy,
)
from shoal.runtime.rules.deadline import given_s, left_of
from shoal.runtime.rules.point import Point
from shoal.runtime.startup import inherited
from shoal.runtime.startup.coordinator_address import join_coordinator
from shoal.runtime.startup.device_start import TIMEOUT_HINT, check_living
from shoal.runtime.startup.launchers import JobPlace, decide, innermost
from shoal.runtime.startup.not_joined import claim_index, mark_member
from shoal.runtime.startup.options import Arguments
from shoal.runtime.startup.single_process import alone
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.service_commands import open_standard_streams
from shoal.runtime.wire.frames import split_address
from shoal.runtime.wire.sockets import is_loopback

SAVES = "shoal-save"  # the name of saving threads, which meet other processes by themselves

_LOG = logging.getLogger("shoal")
_CONNECTING = "shoal connects the devices"


def find_cluster(arguments: Arguments, *, reports: bool = False) -> tuple[JobPlace, bool]:
    """Return this process's place, and whether JAX joined the job already.

    Args:
      reports: whether to log the variables that do not exist, which may be why it fails.
    """
    attached, process = jax_runtime.attached(), 0
    try:
        cluster = _attach(attached, arguments) if attached else decide(arguments, os.environ)
        process = cluster.process
    finally:
        unknown = settings.unknown_variables(os.environ) if reports else {}
        if unknown:  # on one process: the others most likely have the same ones
            level = logging.INFO if process else logging.WARNING
            _LOG.log(level, "%s", "\n".join(unknown.values()))
    return cluster, attached is not None


def _attach(attached: jax_runtime.Attached, arguments: Arguments) -> JobPlace:
    """Return the place in the job that JAX joined; arguments and variables must agree."""
    pair: dict[str, int] = {"num_processes": attached.num_processes, "process_id": attached.process}
    for name, value in pair.items():
        given = getattr(arguments, name)
        if given is not None and given != value:
            raise InitializeError(
                f"initialize({name}={given}), but jax.distributed joined this process as "
                f"{attached.process} of {attached.num_processes}"
            )
    numbers = arguments._replace(
        # A launcher that runs JAX's service runs a coordinator too, and gives its address.
        coordinator_address=None if _is_launched(attached.address) else attached.address,
        num_processes=attached.num_processes,
        process_id=attached.process,
    )
    return decide(numbers, os.environ)


def _is_launched(jax_service: str) -> bool:
    """Return whether this is the launcher's service; on other hosts, by a proxy of this host."""
    launched = os.environ.get("SHOAL_JAX_SERVICE", "")
    is_far = bool(launched) and not is_loopback(split_address(launched)[0])
    return launched == jax_service or (is_far and is_loopback(split_address(jax_service)[0]))


def check_in_time(cluster: JobPlace, *, is_attached: bool, has_left: bool = False) -> None:
    """Raise InitializeError if JAX already has devices that do not fit `cluster`.

    Args:
      has_left: whether this process has been in a job of several before.
    """
    if not jax_runtime.backend_exists():
        return
    if cluster.num_processes > 1 and not is_attached and has_left:
        raise InitializeError(
            "a job of several processes cannot be joined a second time in one process: JAX's "
            "devices stay those of the job that it has left\nstart the program again"
        )
    if cluster.num_processes > 1 and not is_attached:
        raise InitializeError(
            f"too late to join a job of {cluster.num_processes}: JAX has created its devices\n"
            "call initialize() before the first use of jax.devices(), jnp or jit"
        )
    requests = [("virtual_devices", cluster.virtual_devices, jax_runtime.virtual_devices)]
    if cluster.virtual_devices is None:  # which takes precedence
        requests = [("host_devices", cluster.host_devices, jax_runtime.host_devices)]
    for name, wanted, present in requests:
        if wanted is not None and present() != wanted:
            raise InitializeError(
                f"too late for {name}={wanted}: JAX has created its devices\n"
                "call initialize() before the first use of jax.devices(), jnp or jit"
            )


def leave_outer_job() -> None:
    """Remove the variables of a job around this one, before this process claims its record: then
    all variables count as its own."""
    for name in os.environ.keys() - innermost(os.environ).keys():
        del os.environ[name]
    os.environ[inherited.VARIABLE] = inherited.note_of(os.environ, os.getpid())


def become_member(
    cluster: JobPlace, deadline: float, *, is_attached: bool, attempt: int, hooks: bool
) -> JobClient:
    """Join the job; return the job client.

    Args:
      cluster: this process's place.
      deadline: on the monotonic clock.
      is_attached: whether JAX joined the job already.
      attempt: number of earlier attempts of this process; equal on all.
      hooks: whether forked children give up its connections, and this process may outlast others.

    Raises:
      InitializeError: on every living process, before the deadline.
    """
    if cluster.num_processes == 1:
        return alone()
    open_standard_streams()
    host_agent = HostAgent(cluster.name)

    def before_hello() -> None:
        if is_likely_leader(cluster.process, os.environ):
            host_agent.start_early()
        fault_points.reach("initialize.before_hello", cluster.process)

    try:
        number = attempt if is_attached else None
        joined, token = join_coordinator(
            cluster, deadline, attempt=number, before_hello=before_hello, outlasts=hooks
        )
        if hooks:
            joined.abandon_in_forked_children()
    except BaseException:
        host_agent.dismiss()
        raise
    try:
        _enter(cluster, joined, host_agent, token, deadline, is_attached=is_attached)
    except BaseException as error:
        joined.report("failed", f"initialize: {error}")
        if not is_attached:  # before the services end: JAX's client aborts when its service does
            jax_runtime.leave(process_ends=False)
        joined.close()
        if isinstance(error, ShoalError) and not isinstance(error, InitializeError):
            missing = error.lost if isinstance(error, ProcessLostError) else ()
            raise InitializeError(f"initialize: {error}", missing=missing) from None
        raise
    mark_member(cluster)
    joined.claim = claim_index(cluster)
    return joined


def _enter(
    cluster: JobPlace,
    joined: TcpJobClient,
    host_agent: HostAgent,
    token: str,
    deadline: float,
    *,
    is_attached: bool,
) -> None:
    """Connect the devices, each host through its host agent's proxy; then meet."""
    jax_service = "" if is_attached else joined.jax_service
    if not (is_attached or jax_service):
        raise InitializeError(
            "no process gave the address of JAX's service: is SHOAL_JAX_SERVICE set?"
        )
    fault_points.reach("initialize.after_hello", joined.process)
    near = jax_service
    try:
        certificates = jax_runtime.certificates()
        if not is_attached:
            certificates.check(jax_service, deadline)
        if joined.num_processes > 1:
            has_tls = certificates.are_given and not is_attached
            near = find_host_agent(
                host_agent, joined, token, jax_service, deadline, has_tls=has_tls
            )
        if certificates.need_direct and not is_attached:
            near = jax_service
            if joined.process == 0:
                _LOG.warning(NO_SHIELD)
    finally:
        host_agent.dismiss()
    place_host = split_address(joined.address)[0]
    jax_runtime.use_loopback(joined.welcome.is_on_one_host or is_loopback(place_host))
    if not is_attached:
        host = split_address(near)[0]
        if is_loopback(host):
            os.environ.update(without_proxy(host, os.environ))
        _connect_devices(joined, near, deadline, cluster.partition_index)
    fault_points.reach("initialize.after_devices", joined.process)
    point = Point("initialize", operation="initialize", site=callsite())
    joined.arrive(point, timeout_s=left_of(deadline))


def _connect_devices(
    joined: JobClient, near: str, deadline: float, partition_index: int | None
) -> None:
    """Join JAX's service through `near`. It waits for all; give up when a process is lost.

    The call blocks in native code and cannot be interrupted, so it gets its own thread: a daemon,
    because the interpreter must not join it.

    Raises:
      InitializeError: JAX's service refuses.
      ProcessLostError: a process is gone, so the call may never return.
      DeadlineError: it did not return in time.
    """
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(jax_runtime.connect(near, joined.process))
        except Exception as error:  # noqa: BLE001 (raised again in the caller's thread)
            result.set_exception(error)

    threading.Thread(target=run, name=_CONNECTING, daemon=True).start()
    try:
        while wait([result], min(pause_s(joined), left_of(deadline))).not_done:
            check_living(joined, deadline, "connecting the devices")
    except BaseException:
        result.add_done_callback(_disconnect)  # now, or when it connects after all
        raise
    error = result.exception()
    if error is not None:
        raise InitializeError(f"JAX's service at {joined.jax_service}: {error}") from error
    connection, jax_service = result.result(), joined.jax_service
    jax_runtime.install(
        connection, jax_service, joined.process, joined.num_processes, partition_index
    )


def _disconnect(connected: Future[Any]) -> None:
    if connected.exception() is None:
        jax_runtime.disconnect(connected.result())


def is_connecting() -> bool:
    """Return whether an abandoned call to JAX's service is still blocked."""
    return any(thread.name == _CONNECTING for thread in threading.enumerate())


def wait_until_idle(joined: JobClient, deadline: float) -> None:
    """Wait until this process's devices have computed what they were given.

    Raises:
      ProcessLostError: a process is gone, so they may never be.
      DeadlineError: they were not computed in time.
    """
    query_at = time.monotonic() + 1.0
    is_done = device_work.issued_work()
    while not is_done():
        if time.monotonic() >= min(query_at, deadline):
            check_living(joined, deadline, "finishing its computations")
            query_at = time.monotonic() + pause_s(joined)
        time.sleep(0.002)


def wait_for_saves(joined: JobClient, deadline: float, caller: str = "shutdown") -> None:
    """Wait until no thread of this process is saving, whether its save succeeds or not.

    Args:
      deadline: on the monotonic clock.
      caller: the call that waits, for messages.

    Raises:
      DeadlineError: a save did not end in time.
    """
    point = Point(f"{caller}: the end of a save", site=callsite())
    for thread in threading.enumerate():
        if thread.name != SAVES or thread is threading.current_thread():
            continue
        joined.progress.begin_wait(point, time.monotonic())
        try:
            thread.join(min(left_of(deadline), threading.TIMEOUT_MAX))
        finally:
            joined.progress.end_wait(point)
        if thread.is_alive():
            me = f"process {joined.process} of {joined.num_processes} ({socket.gethostname()})"
            reason = f"{caller} waited {given_s(deadline):g} s for a save that still runs"
            raise DeadlineError(f"{me}: {reason}\n{TIMEOUT_HINT}", name=caller)
