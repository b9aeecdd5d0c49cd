"""Start the devices of this process, while watching the other processes.

JAX starts its devices at their first use, which in a job waits in native code until those of all
processes have started, for minutes, whatever happens to the others. So a thread of its own waits.
If the devices of a process fail to start, that process counts as failed from then on, and the
others get an exception.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from shoal import settings
from shoal.errors import (
    DeadlineError,
    DeviceStartError,
    NoDevicesError,
    PeerFailedError,
    ProcessLostError,
    ShoalError,
)
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.exit.causes import departure_of_member, gone_members, record_sent
from shoal.runtime.exit.guard import DEVICE_WORK
from shoal.runtime.exit.unfinished import pause_s
from shoal.runtime.failures.exception_text import failure_of, fate_of
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.rules.deadline import ends_at, given_s, left_of
from shoal.runtime.rules.point import Member, Point
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.local_devices import are_attached
from shoal.runtime.system.own_name import ADVICE, why_unresolved

_LOG = logging.getLogger("shoal")
_NAME = "the start of the devices"
_DOING = "starting the devices"
_LOOK_S = 0.1  # interval of checks for losses
_ASK_S = 2.0
_MOST_SHOWN = 8
# JAX's messages about a platform without a plugin, or whose plugin finds no device.
_ABSENT = (
    "Unknown backend",
    "no platforms that are instances",
    "cannot open shared object file",
    "not in the list of known backends",
)
_FAILED = re.compile(r"[Uu]nable to initialize backend '(\w+)'")


def start_devices(
    client: JobClient,
    platform: str | None,
    timeout_s: float,
    start: DeviceStart | None = None,
) -> list[Any]:
    """Return all devices of the job, of one platform; start them if they have not started.

    Args:
      client: the other processes.
      platform: "tpu", "gpu", "cpu"; None: JAX's default.
      timeout_s: deadline, of a start in a job of several processes.
      start: the state left by earlier calls.

    Raises:
      NoDevicesError: this host has no devices of that platform.
      DeviceStartError: a device failed to start. In a job, this process then counts as failed on
        the others; further calls raise it again.
      ProcessLostError: a process is lost or failed meanwhile.
      PeerFailedError: one has left the job.
      DeadlineError: not all have started in time.
    """
    site = callsite()
    if client.num_processes > 1:
        started = (start or DeviceStart()).under_way(client, site)
        if started is not None:
            _wait(client, started, site, ends_at(timeout_s))
    return _devices(client, platform, site)


class DeviceStart:
    """The start of this process's devices in a job: it happens once, and a failure is final.

    JAX's list of platforms does not show this: JAX starts one after another, the CPU first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: JobClient | None = None
        self._started: Future[object] | None = None

    def under_way(self, client: JobClient, site: str) -> Future[object] | None:
        """Return the start, begun now if need be; None if the devices have started."""
        with self._lock:
            if self._started is not None and self._job is client:
                is_over = self._started.done() and self._started.exception() is None
                if not is_over or jax_runtime.backend_exists():
                    return None if is_over else self._started
            if jax_runtime.backend_exists() and not jax_runtime.is_starting():
                return None
            self._job, self._started = client, Future()
            self._begin(client, self._started, site)
            return self._started

    @staticmethod
    def _begin(client: JobClient, started: Future[object], site: str) -> None:
        def run() -> None:
            try:
                started.set_result(_devices(client, None, site, is_start=True))
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                started.set_exception(error)

        threading.Thread(target=run, name=DEVICE_WORK, daemon=True).start()


def _wait(client: JobClient, started: Future[object], site: str, deadline: float) -> None:
    point = Point(_NAME, site=site)
    client.progress.begin_wait(point, time.monotonic())
    try:
        _watch(client, started, deadline)
    finally:
        client.progress.end_wait(point)
    started.result()


def _watch(client: JobClient, started: Future[object], deadline: float) -> None:
    """Wait for the start; raise if a process is lost, because the start may then never end."""
    began = time.monotonic()
    query_at = began + pause_s(client)
    warn_at = began + settings.seconds("SHOAL_WARN_AFTER_S")
    while wait([started], min(_LOOK_S, left_of(deadline))).not_done:
        now = time.monotonic()
        client.check(_DOING)  # losses known to this process
        if now >= min(query_at, deadline):
            if now >= deadline:
                raise _late(client, given_s(deadline))
            check_living(client, deadline, _DOING)
            _check_left(client)
            query_at = time.monotonic() + pause_s(client)
        if now >= warn_at:
            me = ThisProcess(client.process, client.hosts)
            missing = _words(_missing(client))
            _LOG.warning("%s: %s for %.0f s; %s", me, _DOING, now - began, missing)
            warn_at = math.inf


