"""Gather every process's values on all processes, or on one."""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shoal.arguments import check_flags
from shoal.collectives import wire
from shoal.collectives.arguments import Deadline, deadline_of, meet_callers, process_of
from shoal.collectives.leaves import (
    ANY,
    Array,
    Buffer,
    LeafSpec,
    buffer_of,
    is_global,
    value_of,
    words_of,
    wrap_key,
)
from shoal.collectives.transport import stream
from shoal.colour import collective
from shoal.errors import DivergenceError, ShoalError, UsageError, raise_all
from shoal.hashing import short_digest
from shoal.runtime.agreement import Call
from shoal.runtime.client.group import Group, group_in
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.failures.facts import Difference
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client

_HEAD = struct.Struct("<?Q")  # are the bytes streamed; how many lengths follow
_NUMBER = np.dtype("<u8")


@collective("processes")
@uses_client
@collective_scope("allgather")
def allgather(
    client: JobClient,
    tree: Any,
    *,
    tiled: bool = False,
    to: int | None = None,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> Any:
    """Return the values of all `processes`, side by side, on each of them or on one.

    Collective over processes.

    No two processes ever receive different bits, and values from one call are never delivered to
    another. Guarantees, costs and errors are those of `broadcast`. Memory: the result (plus those
    regions of distributed arrays that are contiguous in runs shorter than 8 KiB), and a few chunks
    of 4 MiB.

    With N processes, also with N = 1, a leaf becomes, in the order of the processes,

    * an array, NumPy scalar, bool, float or complex: an array with a new dim 0 of size N;
    * with `tiled`, an array of one dim or more: all of them, concatenated along dim 0;
    * with `tiled`, an array on devices of several processes: its global value;
    * an int: an int64 array [N], or a list of N ints if one does not fit;
    * a key: an array of keys, as for arrays; str, bytes, None: a list of N.

    Args:
      tree: leaves as for `broadcast`. Shapes and dtypes must be equal; with `tiled` dim 0 may
        differ, and str and bytes may always differ in length. An array on devices of this process
        alone is this process's value; so is, where it does not become its global value, one that
        is fully replicated. Others need `tiled`: write it for arrays on a mesh of the whole job
        even if the job has one process, where they are this process's as well.
      tiled: see above; equal on all.
      to: the one of `processes` that gets the result; None: all.
      processes: the processes that make the call, including the caller; equal on all. None: all of
        the job.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the lane; see `barrier`, and `broadcast` for large values.

    Returns:
      The tree; None where `to` is another process. Arrays are new NumPy arrays.

    Raises:
      DivergenceError: on all that arrived: trees, shapes, dtypes, options or the calls differ.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong, a leaf has an unsupported type (all
        such are named by path). The others get PeerFailedError.

    >>> allgather({"loss": 0.5, "host": "a"})  # one process
    {'host': ['a'], 'loss': array([0.5])}
    """
    deadline = deadline_of("allgather", name, timeout_s, lane)
    group = group_in(client, "allgather", processes)
    check_flags("allgather", tiled=tiled)
    count = client.num_processes
    if to is not None:
        to = process_of(
            operation="allgather", argument="to", value=to, group=group, num_processes=count
        )
    spec, values = wire.flatten(tree, "allgather")
    call = Call("allgather", name, callsite())
    givers = _givers(client, call, values, tiled, deadline, lane, group)
    columns = _columns(spec, values, tiled, givers)
    numbers, own = _packed(columns, values)
    is_small = sum(map(len, own)) <= wire.inline_bytes(group.count**2)
    call = call._replace(spec=(f"tiled={tiled}", f"to={to}", *_lines(spec, columns)))
    payload = _payload(numbers, own if is_small else None)
    payloads = _meet(client, call, payload, deadline, lane, group)
    parcels = _parcels(columns, [payloads[process] for process in group.members])
    takes = to in (None, client.process)
    places = _places(columns, parcels) if takes else []
    if any(parcel.is_large for parcel in parcels):
        stream.gather_bytes(
            client, [] if is_small else own, [_stream_bytes(columns, p) for p in parcels],
            into=[row if p.is_large else [] for row, p in zip(places, parcels, strict=takes)],
            timeout_s=deadline.left_s, lane=lane, name=name or "allgather", group=group.named,
        )  # fmt: skip
    if not takes:
        return None
    _fill(places, parcels)
    return jax.tree.unflatten(spec.treedef, [column.result() for column in columns])


def _lines(spec: wire.Spec, columns: list[Column]) -> tuple[str, ...]:
    """Return the lines that must be equal, by column."""
    return spec._replace(leaves=tuple(column.leaf for column in columns)).lines


def _meet(
    client: JobClient,
    call: Call,
    payload: bytes,
    deadline: Deadline,
    lane: str,
    group: Group,
) -> Mapping[int, bytes]:
    try:
        return meet_callers(client, call, payload, deadline, lane, group)
    except DivergenceError as error:
        error.args = (f"{error}{_advice(error)}",)
        raise


def _advice(error: DivergenceError) -> str:
    """Return what to do about lists and texts that have another length on each process."""
    difference = error.difference
    if not isinstance(difference, Difference):
        return ""
    sides = difference.sides
    if difference.what == "tree" and len({bool(side.path) for side in sides}) > 1:
        how = "an array with tiled=True, or text by json.dumps(…)"
        return f"\na list of another length on each process is one leaf: {how}"
    if len({side.dtype for side in sides if re.fullmatch(r"U\d+", side.dtype)}) > 1:
        return "\ntext of another width on each process: pass json.dumps(….tolist())"
    return ""


class _Parcel(NamedTuple):
    """A process's contribution to the meeting."""

    is_large: bool  # its bytes are streamed
    lengths: list[Any]  # one for each column
    body: memoryview  # its bytes, if inline


def _givers(
    client: JobClient,
    call: Call,
    values: list[Any],
    tiled: bool,
    deadline: Deadline,
    lane: str,
    group: Group,
) -> frozenset[int] | None:
    """Return the processes' JAX numbers, if arrays are distributed over a subset of the job.

    A replica must then come from a process that takes part, which must be known before it is sent.
    """
    if group.is_all or not (tiled and any(map(is_global, values))):
        return None
    call = call._replace(spec=("arrays are distributed over several processes",))
    own_index = str(jax.process_index()).encode()
    return frozenset(
        map(int, meet_callers(client, call, own_index, deadline, lane, group).values())
    )


def _columns(
    spec: wire.Spec, values: list[Any], tiled: bool, givers: frozenset[int] | None
) -> list[Column]:
    columns, problems = [], []
    for leaf, value in zip(spec.leaves, values, strict=True):
        try:
            columns.append(column_of(leaf, value, tiled, givers))
        except UsageError as error:
            problems.append(str(error))
    raise_all("allgather", problems)
    return columns


def _packed(columns: list[Column], values: list[Any]) -> tuple[list[int], list[Buffer]]:
    """Return the lengths of this process's leaves, and its bytes."""
    numbers: list[int] = []
    buffers: list[Buffer] = []
    problems = []
    for column, value in zip(columns, values, strict=True):
        try:
            own_lengths, bodies = column.packed(value)
        except UsageError as error:
            problems.append(f"{column.leaf.path}: {error}")
            continue
        numbers += own_lengths
        buffers += bodies
    raise_all("allgather", problems)
    return numbers, buffers


def _payload(numbers: list[int], buffers: list[Buffer] | None) -> bytes:
    """Return this process's payload; None if its bytes are streamed."""
    head = _HEAD.pack(buffers is None, len(numbers)) + np.array(numbers, _NUMBER).tobytes()
    return head + b"".join(buffers or [])


def _parcels(columns: list[Column], payloads: list[bytes]) -> list[_Parcel]:
    """Return all contributions if they can be combined; else raise on all alike."""
    parcels = [_parcel(columns, payload) for payload in payloads]
    for column, row in zip(columns, _lengths(parcels), strict=True):
        column.check(row)
    return parcels


def _parcel(columns: list[Column], payload: bytes) -> _Parcel:
    is_large, count = _HEAD.unpack_from(payload)
    end = _HEAD.size + count * _NUMBER.itemsize
    numbers = iter(np.frombuffer(payload[_HEAD.size : end], _NUMBER).tolist())
    lengths = [column.read(numbers) for column in columns]
    return _Parcel(is_large, lengths, memoryview(payload)[end:])


def _stream_bytes(columns: list[Column], parcel: _Parcel) -> int:
    if not parcel.is_large:
        return 0
    return sum(c.num_bytes(length) for c, length in zip(columns, parcel.lengths, strict=True))


def _lengths(parcels: list[_Parcel]) -> list[tuple[Any, ...]]:
    """Return for each column the lengths of all processes."""
    return list(zip(*(parcel.lengths for parcel in parcels), strict=True))


def _places(columns: list[Column], parcels: list[_Parcel]) -> list[list[Array]]:
    """Return the destination buffers of each process's bytes, column by column."""
    rows = zip(columns, _lengths(parcels), strict=True)
    places = [column.places(row) for column, row in rows]
    return [[p for column in places for p in column[i]] for i in range(len(parcels))]


def _fill(places: list[list[Array]], parcels: list[_Parcel]) -> None:
    """Copy the bytes that arrived inline to their destinations."""
    for row, parcel in zip(places, parcels, strict=True):
        offset = 0
        for place in row if not parcel.is_large else []:
            place[:] = np.frombuffer(parcel.body[offset : offset + place.size], np.uint8)
            offset += place.size


# Columns: one leaf of every process side by side, and how they are combined.
#
# A column gives the size of each process's leaf, then memory to receive it (that of the result, if
# the result is an array), and then the result.

Region: TypeAlias = list[tuple[int, int]]  # begin and end in each dim
_RUN_BYTES = 8 << 10  # shorter runs are received into a buffer and copied
_DTYPES = {"bool": np.dtype("?"), "float": np.dtype("<f8"), "complex": np.dtype("<c16")}
_INT64 = range(-(1 << 63), 1 << 63)


class Column:
    """Arrays and scalars: a new dim 0, one entry for each process."""

    def __init__(self, leaf: LeafSpec) -> None:
        self.leaf = leaf

    def packed(self, value: Any) -> tuple[list[int], list[Buffer]]:
        """Return the length of this process's leaf, if it must be sent, and its bytes."""
        body = buffer_of(self.leaf, value)
        return [len(body)] if self.leaf.is_open else [], [body]

    def read(self, numbers: Iterator[int]) -> Any:
        """Parse the lengths sent by a process's `packed`, for the methods below."""
        return next(numbers) if self.leaf.is_open else 0

    def num_bytes(self, length: Any) -> int:
        """Return the size of a leaf."""
        return self.leaf.num_bytes(length)

    def check(self, lengths: Sequence[Any]) -> None:
        """Raise, on all processes alike, if the leaves cannot be combined."""

    def places(self, lengths: Sequence[Any]) -> list[list[Array]]:
        """Return the destination buffers of each process's bytes."""
        shape = (len(lengths), *self.leaf.shape, *self.leaf.words)
        self._words: Array = np.ndarray(shape, self.leaf.dtype)  # `empty` widens text of width 0
        return [[_bytes_of(self._words[p : p + 1])] for p in range(len(lengths))]

    def result(self) -> Any:
        """Return the combined value, once the destinations are filled."""
        return self._words if self.leaf.impl is None else wrap_key(self._words, self.leaf.impl)


class Tiled(Column):
    """Arrays concatenated along dim 0, which may differ in size."""

    def packed(self, value: Any) -> tuple[list[int], list[Buffer]]:
        return [value.shape[0]], [buffer_of(self.leaf, value)]

    def places(self, lengths: Sequence[Any]) -> list[list[Array]]:
        row = (*self.leaf.shape[1:], *self.leaf.words)
        self._words = np.ndarray((sum(lengths), *row), self.leaf.dtype)
        parts = np.split(self._words, np.cumsum(lengths[:-1], dtype=np.intp))
        return [[_bytes_of(part)] for part in parts]


class Listed(Column):
    """Text, bytes, None: a list; integers: an array if all fit into 64 bits."""

    def places(self, lengths: Sequence[Any]) -> list[list[Array]]:
        self._bits = [np.empty(self.num_bytes(length), np.uint8) for length in lengths]
        return [[bits] for bits in self._bits]

    def result(self) -> Any:
        values = [value_of(self.leaf, bits) for bits in self._bits]
        if self.leaf.kind == "int" and all(value in _INT64 for value in values):
            return np.array(values, np.int64)
        return values


class Parts(Column):
    """An array distributed over processes: each region comes from one holder.

    A process sends the number of its regions, and the bounds of each in every dim.
    """

    def __init__(self, leaf: LeafSpec, givers: frozenset[int] | None = None) -> None:
        super().__init__(leaf)
        self._givers = givers  # JAX numbers of the participants; None: all

    def packed(self, value: Any) -> tuple[list[int], list[Buffer]]:
        numbers = [0]
        buffers: list[Buffer] = []
        gives = None if self._givers is None else _given_by(value, self._givers)
        for shard in value.addressable_shards:
            if shard.replica_id == 0 if gives is None else shard.device in gives:
                part = np.ascontiguousarray(words_of(shard.data))
                buffers.append(part.reshape(-1).view(np.uint8).data)
                bounds = _bounds(shard.index, self.leaf.shape + self.leaf.words)
                numbers += itertools.chain(*bounds)
                numbers[0] += 1
        return numbers, buffers

    def read(self, numbers: Iterator[int]) -> list[Region]:
        dims = range(len(self.leaf.shape + self.leaf.words))
        return [[(next(numbers), next(numbers)) for _ in dims] for _ in range(next(numbers))]

    def num_bytes(self, length: list[Region]) -> int:
        itemsize = np.dtype(self.leaf.dtype).itemsize
        return itemsize * sum(math.prod(end - begin for begin, end in r) for r in length)

    def check(self, lengths: Sequence[list[Region]]) -> None:
        leaf = self.leaf
        missing = leaf.num_bytes() - sum(map(self.num_bytes, lengths))
        if missing:
            detail = f"no process gave {missing} of its {leaf.num_bytes()} bytes"
            whose = "the job does" if self._givers is None else "these processes do"
            raise ShoalError(f"allgather: {leaf.path}: {detail}; {whose} not hold all of it")

    def places(self, lengths: Sequence[list[Region]]) -> list[list[Array]]:
        self._words = np.empty(self.leaf.shape + self.leaf.words, self.leaf.dtype)
        self._apart: list[tuple[Array, Array]] = []
        return [[place for r in regions for place in self._runs(r)] for regions in lengths]

    def result(self) -> Any:
        for region, bits in self._apart:
            region[...] = bits.view(region.dtype).reshape(region.shape)
        return super().result()

    def _runs(self, bounds: Region) -> list[Array]:
        """Return the destination of a region: in place if it consists of long runs.

        Of (8, 4, 3): rows 2-4, all else, is one run; columns 0-2 of them are two runs of 6 each.
        """
        region = self._words[tuple(slice(*pair) for pair in bounds)]
        whole = [dim for dim in range(region.ndim) if region.shape[dim] != self._words.shape[dim]]
        outer = max(whole, default=0)  # all later dims are whole
        run_bytes = math.prod(region.shape[outer:]) * region.itemsize
        if outer and run_bytes < _RUN_BYTES:
            self._apart.append((region, np.empty(region.nbytes, np.uint8)))
            return [self._apart[-1][1]]
        return [_bytes_of(region[index]) for index in np.ndindex(region.shape[:outer])]


def column_of(
    leaf: LeafSpec, value: Any, tiled: bool, givers: frozenset[int] | None = None
) -> Column:
    """Return the column of a leaf.

    Args:
      givers: JAX numbers of the participants; None: all of the job.

    Raises:
      UsageError: it is distributed over processes, and `tiled` is not set.
    """
    if leaf.dtype is None:
        dtype = _DTYPES.get(leaf.kind)
        return Listed(leaf) if dtype is None else Column(leaf._replace(dtype=dtype))
    if not leaf.shape or leaf.kind == "scalar":
        return Column(leaf)
    if is_global(value) and tiled:
        regions = str(_regions(value.sharding, value.shape))
        return Parts(leaf._replace(kind="parts", regions=regions), givers)
    if is_global(value) and not value.is_fully_replicated:
        detail = "is distributed over several processes: tiled=True gathers its global value"
        raise UsageError(f"{leaf.path}: {detail}")
    return Tiled(leaf._replace(shape=(ANY, *leaf.shape[1:]))) if tiled else Column(leaf)


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Return the bounds in each dim: `(slice(2, 4), slice(None))` of (8, 3): (2, 4), (0, 3)."""
    return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]


def _given_by(value: jax.Array, givers: frozenset[int]) -> set[jax.Device]:
    """Return the devices that supply the distinct regions: for each, the lowest participant's."""
    device_of: dict[tuple[tuple[int, ...], ...], jax.Device] = {}
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        region = tuple(_bounds(index, value.shape))
        other = device_of.get(region, device)
        if device.process_index in givers:
            device_of[region] = min(other, device, key=lambda d: (d.process_index, d.id))
    return {*device_of.values()}


@lru_cache(maxsize=256)
def _regions(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Return a text of who holds which region, equal if and only if that is equal."""
    held = sharding.devices_indices_map(shape)
    rows = sorted((d.process_index, d.id, _bounds(index, shape)) for d, index in held.items())
    digest = short_digest(repr(rows).encode()).hex()
    return f"{getattr(sharding, 'spec', 'sharded')} on {len(held)} devices ({digest})"
