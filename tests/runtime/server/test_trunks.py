"""What the meeting place makes of a trunk: bare frames of a gatherer, right and wrong."""

import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.bare_sockets import BEAT, LIMITS, TOKEN, Bare, Place
from runtime.hostile_frames import FIELDS, FRAMES, JUNK
from shoal.runtime.rules.joining import PROTOCOL
from shoal.runtime.rules.point import Point
from shoal.runtime.server import trunks
from shoal.runtime.server.trunks import TrunkCaller
from shoal.runtime.wire.frames import FrameReader, join_payloads, pack_frame

WELCOME = {"is": "welcome", "heartbeat_s": 0.25, "lost_after_s": 1.0, "body": ""}


class Trunk(Bare):
    """The trunk of a gatherer."""

    def __init__(self, address):
        super().__init__(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.say("trunk", token=TOKEN, process=0)
        assert self.told() == WELCOME

    def branch(self, number, verb, body=b"", **fields):
        self.say("branch", pack_frame({"do": verb, **fields}, body), number=number)

    def hello(self, number, process, processes):
        self.branch(
            number, "hello", protocol=PROTOCOL, token=TOKEN, process=process, processes=processes,
            host="h", pid=7 + process, incarnation=f"run {process}", versions="", jax_service="",
            timeout_s=10, host_id="h",
        )  # fmt: skip

    def lane(self, number, process):
        self.branch(number, "lane", token=TOKEN, process=process, incarnation=f"run {process}")

    def arrive(self, branches, payloads=(), *, name="x", **more):
        point = Point(name, **more)
        header = {"step": 1, "timeout_s": 10, "point": point, "branches": branches}
        self.say("arrive", join_payloads([*payloads]), **header)

    def heard(self):
        """Return the branches of the next frame for processes, and that frame."""
        while (frame := self.receive()).header["is"] in ("close", "beat"):
            pass
        assert frame.header["is"] == "branches", frame
        reader = FrameReader(max_header_bytes=1 << 20, max_body_bytes=1 << 20)
        reader.feed(frame.body)
        return frame.header["numbers"], reader.next()


@pytest.fixture
def place():
    place = Place(4)
    yield place
    place.end()


@pytest.fixture
def trunk(place):
    """Return a trunk with processes 0, 1, 2 (lives 0, 1, 2 and lanes 4, 5, 6); the fourth process
    is connected by itself."""
    trunk = place._take(Trunk(place.address))
    for process in range(3):
        trunk.hello(process, process, 4)
    trunk.alone = place.process(3, host_id="far")
    assert trunk.alone.told()["is"] == "welcome"
    numbers, welcome = trunk.heard()
    assert numbers == [0, 1, 2]
    assert welcome.header["keeps"] == {"0": 7, "1": 8, "2": 9}
    for process in range(3):
        trunk.lane(4 + process, process)
    return trunk


def test_arrivals_of_a_host_are_answered_by_one_frame_with_all_payloads(place, trunk):
    trunk.arrive([4, 5, 6], [b"0", b"1", b"0"])
    lane = place.lane(trunk.alone)
    lane.say("arrive", b"3", step=1, timeout_s=10, point=Point("x"))
    numbers, answer = trunk.heard()
    assert (numbers, answer.header) == ([4, 5, 6], {"is": "ok"})
    assert answer.body == lane.receive().body == join_payloads([b"0", b"1", b"0", b"3"])


def test_a_branch_that_ends_is_the_death_of_its_process(place, trunk):
    trunk.say("end", b"its connection closed (killed?)", number=1)
    place.until_states("here", "lost", "here", "here")
    numbers, gone = trunk.heard()
    assert (numbers, gone.header["process"]) == ([0, 2], 1)
    assert gone.body == b"its connection closed (killed?)"
    trunk.arrive([4, 5, 6])  # that of the dead one was on its way
    numbers, answer = trunk.heard()
    assert answer.header == {"is": "lost"}
    assert 5 not in numbers


def test_a_call_of_processes_one_of_which_has_ended_its_connection_is_taken_from_the_others(
    place, trunk
):
    lane = place.lane(trunk.alone)
    for name in ("x", "y"):
        lane.say("arrive", step=1, timeout_s=10, point=Point(name))
        trunk.arrive([4, 5, 6], name=name)
        if name == "x":
            assert trunk.heard()[0] == [4, 5, 6]
            assert lane.told()["is"] == "ok"
            trunk.say("end", b"interrupted", number=5)
    trunk.lane(7, 1)
    trunk.arrive([7], name="y")
    assert sorted([trunk.heard()[0], trunk.heard()[0]]) == [[4, 6], [7]]


def test_signs_of_life_come_together_and_count(place, trunk):
    row = [BEAT[name] for name in ("step", "place", "since_s", "step_s", "memory_bytes")]
    trunk.say("beats", rows([0, *row, 0.05], [1, *row, 0], [99, *row, 0], [4, *row, 0]))
    assert trunk.told() == {"is": "beat", "body": ""}
    members = place.ask("members")["members"]
    assert [member[8:] for member in members[:2]] == [[0.1, 7, 7, 0.05], [0.1, 7, 8, 0.0]]


def test_a_silent_gatherer_is_lost_with_its_processes(place, trunk):
    place.turn(0.9, beating=[trunk.alone])
    trunk.say("beats")
    assert trunk.told() == {"is": "beat", "body": ""}
    place.turn(0.9, beating=[trunk.alone])
    assert "lost" not in place.states()
    place.turn_until("lost", "lost", "lost", "here", beating=[trunk.alone])
    said = [member[3] for member in place.ask("members")["members"][:3]]
    assert all("the gatherer of its host is lost: silent for" in words for words in said)
    assert LIMITS.lost_after_s == 1.0


@pytest.mark.parametrize(
    ("verb", "fields", "body"),
    [
        ("branch", {"number": "x"}, b""),
        ("end", {}, b""),
        ("arrive", {"branches": [4.0, 5]}, b""),
        ("arrive", {"branches": [[1]]}, b""),
        ("arrive", {"branches": [True, 5]}, b""),
        ("arrive", {"branches": {}}, b""),
        ("arrive", {"branches": []}, b""),
        ("arrive", {"branches": [5, 4]}, b""),
        ("arrive", {"branches": [4] * 1000}, b""),
        ("arrive", {"branches": [4, 5], "point": Point("x")}, b"no payloads"),
        ("arrive", {"branches": [4, 5], "point": Point("x"), "limits": True}, bytes(31)),
        ("arrive", {"branches": [4, 5], "point": Point("x"), "limits": True}, b"\xff" * 32),
        ("beats", {}, b"3"),
        ("beats", {}, b"[3]"),
        ("beats", {}, b"[[]]"),
        ("beats", {}, b"[[[1], 2]]"),
        ("beats", {}, b"[[{}, 2]]"),
        ("beats", {}, b"[[0, 1"),
        ("beats", {}, b"[" * 100_000),
        ("beats", {}, b"\xff"),
        ("wrong", {}, b""),
        ([], {}, b""),
    ],
)
def test_what_no_gatherer_sends_ends_no_process_of_another_host(place, trunk, verb, fields, body):
    trunk.say(verb, body, **fields)
    while trunk.receive() is not None:
        pass
    place.until_states("lost", "lost", "lost", "here")
    said = place.ask("members")["members"][0][3]
    assert "the gatherer of its host is lost: it sent an invalid frame" in said
    trunk.alone.beat()
    assert place.states()[3] == "here"


def rows(*rows):
    return json.dumps(rows).encode()


@pytest.mark.parametrize(
    ("verb", "fields", "body", "words"),
    [
        ("branch", {"number": 0}, b"GET / HTTP/1.1", "not a frame of shoal"),
        ("branch", {"number": 0}, pack_frame({"do": "wrong"}), "unknown verb 'wrong'"),
        ("branch", {"number": 0}, pack_frame({"do": "doing", "words": "x"})[:-1], "a part of one"),
        ("beats", {}, rows([0, None, "x", 0.0, None, 5, 0.0, 3]), "'trails' is not a list"),
        ("beats", {}, rows([0, 1]), "a sign of life lacks a field"),
        ("beats", {}, rows([0, 1, 2, 3, 4, 5, 6]), "'place' is not text"),
        ("beats", {}, rows([0, None, "x", 0.0, float("nan"), 5, 0.0]), "'step_s' is not a number"),
    ],
)
def test_what_no_process_sends_ends_this_process_alone(place, trunk, verb, fields, body, words):
    trunk.say(verb, body, **fields)
    place.until_states("lost", "here", "here", "here")
    said = place.ask("members")["members"][0][3]
    assert "it sent an invalid frame: " in said
    assert words in said
    assert "gatherer" not in said
    numbers, gone = trunk.heard()
    assert (numbers, gone.header["process"]) == ([1, 2], 0)
    lane = place.lane(trunk.alone)
    trunk.arrive([5, 6], [b"", b""], name="live", survivors=True)
    lane.say("arrive", step=1, timeout_s=10, point=Point("live", survivors=True))
    numbers, answer = trunk.heard()
    assert (numbers, answer.header["is"]) == ([5, 6], lane.receive().header["is"])


@pytest.mark.parametrize(
    ("verb", "fields", "body", "closed"),
    [
        ("branch", {"number": 4}, pack_frame({"do": "arrive", "point": 3}), [4]),
        ("arrive", {"branches": [4, 5], "point": 3}, b"", [4, 5]),
        ("arrive", {"branches": [4, 5], "point": Point("x"), "timeout_s": "1"}, b"", [4, 5]),
        ("arrive", {"branches": [4, 5], "point": Point("x", group=(1, 9))}, b"", [4, 5]),
        ("branch", {"number": 9}, pack_frame({"do": "trunk", "token": TOKEN}), [9]),
    ],
)
def test_a_call_that_is_none_ends_its_connection_alone(place, trunk, verb, fields, body, closed):
    trunk.say(verb, body, **{"step": 1, "timeout_s": 10, **fields})
    assert [trunk.receive().header for _ in closed] == [
        {"is": "close", "number": number} for number in closed
    ]
    assert place.states() == ["here"] * 4
    # Of those that are closed nothing is heard any more, not even together with others.
    trunk.arrive(closed, name="from the closed")
    for process in range(3):
        trunk.lane(10 + process, process)
    trunk.arrive([10, 11, 12], name="next")
    lane = place.lane(trunk.alone)
    lane.say("arrive", step=1, timeout_s=10, point=Point("next"))
    assert lane.receive().header == {"is": "ok"}


def test_of_arrivals_that_come_together_the_wrong_one_ends_alone(place, trunk):
    group = (1, 3)
    trunk.arrive([4, 5], group=group)
    assert trunk.receive().header == {"is": "close", "number": 4}
    place.lane(trunk.alone).say("arrive", step=1, timeout_s=10, point=Point("x", group=group))
    numbers, answer = trunk.heard()
    assert (numbers, answer.header) == ([5], {"is": "ok"})


def test_lanes_that_are_not_of_one_job_or_processes_are_taken_one_by_one(place, trunk):
    trunk.lane(7, 0)
    trunk.arrive([4, 7])  # twice the same process
    trunk.arrive([0, 77])  # a life, and nothing
    numbers, gone = trunk.heard()  # what a life may not send ends its process
    assert (numbers, gone.header["is"], gone.header["process"]) == ([1, 2], "gone", 0)
    assert "unknown verb 'arrive'" in gone.body.decode()


def test_a_host_has_so_many_branches_at_a_time(place, trunk, monkeypatch):
    monkeypatch.setattr(trunks, "MOST_BRANCHES", 7)  # of which six are open
    trunk.lane(7, 0)
    trunk.lane(8, 1)
    assert trunk.receive().header == {"is": "close", "number": 8}
    trunk.say("end", number=8)
    trunk.say("end", b"interrupted", number=7)
    trunk.lane(9, 2)
    trunk.arrive([4, 5, 9], group=(0, 1, 2))
    numbers, answer = trunk.heard()
    assert (numbers, answer.header) == ([4, 5, 9], {"is": "ok"})
    assert place.states() == ["here"] * 4


def test_the_reason_of_an_end_is_short(place, trunk):
    trunk.say("end", b"x" * 1_000_000, number=1)
    _, gone = trunk.heard()
    assert 0 < len(gone.body) <= 1000


def until_it_is_full(place, trunk):
    """Let a gatherer ask, and read no answer, until it is not read either; return the meeting
    place's end of the trunk, and the number of questions."""
    (caller,) = place._place._peers._trunks
    far, asked = caller.connection, 0
    assert far.most_unsent_bytes == trunks.MOST_UNSENT_BYTES
    far.most_unsent_bytes = 1 << 20
    far.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)  # the test has the clock
    far.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # the kernel takes little
    trunk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    while far.unsent_bytes <= 1 << 20:
        trunk.say("branch", 1000 * pack_frame({"do": "members", "ticket": 1}), number=4)
        asked += 1000
        place.turn()
    assert far.unsent_bytes < 2 << 20
    return far, asked


