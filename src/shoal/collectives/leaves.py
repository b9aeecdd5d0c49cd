"""Leaves of trees that can be sent between processes, and their bits.

A leaf is described by one line, from its kind, shape and dtype alone, without reading data. Its
bits are those in memory: -0.0, subnormals and NaN payloads survive, whatever the dtype, and 64-bit
values whatever JAX's x64 setting. Nothing is ever pickled.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shoal.arguments import PLAIN_KINDS, no_fixed_bits
from shoal.arrays.host.host_values import is_key, native, without_values
from shoal.conversion_hints import advice
from shoal.errors import UsageError, WrongType, raise_all, with_article
from shoal.plan.shards import Box
from shoal.runtime.rules.spec_lines import SpecLine

Array: TypeAlias = np.ndarray[Any, Any]
ANY = -1  # a size that may differ between processes
Buffer: TypeAlias = bytes | memoryview  # of bytes

_OPEN = ("int", "str", "bytes")
_PLAIN_BYTES: Mapping[str, int] = {"bool": 1, "float": 8, "complex": 16, "None": 0}
_KNOWN = "pass arrays, numbers, str, bytes, PRNG keys or None"
_ABSTRACT = "stands for an array, but this process's value is needed; pass the array"
_ELSEWHERE = (
    "is wholly or partly on devices of other processes; allgather it with tiled=True, or "
    "relayout it to be replicated"
)


class LeafSpec(NamedTuple):
    """One leaf, without its data."""

    path: str  # "['params']['w']", or "the value"
    kind: str  # "array", "scalar" (of NumPy), "key", "parts" (of an array on several processes), or
    # the type of a Python value: "int", "str", …
    dtype: np.dtype[Any] | None = None  # of its words, if any
    shape: tuple[int, ...] = ()  # of the leaf; ANY: a size that may differ between processes
    words: tuple[int, ...] = ()  # trailing dims of a key's words
    impl: Any = None  # of a key
    regions: str = ""  # of an array on several processes

    @property
    def line(self) -> str:
        """The line that must be equal on all processes, see `SpecLine`."""
        if self.dtype is None or self.kind in _PLAIN_BYTES:
            return SpecLine(path=self.path, dtype=self.kind).packed
        if self.kind == "scalar":
            return SpecLine(path=self.path, dtype=f"np.{dtype_name(self.dtype)}").packed
        name = dtype_name(self.dtype) if self.impl is None else f"key<{self.impl}>"
        sizes = ",".join("*" if size == ANY else str(size) for size in self.shape)
        return SpecLine(path=self.path, dtype=name, shape=f"[{sizes}]", layout=self.regions).packed

    def place_of(self, index: int, box: Box | None = None) -> str:
        """Return the index expression of an item of a region: `['w'][2, 3]`; None: of the whole."""
        path = "" if self.path == "the value" else self.path
        if self.dtype is None:
            noun = {"str": " at character ", "bytes": " at byte "}.get(self.kind)
            return self.path + (f"{noun}{index}" if noun else "")
        whole = [(0, size) for size in (*self.shape, *self.words)]
        bounds = whole if box is None else box
        coords = np.unravel_index(index, [end - first for first, end in bounds])
        where = [first + int(i) for (first, _), i in zip(bounds, coords, strict=True)]
        return f"{path}{where}" if where else self.path

    @property
    def is_open(self) -> bool:
        """Only the holder of the value knows its length, which is sent as a number."""
        return self.kind in _OPEN or ANY in self.shape

    @property
    def align(self) -> int:
        """Alignment in bytes required to use it in place."""
        if self.dtype is None or self.dtype.kind == "S":
            return 1
        return 4 if self.dtype.kind == "U" else self.dtype.itemsize

    def num_bytes(self, length: int = 0) -> int:
        """Size in bytes; `length`: that of the value, if it is open."""
        if self.dtype is None:
            return length if self.is_open else _PLAIN_BYTES[self.kind]
        items = math.prod(length if size == ANY else size for size in self.shape)
        return items * math.prod(self.words) * self.dtype.itemsize


def leaf_of(path: str, value: Any) -> LeafSpec | str:
    """Return the leaf for a value, or a description of the problem."""
    kind = PLAIN_KINDS.get(type(value))
    if kind:
        return LeafSpec(path, kind)
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(path, value)
    if isinstance(value, jax.core.Tracer):
        return WrongType(f"{path}: is a value inside jit or grad; pass it out first")
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        if isinstance(value, jax.Array):
            why = without_values(value)
            if why:
                return f"{path}: {why}"
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl, key_words, dtype = _key(value.dtype)
            return LeafSpec(
                path, kind="key", dtype=dtype, shape=value.shape, words=key_words, impl=impl
            )
        why = no_fixed_bits(value.dtype)
        if why:
            return WrongType(f"{path}: has dtype {value.dtype}, {why}")
        return LeafSpec(path, "array", value.dtype, value.shape)
    instead = advice(value, "pass", "sent", can_register=True) or _KNOWN
    return WrongType(f"{path}: is {with_article(type(value).__name__)}; {instead}")


def buffer_of(leaf: LeafSpec, value: Any) -> Buffer:
    """Return the bits of a leaf, without a copy if contiguous."""
    if leaf.dtype is not None and not leaf.dtype.itemsize:
        return b""  # text of width 0, which NumPy may widen
    if leaf.dtype is not None:
        array = np.ascontiguousarray(native(host_view(value)))
        return array.reshape(-1).view(np.uint8).data
    if leaf.kind == "str":
        return bytes(value.encode("utf-8", "surrogatepass"))
    if leaf.kind == "int":
        return bytes(value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True))
    if leaf.kind == "complex":
        return struct.pack("<dd", value.real, value.imag)
    if leaf.kind == "float":
        return struct.pack("<d", value)
    if leaf.kind == "bool":
        return bytes([value])
    return value or b""


def value_of(leaf: LeafSpec, bits: Array) -> Any:
    """Return the value of these bits; a NumPy array shares their memory."""
    if leaf.dtype is not None:
        # Not `view`: text may have no width, and then no bytes.
        array = np.ndarray(leaf.shape + leaf.words, leaf.dtype, bits)
        if leaf.kind == "key":
            return wrap_key(array, leaf.impl)
        return array if leaf.kind == "array" else _scalar(array)
    data = bits.tobytes()
    if leaf.kind == "str":
        return data.decode("utf-8", "surrogatepass")
    if leaf.kind == "int":
        return int.from_bytes(data, "little", signed=True)
    if leaf.kind == "complex":
        return complex(*struct.unpack("<dd", data))
    if leaf.kind == "float":
        return struct.unpack("<d", data)[0]
    if leaf.kind == "bool":
        return data != b"\0"
    return data if leaf.kind == "bytes" else None


def _scalar(array: Array) -> Any:
    """Return the scalar of an array without dims; text keeps the zeros at its end."""
    if array.dtype.kind == "S":
        return np.bytes_(array.tobytes())
    if array.dtype.kind == "U":
        points = np.frombuffer(array.tobytes(), np.uint32).tolist()
        return np.str_("".join(map(chr, points)))
    return array[()]


def wrap_key(key_words: Array, impl: Any) -> jax.Array:
    """Return PRNG keys; compiles nothing, whatever mesh is in context, even while jit traces."""
    with jax.transfer_guard("allow"), jax.ensure_compile_time_eval():
        return jax.random.wrap_key_data(key_words, impl=impl)


def is_global(value: Any) -> bool:
    """True for an array with shards on devices of other processes; a traced value has no shards."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and not value.is_fully_addressable


