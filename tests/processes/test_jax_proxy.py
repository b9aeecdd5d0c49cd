"""A proxy between real sockets: what it passes on, and the one thing that it does not."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time

import pytest

from runtime.bare_sockets import no_descriptors
from shoal.runtime.jax_service.jax_proxy import JaxGate, ProxiedConnections, find
from shoal.runtime.rules.joining import WRONG_TOKEN
from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import pack_frame, split_address
from shoal.runtime.wire.proof import introduce

DEADLINE_S = 30.0  # of the test itself
LARGE = bytes(range(256)) * (1 << 15)  # 8 MiB: more than all buffers between take


class Bench:
    """A proxy, turned by hand, and a far end that the test plays."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.proxies = ProxiedConnections(
            self.selector, socket.AF_INET, self.listener.getsockname()
        )
        self.proxies.listen()
        self.open: list[socket.socket] = [self.listener]

    def near(self) -> socket.socket:
        near = socket.create_connection(split_address(self.proxies.address))
        near.setblocking(False)
        self.open.append(near)
        return near

    def pair(self) -> tuple[socket.socket, socket.socket]:
        near = self.near()
        self.until(lambda: self.proxies.has_connected)
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
        self.proxies.close()
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
    (pair,) = bench.proxies.pairs
    assert 0 < len(pair._to_far) + len(pair._to_near) <= 1 << 16
    assert len(bench.read(reader, sent)) == sent


def test_half_closed_near_end_still_gets_the_answer(bench):
    near, far = bench.pair()
    bench.write(near, b"all I have")
    near.shutdown(socket.SHUT_WR)
    assert bench.read(far, 100) == b"all I have"
    assert bench.read(far, 1) == b""
    sent = bench.fill(far)
    far.close()
    assert len(bench.read(near, sent + 1)) == sent
    assert not bench.proxies.pairs


def test_a_near_end_that_closes_closes_the_far_one(bench):
    near, far = bench.pair()
    near.close()
    assert bench.read(far, 1) == b""
    bench.until(lambda: bench.proxies.is_idle)
    far.close()
    bench.until(lambda: not bench.proxies.pairs)


@pytest.mark.parametrize("end", [socket.socket.close, abort])
def test_a_far_end_that_dies_leaves_the_near_one_open_and_silent(bench, end):
    near, far = bench.pair()
    bench.write(far, b"last words")
    assert bench.read(near, 10) == b"last words"
    (pair,) = bench.proxies.pairs
    end(far)
    bench.until(lambda: pair._far_ended)
    assert bench.is_silent(near)
    bench.write(near, LARGE)  # what is said now is heard by nobody, but it is taken
    assert bench.is_silent(near)
    assert not bench.proxies.is_idle
    near.close()
    bench.until(lambda: not bench.proxies.pairs)


def test_a_refusal_is_passed_on_until_the_far_end_was_there_once(bench):
    bench.listener.close()
    refused = bench.near()
    assert bench.read(refused, 1) == b""
    assert not bench.proxies.pairs


def test_a_far_end_that_is_gone_is_silence_for_newcomers(bench):
    near, far = bench.pair()
    far.close()
    bench.listener.close()
    late = bench.near()
    bench.until(lambda: len(bench.proxies.pairs) == 2)
    bench.until(lambda: all(pair._far_ended for pair in bench.proxies.pairs))
    assert bench.is_silent(late)
    assert bench.is_silent(near)


def test_proxy_without_file_descriptors_waits_and_accepts_later(bench):
    """A listener that cannot accept stays readable: the host agent would spin."""
    early = bench.pair()
    (first,) = bench.proxies.pairs
    late = bench.near()
    with no_descriptors():
        for key, mask in bench.selector.select(10):
            key.data(mask)
        assert bench.selector.select(0) == []
    for end in early:
        end.close()  # which frees some
    bench.until(lambda: bench.proxies.pairs and first not in bench.proxies.pairs)
    far, _ = bench.listener.accept()
    far.setblocking(False)
    bench.open.append(far)
    bench.write(late, b"here")
    assert bench.read(far, 4) == b"here"


# ---- The gate.


SECRET = "the secret of the tests"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


