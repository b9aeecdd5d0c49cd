"""A tree of values to save: what each leaf is, and which process holds which box of it.

Arrays on a mesh are held as their sharding says, even on a mesh of one process of many; processes
go by JAX's numbers. Any other value, such as an array on a process's default device, is equal on
all processes, and held by all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from shoal.arrays.bridge.sharding import layout_of_sharding, memory_of
from shoal.arrays.host.host_values import is_key, without_values
from shoal.checkpoint.format.blobs import encode_tree
from shoal.checkpoint.format.records import LeafRecord, in_memory
from shoal.checkpoint.planning.who_writes import Box, HeldLeaf, ShardMap, WriteBox, own_boxes
from shoal.checkpoint.tree import dtypes, flatten, names, nodes, plain_values
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.checkpoint.tree.jax_nodes import JaxNodes
from shoal.checkpoint.tree.plain_values import remedy
from shoal.collectives import leaves as wire
from shoal.errors import UsageError, WrongType, raise_all
from shoal.hashing import quick_digest

Array = np.ndarray[Any, Any]


class LocalBox(NamedTuple):
    """A box of an array on this host, and its device."""

    box: Box
    place: int  # index among the array's devices on this process
    device: Any


class StateLeaf(NamedTuple):
    """One leaf."""

    record: LeafRecord
    # A NumPy or JAX array; of a per-process value, its bytes. None: the record contains the value.
    value: Any
    shards: ShardMap | None  # by JAX's process numbers; None: every process holds all of it
    here: tuple[LocalBox, ...]  # of a JAX array


class State(NamedTuple):
    """The tree."""

    structure: nodes.Structure
    leaves: tuple[StateLeaf, ...]

    @property
    def mesh(self) -> str:
        """The text of the mesh of the array on the most devices; information only."""
        lying = [leaf for leaf in self.leaves if leaf.record.layout]
        if not lying:
            return ""
        leaf = max(lying, key=lambda leaf: len(leaf.value.sharding.device_set))
        return layout_of_sharding(leaf.value.sharding, len(leaf.record.shape)).mesh.text

    @property
    def is_spread(self) -> bool:
        """Do holders go by JAX's process numbers?"""
        return any(leaf.shards is not None for leaf in self.leaves)


def read_state(value: Any, num_processes: int, operation: str = "save") -> State:
    """Flatten a tree; no value is read.

    Raises:
      UsageError: names every leaf that cannot be saved.
    """
    pairs, structure = flatten.flatten_tree(value, JaxNodes(), operation=operation)
    reading = _StateReading(num_processes)
    problems: list[str] = []
    leaves: list[StateLeaf] = []
    for path, leaf in pairs:
        name = names.name_of(path)
        try:
            leaves.append(reading.leaf(name, leaf))
        except UsageError as error:
            problems += [type(problem)(f"{name}: {problem}") for problem in error.problems]
    raise_all(operation, problems)
    return State(structure, tuple(leaves))


def refuse_device_axis(state: State, operation: str) -> None:
    """Refuse the state of `jax.pmap`, in which each process has arrays of its own.

    Raises:
      UsageError: all arrays on meshes have a leading axis of this process's devices; names them.
    """
    values = {
        leaf.record.name: leaf.value
        for leaf in state.leaves
        if leaf.here and isinstance(leaf.value.sharding, jax.sharding.NamedSharding)
    }
    if not values or not all(map(_has_device_axis, values.values())):
        return
    if jax.process_count() == 1:  # asked last: without arrays it would start the devices
        return
    name, value = next(iter(values.items()))
    more = ""
    if len(values) > 1:
        more = f" (and {len(values) - 1} more)"
    raise UsageError(
        f"{operation}: {name}{more}: dim 0 of {value.shape} is an axis of this process's devices, "
        "as made by jax.pmap or flax.jax_utils.replicate, and other processes have other arrays\n"
        "save one replica: flax.jax_utils.unreplicate(state); if values differ, "
        "join them by from_host_local, or wrap them, as NumPy arrays, in PerProcess",
        problems=list(values),
    )


def _has_device_axis(value: jax.Array) -> bool:
    mesh, spec = value.sharding.mesh, value.sharding.spec
    is_split = len(spec) > 0 and spec[0] in (*mesh.axis_names, mesh.axis_names)
    return is_split and value.is_fully_addressable and value.shape[0] == mesh.size


