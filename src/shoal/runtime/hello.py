"""Saying HELLO at the meeting place, and being told that all are here."""

from __future__ import annotations

import json
import math
import os
import time
from importlib import metadata
from typing import Any, NamedTuple, NoReturn

from shoal.errors import InitializeError, UsageError
from shoal.runtime.channel import Channel, connect
from shoal.runtime.coordinator import MAX_PAYLOAD_BYTES
from shoal.runtime.frames import Frame, FrameError, pack_frame, split_address, text_field
from shoal.runtime.joining import PROTOCOL

__all__ = ["Card", "Welcome", "say_hello"]

_MARGIN_S = 1.0  # how much later than the deadline the meeting place may answer
_FIRST_PAUSE_S = 0.02  # between two knocks at a meeting place that does not listen yet
_LAST_PAUSE_S = 0.5


class Welcome(NamedTuple):
    """What a process learns when all are here."""

    hosts: tuple[str, ...]
    jax_service: str
    incarnation: str  # of this process; its further connections show it
    max_body_bytes: int  # the largest answer


class Card(NamedTuple):
    """What a process says of itself."""

    process: int
    processes: int
    host: str
    token: str
    versions: str | None  # None: the versions of shoal and JAX
    jax_service: str

    def __str__(self) -> str:
        return f"process {self.process} of {self.processes} ({self.host})"


def say_hello(address: str, card: Card, timeout_s: float) -> tuple[Channel, Welcome]:
    """Connect, say HELLO, wait for all others. See `coordinator_tcp.join`."""
    asked = f"{card}: cannot join the job at {address}"
    if card.process < 0 or card.processes < 1 or not timeout_s > 0:
        raise UsageError(f"{asked}: process ≥ 0, num_processes ≥ 1 and timeout_s > 0 are needed")
    try:
        split_address(address)
    except UsageError as error:
        raise UsageError(f"{card}: cannot join the job: {error}") from None
    limit = time.monotonic() + timeout_s
    max_body_bytes = card.processes * (MAX_PAYLOAD_BYTES + 4) + (64 << 20)
    channel = _knock(address, asked, limit, timeout_s, max_body_bytes)
    incarnation = os.urandom(8).hex()
    try:
        channel.send(_hello_frame(card, incarnation, limit), limit + _MARGIN_S)
        frame = channel.receive(limit + _MARGIN_S)
        if text_field(frame.header, "is") != "welcome":
            _refused(asked, frame)
        service = text_field(frame.header, "jax_service")
        hosts = tuple(json.loads(frame.body))
        return channel, Welcome(hosts, service, incarnation, max_body_bytes)
    except BaseException as error:
        channel.close()
        if not isinstance(error, OSError | FrameError):
            raise
        told = f"who listens there ended the connection, or is no meeting place ({error})"
        if isinstance(error, TimeoutError):
            told = f"it accepted the connection, but did not answer within {timeout_s:g} s"
        raise InitializeError(f"{asked}: {told}") from None


def _hello_frame(card: Card, incarnation: str, limit: float) -> bytes:
    hello: dict[str, Any] = card._asdict()
    if card.versions is None:
        hello["versions"] = _versions()
    left_s = max(limit - time.monotonic(), 0.001)
    hello["do"] = "hello"
    hello["protocol"] = PROTOCOL
    hello["pid"] = os.getpid()
    hello["incarnation"] = incarnation
    hello["timeout_s"] = None if left_s == math.inf else left_s
    return pack_frame(hello)


def _refused(asked: str, frame: Frame) -> NoReturn:
    missing = frame.header.get("missing", [])
    raise InitializeError(f"{asked}: {frame.body.decode(errors='replace')}", missing=missing)


def _knock(
    address: str, asked: str, limit: float, timeout_s: float, max_body_bytes: int
) -> Channel:
    """Connect, again and again until the deadline: the meeting place may start later than we."""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return connect(split_address(address), limit, max_body_bytes=max_body_bytes)
        except OSError as error:
            left_s = limit - time.monotonic()
            if left_s <= 0:
                told = f"nobody listens there; tried for {timeout_s:g} s ({error})"
                raise InitializeError(f"{asked}: {told}") from None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _versions() -> str:
    """The versions that must be equal everywhere, without importing anything of them."""
    return ", ".join(f"{name} {_version(name)}" for name in ("shoal", "jax"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
