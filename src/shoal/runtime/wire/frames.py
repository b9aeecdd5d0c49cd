"""The encoding of messages: a length, a JSON header, raw bytes. No pickle.

::

    frame = magic "SHL1" | header length (u32) | body length (u64) | header (JSON object) | body

The reader declares the largest header and body that it accepts; a larger frame, or anything that is
not a frame, is refused as early as possible, before memory is spent on it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from shoal.errors import UsageError

MAX_HELLO_BYTES = 16 << 10  # header of an untrusted connection, which may send no body
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 16 << 20  # of one process at one point; larger values travel between devices

_REMEMBERED_BYTES = 1 << 10
_SMALL_BYTES = 1 << 13
_LARGE_BYTES = 1 << 18
_MAGIC = b"SHL1"
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would build one each time
_DECODE = json.JSONDecoder().raw_decode
_PREFIX = struct.Struct("!4sIQ")
_SIZE = struct.Struct("!I")
_SIDE = struct.Struct("!II")


class FrameError(ValueError):
    """The bytes received are not a frame, are too many, or lack a field."""


class Frame(NamedTuple):
    """One message."""

    header: Mapping[str, Any]  # shared by all frames with equal headers
    body: bytes


def pack_frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return pack_text(_ENCODE(header).encode(), body)


def pack_text(header: bytes, body: bytes = b"") -> bytes:
    """Return the bytes of one frame whose header is already JSON."""
    return _PREFIX.pack(_MAGIC, len(header), len(body)) + header + body


def pack_answer(ticket: int, kind: str, body: bytes = b"") -> bytes:
    """Return `pack_frame({"ticket": ticket, "is": kind}, body)`, fast; ticket 0: without one."""
    field = b'"is":"%b"}' % kind.encode()
    return pack_text(b'{"ticket":%d,%b' % (ticket, field) if ticket else b"{" + field, body)


class FrameReader:
    """Cuts a stream of bytes into frames: `feed` bytes, then call `next` until None."""

    def __init__(self, *, max_header_bytes: int, max_body_bytes: int) -> None:
        self.max_header_bytes = max_header_bytes
        self.max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    @property
    def chunk_bytes(self) -> int:
        """The size for the next recv. More than needed is slow: recv clears the buffer first."""
        return _LARGE_BYTES if len(self._buffer) >= _SMALL_BYTES else _SMALL_BYTES

    def feed(self, data: bytes) -> None:
        """Add bytes from the socket."""
        self._buffer += data

    def rest(self) -> bytes:
        """Return the bytes after the last frame: the peer speaks another protocol from there."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def next(self) -> Frame | None:
        """Return the next whole frame, or None when more bytes are needed.

        Raises:
          FrameError: these bytes can never become a frame within the limits.
        """
        buffer = self._buffer
        if not buffer:
            return None
        if len(buffer) < _PREFIX.size:
            _check_magic(buffer[:4])
            return None
        magic, header_bytes, body_bytes = _PREFIX.unpack_from(buffer)
        if magic != _MAGIC:
            _check_magic(magic)
        if header_bytes > self.max_header_bytes or body_bytes > self.max_body_bytes:
            raise FrameError(
                f"frame too large: header {header_bytes} of {self.max_header_bytes} bytes, "
                f"body {body_bytes} of {self.max_body_bytes} bytes"
            )
        body_at = _PREFIX.size + header_bytes
        end = body_at + body_bytes
        if len(buffer) < end:
            return None
        header = _parse_header(bytes(buffer[_PREFIX.size : body_at]))
        body = bytes(memoryview(buffer)[body_at:end]) if body_bytes else b""
        del buffer[:end]
        return Frame(header, body)


def begins_frame(data: bytes) -> bool:
    """Return whether these bytes, the first of a connection, may begin a frame."""
    return data[: len(_MAGIC)] == _MAGIC[: len(data)]


def _check_magic(begin: bytes | bytearray) -> None:
    if not _MAGIC.startswith(begin):
        raise FrameError(f"not a frame of shoal: it begins with {bytes(begin)!r}")


