"""The server's sockets under hostile bytes, in process, under a clock that the test turns."""

import errno
import os
import socket
import struct

import pytest

from runtime.bare_sockets import no_descriptors
from shoal.runtime.wire.frames import MAX_PAYLOAD_BYTES, FrameError, pack_frame
from shoal.runtime.wire.server_sockets import (
    STRANGER_S,
    Connections,
)


class Place:
    """A listener that echoes, trusts on request, and remembers what it was told."""

    def __init__(self):
        self.now = 0.0
        self.ended = []
        self.frames = []
        self.trusted = []
        server = socket.create_server(("127.0.0.1", 0))
        self.address = server.getsockname()
        self.connections = Connections([server], self, lambda: self.now)

    def on_frame(self, connection, frame):
        self.frames.append(frame)
        if frame.header.get("bad"):
            raise FrameError("as asked")
        if frame.header.get("trust"):
            self.trusted.append(connection)
            self.connections.trust(connection)
        then_close = bool(frame.header.get("last"))
        self.connections.send(connection, pack_frame({}, frame.body), then_close=then_close)

    def on_end(self, connection, reason):
        self.ended.append(reason)

    def knock(self):
        client = socket.create_connection(self.address)
        client.settimeout(10)
        self.connections.poll(10)
        return client

    def say(self, client, data):
        client.sendall(data)
        self.connections.poll(10)


@pytest.fixture
def place():
    place = Place()
    yield place
    place.connections.close_all()


def is_closed(client):
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(255, -1, -1)) * 16,
        struct.pack("!4sIQ", b"SHL1", 2**31, 0),
        struct.pack("!4sIQ", b"SHL1", 10, 1),  # a stranger may send no body
        pack_frame({"bad": True}),
    ],
)
def test_a_hostile_stranger_is_thrown_out_and_the_next_is_served(place, hostile):
    with place.knock() as client:
        place.say(client, hostile)
        assert is_closed(client)
    assert len(place.ended) == 1
    with place.knock() as client:
        place.say(client, pack_frame({"hello": 1}))
        assert client.recv(100) == pack_frame({})


def test_a_stranger_that_stays_silent_or_sends_half_a_frame_is_thrown_out_in_time(place):
    with place.knock() as silent, place.knock() as half, place.knock() as member:
        place.say(half, pack_frame({"hello": 1})[:-1])
        place.say(member, pack_frame({"trust": True}))
        assert place.connections.next_deadline == STRANGER_S
        place.now = STRANGER_S
        place.connections.poll(0)
        assert is_closed(silent)
        assert is_closed(half)
        assert place.connections.next_deadline == float("inf")
        member.recv(100)
        place.say(member, pack_frame({"still": "here"}))
        assert member.recv(100) == pack_frame({})
    assert place.ended == []  # it is we who closed


def test_a_member_may_send_a_payload_but_not_more(place):
    with place.knock() as member:
        place.say(member, pack_frame({"trust": True}) + pack_frame({"n": 2}, b"payload"))
        assert [frame.body for frame in place.frames] == [b"", b"payload"]
        place.say(member, struct.pack("!4sIQ", b"SHL1", 2, MAX_PAYLOAD_BYTES + 1))
    assert "frame too large" in place.ended[0]


def test_peer_that_does_not_read_does_not_block_the_others(place):
    with place.knock() as lazy, place.knock() as other:
        place.say(lazy, pack_frame({"trust": True}))
        body = bytes(MAX_PAYLOAD_BYTES)
        connection = place.trusted[0]
        for _ in range(4):  # more than the kernel's buffers take
            place.connections.send(connection, pack_frame({}, body))
        assert connection.out
        place.say(other, pack_frame({"hello": 1}))
        assert other.recv(100) == pack_frame({})
        wanted = len(pack_frame({})) + 4 * len(pack_frame({}, body))
        got = 0
        while got < wanted:
            place.connections.poll(0)
            got += len(lazy.recv(1 << 20))
        assert got == wanted
        place.connections.poll(0)
        assert not connection.out


