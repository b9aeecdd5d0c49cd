"""Gather every process's values on all processes, or on one."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.arguments import check_flags
from shoal.collectives import wire
from shoal.collectives.arguments import Deadline, deadline_of, meet, process_of
from shoal.collectives.columns import Column, column_of
from shoal.collectives.leaves import Array, Buffer, is_global
from shoal.collectives.transport import stream
from shoal.colour import collective
from shoal.errors import DivergenceError, UsageError, raise_all
from shoal.runtime.agreement import Call
from shoal.runtime.client.group import Group, group_in
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.lanes import one_call
from shoal.runtime.system.callsite import callsite
from shoal.runtime.verb import verb

_HEAD = struct.Struct("<?Q")  # are the bytes streamed; how many lengths follow
_NUMBER = np.dtype("<u8")


@collective("processes")
@verb
@one_call("allgather")
def allgather(
    coordinator: Coordinator,
    tree: Any,
    tiled: bool = False,
    *,
    to: int | None = None,
    processes: Iterable[int] | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> Any:
    """Return the values of all `processes`, side by side, on every one of them or on one.

    Collective over processes.

    It is impossible that two processes get different bits, or that values of one call are taken for
    those of another: see `broadcast`, whose guarantees, costs and errors are the same here. Memory:
    the result (plus those regions of distributed arrays that are contiguous in runs shorter than 8
    KiB), and a few chunks of 4 MiB.

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
        is fully replicated. Others need `tiled`.
      tiled: see above; equal on all.
      to: the one of `processes` that gets the result; None: all.
      processes: the processes that call it, the caller among them; equal on all. None: all of
        the job.
      name: identifies calls at different places as the same call; None: the call site does.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the line of execution; see `barrier`, and `broadcast` for large values.

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
    group = group_in(coordinator, "allgather", processes)
    check_flags("allgather", tiled=tiled)
    count = coordinator.num_processes
    to = None if to is None else process_of("allgather", "to", to, group, count)
    spec, values = wire.flatten(tree, "allgather")
    call = Call("allgather", name, callsite())
    givers = _givers(coordinator, call, values, tiled, deadline, lane, group)
    columns = _columns(spec, values, tiled, givers)
    numbers, own = _packed(columns, values)
    is_small = sum(map(len, own)) <= wire.inline_bytes(group.count**2)
    call = call._replace(spec=(f"tiled={tiled}", f"to={to}", *_lines(spec, columns)))
    payload = _payload(numbers, own if is_small else None)
    payloads = _meet(coordinator, call, payload, deadline, lane, group)
    parcels = _parcels(columns, [payloads[process] for process in group.members])
    takes = to in (None, coordinator.process)
    places = _places(columns, parcels) if takes else [[] for _ in parcels]
    if any(parcel.is_large for parcel in parcels):
        stream.gather_bytes(
            coordinator, [] if is_small else own, [_stream_bytes(columns, p) for p in parcels],
            to=to, timeout_s=deadline.left_s, lane=lane, name=name or "allgather",
            into=[row if p.is_large else [] for row, p in zip(places, parcels, strict=True)],
            group=group.named,
        )  # fmt: skip
    if not takes:
        return None
    _fill(places, parcels)
    return jax.tree.unflatten(spec.treedef, [column.result() for column in columns])


def _lines(spec: wire.Spec, columns: list[Column]) -> tuple[str, ...]:
    """Return the lines that must be equal, by column."""
    return spec._replace(leaves=tuple(column.leaf for column in columns)).lines


def _meet(
    coordinator: Coordinator,
    call: Call,
    payload: bytes,
    deadline: Deadline,
    lane: str,
    group: Group,
) -> Mapping[int, bytes]:
    try:
        return meet(coordinator, call, payload, deadline, lane, group)
    except DivergenceError as error:
        error.args = (f"{error}{_advice(error)}",)
        raise


def _advice(error: DivergenceError) -> str:
    """Return what to do about lists and texts that have another length on each process."""
    sides = "\n".join(map(str, error.sides))
    if wire.NO_MORE in sides:
        how = "an array with tiled=True, or text by json.dumps(…)"
        return f"\na list of another length on each process is one leaf: {how}"
    if len({*re.findall(r": U\d+\[", sides)}) > 1:
        return "\ntext of another width on each process: give json.dumps(….tolist())"
    return ""


class _Parcel(NamedTuple):
    """A process's contribution to the meeting."""

    is_large: bool  # its bytes are streamed
    lengths: list[Any]  # one for each column
    body: memoryview  # its bytes, if inline


def _givers(
    coordinator: Coordinator,
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
    number = str(jax.process_index()).encode()
    return frozenset(map(int, meet(coordinator, call, number, deadline, lane, group).values()))


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
        at = 0
        for place in row if not parcel.is_large else []:
            place[:] = np.frombuffer(parcel.body[at : at + place.size], np.uint8)
            at += place.size
