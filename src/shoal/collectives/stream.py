"""Values too large for one message: fixed-size chunks over one device of each process.

`spread` sends one value along the ring of devices, all chunks in flight one behind the other, so
that each process sends each byte once; `collect` turns the ring until everybody has seen the chunk
of everybody. Where JAX connects no devices of the job, or a process has none, the chunks go
through the meeting place.

Nothing waits for the devices without a look at who is alive: the chunks move in a thread of their
own, and the caller's thread asks the control plane meanwhile. After the last chunk all meet once
more, so that all have the value, or all that are alive get an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from shoal.collectives.chunks import Buffer, ByteArray, Bytes, Run, runs
from shoal.collectives.flow import Flow
from shoal.collectives.ring import Ring
from shoal.runtime import fault_points
from shoal.runtime.coordinator import Coordinator

__all__ = ["collect", "spread"]

_ROUND_BYTES = 8 << 20  # of all processes together, in one meeting


def spread(
    coordinator: Coordinator,
    source: int,
    data: Sequence[Buffer] | None,
    num_bytes: int,
    *,
    timeout_s: float,
    lane: str = "main",
    name: str = "values",
    into: Sequence[Buffer] | None = None,
) -> ByteArray | None:
    """Give the bytes of one process to all.

    All processes call it with equal arguments, but for `data` and `into`. Memory of a process: the
    result, and up to three chunks of 4 MiB; no copy of the whole is made on the source.

    Args:
      source: the process that has the bytes.
      data: its buffers, of `num_bytes` together; others: ignored.
      num_bytes: equal on all.
      timeout_s: deadline in seconds.
      name: what the messages call it.
      into: writable buffers of `num_bytes` together, to be filled; None: one is made.

    Returns:
      uint8[num_bytes]; None on the source, and where `into` was given.

    Raises:
      DeadlineError, ProcessLostError, PeerFailedError: on all that are alive.
    """
    flow = Flow(coordinator, name, lane, timeout_s)
    is_source = coordinator.process == source
    if is_source:
        value, made = Bytes(data or ()), None
    else:
        made = np.empty(num_bytes, np.uint8) if into is None else None
        value = Bytes(into or () if made is None else [made])
    if coordinator.num_processes > 1 and num_bytes:
        flow.move(
            lambda ring: _spread(flow, ring, source, value, num_bytes),
            lambda: _relay_one(flow, source, value, num_bytes),
        )
    return made


def collect(
    coordinator: Coordinator,
    data: Sequence[Buffer],
    sizes: Sequence[int],
    *,
    to: int | None,
    timeout_s: float,
    lane: str = "main",
    name: str = "values",
    into: Sequence[Sequence[Buffer]] | None = None,
) -> list[ByteArray] | None:
    """Give the bytes of each process to all, or to one.

    All processes call it with equal arguments, but for `data` and `into`. Memory of a process: the
    result, and up to three chunks of 4 MiB.

    Args:
      data: the buffers of this process, of `sizes[process]` bytes together.
      sizes: the bytes of each process, equal on all.
      to: who gets them; None: all.
      timeout_s: deadline in seconds.
      name: what the messages call it.
      into: for each process the writable buffers to be filled; None: they are made.

    Returns:
      uint8[sizes[p]] for each process p; None where nothing is to be got or `into` was given.

    Raises:
      DeadlineError, ProcessLostError, PeerFailedError: on all that are alive.
    """
    flow = Flow(coordinator, name, lane, timeout_s)
    takes = to in (None, coordinator.process)
    made = [np.empty(size, np.uint8) for size in sizes] if takes and into is None else None
    places = [Bytes(buffers) for buffers in into or ()] if made is None else []
    places = places or [Bytes([row]) for row in made or ()]
    own = Bytes(data)
    if takes:
        for run in runs(own.num_bytes):
            for begin in range(run.begin, own.num_bytes, run.chunk_bytes):
                count = min(run.chunk_bytes, own.num_bytes - begin)
                places[coordinator.process].write(begin, own.read(begin, count))
    if coordinator.num_processes > 1 and any(sizes):
        flow.move(
            lambda ring: _collect(flow, ring, own, places, sizes),
            lambda: _relay_all(flow, own, places, sizes),
        )
    return made


def _spread(flow: Flow, ring: Ring, source: int, value: Bytes, num_bytes: int) -> None:
    for run in runs(num_bytes):
        _pass_on(flow, ring, source, run, value)


def _pass_on(flow: Flow, ring: Ring, source: int, run: Run, value: Bytes) -> None:
    """Send the chunks of the source along the ring, one behind the other.

    With 4 processes and source 0, after turn 2 process 1 has chunk 2, process 2 has chunk 1 and
    process 3 chunk 0; what comes back to process 0 is left there.
    """
    distance = (ring.process - source) % ring.num_processes
    chunk = ring.zeros(run.chunk_bytes)
    arrived: list[tuple[int, jax.Array]] = []  # at most one, taken while the next is on its way
    for turn in range(run.count + ring.num_processes - 2):
        fault_points.reach("stream.before_chunk", ring.process)
        if not distance and turn < run.count:
            chunk = ring.put(value.read(run.begin + turn * run.chunk_bytes, run.chunk_bytes))
        chunk = ring.rotate(chunk)
        _take(arrived, value)
        number = turn - distance + 1
        is_ours = distance > 0 and 0 <= number < run.count
        arrived.append((run.begin + number * run.chunk_bytes if is_ours else -1, chunk))
        flow.moved_bytes += run.chunk_bytes
        fault_points.reach("stream.after_chunk", ring.process)
    _take(arrived, value)


def _collect(
    flow: Flow, ring: Ring, own: Bytes, places: Sequence[Bytes], sizes: Sequence[int]
) -> None:
    for run in runs(max(sizes)):
        _turn(flow, ring, run, own, places, sizes)


def _turn(
    flow: Flow, ring: Ring, run: Run, own: Bytes, places: Sequence[Bytes], sizes: Sequence[int]
) -> None:
    """Turn the ring until everybody has seen the chunk of everybody; for each chunk anew."""
    arrived: list[tuple[int, jax.Array]] = []
    value = Bytes(())
    for begin in range(run.begin, run.begin + run.count * run.chunk_bytes, run.chunk_bytes):
        chunk = ring.put(own.read(begin, run.chunk_bytes))
        for turn in range(1, ring.num_processes):
            fault_points.reach("stream.before_chunk", ring.process)
            chunk = ring.rotate(chunk)
            _take(arrived, value)
            whose = (ring.process - turn) % ring.num_processes
            value = places[whose] if places else value
            arrived.append((begin if places and begin < sizes[whose] else -1, chunk))
            flow.moved_bytes += run.chunk_bytes
            fault_points.reach("stream.after_chunk", ring.process)
    _take(arrived, value)


def _take(arrived: list[tuple[int, jax.Array]], value: Bytes) -> None:
    """Wait for the chunk that was on its way, and put it where it belongs, if it does.

    So never more than two are on their way, however far ahead the runtime could run.
    """
    while arrived:
        begin, chunk = arrived.pop()
        if begin < 0:
            chunk.block_until_ready()
        else:
            value.write(begin, Ring.host_value(chunk))


def _relay_one(flow: Flow, source: int, value: Bytes, num_bytes: int) -> None:
    """Send the bytes of one process through the meeting place."""
    is_source = flow.coordinator.process == source
    for begin in range(0, num_bytes, _ROUND_BYTES):
        fault_points.reach("stream.before_chunk", flow.coordinator.process)
        end = min(begin + _ROUND_BYTES, num_bytes)
        payload = value.read(begin, end - begin).tobytes() if is_source else b""
        answers = flow.meet(f"bytes {begin} to {end} of process {source}", payload)
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
        answers = flow.meet(f"bytes from {begin}, {step} of each process", payload)
        for place, answer in zip(places, answers, strict=False):
            place.write(begin, np.frombuffer(answer, np.uint8))
        flow.moved_bytes += sum(map(len, answers))
        fault_points.reach("stream.after_chunk", flow.coordinator.process)
