"""Values too large for one message: through shared host memory, or over the devices.

Processes of one host read each other's *windows*. Between hosts a value is sent in fixed-size
chunks over one device of each process: `broadcast_bytes` sends it along a chain of devices,
pipelined, or in a binomial tree if the chunks are few: each byte reaches each process once.
`gather_bytes` rotates chunks round a ring until every process has seen every chunk (R. Thakur, R.
Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19, 2005). Where JAX connects no devices of the job, or a process has none, in lanes other than
"main", and among a subset of the job (others may be dead, and JAX would wait for them), it goes
through the coordinator.

Waiting for devices is always accompanied by liveness checks: the chunks move in a thread of their
own, and the caller's thread polls the control plane meanwhile. After the last chunk all meet once
more, so that all have the value, or all survivors get an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from shoal.collectives.transport.chunks import Buffer, Bytes, Outgoing, Run, runs
from shoal.collectives.transport.device_transfer import DeviceTransfer
from shoal.collectives.transport.ring import (
    Hops,
    Ring,
    borrowed_ring,
    chain,
    give_ring_back,
    has_devices,
    rotation,
    tree,
)
from shoal.collectives.transport.windows import WindowTransfer, meet_at_windows
from shoal.runtime.agreement import Call
from shoal.runtime.client.interface import JobClient
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite

_Endpoint = Outgoing | Bytes | None  # source or destination buffers, or None
_ROUND_BYTES = 8 << 20  # of all processes together, per meeting


def broadcast_bytes(
    client: JobClient,
    source: int,
    data: Sequence[Buffer] | None,
    num_bytes: int,
    *,
    into: Sequence[Buffer],
    timeout_s: float,
    lane: str = "main",
    name: str = "values",
    group: tuple[int, ...] | None = None,
) -> None:
    """Broadcast the bytes of one process to all, or to all of a group.

    All call it with equal arguments, except `data` and `into`. Memory of a process: up to six
    chunks of 4 MiB; no copy of the whole is made on the source.

    Args:
      source: the process that has the bytes.
      data: its buffers, of `num_bytes` together; others: ignored.
      num_bytes: equal on all.
      into: writable buffers of `num_bytes` together, to be filled. Those of the source are filled
        while chunks move; it may have none.
      timeout_s: deadline in seconds.
      name: a label for messages.
      group: the processes, including the caller and the source; None: all of the job.

    Raises:
      DeadlineError, ProcessLostError, PeerFailedError: on all survivors.
    """
    transfer = DeviceTransfer(
        client, Call(name, name, callsite()), timeout_s, group=group, lane=lane
    )
    value = Bytes(data or ()) if client.process == source else None
    _move(_Broadcast(transfer, source, num_bytes, value, place=Bytes(into)))


def gather_bytes(
    client: JobClient,
    data: Sequence[Buffer],
    sizes: Sequence[int],
    *,
    into: Sequence[Sequence[Buffer]],
    timeout_s: float,
    lane: str = "main",
    name: str = "values",
    group: tuple[int, ...] | None = None,
) -> None:
    """Gather the bytes of each process on all, or on some; over all processes, or a group.

    All call it with equal arguments, except `data` and `into`. Memory of a process: up to six
    chunks of 4 MiB.

    Args:
      data: the buffers of this process.
      sizes: the bytes of each process, in the order of the processes; equal on all.
      into: for each process the writable buffers to fill; empty: this process receives nothing.
      timeout_s: deadline in seconds.
      name: a label for messages.
      group: the processes, including the caller; None: all of the job.

    Raises:
      DeadlineError, ProcessLostError, PeerFailedError: on all survivors.
    """
    transfer = DeviceTransfer(
        client, Call(name, name, callsite()), timeout_s, group=group, lane=lane
    )
    _move(_Gather(transfer, sizes, Bytes(data), [Bytes(buffers) for buffers in into]))


class _Broadcast(NamedTuple):
    """The bytes of one process, for all others."""

    transfer: DeviceTransfer
    source: int
    num_bytes: int
    value: Bytes | None  # on the source
    place: Bytes

    @property
    def window_transfer(self) -> WindowTransfer:
        """Return the same, for shared host memory."""
        return WindowTransfer(self.value, {self.source: self.place}, {self.source: self.num_bytes})

    def copy(self) -> None:
        """Copy this process's own bytes to where they are wanted here."""
        if self.value is not None:
            _copy(self.value, self.place)

    def over_devices(self) -> Callable[[Ring], None]:
        """Return what moves the bytes, in a thread of its own."""
        end = self.place if self.value is None else Outgoing(self.value)
        return partial(_spread, self.transfer, self.source, end, self.num_bytes)

    def through_coordinator(self) -> None:
        """Move the bytes in rounds of bounded size."""
        transfer, source, num_bytes = self.transfer, self.source, self.num_bytes
        for begin in range(0, num_bytes, _ROUND_BYTES):
            fault_points.reach("stream.before_chunk", transfer.client.process)
            end = min(begin + _ROUND_BYTES, num_bytes)
            payload = b"" if self.value is None else self.value.read(begin, end - begin).tobytes()
            answers = transfer.meet(
                f"bytes {begin} to {end} of {num_bytes} of process {source}", payload
            )
            if self.value is None:
                self.place.write(begin, np.frombuffer(answers[source], np.uint8))
            transfer.moved_bytes += end - begin
            fault_points.reach("stream.after_chunk", transfer.client.process)


