"""The rules of a stalled job: who is idle, who is stuck, what is reported, and who is odd."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from shoal.runtime.failures.stall_text import stall_headline, stall_lines
from shoal.runtime.rules.stalls import (
    Idle,
    Stalls,
    idle_header,
    idle_of,
    seen_header,
    seen_of,
    stall_of,
)
from shoal.runtime.system.process_status import Seen
from shoal.runtime.wire.frames import FrameError

SEEN = Seen("train.py:7 (native)", share=0.0, limit_s=5.0)
STUCK = Idle(9.0, 5.0, "train.py:14 (main)", seen_s=5.0)


def judged(idle, left=(), silent=None, seen=None):
    """Judge at 60 s; another process has looked at the silent ones."""
    stalls = Stalls()
    for process, report in idle.items():
        stalls.receive(60.0, process, report)
    for process in silent or ():
        assert stalls.ask(58.0, process)
        if seen is not None:
            stalls.receive_seen(58.0, process, seen)
    return stalls.judge(60.0, [*idle, *(silent or ())], dict(left), silent or {})


def test_a_job_ends_once_each_process_is_stuck_silent_or_has_left():
    kinds = {
        "stuck": STUCK,
        "idle": STUCK._replace(seen_s=4.0),
        "held": STUCK._replace(is_held=True),
        "waits": STUCK._replace(is_waiting=True),
    }
    for first, second, others in itertools.product(kinds, kinds, ("", "left", "silent", "quiet")):
        silent = {"silent": {2: 6.0}, "quiet": {2: 4.0}}.get(others)
        left = {2: "train.py:40"} if others == "left" else {}
        stall = judged({0: kinds[first], 1: kinds[second]}, left, silent, SEEN)
        pair = {first, second}
        is_final = not pair & {"idle", "held"} and others != "quiet"
        if pair == {"waits"} and not silent:
            is_final = False  # the deadlines of shoal decide
        assert (stall is not None and stall.is_final) is is_final, (first, second, others)


SHARES = (0.0, 0.019, 0.02, 0.5, 1.0)


@pytest.mark.parametrize("may_poll", [False, True])
@pytest.mark.parametrize("has_returned", [False, True])
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_stuck_and_slow_follow_from_processor_shares(may_poll, has_returned, marks, compiles):
    for main, other in itertools.product(SHARES, SHARES):
        idle = STUCK._replace(
            main_share=main, other_share=other, has_returned=has_returned, may_poll=may_poll,
            marks_its_loop=marks, is_compiling=compiles,
        )  # fmt: skip
        # In native code that polls for devices a main thread may use all of a core.
        main_rests = main < 0.02 or (may_poll and not has_returned)
        others_rest = not has_returned and other < 0.02
        assert idle.is_stuck is (main_rests and (others_rest or (marks and not compiles)))
        assert idle.is_slow is not main_rests
        assert not idle._replace(seen_s=4.9).is_stuck
        assert not idle._replace(limit_s=math.inf).is_stuck


def test_no_stall_is_reported_while_one_process_progresses():
    stalls = Stalls()
    stalls.receive(60.0, 0, STUCK)
    assert stalls.judge(60.0, [0, 1], {}, {}) is None
    stalls.receive(60.0, 1, STUCK)
    stalls.receive(60.0, 0, None)
    assert stalls.judge(60.0, [0, 1], {}, {}) is None
    stalls.receive(60.0, 0, STUCK)
    assert stalls.judge(60.0, [0, 1], {}, {}).is_final
    assert stalls.judge(60.0, [0, 1], {}, {}) is None, "once"


def test_a_stall_is_reported_at_growing_intervals_and_anew_after_progress():
    stalls, reports = Stalls(), []
    for idle_s in range(300, 3000, 10):
        stalls.receive(60.0, 0, Idle(float(idle_s), math.inf, "train.py:14 (main)", is_due=True))
        if (stall := stalls.judge(60.0, [0], {}, {})) is not None:
            reports.append(stall.idle_s)
            assert not stall.is_final
    assert reports == [300, 600, 1200, 2400]
    stalls.receive(60.0, 0, None)
    stalls.receive(60.0, 0, Idle(300.0, math.inf, "train.py:15 (main)", is_due=True))
    assert stalls.judge(60.0, [0], {}, {}).idle_s == 300


def headline(stall):
    """Return the headline of a stall, once it has been sent."""
    sent = stall_of(json.loads(json.dumps(stall)))
    assert sent == stall
    return stall_headline(sent)


@pytest.mark.parametrize("at", range(6))
def test_malformed_stall_raises_frame_error(at):
    row = json.loads(json.dumps(judged({0: STUCK})))
    assert stall_of(row).groups[0].processes == (0,)
    row[at] = [None]
    with pytest.raises(FrameError):
        stall_of(row)


@pytest.mark.parametrize(
    ("odd", "others"),
    [
        (STUCK._replace(site="a.py:1 (f)", below="library"), STUCK),
        (STUCK._replace(site="a.py:1 (f)"), STUCK),
        (STUCK._replace(site="a.py:1 (f)"), STUCK._replace(below="jax")),
        (STUCK._replace(site="a.py:1 (f)", main_share=0.5), STUCK),
        (STUCK._replace(site="a.py:1 (f)"), STUCK._replace(is_waiting=True)),
    ],
)
def test_the_odd_one_is_named_first(odd, others):
    odd, others = odd._replace(is_due=True), others._replace(is_due=True)
    stall = judged({0: others, 1: odd, 2: others})
    assert [group.processes for group in stall.groups] == [(1,), (0, 2)]
    assert headline(stall).startswith("no process has moved for 9 s: process 1 ")
    assert "a.py:1; processes 0, 2 " in headline(stall)


def test_process_that_left_is_listed_if_others_may_wait_for_it():
    left = {1: "sys.exit() at train.py:40 (main)"}
    stall = judged({0: STUCK, 2: STUCK._replace(below="jax")}, left)
    assert "process 1 left the job, last at sys.exit() at train.py:40;" in headline(stall)
    stall = judged({0: STUCK, 2: STUCK._replace(below="library", site="a.py:1 (f)")}, left)
    assert [group.processes for group in stall.groups] == [(2,), (1,), (0,)]


@pytest.mark.parametrize(
    ("seen", "is_final", "words"),
    [
        (
            SEEN,
            True,
            "in native code that holds the interpreter lock, called at train.py:7",
        ),
        (SEEN._replace(limit_s=7.0), False, "in native code that holds"),
        (SEEN._replace(share=0.5), False, "slow, in native code that holds"),
        (SEEN._replace(site=""), False, "without a heartbeat"),  # frozen, or cut off
        (None, False, "without a heartbeat"),
    ],
)
def test_silent_process_is_stuck_only_if_its_host_sees_it_idle(seen, is_final, words):
    stall = judged({0: STUCK._replace(is_due=True)}, (), {1: 6.0}, seen)
    assert stall.is_final is is_final
    assert headline(stall).startswith(f"no process has moved for 6 s: process 1 {words}")


def test_another_process_is_asked_about_a_silent_one_as_often_as_needed():
    stalls = Stalls()
    stalls.receive(60.0, 0, STUCK)
    assert stalls.ask(60.0, 1)
    assert not stalls.ask(61.0, 1), "the answer is awaited"
    assert stalls.judge(60.0, [0, 1], {}, {1: 9.0}) is None
    stalls.receive_seen(61.0, 1, SEEN)
    assert not stalls.ask(62.0, 1)
    assert stalls.ask(63.5, 1), "what it does may have changed"
    stalls.hear(1)  # it moves again
    assert stalls.seen(1) is None
    stalls.receive_seen(64.0, 1, SEEN)  # the answer to the second question
    assert stalls.seen(1) is None


def test_a_report_that_is_old_says_nothing():
    """The process may work in code that holds its interpreter lock since."""
    stalls = Stalls()
    for process in (0, 1):
        stalls.receive(60.0, process, STUCK)
    stalls.receive(68.0, 0, STUCK)
    assert not stalls.are_idle(68.0, [1])
    assert stalls.judge(68.0, [0, 1], {}, {}) is None
    assert stalls.judge(68.0, [0, 1], {}, {1: 8.0}) is None


def test_a_place_is_one_line_whatever_a_process_sends():
    stall = judged({0: STUCK._replace(site="a\n\x1b[31mall is well:3 (main)", source="x\ny")})
    assert "\n" not in headline(stall) + "".join(stall_lines(stall))
    assert "\x1b" not in headline(stall)


def test_many_places_are_cut():
    stall = judged({process: STUCK._replace(site=f"a.py:{process} (f)") for process in range(100)})
    assert stall_lines(stall)[-1] == "… and 92 more places"
    assert len(stall_lines(stall)) == 9
    assert len(headline(stall)) < 200


def without_defaults(report):
    """Return a report in which every field that has a default differs from it."""
    others = {bool: lambda value: not value, float: lambda _: 0.25, str: lambda _: "jax"}
    fields = report._field_defaults.items()
    return report._replace(**{name: others[type(value)](value) for name, value in fields})


def test_reports_survive_the_wire_and_others_are_refused():
    for idle in (None, STUCK, STUCK._replace(limit_s=math.inf), without_defaults(STUCK)):
        assert idle_of(json.loads(json.dumps(idle_header(idle)))) == idle
    for seen in (SEEN, Seen(), without_defaults(Seen())):
        assert seen_of(json.loads(json.dumps(seen_header(3, seen)))) == seen
    for wrong in (
        {"may_poll": 1},
        {"main_share": "1"},
        {"below": "x"},
        {"idle_s": "1"},
        {"site": None},
    ):
        with pytest.raises(FrameError):
            idle_of({**idle_header(STUCK), **wrong})
