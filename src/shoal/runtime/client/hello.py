"""The handshake with the coordinator: HELLO, then wait for all other processes."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import zlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from shoal.errors import InitializeError, UsageError
from shoal.runtime.failures.joining_text import (
    REMEDY,
    NotJoined,
    refusal_text,
    strangers_text,
)
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.deadline import ends_at, given_s, left_of
from shoal.runtime.rules.joining import PROTOCOL, hosts_of, refusal_of_row, strangers_of
from shoal.runtime.system.process_status import pid_namespace
from shoal.runtime.wire.connection import Channel, connect, what_failed
from shoal.runtime.wire.frames import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    body_value,
    number_field,
    pack_frame,
    split_address,
    text_field,
    whole_field,
)
from shoal.runtime.wire.proof import introduce
from shoal.runtime.wire.socket_calls import LinkError, LinkTimeoutError

_LOG = logging.getLogger("shoal")
_MARGIN_S = 1.0  # how much later than the deadline the coordinator may answer
_FIRST_PAUSE_S = 0.02  # between attempts while the coordinator does not listen yet
_LAST_PAUSE_S = 0.5
_ENDING_S = 1.0  # a connection closed sooner, unanswered, belongs to an earlier job


class Welcome(NamedTuple):
    """The answer to HELLO, once all processes have joined."""

    hosts: tuple[str, ...]
    jax_service: str
    incarnation: str  # of this process; identifies its further connections
    max_body_bytes: int  # the largest answer
    heartbeat_s: float  # the coordinator's setting, for all processes
    lost_after_s: float
    leader: int  # the lowest process of this host
    keeps: Mapping[int, int]  # for the leader: the pid of each process of its host
    is_on_one_host: bool  # whether all processes of the job are on this host
    near: str  # name of the server's Unix socket for calls; empty: none


class Identity(NamedTuple):
    """The identity that a process presents, with which benchmarks and attacks say HELLO, too."""

    process: int
    processes: int
    host: str
    token: str
    versions: str | None  # None: the versions of shoal and JAX
    jax_service: str
    host_id: str  # equal for processes that see each other's pids; empty: unknown

    def __str__(self) -> str:
        return f"process {self.process} of {self.processes} ({self.host})"


def handshake(
    address: str, card: Identity, timeout_s: float, warn_after_s: float
) -> tuple[Channel, Welcome]:
    """Connect, send HELLO, wait for all other processes. See `over_tcp.join`."""
    what = f"{card}: cannot join the job at {address}"
    if card.process < 0 or card.processes < 1 or not timeout_s > 0:
        raise UsageError(f"{what}: process ≥ 0, num_processes ≥ 1 and timeout_s > 0 are needed")
    try:
        split_address(address)
    except UsageError as error:
        raise UsageError(f"{card}: cannot join the job: {error}") from None
    limit = ends_at(timeout_s)
    max_body_bytes = card.processes * (MAX_PAYLOAD_BYTES + 4) + (64 << 20)
    incarnation = os.urandom(8).hex()
    refusal = NotJoined()
    try:
        waiting = _Waiting(
            address, card, began=time.monotonic(), limit=limit, warn_after_s=warn_after_s
        )
        channel, frame = _retry_hello(waiting, incarnation, max_body_bytes)
    except LinkTimeoutError:
        reason = f"it accepted the connection, but did not answer within {given_s(timeout_s):g} s"
    except _NoCoordinator as error:
        reason = f"{error.args[0]}; tried for {given_s(timeout_s):g} s"
        reason += f" ({error.args[1]})" if error.args[1] else ""
        refusal = NotJoined("unreachable")
    except (LinkError, FrameError) as error:
        reason = f"the server there closed the connection, or is not a coordinator ({error})"
    else:
        known = incarnation, max_body_bytes
        return channel, _welcome_of(what, channel, frame, card.process, *known)
    raise InitializeError(f"{what}: {reason}", refusal=refusal)


class _NoCoordinator(Exception):
    """No coordinator accepted a HELLO for this job by the deadline."""


class _Waiting:
    """A wait for the other processes: its deadline, and one log line once it is long."""

    def __init__(
        self,
        address: str,
        card: Identity,
        began: float,
        limit: float,
        warn_after_s: float,
    ) -> None:
        self.address, self.card, self.limit = address, card, limit
        self.warn_at = began + warn_after_s  # inf once logged
        self._began = began

    def warn(self, reason: str) -> None:
        waited_s = time.monotonic() - self._began
        _LOG.warning("%s has waited %.0f s to join the job: %s", self.card, waited_s, reason)
        self.warn_at = math.inf


def _retry_hello(waiting: _Waiting, incarnation: str, max_body_bytes: int) -> tuple[Channel, Frame]:
    """Send HELLO repeatedly until the deadline: the coordinator may start later than this
    process, and that of an earlier job at the same address may be about to end."""
    pause_s, limit = _FIRST_PAUSE_S, waiting.limit
    while True:
        try:
            channel = connect(split_address(waiting.address), limit, max_body_bytes=max_body_bytes)
        except LinkError as error:
            reason = what_failed(error)
        else:
            frame = _send_hello(channel, waiting, incarnation)
            if frame is not None and frame.header.get("is") != "later":
                return channel, frame
            channel.close()
            reason = ("an earlier job is still ending there, or it is not a coordinator", "")
        now = time.monotonic()
        if now >= limit:
            raise _NoCoordinator(*reason)
        if now >= waiting.warn_at:
            waiting.warn(f"{waiting.address}: {reason[0]}")
        time.sleep(min(pause_s, limit - now))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _send_hello(channel: Channel, waiting: _Waiting, incarnation: str) -> Frame | None:
    """Send HELLO and wait for the answer. None: the coordinator is shutting down."""
    began, limit = time.monotonic(), waiting.limit + _MARGIN_S
    try:
        card = hello_of(waiting.card, incarnation, left_of(waiting.limit))
        refusal = introduce(channel, card, waiting.card.token, limit)
        frame = refusal or _await_welcome(channel, waiting, limit)
    except BaseException as error:
        channel.close()
        is_closed = isinstance(error, LinkError) and not isinstance(error, LinkTimeoutError)
        if is_closed and time.monotonic() < began + _ENDING_S:
            return None
        raise
    return frame


def _await_welcome(channel: Channel, waiting: _Waiting, limit: float) -> Frame:
    """Wait for the answer; if that takes long, query and log the missing processes."""
    try:
        return channel.receive(min(limit, waiting.warn_at))
    except LinkTimeoutError:
        if time.monotonic() >= limit:
            raise
    channel.send(pack_frame({"do": "who", "ticket": 0, "lane": ""}), limit)
    frame = channel.receive(limit)
    if frame.header.get("is") == "waiting":
        refused = strangers_text(strangers_of(frame.header.get("strangers")))
        remedy = f"\n{REMEDY}" if refused else ""
        strangers = f"; {refused}" if refused else ""
        waiting.warn(f"missing: {listed(body_value(frame))}{strangers}{remedy}")
        frame = channel.receive(limit)
    return frame


def _welcome_of(
    what: str,
    channel: Channel,
    frame: Frame,
    process: int,
    incarnation: str,
    max_body_bytes: int,
) -> Welcome:
    try:
        if text_field(frame.header, "is") != "welcome":
            raise _refused(what, frame)
        service = text_field(frame.header, "jax_service")
        hosts = zlib.decompress(frame.body) if frame.header.get("packed") else frame.body
        leader = whole_field(frame.header, "leader")
        keeps = frame.header.get("keeps", {}) if leader == process else {}
        return Welcome(
            hosts=hosts_of(json.loads(hosts)),
            jax_service=service,
            incarnation=incarnation,
            max_body_bytes=max_body_bytes,
            heartbeat_s=number_field(frame.header, "heartbeat_s"),
            lost_after_s=number_field(frame.header, "lost_after_s"),
            leader=leader,
            keeps={int(p): pid for p, pid in keeps.items()},
            is_on_one_host=frame.header.get("one_host") is True,
            near=text_field(frame.header, "near"),
        )
    except BaseException:
        channel.close()
        raise


def _refused(what: str, frame: Frame) -> InitializeError:
    try:
        refusal = refusal_of_row(frame.header.get("refusal"))
    except FrameError:  # of another version
        return InitializeError(f"{what}: {frame.body.decode(errors='replace')}")
    remedy = REMEDY if refusal.reason == "lacks-token" else ""  # process 0 has sent it
    not_joined = NotJoined(refusal.reason, strangers_text(refusal.strangers), remedy)
    # A name of another process may hold half a surrogate pair, which JSON passes on.
    reason = refusal_text(refusal).encode(errors="replace").decode()
    return InitializeError(f"{what}: {reason}", missing=refusal.missing, refusal=not_joined)


def hello_of(card: Identity, incarnation: str, left_s: float) -> dict[str, Any]:
    """Return a HELLO, which `rules.joining.parse_hello` reads."""
    hello: dict[str, Any] = card._asdict()
    del hello["token"]
    if card.versions is None:
        hello["versions"] = _versions()
    hello["do"] = "hello"
    hello["protocol"] = PROTOCOL
    hello["pid"] = os.getpid()
    hello["incarnation"] = incarnation
    hello["timeout_s"] = None if left_s == math.inf else left_s
    hello["given_s"] = None if given_s(left_s) == math.inf else given_s(left_s)
    return hello


def host_id() -> str:
    """Return an id shared by processes that share pids and loopback; empty: unknown."""
    pids = pid_namespace()
    try:
        return f"{pids} {os.readlink('/proc/self/ns/net')}" if pids else ""
    except OSError:
        return ""


def _versions() -> str:
    """The versions that must be equal everywhere, found without importing the packages."""
    return ", ".join(f"{name} {_version(name)}" for name in ("shoal", "jax"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