def _parse_header(text: bytes) -> Mapping[str, Any]:
    """Parse a header. Loops repeat their headers, so small ones are cached."""
    return _remembered_header(text) if len(text) <= _REMEMBERED_BYTES else _read_header(text)


def _read_header(text: bytes) -> Mapping[str, Any]:
    try:
        decoded = text.decode()
        header, end = _DECODE(decoded)
    except (ValueError, RecursionError) as error:  # deep nesting overflows the parser's stack
        raise FrameError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict) or end != len(decoded):
        raise FrameError("the header is not a JSON object")
    return MappingProxyType(header)


_remembered_header = lru_cache(maxsize=256)(_read_header)


def body_value(frame: Frame) -> Any:
    """Return the value in a body, which must be JSON."""
    try:
        return json.loads(frame.body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the body is not JSON: {error}") from None


def text_field(header: Mapping[str, Any], name: str) -> str:
    """Return a field that must be text."""
    value = header.get(name)
    if not isinstance(value, str):
        raise FrameError(f"field {name!r} is not text")
    return value


def whole_field(header: Mapping[str, Any], name: str) -> int:
    """Return a field that must be an integer (JSON's true is not one)."""
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FrameError(f"field {name!r} is not an integer")
    return value


def number_field(header: Mapping[str, Any], name: str) -> float:
    """Return a field that must be a number; null stands for infinity, which JSON lacks."""
    value = header.get(name, math.nan)
    if value is None:
        return math.inf
    try:
        is_number = isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        is_number = False
    if not is_number or isinstance(value, bool):
        raise FrameError(f"field {name!r} is not a number")
    return float(value)


def join_payloads(payloads: Sequence[bytes]) -> bytes:
    """Return one body for all payloads; equal ones are sent once, with their processes as runs.

    If all are empty the body is too: the answer of a barrier does not grow with the job, nor does
    that of a broadcast, or of a comparison of equal values.

    ::

        body = sides (u32) | per side: runs (u32), bytes (u32), first and end of each run (u32) |
               the bytes of each side
    """
    if not any(payloads):
        return b""
    sides: dict[bytes, list[int]] = {}
    for index, payload in enumerate(payloads):
        runs = sides.setdefault(payload, [])
        if runs and runs[-1] == index:
            runs[-1] = index + 1
        else:
            runs += index, index + 1
    heads = (
        struct.pack(f"!{2 + len(runs)}I", len(runs) // 2, len(payload), *runs)
        for payload, runs in sides.items()
    )
    return b"".join((_SIZE.pack(len(sides)), *heads, *sides))


def split_payloads(body: bytes, count: int) -> list[bytes]:
    """Inverse of `join_payloads`.

    Raises:
      FrameError: it does not hold exactly one payload for each of `count` processes.
    """
    if not body:
        return [b""] * count
    payloads: list[bytes | None] = [None] * count
    try:
        (num_sides,) = _SIZE.unpack_from(body)
        offset, sides = _SIZE.size, []
        for _ in range(num_sides):
            num_runs, size = _SIDE.unpack_from(body, offset)
            runs = struct.unpack_from(f"!{2 * num_runs}I", body, offset + _SIDE.size)
            offset += _SIDE.size + 8 * num_runs
            sides.append((size, runs))
    except struct.error:
        raise FrameError("the answer is truncated") from None
    for size, runs in sides:
        payload, offset = body[offset : offset + size], offset + size
        for first, end in zip(runs[::2], runs[1::2], strict=True):
            if not first < end <= count or payloads[first:end].count(None) != end - first:
                raise FrameError("the answer is inconsistent")
            payloads[first:end] = [payload] * (end - first)
    if offset != len(body) or None in payloads:
        raise FrameError("the answer is inconsistent")
    return cast(list[bytes], payloads)


def address_text(host: str, port: int) -> str:
    """Return `host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Inverse of `address_text`.

    Raises:
      UsageError: it is not `host:port`.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r} is not an address; pass host:port, as in 10.0.0.1:8476")
    return host, int(port)
