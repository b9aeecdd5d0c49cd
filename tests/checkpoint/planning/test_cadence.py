"""When a history saves."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.planning.policies import (
    Cadence,
    EverySeconds,
    EverySteps,
    Last,
    due_by_steps,
    policy_of,
    rule_text,
    rules_of,
    steps_to_look,
)
from shoal.errors import UsageError, UsageTypeError


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def cadence(every, clock=None, *, last=-1, meetings=None, is_free=lambda: True):
    def ask(look):
        if meetings is not None:
            meetings.append(clock())
        return look()

    return Cadence(every, ask, is_free=is_free, last=last, clock=clock or Clock())


def saved_by(every, steps, **options):
    decides = cadence(every, **options)
    saved = []
    for step in steps:
        if decides.wants(step):
            decides.begin(step)
            saved.append(step)
    return saved


def third(step):
    return step == 3


def test_every_tenth_step_ends_at_9_19_29():
    assert saved_by(10, range(30)) == [9, 19, 29]


def test_a_stride_leaps_over_none():
    assert saved_by(10, range(0, 50, 7)) == [14, 21, 35, 42, 49]


def test_a_save_between_them_moves_nothing():
    decides = cadence(10, last=13)
    assert [step for step in range(14, 30) if decides.wants(step)] == list(range(19, 30))


@given(st.integers(1, 20), st.lists(st.integers(0, 200), unique=True).map(sorted))
def test_each_span_of_n_steps_is_saved_once_if_the_loop_comes_by(n, steps):
    saved = saved_by(n, steps)
    spans = [(step + 1) // n for step in saved]
    assert len(set(spans)) == len(spans)
    assert set(spans) == {(step + 1) // n for step in steps if step + 1 >= n}


def test_steps_up_to_the_last_save_are_not_due():
    assert not any(due_by_steps(3, step, 20) for step in range(21))
    timed = cadence(EverySeconds(1), clock := Clock(), last=20)
    clock.now += 5
    assert [step for step in (20, 21) if timed.wants(step)] == [21]


def test_a_loop_that_goes_back_saves_again():
    decides = cadence(10, last=1009)
    assert next(step for step in range(501, 531) if decides.wants(step)) == 509
    assert saved_by(10, [*range(20), *range(5, 25)]) == [9, 19, 9, 19]
    timed = cadence(EverySeconds(1), clock := Clock(), last=20)
    clock.now += 5
    assert timed.wants(7)


def test_free_is_evaluated_once_a_step_and_never_for_a_step_that_is_saved():
    answers = iter([True, False, False, True, True])
    decides = cadence("free", is_free=lambda: next(answers), last=4)
    saved = []
    for step in (4, 5, 6, 7, 8, 6):
        wants = decides.wants(step)
        assert decides.wants(step) is wants
        if wants:
            decides.begin(step)
            saved.append(step)
        assert step > decides.last or not decides.wants(step)
    assert saved == [5, 8, 6]
    assert next(answers, None) is None


def test_rules_joined_to_free_save_while_a_save_runs_too():
    assert saved_by(EverySteps(4) | "free", range(12), is_free=lambda: False) == [3, 7, 11]
    assert saved_by("free" | EverySteps(4), range(3)) == [0, 1, 2]
    assert rules_of(third | EverySeconds(9) | EverySteps(2) | "free" | "free") == (
        EverySteps(2),
        EverySeconds(9),
        "free",
        third,
    )
    assert rule_text("free") == "'free'"


@pytest.mark.parametrize(
    ("every", "hint"), [("fre", "; did you mean 'free'?"), ("always", ""), ("FREE", "free")]
)
def test_another_text_is_refused_and_free_is_named(every, hint):
    with pytest.raises(UsageTypeError, match=r"every=.*'free' \(whenever no save runs\)") as caught:
        rules_of(every)
    assert hint in str(caught.value)
    with pytest.raises(UsageTypeError, match="in every= also a timedelta, 'free'"):
        EverySteps(4) | every


@pytest.mark.parametrize("keep", ["free", Last(2) | "free"])
def test_free_is_no_policy_of_keep(keep):
    with pytest.raises(UsageTypeError, match=r"^keep='free' must be"):
        policy_of(keep)


def test_cadence_none_saves_every_step():
    assert saved_by(None, range(3)) == [0, 1, 2]


def test_a_function_decides():
    assert saved_by(lambda step: step in (2, 3), range(6)) == [2, 3]


def test_repeated_question_gets_the_same_answer_without_synchronizing():
    clock, meetings = Clock(), []
    decides = cadence(timedelta(seconds=10), clock, meetings=meetings)
    assert not decides.wants(0)
    clock.now += 60
    assert not decides.wants(0)
    assert decides.wants(1)
    assert decides.wants(1)
    assert len(meetings) == 2


@given(st.floats(0.05, 3.0), st.floats(20, 100))
def test_time_is_kept_within_a_few_steps_and_with_few_meetings(step_s, every_s):
    clock, meetings, saved = Clock(), [], []
    decides = cadence(EverySeconds(every_s), clock, meetings=meetings)
    began = clock()
    for step in range(int(3 * every_s / step_s) + 10):
        clock.now += step_s
        if decides.wants(step):
            saved.append(clock())
            decides.begin(step)
    assert saved
    gaps = [right - left for left, right in zip([began, *saved], saved, strict=False)]
    assert all(every_s <= gap <= every_s + 3 * step_s for gap in gaps), gaps
    assert len(meetings) <= 25 * (len(saved) + 1)


@given(
    st.sampled_from(
        [
            EverySeconds(5),
            EverySeconds(5) | EverySteps(4),
            EverySteps(4),
            third | EverySeconds(5),
            EverySteps(4) | third | timedelta(seconds=5),
        ]
    ),
    st.integers(-1, 9),
    st.integers(1, 7),
    st.lists(st.floats(0.01, 9), min_size=3, max_size=60),
    st.randoms(use_true_random=False),
)
def test_whether_the_next_step_reads_the_clock_is_known_before(every, last, stride, times, random):
    clock, looks = Clock(), []
    decides = cadence(every, clock, last=last, meetings=looks)
    for number, step_s in enumerate(times):
        step, looked = last + 1 + number * stride, len(looks)
        expected = decides.looks_next
        is_due = decides.wants(step)
        if number != 1 or stride == 1:  # after one step it is not known
            assert (len(looks) > looked) is expected, step
        if is_due and random.random() < 0.8:
            decides.begin(step)
        clock.now += step_s


def test_a_loop_that_begins_again_lower_is_not_forgotten():
    clock = Clock()
    decides = cadence(EverySeconds(10), clock)
    for step in range(50, 90):
        clock.now += 0.1
        assert not decides.wants(step)
    clock.now += 60
    assert any(decides.wants(step) for step in range(10))


def test_rules_are_joined():
    assert rules_of(EverySteps(5) | EverySeconds(9) | EverySeconds(3)) == (
        EverySteps(5),
        EverySeconds(3),
    )
    assert saved_by(EverySteps(4) | EverySteps(6), range(13)) == [3, 5, 7, 11]


@pytest.mark.parametrize(
    ("build", "rules", "text"),
    [
        (lambda: EverySteps(9) | 4, (EverySteps(9), EverySteps(4)), "EverySteps(n=9) | 4"),
        (lambda: 4 | EverySteps(9), (EverySteps(9), EverySteps(4)), "EverySteps(n=9) | 4"),
        (
            lambda: EverySteps(9) | timedelta(minutes=1) | timedelta(seconds=5),
            (EverySteps(9), EverySeconds(5)),
            "EverySteps(n=9) | datetime.timedelta(seconds=60) | datetime.timedelta(seconds=5)",
        ),
        (
            lambda: timedelta(minutes=1) | EverySteps(9),
            (EverySteps(9), EverySeconds(60)),
            "EverySteps(n=9) | datetime.timedelta(seconds=60)",
        ),
        (
            lambda: third | EverySeconds(60) | EverySteps(9),
            (EverySteps(9), EverySeconds(60), third),
            "EverySeconds(s=60) | third | EverySteps(n=9)",
        ),
    ],
)
def test_every_accepts_its_rules_joined(build, rules, text):
    assert rules_of(build()) == rules
    assert rule_text(build()) == text


def test_a_function_joined_to_a_number_selects_more_steps():
    assert saved_by(EverySteps(6) | third, range(13)) == [3, 5, 11]
    assert saved_by(third | EverySteps(6) | 4, range(13)) == [3, 5, 7, 11]


@pytest.mark.parametrize("every", [Last, "10", 2.5, None])
def test_joining_an_invalid_rule_is_refused(every):
    with pytest.raises(UsageTypeError, match=r"in every= also a timedelta|keep: None"):
        EverySteps(4) | every


@pytest.mark.parametrize("every", [EverySteps(2) | Last(1), Last(1) | timedelta(seconds=1)])
def test_policies_that_only_keep_takes_are_refused_by_every_by_name(every):
    with pytest.raises(UsageTypeError, match=r"^every=.*Last\(n=1\)"):
        rules_of(every)


@pytest.mark.parametrize("keep", [EverySteps(2) | third, Last(1) | timedelta(seconds=1)])
def test_rules_that_only_every_takes_are_refused_by_keep_by_name(keep):
    with pytest.raises(UsageTypeError, match=r"^keep=(<function third|datetime.timedelta)"):
        policy_of(keep)


def test_the_next_look_is_never_far():
    assert steps_to_look(600.0, 1e-9, 1) == 8
    assert steps_to_look(600.0, 0.0, 0) == 1
    assert steps_to_look(600.0, 900.0, 5) == 1


@pytest.mark.parametrize("every", ["10", 2.5, True, Last(2), EverySteps(2) | Last(1), Last])
def test_wrong_types_are_refused(every):
    with pytest.raises(UsageTypeError):
        rules_of(every)


@pytest.mark.parametrize("every", [0, -3, timedelta(0)])
def test_wrong_values_are_refused(every):
    with pytest.raises(UsageError):
        rules_of(every)