KEPT: list[object] = []  # gates have no end but that of their process


class Behind:
    """A gate, and what listens behind it."""

    def __init__(self, folder, *, is_open=False):
        self.ends = contextlib.ExitStack()
        self.listener = self.ends.enter_context(socket.socket(socket.AF_UNIX))
        self.listener.bind(f"{folder}/service")
        self.listener.listen()
        self.listener.settimeout(DEADLINE_S)
        server = socket.create_server(("127.0.0.1", 0))
        self.port = server.getsockname()[1]
        gate = JaxGate(server, f"{folder}/service", SECRET, is_open=is_open)
        gate.open()
        KEPT.append((server, gate))

    def connect(self):
        near = socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)
        return self.ends.enter_context(near)

    def accept(self):
        far = self.ends.enter_context(self.listener.accept()[0])
        far.settimeout(DEADLINE_S)
        return far

    def introduced(self, secret=SECRET, do="jax"):
        """Return a connection and the gate's refusal."""
        near, limit = self.connect(), time.monotonic() + DEADLINE_S
        refusal = introduce(Channel(near, max_body_bytes=1 << 16), {"do": do}, secret, limit)
        near.settimeout(DEADLINE_S)
        return near, refusal

    def is_alive(self):
        """Return whether a right proof still opens it."""
        _, refusal = self.introduced()
        self.accept()
        return refusal is None


@pytest.fixture
def behind(tmp_path):
    behind = Behind(tmp_path)
    with behind.ends:
        yield behind


def ended(near):
    """Return whether a connection ends without a byte."""
    try:
        return near.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("first", ["near", "far"])
def test_proof_opens_the_gate_and_each_end_closes_the_other(behind, first):
    near, refusal = behind.introduced()
    assert refusal is None
    far = behind.accept()
    near.sendall(HTTP2)
    assert far.recv(100) == HTTP2
    far.sendall(b"answer")
    assert near.recv(6) == b"answer"
    one, other = (near, far) if first == "near" else (far, near)
    one.close()
    assert ended(other)


def test_a_wrong_proof_is_refused(behind):
    near, refusal = behind.introduced("another")
    assert refusal.body.decode() == WRONG_TOKEN
    assert ended(near)


def test_a_proof_for_the_coordinator_does_not_open_it(behind):
    """As one that is passed on by whoever listened at the coordinator's address."""
    with pytest.raises(ConnectionError):
        behind.introduced(do="hello")
    assert behind.is_alive()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_client_of_jax_alone(tmp_path, is_open):
    behind = Behind(tmp_path, is_open=is_open)
    with behind.ends:
        near = behind.connect()
        near.sendall(HTTP2)
        if is_open:
            assert behind.accept().recv(100) == HTTP2
        else:
            assert ended(near)
        assert behind.is_alive()


def test_no_frame_of_a_stranger_ends_it(behind):
    """At some depth lists within lists can just be read, and not be written again."""
    empty = pack_frame({})
    for depth in [*range(900, 1001), 5000]:
        near = behind.connect()
        header = f'{{"do": "jax", "nonce": "x", "a": {"[" * depth + "]" * depth}}}'.encode()
        prefix = empty[:4] + struct.pack("!IQ", len(header), 0)
        near.sendall(prefix + header + pack_frame({"do": "proof", "proof": "y"}))
        with contextlib.suppress(ConnectionError):
            while near.recv(1 << 16):
                pass
        near.close()
    assert behind.is_alive()


def test_what_jax_s_service_does_not_accept_is_refused(behind):
    behind.listener.close()
    _, refusal = behind.introduced()
    assert refusal.body == b"JAX's service accepts no connection"


def test_find_waits_for_a_gate_and_reports_refusals(behind):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            find("127.0.0.1", holder.getsockname()[1], SECRET, time.monotonic())
    family, far = find("localhost", behind.port, SECRET, time.monotonic() + DEADLINE_S)
    assert (family, far) == (socket.AF_INET, ("127.0.0.1", behind.port))
    with pytest.raises(PermissionError, match="the token is wrong"):
        find("localhost", behind.port, "another", time.monotonic() + DEADLINE_S)
