"""Programs that end in order are compared with those that have ended before, and no further."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.rules.call_record import CallRecords, RecordedCall
from shoal.runtime.rules.endings import WAIT_S, Endings
from shoal.runtime.rules.record_marks import LatestMarks

GROUPS = (None, (0, 1), (1, 2, 3))
PROCESSES = range(4)


def records_of(process, histories):
    """Return the call records of a process that made these calls, by group and lane."""
    call_records = CallRecords(process, len(PROCESSES))
    for (group, lane), values in histories.items():
        for value in values:
            call_records.record(
                RecordedCall("put", "a.py:1 (f)", ("x",), value), group=group, lane=lane
            )
    return call_records


def ended(calls, group=None, lane="main"):
    """Return the call records of a process that made these calls in one lane."""
    return records_of(0, {(group, lane): calls}).all_compared()


def differ(said):
    """Return the processes of each side of each difference."""
    return [[[*side.processes] for side in difference.versions] for difference in said]


HISTORIES = st.dictionaries(
    st.sampled_from(GROUPS), st.lists(st.sampled_from("ab"), max_size=3), max_size=3
)


@given(
    st.lists(HISTORIES, min_size=4, max_size=4),
    st.permutations(PROCESSES),
    st.lists(st.sampled_from([0.0, 0.4, 1.5]), min_size=4, max_size=4),
)
def test_difference_is_reported_to_a_process_if_an_exited_one_made_other_calls(
    histories, order, gaps
):
    endings, now, have_ended, waiting, told = Endings(4, LatestMarks()), 0.0, [], {}, {}

    def look():
        for reply in endings.answer(now)[1]:
            told[reply.to] = reply.answer.differences
            own = histories[reply.to]
            expected = {
                group
                for group in GROUPS
                if group is None or reply.to in group
                for members in [[p for p in have_ended if group is None or p in group]]
                for made in [[histories[p].get(group, []) for p in members]]
                if any(a[: len(b)] != b[: len(a)] for a in made for b in made)
            }
            assert {difference.group for difference in told[reply.to]} == expected, own
            assert waiting.pop(reply.to) + WAIT_S >= now

    for process, gap_s in zip(order, gaps, strict=True):
        until = now + gap_s
        while endings.deadline <= until:
            now = endings.deadline
            look()
        now = until
        calls = {(g, "main"): v for g, v in histories[process].items() if not g or process in g}
        endings.end(
            now, process, records_of(process, calls).all_compared(), process, ticket=process
        )
        have_ended.append(process)
        waiting[process] = now
        look()
    assert set(told) == {*PROCESSES}, "all have ended: none waits"
    assert endings.deadline == math.inf


def test_all_sides_are_known_when_all_have_ended():
    endings = Endings(4, LatestMarks())
    for process, calls in enumerate(["ab", "ab", "ax", ""]):
        endings.end(0.0, process, ended(calls), process, ticket=7)
    new, replies = endings.answer(0.0)
    assert differ(new) == [[[0, 1], [2]]]
    assert len({id(reply.answer) for reply in replies}) == 1, "packed once, for all"


def test_the_calls_of_another_lane_are_compared_as_far_as_both_go():
    for second, expected in (("abc", []), ("", []), ("xbcd", [[[0], [1]]])):
        endings = Endings(2, LatestMarks())
        endings.end(0.0, 0, ended("ab", lane="data"), 0, ticket=1)
        endings.end(0.0, 1, ended(second, lane="data"), 1, ticket=1)
        new, replies = endings.answer(0.0)
        assert differ(new) == expected
        assert [differ(reply.answer.differences) for reply in replies] == [expected] * 2


@pytest.mark.parametrize("state", ["left", "lost"])
def test_departed_process_is_not_awaited_and_a_loss_disables_the_comparison(state):
    endings = Endings(3, LatestMarks())
    endings.end(0.0, 0, ended("a"), 0, ticket=1)
    endings.end(0.0, 1, ended("b"), 1, ticket=1)
    assert endings.answer(0.5) == ([], [])
    endings.depart(2, is_lost=state == "lost")
    new, replies = endings.answer(0.5)
    assert differ(new) == ([] if state == "lost" else [[[0], [1]]])
    assert [len(reply.answer.differences) for reply in replies] == [len(new)] * 2


def test_a_difference_that_was_known_before_a_loss_is_still_reported():
    endings = Endings(2, LatestMarks())
    endings.end(0.0, 0, ended("a"), 0, ticket=1)
    endings.answer(WAIT_S)
    endings.end(1.0, 1, ended("b"), 1, ticket=1)
    assert differ(endings.answer(1.0)[0]) == [[[0], [1]]]
    endings.depart(1, is_lost=True)
    endings.end(2.0, 0, ended("a"), 0, ticket=2)
    new, (reply,) = endings.answer(2.0)
    assert new == []
    assert differ(reply.answer.differences) == [[[0], [1]]]


def test_calls_that_count_from_different_points_are_not_compared():
    endings = Endings(3, LatestMarks())
    endings.end(0.0, 0, ended("ab"), 0, ticket=1)
    since_a_loss = [record._replace(base="since a loss") for record in ended("xy")]
    endings.end(0.0, 1, since_a_loss, 1, ticket=1)
    endings.end(0.0, 2, [], 2, ticket=1)  # unknown calls are not sent
    assert endings.answer(0.0)[0] == []


def test_calls_of_a_running_process_are_compared_as_far_as_both_go():
    marks = LatestMarks()
    endings = Endings(2, marks)
    (beat,) = ended("abcd")
    assert marks.receive(1, beat) is None
    endings.end(0.0, 0, ended("ab"), 0, ticket=1)
    assert endings.answer(WAIT_S)[0] == [], "it may yet make them"
    endings.end(2.0, 0, ended("ax"), 0, ticket=1)
    assert differ(endings.answer(2.0 + WAIT_S)[0]) == [[[0], [1]]]
