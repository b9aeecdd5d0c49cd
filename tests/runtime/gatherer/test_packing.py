"""What a gatherer holds back: nothing is lost or sent twice, and equal arrivals go together."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bare_sockets import BEAT
from shoal.runtime.gatherer.packing import (
    HOLD_S,
    LARGE_BYTES,
    MOST_BEATS_BYTES,
    HeldArrivals,
    HeldBeats,
)
from shoal.runtime.rules.messages import arrival_of, beat_of, split_limits, trails_of
from shoal.runtime.rules.point import Point
from shoal.runtime.server.trunks import TrunkCaller
from shoal.runtime.wire.frames import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameReader,
    split_payloads,
)

LIMITS = [{"timeout_s": 2.5}, {"timeout_s": None}, {"timeout_s": 3.5, "given_s": 4.0}]
ADDS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from("ab"), st.sampled_from(["main", "side"]),
        st.sampled_from(LIMITS), st.binary(max_size=2), st.integers(0, 3),
    )
)  # fmt: skip


def header_of(name="x", *, lane="main", **more):
    """Return the header of an arrival as it is read."""
    point = json.loads(json.dumps(Point(name, lane=lane)))
    return {"do": "arrive", "step": 1, "timeout_s": 9.0, "point": point, **more}


def frames_of(data):
    reader = FrameReader(
        max_header_bytes=MAX_HEADER_BYTES, max_body_bytes=TrunkCaller.max_body_bytes
    )
    reader.feed(data)
    return list(iter(reader.next, None))


class Host:
    """Arrivals of the processes of a host, and the frames that were sent for them."""

    def __init__(self, processes):
        self.processes = range(processes)
        self._sent = []
        self.held = HeldArrivals(self._sent.append)
        self.now = 0.0

    def arrive(self, process, header, payload=b"", *, branch=None):
        """Let a process arrive; its branch bears its number unless another is given."""
        arrival = arrival_of(header, process, len(self.processes))
        branch = process if branch is None else branch
        frame = Frame(header, payload)
        return self.held.add(self.now, branch, process, frame, arrival, self.processes)

    def wait(self, seconds):
        self.now += seconds
        if self.now >= self.held.due:
            self.held.expire(self.now)

    def sent(self):
        """Return the frames that were sent since."""
        data, self._sent[:] = b"".join(self._sent), []
        return frames_of(data)

    def branches(self):
        return [frame.header["branches"] for frame in self.sent()]

    def answer(self, *branches):
        for branch in branches:
            self.held.answered(branch)


@given(ADDS)
def test_each_arrival_is_sent_once_and_in_the_order_of_its_branch(adds):
    host, came, left = Host(3), {}, {}
    for process, name, lane, limits, payload, then in adds:
        if process not in host.processes:
            continue
        branch = 10 * (lane == "side") + process
        header = header_of(name, lane=lane, **limits)
        came.setdefault(branch, []).append((name, lane, limits, payload))
        assert host.arrive(process, header, payload, branch=branch)
        if then == 1:
            host.held.flush()
        elif then == 2:
            host.wait(HOLD_S)
        elif then == 3:
            host.answer(branch)
    host.held.flush()
    assert host.held.due == math.inf
    for frame in host.sent():
        branches = frame.header["branches"]
        assert branches == sorted({*branches})
        limits, body = None, frame.body
        if frame.header.get("limits"):
            limits, body = split_limits(body, len(branches))
        name, _, lane, *_ = frame.header["point"]
        payloads = split_payloads(body, len(branches))
        for index, (branch, payload) in enumerate(zip(branches, payloads, strict=True)):
            own = limits_of(limits, index) if limits else limits_in(frame.header)
            left.setdefault(branch, []).append((name, lane, own, payload))
    assert left == came


def limits_in(header):
    return {name: header[name] for name in ("timeout_s", "given_s") if name in header}


def limits_of(limits, index):
    left_s, given_s = limits.timeouts_s[index], limits.given_s[index]
    found = {"timeout_s": None if left_s == math.inf else left_s}
    return found if left_s == given_s else {**found, "given_s": given_s}


def test_all_of_a_host_go_together_and_a_part_of_them_when_it_has_waited():
    host = Host(3)
    header = header_of()
    for process in (1, 0):
        assert host.arrive(process, header)
    assert host.sent() == []
    assert host.held.due == HOLD_S
    host.arrive(2, header)
    (frame,) = host.sent()
    assert frame.header == {**header, "branches": [0, 1, 2]}
    assert host.held.due == math.inf


def test_the_last_of_a_host_is_not_held():
    host = Host(3)
    host.arrive(0, header_of())
    host.arrive(1, header_of())
    host.wait(HOLD_S)
    assert host.branches() == [[0, 1]]
    host.wait(0.1)
    host.arrive(2, header_of())
    assert host.branches() == [[2]]
    host.answer(0, 1, 2)
    for process in (2, 1, 0):  # and the next time they go together again
        host.arrive(process, header_of())
    assert host.branches() == [[0, 1, 2]]


def test_what_was_sent_early_for_another_frame_counts_too():
    """As at the first point, where the processes open their connections one after the other."""
    host = Host(3)
    for process in range(3):
        host.held.flush()
        host.arrive(process, header_of())
    assert host.branches() == [[0], [1], [2]]
    assert host.held.due == math.inf


def test_a_process_that_takes_another_way_is_waited_for_once():
    host = Host(3)
    for turn in range(3):
        host.arrive(0, header_of())
        host.arrive(1, header_of())
        assert (host.held.due < math.inf) == (turn == 0)
        host.wait(HOLD_S)
        assert host.branches() == [[0, 1]]
        host.answer(0, 1)
    host.arrive(2, header_of())  # until it comes by this one
    assert host.branches() == []
    host.arrive(0, header_of())
    host.arrive(1, header_of())
    assert host.branches() == [[0, 1, 2]]


def test_a_process_that_ended_at_a_point_has_not_come_to_it():
    host = Host(2)
    host.arrive(0, header_of())
    host.held.flush()
    host.answer(0)  # its connection has ended; with another it comes again
    host.arrive(0, header_of(), branch=7)
    host.arrive(1, header_of())
    assert host.branches() == [[0], [1, 7]]


def test_calls_that_a_process_does_not_wait_for_are_not_kept():
    host = Host(2)
    for turn in range(100):
        host.arrive(0, header_of(lane=f"lane {turn}"))
        host.held.flush()
    assert len(host.sent()) == 100
    assert len(host.held._lines) == len(host.held._waiting) == 1
    host.arrive(1, header_of(lane="lane 99"))
    assert host.branches() == [[1]]  # the other has come
    host.answer(0, 1)
    assert not host.held._lines


def test_a_process_that_has_left_the_host_is_not_remembered():
    host = Host(2)
    host.arrive(0, header_of())
    host.wait(HOLD_S)
    assert host.held._away == {1}
    host.held.left(1)
    assert not host.held._away


def test_processes_that_differ_are_not_held():
    host = Host(3)
    host.arrive(0, header_of("a"), b"x")
    host.arrive(1, header_of("b"))
    assert host.branches() == [[0], [1]]
    host = Host(2)
    host.arrive(0, header_of("a"))
    host.wait(HOLD_S)
    host.arrive(1, header_of("b"))
    assert host.branches() == [[0], [1]]


def test_limits_may_differ_and_calls_of_other_lanes_are_no_difference():
    host = Host(4)
    for process, limit in enumerate(LIMITS):
        host.arrive(process, header_of(lane="save"), branch=10 + process)
        host.arrive(process, header_of(**limit, junk=[process]), b"%d" % process)
    host.arrive(3, header_of(timeout_s=-1), b"3")  # which is for the meeting place to judge
    (frame,) = host.sent()
    assert frame.header == {
        "do": "arrive", "step": 1, "point": header_of()["point"], "timeout_s": None,
        "branches": [0, 1, 2, 3], "limits": True,
    }  # fmt: skip
    found, body = split_limits(frame.body, 4)
    assert found == ((2.5, math.inf, 3.5, -1.0), (2.5, math.inf, 4.0, -1.0))
    assert split_payloads(body, 4) == [b"0", b"1", b"2", b"3"]
    assert host.held.due == HOLD_S  # the other lane's


def test_payloads_that_are_too_much_for_one_frame_go_in_several():
    host = Host(80)
    payloads = [bytes([process]) * 250_000 for process in host.processes]
    for process, payload in enumerate(payloads):
        host.arrive(process, header_of(), payload)
    frames = host.sent()  # each is of a size that the meeting place reads
    assert [branch for frame in frames for branch in frame.header["branches"]] == [*range(80)]
    found = [split_payloads(f.body, len(f.header["branches"])) for f in frames]
    assert [payload for some in found for payload in some] == payloads


def test_a_large_payload_is_not_held_and_its_process_has_come():
    host = Host(2)
    host.arrive(0, header_of(), bytes(MAX_PAYLOAD_BYTES))
    host.arrive(1, header_of())
    assert host.branches() == [[0], [1]]
    assert not host.arrive(0, header_of("x" * LARGE_BYTES))


def test_signs_of_life_go_together_and_each_frame_is_answered():
    held = HeldBeats(0.5)
    held.add(1.0, 4, beat_of(BEAT), (), 2)
    assert held.due == 1.5
    row = [None, "main", "base", "1:aa"]
    trails = trails_of({"trails": [row]}, 0, 2)
    held.add(1.125, 3, beat_of({**BEAT, "wait_s": 0.05}), trails, 3)
    held.add(1.25, 3, beat_of({**BEAT, "wait_s": 0.05}), trails, 2)
    assert held.due == 1.25
    (frame,) = frames_of(b"".join(held.frames(1.25)))
    assert frame.header == {"do": "beats"}
    assert json.loads(frame.body) == [
        [3, 3, BEAT["place"], 0.5, 0.1, 7, 0.05, [row, row]],
        [4, 3, BEAT["place"], 0.75, 0.1, 7, 0.0],  # 0.25 s later
    ]
    assert held.due == math.inf
    (own,) = frames_of(b"".join(held.frames(3.0)))  # without any, it is the gatherer's own
    assert json.loads(own.body) == []
    assert [held.answered(), held.answered()] == [[3, 4], []]


def test_signs_of_life_of_many_are_frames_that_the_meeting_place_reads():
    held = HeldBeats(0.5)
    beat = beat_of({**BEAT, "place": "é" * 1000})
    for branch in range(2000):
        held.add(1.0, branch, beat, (), 2000)
    frames = frames_of(b"".join(held.frames(1.0)))
    assert max(len(frame.body) for frame in frames) <= MOST_BEATS_BYTES + 10_000
    assert [row[0] for frame in frames for row in json.loads(frame.body)] == [*range(2000)]


@pytest.mark.parametrize("row", [[None, "m", "b", "1:aa " * 1000], [[*range(1000)], "m", "b", ""]])
def test_trails_of_a_process_that_repeats_them_are_not_kept_for_long(row):
    held = HeldBeats(math.inf)
    trails = trails_of({"trails": [row] * 20}, 0, 2000)
    for _ in range(MOST_BEATS_BYTES // len(json.dumps([row] * 20))):
        held.add(1.0, 0, beat_of(BEAT), trails, 2)
        assert held.due == math.inf
    held.add(1.0, 0, beat_of(BEAT), trails, 2)
    assert held.due == 1.0
    (frame,) = frames_of(b"".join(held.frames(1.0)))
    assert len(frame.body) < 2 * MOST_BEATS_BYTES