def blocked(place, client):
    """Let there be more for `client` than the kernel takes; return how much."""
    place.say(client, pack_frame({"trust": True}))
    data = pack_frame({}, bytes(MAX_PAYLOAD_BYTES))
    while not place.trusted[0].out:
        place.connections.send(place.trusted[0], data)
    return len(pack_frame({})) + len(data)


def test_peer_that_does_not_read_its_answers_is_not_read_until_it_does(place):
    with place.knock() as lazy:
        unread = blocked(place, lazy)
        before = len(place.frames)
        lazy.sendall(2 * pack_frame({"n": 1}))
        for _ in range(10):
            place.connections.poll(0)
        assert len(place.frames) == before
        while unread:
            unread -= len(lazy.recv(min(unread, 1 << 20)))
            place.connections.poll(0)
        while len(place.frames) < before + 2:
            assert place.connections.poll(10)
        assert lazy.recv(100) == 2 * pack_frame({})


def test_disconnect_of_a_peer_that_did_not_read_is_detected(place):
    with place.knock() as lazy:
        blocked(place, lazy)
    while not place.ended:
        assert place.connections.poll(10)
    assert place.ended == ["its connection closed"]


def test_the_last_word_is_sent_before_the_connection_is_closed(place):
    with place.knock() as client:
        place.say(client, pack_frame({"last": True}) + pack_frame({"ignored": True}))
        assert client.recv(100) == pack_frame({})
        assert is_closed(client)
    assert len(place.frames) == 1


def test_the_end_of_the_leash_ends_the_loop(place):
    reading, writing = os.pipe()
    try:
        place.connections.hold_leash(reading)
        assert place.connections.poll(0)
        os.close(writing)
        assert not place.connections.poll(10)
    finally:
        os.close(reading)


class CutOff:
    """A socket whose other end the kernel has given up."""

    def __init__(self, sock, number):
        self._sock = sock
        self._number = number

    def recv(self, size):
        raise OSError(self._number, os.strerror(self._number))

    def __getattr__(self, name):
        return getattr(self._sock, name)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ETIMEDOUT, "cut off (Connection timed out)"),
        (errno.EHOSTUNREACH, "cut off (No route to host)"),
        (errno.ECONNRESET, "its connection closed"),
    ],
)
def test_cut_link_is_reported_as_cut_off(place, number, words):
    with place.knock() as client:
        place.say(client, pack_frame({"trust": True}))
        [connection] = place.trusted
        connection.socket = CutOff(connection.socket, number)
        place.say(client, pack_frame({"hello": 1}))
    assert place.ended == [words]


def test_trusted_connection_can_be_given_another_receiver(place):
    other = Place()
    with place.knock() as client:
        place.say(client, pack_frame({"trust": True}))
        place.connections.trust(place.trusted[0], Deaf(other), max_body_bytes=3)
        place.say(client, pack_frame({"n": 1}, b"abc"))
        place.say(client, pack_frame({"n": 2}, b"abcd"))
    assert [frame.body for frame in other.frames] == [b"abc"]
    assert "frame too large" in other.ended[0]
    assert len(place.frames) == 1
    assert place.ended == []
    other.connections.close_all()


class Deaf:
    """Passes on what it hears, and answers nothing."""

    def __init__(self, place):
        self._place = place

    def on_frame(self, connection, frame):
        self._place.frames.append(frame)

    def on_end(self, connection, reason):
        self._place.ended.append(reason)


@pytest.mark.parametrize("has_another", [True, False])
def test_listener_without_file_descriptors_waits_and_accepts_later(place, has_another):
    """A socket that cannot accept stays readable: `poll` would return at once, for ever."""
    other = place.knock() if has_another else None
    late = socket.create_connection(place.address)
    late.settimeout(10)
    with no_descriptors():
        place.connections.poll(10)
        assert place.connections._selector.select(0) == []
    if other:
        place.say(other, b"not a frame, which closes it" * 9)
    else:
        place.now = place.connections.next_deadline
        place.connections.poll(0)
    place.connections.poll(10)
    place.say(late, pack_frame({}))
    assert late.recv(4) == b"SHL1"
    late.close()
    if other:
        other.close()
