"""A splice between real sockets: what it passes on, and the one thing that it does not."""

from __future__ import annotations

import selectors
import socket
import struct
import time

import pytest

from runtime.bare_sockets import no_descriptors
from shoal.runtime.jax_service.splice import Splices, find
from shoal.runtime.wire.frames import split_address

DEADLINE_S = 30.0  # of the test itself
LARGE = bytes(range(256)) * (1 << 15)  # 8 MiB: more than all buffers between take


class Bench:
    """A splice, turned by hand, and a far end that the test plays."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.splices = Splices(self.selector, socket.AF_INET, self.listener.getsockname())
        self.splices.listen()
        self.open: list[socket.socket] = [self.listener]

    def near(self) -> socket.socket:
        near = socket.create_connection(split_address(self.splices.address))
        near.setblocking(False)
        self.open.append(near)
        return near

    def pair(self) -> tuple[socket.socket, socket.socket]:
        near = self.near()
        self.until(lambda: self.splices.has_connected)
        far, _ = self.listener.accept()
        far.setblocking(False)
        self.open.append(far)
        return near, far

    def until(self, is_true) -> None:
        limit = time.monotonic() + DEADLINE_S
        while not is_true():
            assert time.monotonic() < limit, "it never came true"
            for key, mask in self.selector.select(0.01):
                key.data(mask)

    def read(self, end: socket.socket, count: int) -> bytes:
        """Read so many bytes, fewer at the end."""
        got = bytearray()

        def is_read() -> bool:
            try:
                data = end.recv(1 << 16)
            except BlockingIOError:
                return False
            got.extend(data)
            return not data or len(got) >= count

        self.until(is_read)
        return bytes(got)

    def write(self, end: socket.socket, data: bytes) -> None:
        rest = memoryview(data)

        def is_written() -> bool:
            nonlocal rest
            rest = rest[send_some(end, rest) :]
            return not rest

        self.until(is_written)

    def fill(self, end: socket.socket) -> int:
        """Write until nobody takes any more; return how many bytes that were."""
        sent = 0

        def is_full() -> bool:
            nonlocal sent
            now = send_some(end, LARGE)
            sent += now
            return not now and not self.selector.select(0)

        self.until(is_full)
        return sent

    def is_silent(self, end: socket.socket) -> bool:
        """Is it open, with nothing to read?"""
        for key, mask in self.selector.select(0):
            key.data(mask)
        try:
            end.recv(1)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self.splices.close()
        for end in self.open:
            end.close()
        self.selector.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def send_some(end: socket.socket, data: bytes | memoryview) -> int:
    try:
        return end.send(data)
    except BlockingIOError:
        return 0


def abort(end: socket.socket) -> None:
    """Close with a reset, as the kernel does for a process that dies with unread data."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def test_bytes_pass_both_ways(bench):
    near, far = bench.pair()
    bench.write(near, b"ask")
    assert bench.read(far, 3) == b"ask"
    bench.write(far, b"answer")
    assert bench.read(near, 6) == b"answer"


@pytest.mark.parametrize("from_near", [True, False])
def test_a_slow_reader_holds_the_writer_back(bench, from_near):
    near, far = bench.pair()
    writer, reader = (near, far) if from_near else (far, near)
    sent = bench.fill(writer)
    (pair,) = bench.splices.pairs
    assert 0 < len(pair._to_far) + len(pair._to_near) <= 1 << 16
    assert len(bench.read(reader, sent)) == sent


def test_a_near_end_that_closes_half_still_hears_the_answer(bench):
    near, far = bench.pair()
    bench.write(near, b"all I have")
    near.shutdown(socket.SHUT_WR)
    assert bench.read(far, 100) == b"all I have"
    assert bench.read(far, 1) == b""
    sent = bench.fill(far)
    far.close()
    assert len(bench.read(near, sent + 1)) == sent
    assert not bench.splices.pairs


def test_a_near_end_that_closes_closes_the_far_one(bench):
    near, far = bench.pair()
    near.close()
    assert bench.read(far, 1) == b""
    bench.until(lambda: bench.splices.is_idle)
    far.close()
    bench.until(lambda: not bench.splices.pairs)


@pytest.mark.parametrize("end", [socket.socket.close, abort])
def test_a_far_end_that_dies_leaves_the_near_one_open_and_silent(bench, end):
    near, far = bench.pair()
    bench.write(far, b"last words")
    assert bench.read(near, 10) == b"last words"
    (pair,) = bench.splices.pairs
    end(far)
    bench.until(lambda: pair._far_ended)
    assert bench.is_silent(near)
    bench.write(near, LARGE)  # what is said now is heard by nobody, but it is taken
    assert bench.is_silent(near)
    assert not bench.splices.is_idle
    near.close()
    bench.until(lambda: not bench.splices.pairs)


def test_a_refusal_is_passed_on_until_the_far_end_was_there_once(bench):
    bench.listener.close()
    refused = bench.near()
    assert bench.read(refused, 1) == b""
    assert not bench.splices.pairs


def test_a_far_end_that_is_gone_is_silence_for_newcomers(bench):
    near, far = bench.pair()
    far.close()
    bench.listener.close()
    late = bench.near()
    bench.until(lambda: len(bench.splices.pairs) == 2)
    bench.until(lambda: all(pair._far_ended for pair in bench.splices.pairs))
    assert bench.is_silent(late)
    assert bench.is_silent(near)


def test_without_file_descriptors_it_waits_and_serves_who_came_meanwhile(bench):
    """A listener that cannot accept stays readable: the keeper of a host would spin."""
    early = bench.pair()
    (first,) = bench.splices.pairs
    late = bench.near()
    with no_descriptors():
        for key, mask in bench.selector.select(10):
            key.data(mask)
        assert bench.selector.select(0) == []
    for end in early:
        end.close()  # which frees some
    bench.until(lambda: bench.splices.pairs and first not in bench.splices.pairs)
    far, _ = bench.listener.accept()
    far.setblocking(False)
    bench.open.append(far)
    bench.write(late, b"here")
    assert bench.read(far, 4) == b"here"


def test_find_waits_for_a_listener_and_names_what_is_wrong():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            find("127.0.0.1", port, time.monotonic())
        holder.listen()
        family, far = find("localhost", port, time.monotonic() + DEADLINE_S)
    assert (family, far) == (socket.AF_INET, ("127.0.0.1", port))
