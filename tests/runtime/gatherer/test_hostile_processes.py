"""A gatherer under hostile bytes, turned by hand: what it passes on to the meeting place."""

import contextlib
import json
import math
import secrets
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.bare_sockets import BEAT, PATIENCE_S, TOKEN
from runtime.hostile_frames import FRAMES
from shoal.runtime.gatherer.gathering import MOST_UNSENT_BYTES, Gatherer
from shoal.runtime.rules.joining import WRONG_TOKEN
from shoal.runtime.rules.point import Point
from shoal.runtime.wire import unix_socket
from shoal.runtime.wire.frames import (
    MAX_PAYLOAD_BYTES,
    FrameReader,
    address_text,
    pack_frame,
    pack_text,
)
from shoal.runtime.wire.unix_socket import connect_unix, listen_unix

LIMITS = {"heartbeat_s": 60.0, "lost_after_s": 600.0}


class End:
    """A socket that does not block, and what came there."""

    def __init__(self, sock):
        sock.setblocking(False)
        self.socket = sock
        self.has_ended = False
        self._reader = FrameReader(max_header_bytes=1 << 20, max_body_bytes=1 << 26)

    def next(self):
        """Return the next frame if one has come."""
        while (frame := self._reader.next()) is None:
            try:
                data = self.socket.recv(1 << 20)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                self.has_ended = True
                return None
            self._reader.feed(data)
        return frame


class Host:
    """A gatherer, sockets of processes, and the meeting place's end of the trunk."""

    def __init__(self, address=""):
        self._place = socket.create_server(("127.0.0.1", 0))
        self._place.settimeout(PATIENCE_S)
        self.name = f"shoal-test-{secrets.token_hex(8)}"
        address = address or address_text(*self._place.getsockname())
        orders = {"meeting_place": address, "token": TOKEN}
        self.gatherer = Gatherer(orders, listen_unix(self.name))
        self.ends = []
        self.trunk = None

    def connect(self, verb, **fields):
        """Return the end of a process that has sent its first frame."""
        end = End(connect_unix(self.name))
        self.ends.append(end)
        self.say(end, verb, **{"token": TOKEN, **fields})
        return end

    def say(self, end, verb, body=b"", **fields):
        end.socket.sendall(pack_frame({"do": verb, **fields}, body))

    def receive(self, end):
        """Turn the gatherer until a frame has come to an end; None: it has been closed."""
        while (frame := end.next()) is None and not end.has_ended:
            self.gatherer.turn()
        return frame

    def join(self, processes):
        """Let processes join, each with a life and a lane: branches 0, 1, and so on in turn."""
        members = []
        for process in range(processes):
            life = self.connect("hello", process=process, processes=processes)
            if self.trunk is None:
                self.accept()
            assert self.forwarded().header["do"] == "hello"
            lane = self.connect("lane", process=process)
            assert self.forwarded().header["do"] == "lane"
            members.append((life, lane))
        return members

    def accept(self):
        """Take the trunk, and welcome it."""
        while not self.gatherer._trunk:
            self.gatherer.turn()
        self.trunk = End(self._place.accept()[0])
        self.ends.append(self.trunk)
        assert self.receive(self.trunk).header == {"do": "trunk", "token": TOKEN, "process": 0}
        self.trunk.socket.sendall(pack_frame({"is": "welcome", **LIMITS}))
        while not self.gatherer._is_welcome:
            self.gatherer.turn()

    def forwarded(self, number=None):
        """Return the frame of a branch that comes next on the trunk."""
        frame = self.receive(self.trunk)
        assert frame.header["do"] == "branch", frame
        assert number in (None, frame.header["number"])
        reader = FrameReader(max_header_bytes=1 << 20, max_body_bytes=1 << 26)
        reader.feed(frame.body)
        return reader.next()

    def close(self):
        self.gatherer.close()
        for end in self.ends:
            end.socket.close()
        self._place.close()


@pytest.fixture
def host():
    host = Host()
    yield host
    host.close()


