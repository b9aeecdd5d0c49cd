"""Read and write safetensors headers strictly: everything is validated before it is used.

Source: the format section of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.errors import CorruptCheckpointError, UsageError

MOST_BYTES = 100_000_000  # of a header: the limit of safetensors
_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_LARGEST = 1 << 62  # sizes and offsets stay below: sums of two fit into 64 bits


class Entry(NamedTuple):
    """One array of a file. Offsets count from the end of the header."""

    name: str
    dtype: str  # of safetensors: "F32"
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The parsed header of a file."""

    entries: tuple[Entry, ...]  # by `begin`
    metadata: Mapping[str, str]
    num_bytes: int  # of the header with length and padding: where the data begin


def arrange(items: Iterable[tuple[str, str, Sequence[int]]]) -> list[Entry]:
    """Lay out arrays (name, dtype, shape) without holes, each aligned to its dtype."""
    entries, begin = [], 0
    for name, dtype, shape in sorted(items, key=lambda item: -_BITS[item[1]]):
        end = begin + _size(dtype, shape)
        entries.append(Entry(name, dtype, shape=tuple(shape), begin=begin, end=end))
        begin = end
    return entries


def build_header(
    entries: Sequence[Entry], metadata: Mapping[str, str], *, page_bytes: int = PAGE_BYTES
) -> bytes:
    """Return length, JSON and padding, up to a multiple of `page_bytes`.

    Entries are in the order of their data, without holes; names are distinct.

    Raises:
      UsageError: too large for safetensors.
    """
    quote = json.encoder.encode_basestring
    inner = [f'"__metadata__":{json.dumps(dict(metadata), ensure_ascii=False)}'] if metadata else []
    inner += [
        f'{quote(name)}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],'
        f'"data_offsets":[{begin},{end}]}}'
        for name, dtype, shape, begin, end in entries
    ]
    text = ("{" + ",".join(inner) + "}").encode()
    padded = -(-(8 + len(text)) // page_bytes) * page_bytes
    if padded - 8 > MOST_BYTES:
        raise UsageError(
            f"the header of a file with {len(entries)} entries has {padded} bytes, and "
            f"safetensors allows {MOST_BYTES}; write more files"
        )
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def header_bytes(data: bytes | memoryview, file_bytes: int, file: str) -> int:
    """Return the header's size, including its length field and padding, from the first 8 bytes.

    Raises:
      CorruptCheckpointError: the length is impossible.
    """
    if len(data) < 8 or file_bytes < 8:
        _refuse(file, f"is {file_bytes} bytes long, too short for any header")
    length = int.from_bytes(data[:8], "little")
    if length > MOST_BYTES or length < 2:
        _refuse(file, f"says that its header has {length} bytes")
    if 8 + length > file_bytes:
        _refuse(file, f"is {file_bytes} bytes long, and says that its header has {length}")
    return 8 + length


def parse_header(data: bytes | memoryview, file_bytes: int, file: str) -> Header:
    """Parse a header; `data` begins where the file does and holds all of the header.

    Raises:
      CorruptCheckpointError: it is malformed, or contradicts itself or the length of the file.
    """
    length = header_bytes(data, file_bytes, file)
    text = bytes(data[8:length])
    if len(text) < length - 8 or text[:1] != b"{":
        _refuse(file, "has no header")
    fields = strict_json(text.rstrip(b" "), file)
    metadata = fields.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        _refuse(file, "has a header whose __metadata__ is not text")
    entries = sorted(
        (_entry(name, record, file) for name, record in fields.items()),
        key=lambda e: (e.begin, e.end),
    )
    _check_places(entries, file_bytes - length, file)
    return Header(tuple(entries), metadata, length)


def strict_json(text: bytes | str, file: str) -> Any:
    """Parse JSON, rejecting repeated keys, NaN, 1e400 and other Python extensions.

    Raises:
      CorruptCheckpointError: it is not strict JSON.
    """
    try:
        whole = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(whole, **_STRICT)
    except (ValueError, RecursionError, MemoryError) as why:
        problem = "it is nested too deeply" if isinstance(why, RecursionError) else str(why)
        raise CorruptCheckpointError(f"{file} is not valid JSON: {problem}", file=file) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise UsageError(f"the key {key[:100]!r} occurs twice")
            seen.add(key)
    return fields


def _no_constant(word: str) -> NoReturn:
    raise UsageError(f"{word} is not JSON")


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # Python parses 1e400 as inf
        raise UsageError(f"{text[:100]} is larger than any number")
    return number


_STRICT: Mapping[str, Any] = {
    "object_pairs_hook": _object, "parse_constant": _no_constant, "parse_float": _number,
}  # fmt: skip


def _entry(name: str, record: Any, file: str) -> Entry:
    if type(record) is not dict or record.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(file, f"has an entry {name[:100]!r} that is invalid")
    dtype, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if type(dtype) is not str or dtype not in _BITS:
        _refuse(file, f"has an entry {name[:100]!r} of no known dtype")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        _refuse(file, f"has an entry {name[:100]!r} whose shape or offsets are not sizes")
    begin, end = offsets
    if end - begin != _size(dtype, shape):
        _refuse(
            file,
            f"gives the entry {name[:100]!r} of {dtype}{shape} {end - begin} bytes, "
            f"which has {_size(dtype, shape)}",
        )
    return Entry(name, dtype, shape=tuple(shape), begin=begin, end=end)


def _sizes(value: Any) -> bool:
    """Is it a list of sizes? True and 1.0 are not sizes."""
    return type(value) is list and all(type(size) is int and 0 <= size < _LARGEST for size in value)


def _size(dtype: str, shape: Sequence[int]) -> int:
    bits = math.prod(shape) * _BITS[dtype]
    return bits // 8 if bits % 8 == 0 else -1


def _check_places(entries: Sequence[Entry], data_bytes: int, file: str) -> None:
    """Reject overlaps, holes, and offsets beyond the file."""
    begin = 0
    for entry in entries:
        if entry.begin != begin:
            what = "overlaps another entry" if entry.begin < begin else "follows a gap"
            _refuse(file, f"has an entry {entry.name[:100]!r} that {what}")
        begin = entry.end
    if begin != data_bytes:
        _refuse(file, f"has {data_bytes} bytes of data, and its header says {begin}")


def _refuse(file: str, what: str) -> NoReturn:
    raise CorruptCheckpointError(f"{file} {what}", file=file)
