"""How each dtype is stored in a data file: its safetensors dtype, and packing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from shoal.arguments import no_fixed_bits
from shoal.errors import UsageError, UsageTypeError, WrongType

Array = np.ndarray[Any, Any]
Bytes = NDArray[np.uint8]


class Storage(NamedTuple):
    """How elements of a dtype are stored, always little-endian."""

    entry: str  # the dtype of the entry: "F32", "U8"
    per_byte: int  # elements per byte: 1, or 2, 4, 8 if packed, low bits first
    item_bytes: int  # of an element, if not packed
    trailing: tuple[int, ...]  # extra trailing dims of the entry
    align: int  # alignment of the entry


_ENTRIES: Mapping[str, str] = {  # dtypes native to safetensors
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
# Stored as two of another type, in an additional last dim.
_PAIRS: Mapping[str, str] = {"complex128": "F64", "complex32": "F16", "bcomplex32": "BF16"}
# Several elements of so many bits in a byte.
_BITS_PACKED: Mapping[str, int] = {
    "int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4,
}  # fmt: skip
# One element in a byte, which safetensors knows as a number without a type.
_ONE_PER_BYTE = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float6_e2m3fn",
    "float6_e3m2fn",
)
_TIME = re.compile(
    r"(?:datetime|timedelta)64(?:\[(?:[1-9][0-9]{0,8})?(?:[YMWDhms]|ms|us|ns|ps|fs|as)\])?",
    re.ASCII,
)
_TEXT = re.compile(r"([SU])(0|[1-9][0-9]{0,8})", re.ASCII)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype in manifests, whatever its byte order.

    Raises:
      UsageTypeError: it cannot be stored.
    """
    return _name_of(np.dtype(dtype))


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises:
      UsageError: the name is unknown.
    """
    dtype = _dtype_of(name)
    if dtype is None:
        raise UsageError(f"{name[:100]!r} is not the name of a dtype that can be stored")
    return dtype


def storage_of(dtype: Any) -> Storage:
    """Return how a dtype is stored.

    Raises:
      UsageTypeError: it cannot be.
    """
    return _storage(np.dtype(dtype))


def num_bytes(dtype: Any, shape: Sequence[int]) -> int:
    """Return the size of a box of that shape in a file."""
    how = storage_of(dtype)
    elements = math.prod(shape)
    if how.per_byte > 1:
        return -(-elements // how.per_byte)
    return elements * how.item_bytes


def entry_shape(dtype: Any, extent: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the entry of a box."""
    how = storage_of(dtype)
    if how.per_byte > 1:
        return (num_bytes(dtype, extent),)
    return (*extent, *how.trailing)


def pack_elements(array: Array) -> Bytes:
    """Return an array's bytes in file format, without a copy where possible."""
    how = storage_of(array.dtype)
    if how.per_byte > 1:
        return _pack(np.ascontiguousarray(array).reshape(-1).view(np.uint8), how.per_byte)
    if not how.item_bytes:  # zero-length strings
        return np.empty(0, np.uint8)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)


def unpack_elements(data: Any, dtype: Any, shape: Sequence[int]) -> Array:
    """Return the array of these bytes; unpacked dtypes share their memory.

    `data` is bytes, or an array of them, exactly as many as `num_bytes` says.
    """
    dtype = np.dtype(dtype)
    how = storage_of(dtype)
    stored = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    if stored.size != num_bytes(dtype, shape):
        raise UsageError(
            f"{stored.size} bytes are no {dtype_name(dtype)}{list(shape)}: "
            f"that has {num_bytes(dtype, shape)}"
        )
    if how.per_byte > 1:
        elements = _unpack(stored, how.per_byte, math.prod(shape))
        return np.ndarray(shape, dtype, elements)
    return np.ndarray(shape, dtype.newbyteorder("<"), stored)


def _pack(elements: Bytes, per_byte: int) -> Bytes:
    bits = 8 // per_byte
    mask = np.uint8((1 << bits) - 1)
    whole = elements.size // per_byte * per_byte
    packed = np.empty(-(-elements.size // per_byte), np.uint8)
    body = packed[: whole // per_byte]
    np.bitwise_and(elements[:whole:per_byte], mask, out=body)
    for place in range(1, per_byte):
        body |= (elements[place:whole:per_byte] & mask) << np.uint8(place * bits)
    if whole < elements.size:
        last = 0
        for place, element in enumerate(elements[whole:].tolist()):
            last |= (element & int(mask)) << (place * bits)
        packed[-1] = last
    return packed


def _unpack(packed: Bytes, per_byte: int, elements: int) -> Bytes:
    bits = 8 // per_byte
    mask = np.uint8((1 << bits) - 1)
    apart = np.empty((packed.size, per_byte), np.uint8)
    for place in range(per_byte):
        np.bitwise_and(packed >> np.uint8(place * bits), mask, out=apart[:, place])
    return apart.reshape(-1)[:elements]


_UNKNOWN = "which cannot be stored; save its bits, .view(np.uint8)"  # a new one of ml_dtypes


@lru_cache(maxsize=1024)
def _name_of(dtype: np.dtype[Any]) -> str:
    name = dtype.name
    if dtype.kind == "U":
        name = f"U{dtype.itemsize // 4}"
    elif dtype.type is np.bytes_:
        name = dtype.str[1:]
    if _dtype_of(name) != (dtype if dtype.isnative else dtype.newbyteorder("=")):
        what = f"has dtype {dtype}, {no_fixed_bits(dtype) or _UNKNOWN}"
        raise UsageTypeError(what, problems=[WrongType(what)])
    return name


@lru_cache(maxsize=1024)
def _dtype_of(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a name in a manifest, None if there is none."""
    small = name in _BITS_PACKED or name in _ONE_PER_BYTE or name in _ENTRIES or name in _PAIRS
    if small:
        kind = getattr(ml_dtypes, name, None) or name
    elif _TIME.fullmatch(name) or _TEXT.fullmatch(name):
        kind = name
    else:
        return None
    try:
        return np.dtype(kind)
    except (TypeError, ValueError, OverflowError):
        return None


@lru_cache(maxsize=1024)
def _storage(dtype: np.dtype[Any]) -> Storage:
    name = _name_of(dtype)
    size = dtype.itemsize
    if name in _BITS_PACKED:
        return Storage(
            entry="U8", per_byte=8 // _BITS_PACKED[name], item_bytes=1, trailing=(), align=1
        )
    if name in _PAIRS:
        return Storage(
            entry=_PAIRS[name], per_byte=1, item_bytes=size, trailing=(2,), align=size // 2
        )
    if name in _ENTRIES:
        return Storage(entry=_ENTRIES[name], per_byte=1, item_bytes=size, trailing=(), align=size)
    if name in _ONE_PER_BYTE:
        return Storage(entry="U8", per_byte=1, item_bytes=1, trailing=(), align=1)
    if dtype.kind in "mM":
        return Storage(entry="I64", per_byte=1, item_bytes=8, trailing=(), align=8)
    return Storage(entry="U8", per_byte=1, item_bytes=size, trailing=(size,), align=1)