ARRIVAL = {"step": 1, "timeout_s": 10, "point": Point("x")}
MALFORMED = [
    (0, "beat", {**BEAT, "trails": 5}),
    (0, "beat", {**BEAT, "trails": [[None]]}),
    (0, "beat", {**BEAT, "since_s": "long"}),
    (0, "beat", {**BEAT, "since_s": 10**400}),
    (0, "beat", {}),
    (0, ["beat"], BEAT),
    (1, "arrive", {"point": ["x", [[1]], "main"]}),
    (1, "arrive", {**ARRIVAL, "point": ["x", {}, [], "", "", False, "", False]}),
    (1, "arrive", {**ARRIVAL, "point": Point("x", group=(1,))}),
    (1, "arrive", {**ARRIVAL, "timeout_s": "soon"}),
    (1, "arrive", {**ARRIVAL, "timeout_s": float("nan")}),
    (1, "arrive", {**ARRIVAL, "given_s": []}),
    (1, "arrive", {}),
    (1, None, {}),
]


@pytest.mark.parametrize(("which", "verb", "fields"), MALFORMED)
def test_what_is_malformed_is_passed_on_alone_for_the_meeting_place_to_judge(
    host, which, verb, fields
):
    bad, other = host.join(2)
    host.say(bad[which], verb, **fields)
    passed = host.forwarded(number=which)
    assert json.dumps(dict(passed.header)) == json.dumps({"do": verb, **fields})
    host.trunk.socket.sendall(pack_frame({"is": "close", "number": which}))
    assert host.receive(bad[which]) is None
    assert host.receive(host.trunk).header == {"do": "end", "number": which}
    host.say(other[1], "who", ticket=1, lane="main")
    assert host.forwarded(number=3).header["do"] == "who"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1), FRAMES | st.binary(max_size=30)), max_size=8))
def test_whatever_a_process_says_the_others_of_its_host_are_passed_on(said):
    host = Host()
    bad, other = host.join(2)
    for which, data in said:
        with contextlib.suppress(OSError):  # it may be closed by now
            bad[which].socket.sendall(data)
        host.gatherer._beat_at = 0.0  # so that a turn does not wait
        host.gatherer.turn()
    host.say(other[0], "bye")
    while (frame := host.receive(host.trunk)).header.get("number") != 2:
        pass
    assert frame.body == pack_frame({"do": "bye"})
    host.close()


def test_what_is_no_frame_ends_its_process_alone(host):
    bad, other = host.join(2)
    bad[0].socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    end = host.receive(host.trunk)
    assert end.header == {"do": "end", "number": 0}
    assert b"it sent an invalid frame: not a frame of shoal" in end.body
    host.say(other[0], "bye")
    assert host.forwarded(number=2).header == {"do": "bye"}


@pytest.mark.parametrize("depth", [10, 500, 900, 950, 980, 2000, 50_000])
def test_a_header_of_any_depth_ends_at_most_its_process(host, depth):
    bad, other = host.join(2)
    header = b'{"do":"who","deep":' + b"[" * depth + b"]" * depth + b"}"
    bad[0].socket.sendall(pack_text(header))
    assert host.receive(host.trunk).header["do"] in (
        ("branch", "end") if depth > 100 else ("branch",)
    )
    host.say(other[0], "bye")
    assert host.forwarded(number=2).header == {"do": "bye"}


def test_a_process_that_comes_late_is_not_held_and_goes_with_the_others_the_next_time(host):
    (_, first), (_, late) = host.join(2)
    host.say(first, "arrive", **ARRIVAL)
    assert host.receive(host.trunk).header["branches"] == [1]  # once it has been held
    host.say(late, "arrive", **ARRIVAL)
    host.gatherer.turn()
    assert host.receive(host.trunk).header["branches"] == [3]
    assert host.gatherer._arrivals.due == math.inf
    answer = pack_frame({"is": "ok"})
    host.trunk.socket.sendall(pack_frame({"is": "branches", "numbers": [1, 3]}, answer))
    for lane in (late, first):
        assert host.receive(lane).header == {"is": "ok"}
        host.say(lane, "arrive", **ARRIVAL)
    assert host.receive(host.trunk).header["branches"] == [1, 3]
    first.socket.close()  # it has left the call, and comes by another connection
    assert host.receive(host.trunk).header == {"do": "end", "number": 1}
    again = host.connect("lane", process=0)
    host.forwarded(number=4)
    host.say(again, "arrive", **ARRIVAL)
    assert host.receive(host.trunk).header["branches"] == [4]


