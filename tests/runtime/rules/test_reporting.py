"""Which process reports the failure of its job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.rules.reporting import CONFIRMS_S, Reporting


def ask(reporting, now, process, living):
    """Return the processes that are answered, and whether each reports."""
    answers = reporting.ask(now, process, process, 0, living)
    return {answer.to: answer.reports for answer in answers}


def answered(answers):
    return {answer.to: answer.reports for answer in answers}


def test_the_lowest_that_lives_reports_once_it_has_confirmed():
    reporting = Reporting()
    assert ask(reporting, 0.0, 2, [1, 2, 3]) == {}
    assert reporting.expected == 1
    assert ask(reporting, 0.1, 3, [1, 2, 3]) == {}
    assert reporting.confirm(3) == []
    assert answered(reporting.confirm(1)) == {2: False, 3: False}
    assert ask(reporting, 9.0, 4, [4]) == {4: False}
    assert ask(reporting, 9.1, 1, [1]) == {1: True}, "it may go on for a while"
    assert ask(reporting, 9.2, 1, [1]) == {1: True}, "it asks again for news"
    assert reporting.lose(1) == []
    assert ask(reporting, 9.3, 0, [0]) == {0: False}, "there is a report"


def test_process_that_requests_to_report_has_confirmed():
    reporting = Reporting()
    assert ask(reporting, 0.0, 3, [1, 3]) == {}
    assert ask(reporting, 0.2, 1, [1, 3]) == {1: True, 3: False}


def test_process_that_has_raised_does_not_wait_for_a_lower_one():
    reporting = Reporting()
    assert reporting.ask(0.0, 2, 2, 7, [1, 2], waits=False) == [(2, 7, False)]
    assert reporting.expected is None
    frozen = Reporting()
    assert frozen.ask(0.0, 3, 3, 6, [0, 2, 3]) == []
    assert frozen.ask(0.0, 2, 2, 7, [0, 2, 3], waits=False) == [(2, 7, False)]
    assert answered(frozen.tick(CONFIRMS_S)) == {3: True}
    assert reporting.ask(0.0, 1, 1, 8, [1, 2], waits=False) == [(1, 8, True)]


def test_if_the_lowest_does_not_confirm_in_time_the_next_one_reports():
    reporting = Reporting()
    assert ask(reporting, 0.0, 3, [0, 2, 3]) == {}
    assert ask(reporting, 0.1, 2, [0, 2, 3]) == {}
    assert reporting.deadline == CONFIRMS_S
    assert reporting.tick(0.4) == []
    assert answered(reporting.tick(CONFIRMS_S)) == {2: True, 3: False}
    assert reporting.confirm(0) == []
    assert ask(reporting, 1.0, 0, [0]) == {0: False}, "it comes late"


def test_if_the_lowest_is_gone_the_next_one_reports():
    reporting = Reporting()
    assert ask(reporting, 0.0, 2, [0, 2]) == {}
    assert answered(reporting.lose(0)) == {2: True}
    confirmed = Reporting()
    assert ask(confirmed, 0.0, 2, [0, 2]) == {}
    assert answered(confirmed.confirm(0)) == {2: False}
    assert confirmed.lose(0) == []
    assert ask(confirmed, 0.0, 1, [1]) == {1: True}
    nobody = Reporting()
    assert nobody.lose(0) == []
    assert ask(nobody, 0.0, 2, []) == {2: True}


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "confirm", "lose", "wait"]), st.integers(0, 4)), max_size=20
)


@given(EVENTS)
def test_one_process_reports_and_each_that_asks_is_answered(events):
    reporting, now, living = Reporting(), 0.0, set(range(5))
    asked, reports = set(), []  # those that wait for an answer, and those that report
    for event, process in [*events, ("wait", 1)]:
        answers = []
        if event == "wait":
            now += CONFIRMS_S
            answers = reporting.tick(now)
        elif event == "confirm" and process in living:
            answers = reporting.confirm(process)
        elif event == "lose" and process in living:
            living.discard(process)
            asked.discard(process)
            answers = reporting.lose(process)
        elif event == "ask" and process in living and process not in asked:
            asked.add(process)
            answers = reporting.ask(now, process, process, 0, living)
        for answer in answers:
            asked.remove(answer.to)
            reports += [answer.to] * answer.reports
    assert not asked
    assert len(set(reports)) <= 1