def held_of(state: State, num_processes: int) -> list[HeldLeaf]:
    """Return the holders of all leaves with data, except per-process values."""
    held = []
    for index, leaf in enumerate(state.leaves):
        record, shards = leaf.record, leaf.shards
        if not record.dtype or record.kind == "per_process":
            continue
        if shards is None:
            shards = _everywhere(record.stored_shape, num_processes)
        held.append(HeldLeaf(index, record, shards))
    return held


def own_of(state: State, holder: int, process: int, num_processes: int) -> list[WriteBox]:
    """Return the boxes that one process writes, sorted by leaf and origin.

    Args:
      holder: this process's number as a holder; `process`: in the job.
    """
    own = own_boxes(held_of(state, num_processes), holder)
    values = [
        WriteBox(index, leaf.record, Box((process,), (leaf.value.size,)))
        for index, leaf in enumerate(state.leaves)
        if leaf.record.kind == "per_process"
    ]
    if not values:
        return own
    return sorted([*own, *values], key=lambda write: (write.leaf, write.box.origin))


def among(state: State, numbers: Sequence[int]) -> tuple[State, list[str]]:
    """Return a state as held by a group of processes, and describe what none of them holds.

    In the returned state holders are numbered by their index in the group.

    Args:
      numbers: the group's JAX process numbers, in order.
    """
    places = {process: place for place, process in enumerate(numbers)}
    known: dict[int, tuple[ShardMap, int]] = {}  # leaves of one layout share one object
    leaves, lost = [], []
    for leaf in state.leaves:
        if leaf.shards is not None:
            if id(leaf.shards) not in known:
                known[id(leaf.shards)] = _among(leaf.shards, places)
            shards, missing = known[id(leaf.shards)]
            if missing:
                name, total = leaf.record.name, math.prod(leaf.record.stored_shape)
                lost.append(
                    f"{name}: {missing} of its {total} values are held only by other processes"
                )
            leaf = leaf._replace(shards=shards)
        leaves.append(leaf)
    return state._replace(leaves=tuple(leaves)), lost


def _among(shards: ShardMap, places: Mapping[int, int]) -> tuple[ShardMap, int]:
    """Return an array's holders in a group, and how many of its values the group lacks."""
    holders, missing = [], 0
    for who, extent in zip(shards.holders, shards.extent.tolist(), strict=True):
        here = tuple(sorted(places[process] for process in who if process in places))
        missing += 0 if here else math.prod(extent)
        holders.append(here or (0,))  # without elements, any process may be the holder
    return shards._replace(holders=tuple(holders)), missing


