"""What is known of one process, and how it is said: where it is, what stopped it, how it went."""

import pytest

from shoal.runtime.rules.messages import Beat
from shoal.runtime.rules.point import Departure, Point
from shoal.runtime.rules.roster import Record

EPOCH = Point("epoch", site="t.py:9 (f)")
STEP = "'step' (t.py:8)"


@pytest.fixture
def record():
    return Record(1, "b", 17, 0.0)


def beat(place, since_s, step=6):
    return Beat(step, place, since_s, None, 7)


def test_a_step_that_begins_right_after_a_meeting_is_where_it_is(record):
    record.note(100.0, "last at", EPOCH)
    record.take_beat(102.0, beat(STEP, 1.999))
    member = record.member(103.0)
    assert (member.place, member.step) == (STEP, 6)
    assert member.last_words == f"step 6, last at {STEP}, 3.0 s ago"


def test_heartbeat_with_a_repeated_or_older_call_is_ignored(record):
    record.note(100.0, "last at", EPOCH)
    for place, since_s in (("'epoch' (t.py:9)", 1.9), (STEP, 2.5)):
        record.take_beat(102.0, beat(place, since_s))
        assert record.member(103.0).place == "'epoch' (t.py:9)"
        assert record.member(103.0).since_s == 3.0


def test_stopped_process_is_shown_as_stopped_until_it_continues(record):
    record.note(1.0, "last at", EPOCH)
    record.stop(2.0, is_stopped=True)
    record.stop(4.0, is_stopped=True)
    member = record.member(5.0)
    assert member.state == "stopped"
    assert member.last_words == "stopped (SIGSTOP?) for 3.0 s; last at 'epoch' (t.py:9), 4.0 s ago"
    record.stop(5.0, is_stopped=False)
    assert (record.member(6.0).state, record.stopped_since) == ("here", None)


def test_the_call_and_a_standstill_are_fields(record):
    record.note(1.0, "last at", EPOCH._replace(operation="barrier"))
    assert (record.member(2.0).call, record.member(2.0).still) == ("barrier", "")
    record.take_beat(5.0, beat(STEP, 0.5)._replace(at=("step", "step", "t.py:8 (f)")))
    record.idle = "no progress for 12 s, at t.py:7"
    member = record.member(6.0)
    assert (member.call, member.still) == ("step", record.idle)
    assert member.last_words.startswith(f"{record.idle}; step 6, last at {STEP}, ")
    record.leave(7.0, Departure("killed", "lost"))
    assert record.member(8.0).still == ""


def test_departure_has_the_last_place_of_the_process(record):
    record.take_beat(2.0, beat(STEP, 0.5))
    record.stop(3.0, is_stopped=True)
    record.leave(4.0, Departure("killed", "lost"))
    assert record.departure.words == f"killed; step 6, last at {STEP}, 2.5 s before"
    member = record.member(6.0)
    assert (member.state, member.last_words) == ("lost", "killed, 2.0 s ago")


def test_departure_words_are_unchanged_for_tracebacks_and_without_calls(record):
    record.leave(1.0, Departure("killed", "lost"))
    assert record.departure.words == "killed"
    other = Record(2, "c", 18, 0.0)
    other.take_beat(2.0, beat(STEP, 0.5))
    other.leave(3.0, Departure("Traceback\nValueError: no data"))
    assert other.departure.words == "Traceback\nValueError: no data"