class _Gather(NamedTuple):
    """The bytes of all processes, for those that have places for them."""

    transfer: DeviceTransfer
    sizes: Sequence[int]
    own: Bytes
    places: Sequence[Bytes]  # empty where nothing is received

    @property
    def window_transfer(self) -> WindowTransfer:
        """Return the same, for shared host memory."""
        members = self.transfer.members
        places = dict(zip(members, self.places, strict=bool(self.places)))
        return WindowTransfer(self.own, places, dict(zip(members, self.sizes, strict=True)))

    def copy(self) -> None:
        """Copy this process's own bytes to where they are wanted here."""
        if self.places:
            _copy(self.own, self.places[self.transfer.members.index(self.transfer.client.process)])

    def over_devices(self) -> Callable[[Ring], None]:
        """Return what moves the bytes, in a thread of its own."""
        own = Outgoing(self.own)
        return partial(_collect, self.transfer, own, self.places, self.sizes)

    def through_coordinator(self) -> None:
        """Move the bytes in rounds of bounded size."""
        transfer, sizes, own = self.transfer, self.sizes, self.own
        step = max(1, _ROUND_BYTES // len(sizes))
        for begin in range(0, max(sizes), step):
            fault_points.reach("stream.before_chunk", transfer.client.process)
            count = max(0, min(step, own.num_bytes - begin))
            stage = f"bytes from {begin} of {sum(sizes)}, {step} of each process"
            answers = transfer.meet(stage, own.read(begin, count).tobytes())
            for process, place in zip(transfer.members, self.places, strict=bool(self.places)):
                place.write(begin, np.frombuffer(answers[process], np.uint8))
            transfer.moved_bytes += sum(map(len, answers.values()))
            fault_points.reach("stream.after_chunk", transfer.client.process)


def _move(operation: _Broadcast | _Gather) -> None:
    """Move bytes through shared host memory, over the devices, or through the coordinator.

    Through memory if there is one host, else over the devices if all processes have one; meanwhile
    this process's own data are copied.

    There is one window and one stream of device programs: if two threads used them, data of one
    lane could be taken for the other's. So they are used by lane "main" alone.
    """
    transfer, window_transfer = operation.transfer, operation.window_transfer
    if len(transfer.members) == 1 or not window_transfer.num_bytes:
        operation.copy()
        return
    windows = meet_at_windows(transfer, window_transfer) if transfer.lane == "main" else None
    if windows is not None:
        windows.pass_on(transfer, window_transfer)
    elif transfer.lane == "main" and transfer.group is None and has_devices(transfer.client):
        if not _moves_over_devices(operation):
            operation.through_coordinator()
    else:
        operation.copy()
        operation.through_coordinator()


def _moves_over_devices(operation: _Broadcast | _Gather) -> bool:
    """Move chunks over the devices; False if a process has none, but all have copied."""
    transfer, over = operation.transfer, operation.over_devices()

    def move() -> bool:
        with borrowed_ring(
            transfer.client, site=transfer.call.site, timeout_s=transfer.left_s, lane=transfer.lane
        ) as ring:
            if ring is not None:
                over(ring)
            return ring is not None

    def still() -> str:
        return f"{transfer.moved_bytes} bytes were moved"

    if not transfer.together("the last chunk", move, still, meanwhile=operation.copy):
        return False
    give_ring_back(transfer.client)
    return True


def _copy(value: Bytes, place: Bytes) -> None:
    for begin, piece in value.pieces():
        place.write(begin, piece)


def _spread(
    transfer: DeviceTransfer, source: int, end: _Endpoint, num_bytes: int, ring: Ring
) -> None:
    """Choose the tree for few chunks and the chain for many: whichever has fewer turns."""
    rounds, line = tree(ring.num_processes, source), chain(ring.num_processes, source)
    ring.prepare([*rounds, line])
    for run in runs(num_bytes):
        if run.num_chunks * len(rounds) <= run.num_chunks + ring.num_processes - 2:
            _branch(transfer, ring, rounds, run, end)
        else:
            _pass_on(transfer, ring, source, line, run, end)


def _branch(
    transfer: DeviceTransfer, ring: Ring, rounds: Sequence[Hops], run: Run, end: _Endpoint
) -> None:
    """Send each chunk along a binomial tree."""
    under_way = _UnderWay(transfer, ring)
    for begin in run.begins:
        chunk = ring.zeros(run.chunk_bytes)
        if isinstance(end, Outgoing):
            chunk = ring.put(end.read(begin, run.chunk_bytes))
        for hops in rounds:
            is_receiver = ring.process in (receiver for _, receiver in hops)
            moved = under_way.move(chunk, hops, end if is_receiver else None, begin)
            chunk = moved if is_receiver else chunk
    under_way.take()


def _pass_on(
    transfer: DeviceTransfer, ring: Ring, source: int, line: Hops, run: Run, end: _Endpoint
) -> None:
    """Send the chunks along a chain, pipelined.

    With 4 processes and source 0, after turn 2 process 1 has chunk 2, process 2 has chunk 1 and
    process 3 chunk 0.
    """
    distance = (ring.process - source) % ring.num_processes
    chunk = ring.zeros(run.chunk_bytes)
    under_way = _UnderWay(transfer, ring)
    for turn in range(run.num_chunks + ring.num_processes - 2):
        if isinstance(end, Outgoing) and turn < run.num_chunks:
            chunk = ring.put(end.read(run.begins[turn], run.chunk_bytes))
        chunk_index = turn - distance + 1
        is_ours = distance > 0 and 0 <= chunk_index < run.num_chunks
        begin = run.begin + chunk_index * run.chunk_bytes
        chunk = under_way.move(chunk, line, end if is_ours else None, begin)
    under_way.take()


def _collect(
    transfer: DeviceTransfer,
    own: Outgoing,
    places: Sequence[Bytes],
    sizes: Sequence[int],
    ring: Ring,
) -> None:
    """Move all values at once, or one after the other: whichever has fewer turns.

    The second is the case if few processes have most of the data. Both use the same program.
    """
    around = rotation(ring.num_processes)
    ring.prepare([around])
    chunks = [sum(run.num_chunks for run in runs(size)) for size in sizes]
    at_once = max(chunks) * (ring.num_processes - 1)
    if sum(count + ring.num_processes - 2 for count in chunks if count) >= at_once:
        _turn(transfer, ring, around, own, places, sizes)
        return
    for source, size in enumerate(sizes):
        place = places[source] if places else None
        end = own if source == ring.process else place
        for run in runs(size):
            _pass_on(transfer, ring, source, around, run, end)


def _turn(
    transfer: DeviceTransfer,
    ring: Ring,
    around: Hops,
    own: Outgoing,
    places: Sequence[Bytes],
    sizes: Sequence[int],
) -> None:
    """For each chunk index, rotate the ring until every process has seen every chunk."""
    under_way = _UnderWay(transfer, ring)
    for run in runs(max(sizes)):
        for begin in run.begins:
            chunk = ring.put(own.read(begin, run.chunk_bytes))
            for turn in range(1, ring.num_processes):
                whose = (ring.process - turn) % ring.num_processes
                is_wanted = bool(places) and begin < sizes[whose]
                chunk = under_way.move(chunk, around, places[whose] if is_wanted else None, begin)
    under_way.take()


class _UnderWay:
    """The chunk in flight.

    It is collected while the next one moves, so that there are never more than two, however far
    ahead the runtime could run.
    """

    def __init__(self, transfer: DeviceTransfer, ring: Ring) -> None:
        self._transfer, self._ring = transfer, ring
        self._chunk: jax.Array | None = None
        self._into: _Endpoint = None
        self._begin = 0

    def move(self, chunk: jax.Array, hops: Hops, into: _Endpoint, begin: int) -> jax.Array:
        """Start moving a chunk, and collect the previous one.

        The next `move` or `take` writes what arrives here at `begin` of `into`, if given.
        """
        fault_points.reach("stream.before_chunk", self._ring.process)
        moved = self._ring.move(chunk, hops)
        self.take()
        self._chunk, self._into, self._begin = moved, into, begin
        self._transfer.moved_bytes += moved.size // self._ring.num_processes
        fault_points.reach("stream.after_chunk", self._ring.process)
        return moved

    def take(self) -> None:
        """Wait for it, and write it to its destination."""
        if self._chunk is not None and isinstance(self._into, Bytes):
            self._into.write(self._begin, self._ring.host_value(self._chunk))
        elif self._chunk is not None:
            self._chunk.block_until_ready()
        self._chunk = None