def words_of(piece: jax.Array) -> Array:
    """Return the words of an array on one device, in place if in host memory.

    Also for keys: the words of keys on several devices would be a program of all their processes.
    """
    with jax.transfer_guard("allow"), jax.ensure_compile_time_eval():  # jit may be tracing now
        return np.asarray(jax.random.key_data(piece) if is_key(piece) else piece)


def box_of(index: tuple[slice, ...], leaf: LeafSpec) -> Box:
    """Return a region of a leaf's words; a JAX index of a key may omit their dims."""
    sizes = (*leaf.shape, *leaf.words)
    cuts = (*index, *[slice(None)] * (len(sizes) - len(index)))
    return tuple(cut.indices(size)[:2] for cut, size in zip(cuts, sizes, strict=True))


def require_values(operation: str, leaves: Sequence[LeafSpec], values: Sequence[Any]) -> None:
    """Raise unless every leaf has a value.

    Raises:
      UsageError: leaves stand for arrays; names all, by path.
    """
    problems = [
        f"{leaf.path}: stands for an array, but its value is needed"
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(value, jax.ShapeDtypeStruct)
    ]
    raise_all(operation, problems)


def host_view(value: Any) -> Array:
    """Return the words of an array on the host, without a copy if this host has them.

    Raises:
      UsageError: this process holds only a part of it, or none; the caller adds the name.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        raise UsageError(_ABSTRACT)
    if not isinstance(value, jax.Array):
        return np.asarray(value)
    shards = value.addressable_shards
    if is_global(value) and not (value.is_fully_replicated and shards):
        raise UsageError(_ELSEWHERE)
    first = words_of(shards[0].data)
    if value.is_fully_replicated:
        return first
    whole = np.empty(value.shape + first.shape[value.ndim :], first.dtype)
    for shard in shards:  # np.asarray(value) would be cached in the array
        if shard.replica_id == 0:
            whole[shard.index] = words_of(shard.data)
    return whole


def _of_numpy(path: str, value: Any) -> LeafSpec | str:
    if isinstance(value, np.ma.MaskedArray):
        return WrongType(f"{path}: is a masked array, and the mask would be lost; fill it first")
    dtype = value.dtype if value.dtype.isnative else value.dtype.newbyteorder("=")
    why = no_fixed_bits(dtype)
    if why:
        return WrongType(f"{path}: has dtype {value.dtype}, {why}")
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    return LeafSpec(path, kind, dtype, value.shape)


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, of which `np.dtype` makes it again."""
    # Slow: NumPy builds the name on every access. That of text counts bits: str96 is U3.
    return dtype.str[1:] if dtype.kind in "SU" else dtype.name


@lru_cache(maxsize=64)
def _key(dtype: Any) -> tuple[Any, tuple[int, ...], np.dtype[Any]]:
    """Return the implementation of a key dtype, and the shape and dtype of a key's words."""
    impls = []

    def words_of(key: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    key_words = jax.eval_shape(words_of, jax.ShapeDtypeStruct((), dtype))
    return impls[0], key_words.shape, np.dtype(key_words.dtype)
