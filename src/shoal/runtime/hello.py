"""Saying HELLO at the meeting place, and being told that all are here."""

from __future__ import annotations

import json
import math
import os
import time
from importlib import metadata
from typing import Any, NamedTuple

from shoal.errors import InitializeError, UsageError
from shoal.runtime.channel import Channel, connect
from shoal.runtime.coordinator import MAX_PAYLOAD_BYTES
from shoal.runtime.frames import Frame, FrameError, pack_frame, split_address, text_field
from shoal.runtime.joining import PROTOCOL

__all__ = ["Card", "Welcome", "say_hello"]

_MARGIN_S = 1.0  # how much later than the deadline the meeting place may answer
_FIRST_PAUSE_S = 0.02  # between two knocks at a meeting place that does not listen yet
_LAST_PAUSE_S = 0.5
_ENDING_S = 1.0  # an end without a word within this is that of an earlier job


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
    incarnation = os.urandom(8).hex()
    try:
        channel, frame = _knock(address, card, incarnation, limit, max_body_bytes)
    except TimeoutError:
        told = f"it accepted the connection, but did not answer within {timeout_s:g} s"
    except _Absent as error:
        told = f"{error.args[0]}; tried for {timeout_s:g} s{error.args[1]}"
    except (OSError, FrameError) as error:
        told = f"who listens there ended the connection, or is no meeting place ({error})"
    else:
        return channel, _welcome_of(asked, channel, frame, incarnation, max_body_bytes)
    raise InitializeError(f"{asked}: {told}")


class _Absent(Exception):
    """No meeting place that takes a HELLO of this job was there by the deadline."""


def _knock(
    address: str, card: Card, incarnation: str, limit: float, max_body_bytes: int
) -> tuple[Channel, Frame]:
    """Say HELLO again and again until the deadline: the meeting place may start later than we,
    and that of an earlier job at the same address may be about to end."""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            channel = connect(split_address(address), limit, max_body_bytes=max_body_bytes)
        except OSError as error:
            told = ("nobody listens there", f" ({error})")
        else:
            frame = _speak(channel, card, incarnation, limit)
            if frame is not None:
                return channel, frame
            told = ("an earlier job is still ending there, or it is no meeting place", "")
        left_s = limit - time.monotonic()
        if left_s <= 0:
            raise _Absent(*told)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _speak(channel: Channel, card: Card, incarnation: str, limit: float) -> Frame | None:
    """Say HELLO and wait for the answer. None: the meeting place is one that ends."""
    began = time.monotonic()
    try:
        channel.send(_hello_frame(card, incarnation, limit), limit + _MARGIN_S)
        frame = channel.receive(limit + _MARGIN_S)
    except BaseException as error:
        channel.close()
        if isinstance(error, ConnectionError) and time.monotonic() < began + _ENDING_S:
            return None
        raise
    if frame.header.get("is") != "later":
        return frame
    channel.close()
    return None


def _welcome_of(
    asked: str, channel: Channel, frame: Frame, incarnation: str, max_body_bytes: int
) -> Welcome:
    try:
        if text_field(frame.header, "is") != "welcome":
            missing = frame.header.get("missing", [])
            raise InitializeError(
                f"{asked}: {frame.body.decode(errors='replace')}", missing=missing
            )
        service = text_field(frame.header, "jax_service")
        return Welcome(tuple(json.loads(frame.body)), service, incarnation, max_body_bytes)
    except BaseException:
        channel.close()
        raise


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


def _versions() -> str:
    """The versions that must be equal everywhere, without importing anything of them."""
    return ", ".join(f"{name} {_version(name)}" for name in ("shoal", "jax"))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