def test_a_field_that_is_the_gatherers_own_is_not_passed_on(host):
    ((_, lane),) = host.join(1)
    host.say(lane, "arrive", **ARRIVAL, limits=True, branches="all", junk=1)
    header = host.receive(host.trunk).header
    assert header == {"do": "arrive", **json.loads(json.dumps(ARRIVAL)), "branches": [1]}


@pytest.mark.parametrize(
    "first",
    [
        {"token": "guessed", "process": 0, "processes": 1},
        {"token": "\udcff", "process": 0},
        {"token": None, "process": 0},
        {"token": [TOKEN]},
        {"token": TOKEN, "process": "0"},
        {"token": TOKEN, "process": 0, "processes": None},
    ],
)
@pytest.mark.parametrize("then", [which[1:] for which in MALFORMED[::3]])
def test_a_stranger_is_not_read_beyond_its_first_frame(host, first, then):
    stranger = host.connect("hello", **first)
    host.say(stranger, then[0], **then[1])
    heard = host.receive(stranger)
    if heard is not None:
        assert heard.header == {"is": "refused", "missing": []}
        assert heard.body == WRONG_TOKEN.encode()
        assert host.receive(stranger) is None
    assert host.gatherer._trunk is None
    host.join(1)


@pytest.mark.parametrize("verb", ["observe", "trunk", "serve", "keep", "arrive"])
def test_a_gatherer_is_for_processes_only(host, verb):
    stranger = host.connect(verb, process=0, name="x", host="h", pid=1)
    assert host.receive(stranger) is None
    host.join(1)


def test_another_user_is_not_read_at_all(host, monkeypatch):
    with monkeypatch.context() as elsewhere:
        end = host.connect("hello", process=0, processes=1)
        elsewhere.setattr(unix_socket.os, "geteuid", lambda: 1000)
        elsewhere.setattr(unix_socket, "_owner", lambda _sock: 1001)
        assert host.receive(end) is None
    assert host.gatherer._trunk is None
    host.join(1)


def test_a_meeting_place_that_does_not_read_holds_up_those_who_write(host):
    (_, lane), _ = host.join(2)
    frame = memoryview(pack_frame({"do": "who"}, bytes(MAX_PAYLOAD_BYTES)))
    number = 4 * MOST_UNSENT_BYTES // MAX_PAYLOAD_BYTES
    sent = [0]

    def write():
        """Send what the gatherer takes."""
        while sent[0] < number * len(frame):
            try:
                sent[0] += lane.socket.send(frame[sent[0] % len(frame) :])
            except BlockingIOError:
                return

    while not host.gatherer.is_full:
        write()
        assert sent[0] < number * len(frame)
        host.gatherer.turn()
    write()
    held_up = sent[0]
    for _ in range(10):  # each for as long as the trunk has nothing, if it were not for its due
        host.gatherer._beat_at = 0.0
        host.gatherer.turn()
        write()
    assert sent[0] == held_up
    assert host.gatherer._trunk.unsent_bytes < 2 * MOST_UNSENT_BYTES
    came = 0
    while came < number:  # once it reads on, nothing is lost
        if (passed := host.trunk.next()) is None:
            host.gatherer.turn()
            write()
        elif passed.header["do"] == "branch":
            came += 1
            assert passed.header["number"] == 1
            assert len(passed.body) == len(frame)
    assert host.gatherer._trunk.unsent_bytes == 0


def test_a_gatherer_does_not_take_itself_for_the_meeting_place(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()
    connect = socket.create_connection
    # Linux chooses such a port by chance, if it is tried often enough.
    monkeypatch.setattr(
        socket, "create_connection",
        lambda address, timeout=None: connect(address, timeout, source_address=free),
    )  # fmt: skip
    host = Host(address_text(*free))
    end = host.connect("hello", process=0, processes=1)
    refusal = host.receive(end)
    assert refusal.header == {"is": "unreachable", "what": "nothing listens there"}
    assert refusal.body == b"Connection refused"
    assert host.gatherer._trunk is None
    host.close()


def test_processes_are_sent_on_if_the_meeting_place_takes_no_gatherer(host):
    end = host.connect("hello", process=0, processes=1)
    while not host.gatherer._trunk:
        host.gatherer.turn()
    host._place.accept()[0].close()
    assert host.receive(end).header == {"is": "direct"}
    assert host.receive(end) is None