def test_a_gatherer_that_does_not_read_is_not_read_and_lives_while_it_takes_bytes(place, trunk):
    far, asked = until_it_is_full(place, trunk)
    far.most_unsent_bytes = 1 << 10  # so that it is not read soon
    trunk.say("end", b"its connection closed", number=2)
    for _ in range(3):  # each nearly long enough to be lost
        place.turn(0.9, beating=[trunk.alone])
        assert "lost" not in place.states()
        unsent = far.unsent_bytes
        while unsent == far.unsent_bytes:
            trunk._reader.feed(trunk.socket.recv(1 << 12))
            place.turn()
    for _ in range(asked):  # nothing is lost
        numbers, answer = trunk.heard()
        assert (numbers, answer.header["is"]) == ([4], "members")
    place.until_states("silent", "silent", "lost", "here")


def test_a_gatherer_that_takes_no_byte_is_lost(place, trunk):
    until_it_is_full(place, trunk)
    place.turn(1.5, beating=[trunk.alone])  # what it says meanwhile is not read
    assert place.states() == ["lost"] * 3 + ["here"]


def test_a_stranger_is_no_gatherer(place):
    stranger = place.stranger("trunk", token="wrong", process=0)
    assert "the token is wrong" in stranger.told()["body"]
    assert stranger.told() is None


BODIES = st.one_of(
    FRAMES, st.lists(FRAMES, max_size=3).map(b"".join), st.binary(max_size=40),
    st.lists(st.lists(JUNK, max_size=9)).map(json.dumps).map(str.encode),
)  # fmt: skip
SAID = st.tuples(st.sampled_from([*TrunkCaller.VERBS, "branch", "arrive"]) | JUNK, FIELDS, BODIES)


@settings(max_examples=60)
@given(st.lists(SAID, min_size=1, max_size=8))
def test_whatever_a_trunk_says_the_processes_of_other_hosts_live_on(said):
    place = Place(2)
    trunk = place._take(Trunk(place.address))
    trunk.hello(0, 0, 2)
    alone = place.process(1, host_id="far")
    assert alone.told()["is"] == "welcome"
    for lane in (1, 2):
        trunk.lane(lane, 0)
    for verb, fields, body in said:
        trunk.say(verb, body, **fields)
    trunk.say("bye")
    while trunk.receive() is not None:
        pass
    alone.beat()
    assert place.states()[1] == "here"
    place.end()
