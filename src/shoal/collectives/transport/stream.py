"""Values too large for one message: through shared host memory, or over the devices.

Processes of one host read each other's *windows*. Between hosts a value is sent in fixed-size
chunks over one device of each process: `broadcast_bytes` sends it along a chain of devices,
pipelined, or in a binomial tree if the chunks are few: each byte reaches each process once.
`gather_bytes` rotates chunks round a ring until every process has seen every chunk (R. Thakur, R.
Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19, 2005). Where JAX connects no devices of the job, or a process has none, in lanes other than
"main", and among a subset of the job (others may be dead, and JAX would wait for them), it goes
through the meeting place.

Waiting for devices is always accompanied by liveness checks: the chunks move in a thread of their
own, and the caller's thread polls the control plane meanwhile. After the last chunk all meet once
more, so that all have the value, or all survivors get an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from shoal.collectives.transport.chunks import Buffer, ByteArray, Bytes, Outgoing, Run, runs
from shoal.collectives.transport.flow import Flow
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
from shoal.collectives.transport.windows import Passing, meet_at_windows
from shoal.runtime.agreement import Call
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite

_Endpoint = Outgoing | Bytes | None  # source or destination buffers, or None
_ROUND_BYTES = 8 << 20  # of all processes together, per meeting


def broadcast_bytes(
    coordinator: Coordinator,
    source: int,
    data: Sequence[Buffer] | None,
    num_bytes: int,
    *,
    timeout_s: float,
    lane: str = "main",
    name: str = "values",
    into: Sequence[Buffer] | None = None,
    group: tuple[int, ...] | None = None,
) -> ByteArray | None:
    """Broadcast the bytes of one process to all, or to all of a group.

    All call it with equal arguments, except `data` and `into`. Memory of a process: the
    result, and up to six chunks of 4 MiB; no copy of the whole is made on the source.

    Args:
      source: the process that has the bytes.
      data: its buffers, of `num_bytes` together; others: ignored.
      num_bytes: equal on all.
      timeout_s: deadline in seconds.
      name: a label for messages.
      into: writable buffers of `num_bytes` together, to be filled, also on the source, where that
        happens while chunks move; None: one is allocated, except on the source.
      group: the processes, including the caller and the source; None: all of the job.

    Returns:
      uint8[num_bytes]; None on the source, and where `into` was given.

    Raises:
      DeadlineError, ProcessLostError, PeerFailedError: on all survivors.
    """
    flow = Flow(coordinator, Call(name, name, callsite()), timeout_s, group=group, lane=lane)
    is_source = coordinator.process == source
    made = None
    if into is None and not is_source:
        made = np.empty(num_bytes, np.uint8)
    place = Bytes([made] if made is not None else into or ())
    value = Bytes(data or ()) if is_source else place

    def copy() -> None:
        if is_source:
            _copy(value, place)

    if len(flow.members) > 1 and num_bytes:
        _move(
            flow,
            Passing(value if is_source else None, {source: place}, {source: num_bytes}),
            lambda: partial(
                _spread, flow, source, Outgoing(value) if is_source else value, num_bytes
            ),
            lambda: _relay_one(flow, source, value, num_bytes),
            copy,
        )
    else:
        copy()
    return made


def gather_bytes(
    coordinator: Coordinator,
    data: Sequence[Buffer],
    sizes: Sequence[int],
    *,
    to: int | None,
    timeout_s: float,
    lane: str = "main",
    name: str = "values",
    into: Sequence[Sequence[Buffer]] | None = None,
    group: tuple[int, ...] | None = None,
) -> list[ByteArray] | None:
    """Gather the bytes of each process on all, or on one; over all processes, or a group.

    All call it with equal arguments, except `data` and `into`. Memory of a process: the
    result, and up to six chunks of 4 MiB.

    Args:
      data: the buffers of this process.
      sizes: the bytes of each process, in the order of the processes; equal on all.
      to: the receiving process; None: all.
      timeout_s: deadline in seconds.
      name: a label for messages.
      into: for each process the writable buffers to fill; None: allocated.
      group: the processes, including the caller and `to`; None: all of the job.

    Returns:
      uint8[size] for each process; None where nothing is received or `into` was given.

    Raises:
      DeadlineError, ProcessLostError, PeerFailedError: on all survivors.
    """
    flow = Flow(coordinator, Call(name, name, callsite()), timeout_s, group=group, lane=lane)
    takes = to in (None, coordinator.process)
    made = None
    if takes and into is None:
        made = [np.empty(size, np.uint8) for size in sizes]
    places = [Bytes(buffers) for buffers in into or ()] if made is None else []
    places = places or [Bytes([row]) for row in made or ()]
    own, members = Bytes(data), flow.members

    def copy() -> None:
        if takes:
            _copy(own, places[members.index(coordinator.process)])

    if len(members) > 1 and any(sizes):
        _move(
            flow,
            Passing(
                own,
                dict(zip(members, places, strict=False)),  # empty where nothing is received
                dict(zip(members, sizes, strict=True)),
            ),
            lambda: partial(_collect, flow, Outgoing(own), places, sizes),
            lambda: _relay_all(flow, own, places, sizes),
            copy,
        )
    else:
        copy()
    return made


def _move(
    flow: Flow,
    passing: Passing,
    over: Callable[[], Callable[[Ring], object]],
    relay: Callable[[], object],
    copy: Callable[[], object],
) -> None:
    """Move bytes through shared host memory, over the devices, or through the meeting place.

    Through memory if there is one host, else over the devices if all processes have one; meanwhile
    this process's own data are copied.

    There is one window and one stream of device programs: if two threads used them, data of one
    lane could be taken for the other's. So they are used by lane "main" alone.
    """
    windows = meet_at_windows(flow, passing) if flow.lane == "main" else None
    if windows is not None:
        windows.pass_on(flow, passing)
        return
    if flow.lane != "main" or flow.group is not None or not has_devices(flow.coordinator):
        copy()
    elif _moves_over_devices(flow, over(), copy):
        return
    relay()


def _moves_over_devices(
    flow: Flow, over: Callable[[Ring], object], copy: Callable[[], object]
) -> bool:
    """Move chunks over the devices; False if a process has none, but all have copied."""

    def move() -> bool:
        with borrowed_ring(
            flow.coordinator, site=flow.call.site, timeout_s=flow.left_s, lane=flow.lane
        ) as ring:
            if ring is not None:
                over(ring)
            return ring is not None

    def still() -> str:
        return f"{flow.moved_bytes} bytes were moved"

    if not flow.together("the last chunk", move, still, meanwhile=copy):
        return False
    give_ring_back(flow.coordinator)
    return True


def _copy(value: Bytes, place: Bytes) -> None:
    for begin, piece in value.pieces():
        place.write(begin, piece)


def _spread(flow: Flow, source: int, end: _Endpoint, num_bytes: int, ring: Ring) -> None:
    """Choose the tree for few chunks and the chain for many: whichever has fewer turns."""
    rounds, line = tree(ring.num_processes, source), chain(ring.num_processes, source)
    ring.prepare([*rounds, line])
    for run in runs(num_bytes):
        if run.num_chunks * len(rounds) <= run.num_chunks + ring.num_processes - 2:
            _branch(flow, ring, rounds, run, end)
        else:
            _pass_on(flow, ring, source, line, run, end)


def _branch(flow: Flow, ring: Ring, rounds: Sequence[Hops], run: Run, end: _Endpoint) -> None:
    """Send each chunk along a binomial tree."""
    under_way = _UnderWay(flow, ring)
    for begin in run.begins:
        chunk = ring.zeros(run.chunk_bytes)
        if isinstance(end, Outgoing):
            chunk = ring.put(end.read(begin, run.chunk_bytes))
        for hops in rounds:
            is_receiver = ring.process in (receiver for _, receiver in hops)
            moved = under_way.move(chunk, hops, end if is_receiver else None, begin)
            chunk = moved if is_receiver else chunk
    under_way.take()


def _pass_on(flow: Flow, ring: Ring, source: int, line: Hops, run: Run, end: _Endpoint) -> None:
    """Send the chunks along a chain, pipelined.

    With 4 processes and source 0, after turn 2 process 1 has chunk 2, process 2 has chunk 1 and
    process 3 chunk 0.
    """
    distance = (ring.process - source) % ring.num_processes
    chunk = ring.zeros(run.chunk_bytes)
    under_way = _UnderWay(flow, ring)
    for turn in range(run.num_chunks + ring.num_processes - 2):
        if isinstance(end, Outgoing) and turn < run.num_chunks:
            chunk = ring.put(end.read(run.begins[turn], run.chunk_bytes))
        number = turn - distance + 1
        is_ours = distance > 0 and 0 <= number < run.num_chunks
        begin = run.begin + number * run.chunk_bytes
        chunk = under_way.move(chunk, line, end if is_ours else None, begin)
    under_way.take()


def _collect(
    flow: Flow, own: Outgoing, places: Sequence[Bytes], sizes: Sequence[int], ring: Ring
) -> None:
    """Move all values at once, or one after the other: whichever has fewer turns.

    The second is the case if few processes have most of the data. Both use the same program.
    """
    around = rotation(ring.num_processes)
    ring.prepare([around])
    chunks = [sum(run.num_chunks for run in runs(size)) for size in sizes]
    at_once = max(chunks) * (ring.num_processes - 1)
    if sum(count + ring.num_processes - 2 for count in chunks if count) >= at_once:
        _turn(flow, ring, around, own, places, sizes)
        return
    for source, size in enumerate(sizes):
        place = places[source] if places else None
        end = own if source == ring.process else place
        for run in runs(size):
            _pass_on(flow, ring, source, around, run, end)


def _turn(
    flow: Flow,
    ring: Ring,
    around: Hops,
    own: Outgoing,
    places: Sequence[Bytes],
    sizes: Sequence[int],
) -> None:
    """For each chunk index, rotate the ring until every process has seen every chunk."""
    under_way = _UnderWay(flow, ring)
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

    def __init__(self, flow: Flow, ring: Ring) -> None:
        self._flow, self._ring = flow, ring
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
        self._flow.moved_bytes += moved.size // self._ring.num_processes
        fault_points.reach("stream.after_chunk", self._ring.process)
        return moved

    def take(self) -> None:
        """Wait for it, and write it to its destination."""
        if self._chunk is not None and isinstance(self._into, Bytes):
            self._into.write(self._begin, self._ring.host_value(self._chunk))
        elif self._chunk is not None:
            self._chunk.block_until_ready()
        self._chunk = None


def _relay_one(flow: Flow, source: int, value: Bytes, num_bytes: int) -> None:
    """Send the bytes of one process through the meeting place."""
    is_source = flow.coordinator.process == source
    for begin in range(0, num_bytes, _ROUND_BYTES):
        fault_points.reach("stream.before_chunk", flow.coordinator.process)
        end = min(begin + _ROUND_BYTES, num_bytes)
        payload = value.read(begin, end - begin).tobytes() if is_source else b""
        answers = flow.meet(f"bytes {begin} to {end} of {num_bytes} of process {source}", payload)
        if not is_source:
            value.write(begin, np.frombuffer(answers[source], np.uint8))
        flow.moved_bytes += end - begin
        fault_points.reach("stream.after_chunk", flow.coordinator.process)


def _relay_all(flow: Flow, own: Bytes, places: Sequence[Bytes], sizes: Sequence[int]) -> None:
    """Send the bytes of all processes through the meeting place."""
    step = max(1, _ROUND_BYTES // len(sizes))
    for begin in range(0, max(sizes), step):
        fault_points.reach("stream.before_chunk", flow.coordinator.process)
        count = max(0, min(step, own.num_bytes - begin))
        payload = own.read(begin, count).tobytes()
        answers = flow.meet(f"bytes from {begin} of {sum(sizes)}, {step} of each process", payload)
        for process, place in zip(flow.members, places, strict=False):
            place.write(begin, np.frombuffer(answers[process], np.uint8))
        flow.moved_bytes += sum(map(len, answers.values()))
        fault_points.reach("stream.after_chunk", flow.coordinator.process)
