"""Large values, cut, sent and put together: every byte, whatever the size, source and receiver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.transport import stream, windows
from shoal.collectives.transport.chunks import CHUNKS, LARGE_BYTES, SMALL_BYTES, Bytes, runs
from shoal.collectives.transport.ring import chain, rotation, tree
from shoal.collectives.transport.stream import broadcast_bytes, gather_bytes
from shoal.errors import DeadlineError, DivergenceError, PeerFailedError, ProcessLostError
from shoal.runtime.client.in_process import LocalJob


@pytest.fixture(params=["host memory", "coordinator"])
def way(request, monkeypatch):
    """Go through the memory of the host, or without it through the coordinator."""
    monkeypatch.setenv("SHOAL_SHARED_MEMORY", "1" if request.param == "host memory" else "0")
    monkeypatch.setattr(stream, "_ROUND_BYTES", 100)
    monkeypatch.setattr(windows, "_PIECE_BYTES", 64)


def value_of(process, num_bytes):
    return np.random.default_rng([process, num_bytes]).integers(0, 256, num_bytes, dtype=np.uint8)


def spread(client, source, data, num_bytes, into=None):
    into = [np.empty(num_bytes, np.uint8)] if into is None else into
    broadcast_bytes(client, source, data, num_bytes, into=into, timeout_s=PATIENCE_S)


def cut(value, *at):
    return np.split(value, at)


@given(st.integers(0, 40 * LARGE_BYTES))
def test_runs_cover_a_value_with_little_waste(num_bytes):
    cut = runs(num_bytes)
    assert [begin for run in cut for begin in run.begins] == sorted(
        {begin for run in cut for begin in run.begins}
    )
    end = 0
    for run in cut:
        assert run.begin == end
        assert run.chunk_bytes in CHUNKS
        end += run.num_chunks * run.chunk_bytes
    assert end >= num_bytes
    assert end - num_bytes < LARGE_BYTES
    assert sum(run.num_chunks for run in cut) <= num_bytes / LARGE_BYTES + 5


@pytest.mark.parametrize("num_bytes", [1, SMALL_BYTES, 4 * SMALL_BYTES])
def test_a_short_value_costs_no_large_chunk(num_bytes):
    (run,) = runs(num_bytes)
    assert run.chunk_bytes == SMALL_BYTES
    assert run.num_chunks == -(-num_bytes // SMALL_BYTES)


@given(
    st.lists(st.binary(max_size=9), max_size=6),
    st.integers(0, 40),
    st.integers(0, 20),
)
def test_several_buffers_are_read_and_written_as_one(buffers, begin, num_bytes):
    whole = b"".join(buffers)
    read = Bytes(buffers).read(begin, num_bytes)
    assert read.tobytes() == whole[begin : begin + num_bytes].ljust(num_bytes, b"\0")
    places = [np.zeros(len(buffer), np.uint8) for buffer in buffers]
    Bytes(places).write(begin, read)
    written = b"".join(place.tobytes() for place in places)
    end = min(begin + num_bytes, len(whole))
    assert written == (b"\0" * begin + whole[begin:end]).ljust(len(whole), b"\0")[: len(whole)]


def test_range_within_one_aligned_buffer_is_not_copied():
    memory = np.zeros(200, np.uint8)
    value = memory[-memory.ctypes.data % 64 :][:128]
    assert np.shares_memory(Bytes([value]).read(64, 64), value)
    assert not np.shares_memory(Bytes([value]).read(1, 64), value)
    assert Bytes([value]).read(1, 64).ctypes.data % 64 == 0


def test_every_array_is_bytes():
    words = np.array([[1, -2], [3, 4]], np.int64)
    assert Bytes([words, b"", memoryview(b"ab")]).read(0, 34).tobytes() == words.tobytes() + b"ab"


@pytest.mark.parametrize("num_processes", [2, 3, 4, 5, 8, 13])
def test_every_route_reaches_each_process_once(num_processes):
    for source in range(num_processes):
        line = chain(num_processes, source)
        assert [sender for sender, _ in line] == [
            (source + step) % num_processes for step in range(num_processes - 1)
        ]
        assert all(receiver == (sender + 1) % num_processes for sender, receiver in line)
        have = {source}
        for hops in tree(num_processes, source):
            senders, receivers = ({pair[end] for pair in hops} for end in (0, 1))
            assert senders <= have
            assert not receivers & have
            assert len(senders) == len(receivers) == len(hops)
            have |= receivers
        assert have == set(range(num_processes))
        assert len(tree(num_processes, source)) == (num_processes - 1).bit_length()
    assert sorted(receiver for _, receiver in rotation(num_processes)) == [*range(num_processes)]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 99, 100, 101, 350])
def test_without_devices_every_byte_comes_too(num_processes, num_bytes, way):
    values = [value_of(p, num_bytes + 7 * p) for p in range(num_processes)]
    sizes = [value.size for value in values]

    def go(client):
        me = client.process
        for source, value in enumerate(values):
            if me == source:
                spread(client, source, cut(value, 3, 3, 60), value.size, into=[])
            else:
                came = np.empty(value.size, np.uint8)
                spread(client, source, None, value.size, into=[came])
                assert np.array_equal(came, value)
        for receivers in ({*range(num_processes)}, *({p} for p in range(num_processes))):
            rows = [np.empty(size, np.uint8) for size in sizes if me in receivers]
            places = [[row] for row in rows]
            gather_bytes(client, cut(values[me], 5), sizes, into=places, timeout_s=PATIENCE_S)
            assert all(map(np.array_equal, rows, values))
        return True

    assert run_all(LocalJob(num_processes), go) == [True] * num_processes


def test_bytes_come_to_where_they_are_wanted(way):
    values = [value_of(p, 1000) for p in range(3)]

    def go(client):
        me = client.process
        pieces = [np.zeros((10, 10), np.int8), np.zeros(900, np.uint8)]
        data = [values[1]] if me == 1 else None
        options = {"timeout_s": PATIENCE_S, "into": pieces}
        broadcast_bytes(client, 1, data, 1000, **options)
        assert b"".join(map(np.ndarray.tobytes, pieces)) == values[1].tobytes()
        rows = np.zeros((3, 1000), np.uint8)
        options["into"] = [[row[:1], row[1:]] for row in rows]
        gather_bytes(client, [values[me]], [1000] * 3, **options)
        return np.array_equal(rows, values)

    assert run_all(LocalJob(3), go) == [True] * 3


def test_loss_between_two_rounds_raises_on_every_other_process(way):
    job = LocalJob(3)

    def go(client):
        if client.process == 1:
            job.lose(1)
        data = [value_of(0, 300)] if client.process == 0 else None
        spread(client, 0, data, 300)

    errors = run_all(job, go)
    assert [type(errors[p]) for p in (0, 2)] == [ProcessLostError] * 2
    assert errors[0].lost.keys() == {1}


def test_different_transfer_raises_on_every_process(way):
    def go(client):
        if client.process == 1:
            spread(client, 0, None, 200)
        else:
            spread(client, 0, [value_of(0, 100)], 100)

    assert [type(error) for error in run_all(LocalJob(2), go)] == [DivergenceError] * 2


def test_process_that_leaves_or_is_late_is_named(way):
    def leave(client):
        if client.process == 1:
            return client.close()
        return spread(client, 0, [value_of(0, 100)], 100)

    assert type(run_all(LocalJob(2), leave)[0]) is PeerFailedError
    client = LocalJob(2).clients[0]
    with pytest.raises(DeadlineError) as told:
        broadcast_bytes(client, 0, [b"abc"], 3, into=[], timeout_s=0.05, name="params")
    assert told.value.missing == (1,)
    assert "collectives/transport/test_stream.py:" in str(told.value)