def _check_left(client: JobClient) -> None:
    """Raise if a process has left the job, because JAX's start then never ends."""
    try:
        members = client.members(timeout_s=_ASK_S)
    except DeadlineError:  # the next round asks again
        return
    left = [member for member in members if member.state == "left"]
    if not left:
        return
    me = ThisProcess(client.process, client.hosts)
    names = "; ".join(
        f"process {member.process} ({member.host}) {member.last_words}" for member in left
    )
    raise PeerFailedError(
        f"{me} cannot continue {_DOING}: {names}",
        failed={member.process: member.last_words for member in left},
        ends={member.process: departure_of_member(member) for member in left},
    )


def _missing(client: JobClient) -> list[Member] | None:
    """Return the other processes that have not begun to start their devices; None: unknown."""
    with contextlib.suppress(ShoalError):
        return [
            member
            for member in client.members(timeout_s=_ASK_S)
            if member.process != client.process and member.call != _NAME
        ]
    return None


def _words(missing: Sequence[Member] | None) -> str:
    if not missing:
        all_there = "all processes are starting theirs"
        return "the missing processes are unknown" if missing is None else all_there
    shown = [
        f"process {member.process} ({member.host}), {member.last_words}"
        for member in missing[:_MOST_SHOWN]
    ]
    more = len(missing) - len(shown)
    return "not there: " + "; ".join(shown + ([f"and {more} more"] if more else []))


def _late(client: JobClient, timeout_s: float) -> DeadlineError:
    missing = _missing(client)
    me = ThisProcess(client.process, client.hosts)
    return DeadlineError(
        f"{me} is still {_DOING} at its deadline ({timeout_s:g} s): JAX waits until all processes "
        f"do so; {_words(missing)}\n{TIMEOUT_HINT}",
        name=_NAME,
        waited_s=timeout_s,
        missing=[member.process for member in missing or ()],
        last_words={member.process: member.last_words for member in missing or ()},
    )


def _devices(
    client: JobClient, platform: str | None, site: str, *, is_start: bool = False
) -> list[Any]:
    try:
        return jax_runtime.devices(platform)
    except Exception as error:  # JAX raises many types, AssertionError among them
        failure = _failure(client, platform, error)
        if is_start:
            with contextlib.suppress(OSError):
                client.report(
                    "failed", failure_of(failure, site).words, record_sent(client, failure)
                )
        raise failure from error


def _failure(client: JobClient, requested: str | None, error: Exception) -> DeviceStartError:
    platforms = jax_runtime.platforms()
    match = _FAILED.search(str(error))
    platform = requested or (match[1] if match else platforms.partition(",")[0])
    host = client.hosts[client.process]
    me = ThisProcess(client.process, client.hosts)
    words_of_error = (str(error).splitlines() or [""])[0] or type(error).__name__
    kind = platform.upper() if platform else "default"
    is_absent = any(text in str(error) for text in _ABSENT) or not are_attached(platform)
    if is_absent:
        who = "the program"
        if platforms and not requested:
            who = f"JAX_PLATFORMS={platforms}"
        return NoDevicesError(
            f"{me}: no {kind} device was found: {words_of_error}\n"
            f"{who} requests them: run on a host that has some, with JAX's plugin for them "
            "installed, or choose others",
            platform=platform,
            process=client.process,
            host=host,
        )
    advice = (
        f"a likely hardware fault of {host}, if no other program holds the devices: look at its "
        "system log, and start the job without this host"
    )
    if platform == "cpu" and client.num_processes > 1:
        unresolved = why_unresolved()
        if unresolved:
            words_of_error, advice = unresolved, ADVICE
    return DeviceStartError(
        f"{me}: the {kind} devices failed to start: {words_of_error}\n{advice}",
        platform=platform,
        process=client.process,
        host=host,
    )


# ---- Check that the peers are alive, while this process waits for native code.


TIMEOUT_HINT = "raise timeout_s= if it is merely slow"


def check_living(joined: JobClient, deadline: float, doing: str) -> None:
    """Raise if a process that this one needs is gone, or the deadline has passed.

    Args:
      joined: the job client.
      deadline: on the monotonic clock.
      doing: the operation of this process, for the message.

    Raises:
      ProcessLostError: a process is lost or failed, or a service of the job is lost.
      DeadlineError: the deadline has passed.
    """
    me = f"process {joined.process} of {joined.num_processes} ({socket.gethostname()})"
    gone = gone_members(joined)
    if gone:
        joined.peer_losses.mark_all_reported()
        joined.peer_losses.mark_reported(gone)  # perhaps before the watcher hears of them
        lost = {p: member.last_words for p, member in gone.items()}
        ends = {p: departure_of_member(member) for p, member in gone.items()}
        names = "; ".join(f"process {p} ({m.host}) {fate_of(ends[p])}" for p, m in gone.items())
        raise ProcessLostError(f"{me} cannot continue {doing}: {names}", lost=lost, ends=ends)
    joined.check(doing)  # JAX's service may be lost
    if time.monotonic() >= deadline:
        state = f"is still {doing} at its deadline ({given_s(deadline):g} s)"
        raise DeadlineError(f"{me} {state}\n{TIMEOUT_HINT}", name=doing)