class _StateReading:
    """Caches the parts that the leaves of a tree have in common."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._here: dict[tuple[Any, tuple[int, ...]], tuple[LocalBox, ...]] = {}

    def leaf(self, name: str, value: Any) -> StateLeaf:
        if isinstance(value, jax.Array):
            return self._of_jax(name, value)
        if type(value) is np.ndarray:
            record = LeafRecord(name, "array", dtypes.dtype_name(value.dtype), value.shape)
            return StateLeaf(record, value, None, ())
        if isinstance(value, PerProcess):
            blob = encode_tree(value.value, JaxNodes(), words_of=_own_words)
            record = LeafRecord(name, "per_process", "uint8")
            return StateLeaf(record, np.frombuffer(blob, np.uint8), None, ())
        kind = plain_values.kind_of(value)
        if kind is None:
            return _of_numpy(name, value)
        bulk = plain_values.bulk_of(value)
        if bulk is not None:
            return StateLeaf(LeafRecord(name, kind, "uint8", bulk.shape), bulk, None, ())
        return StateLeaf(
            LeafRecord(name, kind, value=plain_values.encode_value(value)), None, None, ()
        )

    def _of_jax(self, name: str, value: jax.Array) -> StateLeaf:
        if isinstance(value, jax.core.Tracer):
            _refuse(WrongType("is a value inside jit or grad; pass it out first"))
        why = without_values(value)
        if why:
            _refuse(why)
        key_words: tuple[int, ...] = ()
        kind, impl, dtype = "array", "", value.dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            kind = "key"
            impl, key_words, dtype = _key(dtype)
        sharding, shape = value.sharding, value.shape
        layout = _layout_text(sharding, len(shape))
        record = LeafRecord(
            name,
            kind,
            dtype=dtypes.dtype_name(dtype),
            shape=shape,
            words=key_words,
            impl=impl,
            layout=layout,
        )
        is_spread = (
            self._num_processes == 1
            or not value.is_fully_addressable
            or (isinstance(sharding, jax.sharding.NamedSharding) and jax.process_count() > 1)
        )
        shards = _shard_map(sharding, shape, key_words) if is_spread else None
        key = (sharding, shape + key_words)
        here = self._here.get(key)
        if here is None:
            here = self._here[key] = _local_boxes(value, key_words)
        return StateLeaf(record, value, shards, here)


def _of_numpy(name: str, value: Any) -> StateLeaf:
    """Convert array-likes to NumPy arrays, or refuse them."""
    if isinstance(value, np.ma.MaskedArray):
        _refuse(WrongType("is a masked array, and the mask would be lost; fill it first"))
    if isinstance(value, np.ndarray):
        plain = np.asarray(value)
        record = LeafRecord(name, "array", dtypes.dtype_name(plain.dtype), plain.shape)
        return StateLeaf(record, plain, None, ())
    if isinstance(value, jax.ShapeDtypeStruct):
        _refuse("stands for an array, but its value is saved; pass the array")
    what = WrongType(remedy(value))
    raise UsageError(what, problems=[what])


def _refuse(what: str) -> NoReturn:
    raise UsageError(what, problems=[what])


def _own_words(value: Any) -> tuple[str, Array] | None:
    """Return the implementation and the words of PRNG keys; None: it is no key."""
    if not isinstance(value, jax.Array) or not is_key(value):
        return None
    if isinstance(value, jax.core.Tracer):
        _refuse(WrongType("is a value inside jit or grad; pass it out first"))
    why = without_values(value)
    if why:
        _refuse(why)
    return _key(value.dtype)[0], wire.host_view(value)


@lru_cache(maxsize=64)
def _key(dtype: Any) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return the implementation of keys, and the shape and dtype of their words."""
    leaf = wire.leaf_of("", jax.ShapeDtypeStruct((), dtype))
    if isinstance(leaf, str) or leaf.dtype is None:
        raise UsageError(f"has dtype {dtype}, a kind of key that this JAX does not describe")
    return str(leaf.impl), leaf.words, leaf.dtype


@lru_cache(maxsize=4096)
def _layout_text(sharding: Any, rank: int) -> str:
    try:
        return in_memory(layout_of_sharding(sharding, rank).text, memory_of(sharding))
    except UsageError:  # no layout; this is information only
        return ""


@lru_cache(maxsize=4096)
def _everywhere(shape: tuple[int, ...], num_processes: int) -> ShardMap:
    origin = np.zeros((1, len(shape)), np.int64)
    extent = np.array([shape], np.int64).reshape(1, len(shape))
    return ShardMap(origin, extent, (_all_of(num_processes),))


@lru_cache(maxsize=1)
def _all_of(num_processes: int) -> tuple[int, ...]:
    return tuple(range(num_processes))


@lru_cache(maxsize=4096)
def _shard_map(sharding: Any, shape: tuple[int, ...], key_words: tuple[int, ...]) -> ShardMap:
    """Return the boxes of an array and their holders, by JAX's process numbers."""
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape + key_words), set()).add(device.process_index)
    boxes = sorted(holders)
    rank = len(shape + key_words)
    origin = np.array([box.origin for box in boxes], np.int64).reshape(len(boxes), rank)
    extent = np.array([box.extent for box in boxes], np.int64).reshape(len(boxes), rank)
    who = tuple(tuple(sorted(holders[box])) for box in boxes)
    return ShardMap(origin, extent, who, quick_digest(repr((boxes, who)).encode()).hex())


def _local_boxes(value: jax.Array, key_words: tuple[int, ...]) -> tuple[LocalBox, ...]:
    """Return the distinct boxes on this process's devices."""
    by_box: dict[Box, LocalBox] = {}
    for place, shard in enumerate(value.addressable_shards):
        box = _box(shard.index, value.shape + key_words)
        by_box.setdefault(box, LocalBox(box, place, shard.device))
    return tuple(by_box[box] for box in sorted(by_box))


def _box(index: Iterable[slice], sizes: tuple[int, ...]) -> Box:
    """Return the box of a JAX index; that of a key may omit the dims of its words."""
    cuts = [*index]
    cuts += [slice(None)] * (len(sizes) - len(cuts))
    ranges = [cut.indices(size) for cut, size in zip(cuts, sizes, strict=True)]
    return Box(tuple(r[0] for r in ranges), tuple(max(0, r[1] - r[0]) for r in ranges))
