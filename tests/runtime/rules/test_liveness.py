"""Who is alive, under a clock that the test turns."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.runtime.rules.liveness import Limits, Liveness, RunningClock

LIMITS = Limits(heartbeat_s=2.0, lost_after_s=10.0, silent_lost_after_s=60.0)


def watched(count=1, limits=LIMITS):
    liveness = Liveness(limits)
    for key in range(count):
        liveness.watch(0.0, key)
    return liveness


def told(verdicts):
    return [(key, state, reason) for key, state, reason, _ in verdicts]


def test_process_with_heartbeats_is_never_reported():
    liveness = watched(2)
    for second in range(100):
        assert not liveness.beat(second, 0)
        assert not liveness.beat(second, 1)
        assert liveness.tick(second) == []
    assert liveness.next_deadline() == 109.0


def test_silent_process_is_reported_once_and_lost_much_later():
    liveness = watched(2)
    liveness.beat(5.0, 1)
    assert liveness.next_deadline() == 10.0
    assert liveness.tick(9.9) == []
    [(key, state, reason, silent_s)] = liveness.tick(10.0)
    assert (key, state, silent_s) == (0, "silent", 10.0)
    assert reason == "silent for 10 s; it may hold the interpreter lock"
    assert liveness.tick(14.9) == []
    liveness.forget(1)
    assert liveness.next_deadline() == 60.0
    assert liveness.tick(59.9) == []
    assert told(liveness.tick(60.0)) == [(0, "lost", "silent for 60 s")]
    assert liveness.next_deadline() == math.inf
    assert liveness.tick(1e9) == []


def test_silent_process_recovers_with_a_heartbeat_and_can_be_silent_again():
    liveness = watched()
    liveness.tick(10.0)
    assert liveness.beat(40.0, 0)
    assert not liveness.beat(41.0, 0)
    assert liveness.tick(50.9) == []
    assert [v.state for v in liveness.tick(51.0)] == ["silent"]
    assert [v.state for v in liveness.tick(101.0)] == ["lost"]
    assert not liveness.beat(102.0, 0), "nobody comes back from the dead"


def test_stopped_process_is_lost_as_soon_as_it_is_silent():
    liveness = watched(3)
    liveness.states(3.0, (0, 1), stopped=(0,), ended=())
    assert liveness.tick(9.9) == []
    assert told(sorted(liveness.tick(10.0)))[0] == (
        0,
        "lost",
        "stopped (SIGSTOP?), silent for 10 s",
    )
    liveness.states(30.0, (0, 1), stopped=(0, 1), ended=())
    assert told(liveness.tick(30.0)) == [(1, "lost", "stopped (SIGSTOP?), silent for 30 s")]
    assert not liveness.is_quiet(0), "who is gone is forgotten"
    assert liveness.is_quiet(2)


def test_continued_process_has_time_to_send_a_heartbeat():
    liveness = watched(limits=LIMITS._replace(lost_after_s=math.inf))
    liveness.states(0.0, (0,), stopped=(0,), ended=())
    assert liveness.tick(3600.0) == []
    liveness.states(3600.0, (0,), stopped=(), ended=())
    assert liveness.tick(3600.0) == []
    assert liveness.tick(3659.9) == []
    assert told(liveness.tick(3660.0)) == [(0, "lost", "silent for 60 s")]


def test_exited_process_is_lost_unless_its_connection_reports_first():
    liveness = watched(2)
    liveness.states(1.0, (0, 1), stopped=(), ended=(0, 1))
    liveness.states(1.2, (0, 1), stopped=(), ended=(0, 1))  # a host agent repeats itself
    assert liveness.tick(1.2) == []
    liveness.forget(1)  # a BYE, or its end
    assert liveness.next_deadline() == 1.3
    assert told(liveness.tick(1.3)) == [(0, "lost", "its process ended without leaving the job")]
    assert liveness.next_deadline() == math.inf


@pytest.mark.parametrize(
    ("limits", "stopped", "history"),
    [
        (Limits(2.0, math.inf, math.inf), (), []),
        (Limits(2.0, math.inf, math.inf), (0,), []),
        (Limits(2.0, 10.0, math.inf), (), [(10.0, "silent")]),
        (Limits(2.0, 10.0, math.inf), (0,), [(10.0, "lost")]),
        (Limits(2.0, math.inf, 60.0), (), [(60.0, "lost")]),
        (Limits(2.0, math.inf, 60.0), (0,), []),
        (Limits(2.0, 10.0, 5.0), (), [(5.0, "lost")]),
        (Limits(2.0, 10.0, 5.0), (0,), [(10.0, "lost")]),
    ],
)
def test_infinity_switches_each_of_them_off(limits, stopped, history):
    liveness = watched(limits=limits)
    liveness.states(0.0, (0,), stopped=stopped, ended=())
    seen = []
    while (now := liveness.next_deadline()) < math.inf:
        seen += [(now, verdict.state) for verdict in liveness.tick(now)]
    assert seen == history
    assert liveness.tick(1e12) == []


def test_limits_come_from_the_environment_and_signs_of_life_fit_in(monkeypatch):
    for name in ("SHOAL_HEARTBEAT_S", "SHOAL_LOST_AFTER_S", "SHOAL_SILENT_LOST_AFTER_S"):
        monkeypatch.delenv(name, raising=False)
    assert Limits.of_settings() == LIMITS
    assert LIMITS.words == {"heartbeat_s": 2.0, "lost_after_s": 10.0}
    monkeypatch.setenv("SHOAL_LOST_AFTER_S", "1")
    assert Limits.of_settings() == Limits(0.25, 1.0, 60.0)
    monkeypatch.setenv("SHOAL_LOST_AFTER_S", "inf")
    monkeypatch.setenv("SHOAL_SILENT_LOST_AFTER_S", "inf")
    monkeypatch.setenv("SHOAL_HEARTBEAT_S", "inf")
    never = Limits.of_settings()
    assert never.words == {"heartbeat_s": None, "lost_after_s": None}
    assert 0 < never.tick_s < 2
    monkeypatch.setenv("SHOAL_LOST_AFTER_S", "soon")
    with pytest.raises(UsageError, match="SHOAL_LOST_AFTER_S"):
        Limits.of_settings()


def test_time_in_which_the_counter_did_not_run_is_a_gift():
    clock = RunningClock(1000.0, tick_s=1.0)
    assert clock.read(1001.0) == 1.0
    assert clock.read(1030.0) == 3.0
    assert clock.read(1030.5) == 3.5
    assert clock.read(1030.0) == 3.5  # no clock runs back
    assert clock.read(1031.0) == 4.0


@given(st.lists(st.floats(0.0, 100.0), max_size=30), st.floats(0.1, 5.0))
def test_running_time_is_real_time_but_for_the_gaps(gaps, tick_s):
    now, clock = 50.0, RunningClock(50.0, tick_s=tick_s)
    for gap in gaps:
        now += gap
        clock.read(now)
    assert clock.read(now) == pytest.approx(sum(min(gap, 2 * tick_s) for gap in gaps))


EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 20.0)),
    st.tuples(st.just("beat"), st.integers(0, 2)),
    st.tuples(st.just("stopped"), st.sets(st.integers(0, 2))),
    st.tuples(st.just("forget"), st.integers(0, 2)),
)
SECONDS = st.sampled_from([5.0, 10.0, 60.0, math.inf])


@given(st.lists(EVENTS, max_size=40), SECONDS, SECONDS)
def test_no_event_history_reports_a_process_too_early_or_too_late(events, lost_s, silent_lost_s):
    limits = Limits(2.0, lost_s, silent_lost_s)
    liveness, now = watched(3, limits), 0.0
    signs = dict.fromkeys(range(3), 0.0)  # who is here: since when it has been silent
    named, stopped = set(), set()
    for verb, value in events:
        if verb == "wait":
            now += value
        elif verb == "beat" and value in signs:
            assert liveness.beat(now, value) == (value in named)
            signs[value] = now
            named.discard(value)
        elif verb == "forget":
            liveness.forget(value)
            signs.pop(value, None)
        elif verb == "stopped":
            liveness.states(now, range(3), stopped=value, ended=())
            for key in stopped - value:
                if key in signs and now >= signs[key] + min(lost_s, silent_lost_s):
                    signs[key] = now
            stopped = value
        is_due = liveness.next_deadline() <= now
        verdicts = liveness.tick(now)
        assert is_due or not verdicts
        for key, state, _, silent_s in verdicts:
            assert silent_s == now - signs[key]
            if state == "lost":
                assert silent_s >= (lost_s if key in stopped else silent_lost_s)
                del signs[key]
                named.discard(key)
            else:
                assert silent_s >= lost_s
                assert key not in named
                named.add(key)
        for key, since in signs.items():
            assert now < since + (lost_s if key in stopped else silent_lost_s)
            assert key in named or now < since + lost_s
