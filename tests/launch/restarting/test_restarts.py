"""Whether a job that has ended is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.conclusion import Conclusion
from shoal.launch.order import Restarts
from shoal.launch.restarts import MOST_IDLE, RestartRules
from shoal.runtime.system.progress_file import StepProgress

CODES = st.sampled_from([1, 3, 71, 75, 137])
NUMBERS = st.integers(-1, 4)
PROGRESS = st.builds(StepProgress, NUMBERS, NUMBERS, NUMBERS)
ATTEMPTS = st.lists(st.tuples(CODES, PROGRESS), min_size=1, max_size=12)


def expected(restarts, attempts) -> int:
    """Return how many of these attempts begin, by counting in a plain way."""
    failures = idle = 0
    ended = saved = -1
    for number, (code, progress) in enumerate(attempts):
        is_further = progress.saved > saved or (
            saved == progress.saved == -1 and progress.ended > ended
        )
        failures += code != 75
        idle = 0 if is_further else idle + (code != 75)
        ended, saved = max(ended, progress.ended), max(saved, progress.saved)
        allowed = restarts.after_preemption if code == 75 else failures <= restarts.most
        if not allowed or (idle >= 3 and code != 75):
            return number + 1
    return len(attempts) + 1


@given(st.integers(0, 5), st.booleans(), ATTEMPTS)
def test_attempts_begin_as_counted(most, after_preemption, attempts):
    restarts = Restarts(most, after_preemption)
    rules, began = RestartRules(restarts), 1
    for code, progress in attempts:
        judged = rules.judge(Conclusion(code), progress, rules.attempt)
        if not judged.again:
            break
        began += 1
        assert rules.attempt == began - 1
        assert judged.next_words.startswith(f"attempt {began - 1} begins (")
    assert began == expected(restarts, attempts)


@pytest.mark.parametrize(
    "conclusion", [Conclusion(0), Conclusion(1, is_final=True), Conclusion(75, is_final=True)]
)
def test_final_conclusions_are_not_restarted(conclusion):
    judged = RestartRules(Restarts(9, True)).judge(conclusion, StepProgress(1, 1), 0)
    assert (judged.again, judged.lines) == (False, ())


def test_restart_rules_without_options_add_no_words():
    for code in (0, 1, 75):
        assert RestartRules(None).judge(Conclusion(code), StepProgress(), 0) == Conclusion(
            code, again=False
        )


def test_the_verdict_of_node_0_stays_and_counts():
    rules = RestartRules(Restarts(0, False))
    assert rules.judge(Conclusion(1, again=True), StepProgress(5, 4), 2).again
    assert rules.attempt == 3
    assert rules.judge(Conclusion(1, again=False), StepProgress(), 3).again is False
    assert rules.attempt == 3


def test_the_limit_is_named():
    rules = RestartRules(Restarts(1, False))
    judged = rules.judge(Conclusion(1), StepProgress(7, 5), 0)
    assert judged.next_words == (
        "attempt 1 begins (1 of --max-restarts 1); highest step begun 7, saved 5"
    )
    judged = rules.judge(Conclusion(1, ("why",)), StepProgress(9, 5), 1)
    assert judged.lines == ("why", "No new attempt: --max-restarts 1.")


def test_suspected_compile_cache_is_reported_before_the_next_attempt():
    words = "process 1 died of SIGSEGV before its first step"
    judged = RestartRules(Restarts(1, False)).judge(
        Conclusion(139, suspicion=words), StepProgress(), 0
    )
    assert judged.next_words == (
        f"attempt 1 begins (1 of --max-restarts 1); without the compile cache: {words}"
    )


def test_beside_a_process_that_sigkill_has_not_ended_no_attempt_begins():
    words = "process 3 (pid 17, state D) of node 1 (host)"
    judged = RestartRules(Restarts(9, False)).judge(
        Conclusion(71, remaining=words), StepProgress(7), 0
    )
    assert (judged.again, judged.lines) == (
        False,
        (f"No new attempt: SIGKILL has not ended {words}.",),
    )
    judged = RestartRules(Restarts(0, True)).judge(
        Conclusion(75, remaining=words), StepProgress(7), 0
    )
    assert not judged.again
    done = Conclusion(0, remaining=words)
    assert RestartRules(Restarts(9, False)).judge(done, StepProgress(7), 0).lines == ()


def test_a_crash_loop_is_named():
    rules = RestartRules(Restarts(9, False))
    silent = [rules.judge(Conclusion(1), StepProgress(), n) for n in range(MOST_IDLE)]
    assert [judged.again for judged in silent] == [True] * (MOST_IDLE - 1) + [False]
    assert silent[-1].lines == (
        "No new attempt: a crash loop, 3 failed and noted no step (shoal.step, "
        "shoal.preempted, shoal.preemption.mark_saved).",
    )
    rules = RestartRules(Restarts(9, False))
    stuck = [rules.judge(Conclusion(1), StepProgress(7, ended=6), n) for n in range(1 + MOST_IDLE)]
    assert stuck[-1].lines == (
        "No new attempt: a crash loop, 3 failed without progress; highest step begun 7.",
    )


def test_steps_that_end_count_until_one_is_saved():
    """Work that was started, not finished, differs by chance; and what is not saved is lost."""
    rules = RestartRules(Restarts(9, False))
    begun = [rules.judge(Conclusion(1), StepProgress(step), step) for step in range(MOST_IDLE)]
    assert [judged.again for judged in begun] == [True] * (MOST_IDLE - 1) + [False]
    rules = RestartRules(Restarts(9, False))
    for n, progress in enumerate(
        [StepProgress(3, ended=2), StepProgress(4, ended=3), StepProgress(9, 0, 8)]
    ):
        assert rules.judge(Conclusion(1), progress, n).again
    further = [
        rules.judge(Conclusion(1), StepProgress(9 + n, 0, 9 + n), n) for n in range(MOST_IDLE)
    ]
    assert [judged.again for judged in further] == [True] * (MOST_IDLE - 1) + [False]


NAN = Conclusion(1, cause="FloatingPointError at train.py:30", step=12)
KILLED = Conclusion(137, is_from_outside=True)


def test_the_same_exception_at_the_same_place_and_step_twice_ends_it():
    rules = RestartRules(Restarts(100, False))
    assert rules.judge(NAN, StepProgress(12, 9), 0).again
    judged = rules.judge(NAN, StepProgress(15, 9), 1)  # another process has come further
    assert (judged.again, judged.lines) == (
        False,
        ("No new attempt: two failed alike, FloatingPointError at train.py:30 at step 12.",),
    )
    rules = RestartRules(Restarts(100, False))
    again = [
        rules.judge(Conclusion(1, cause="NameError at t.py:3"), StepProgress(), n) for n in (0, 1)
    ]
    assert [judged.again for judged in again] == [True, False]
    assert again[1].lines[0].endswith("failed alike, NameError at t.py:3 before the first step.")


def test_another_line_or_step_is_another_failure():
    rules = RestartRules(Restarts(100, False))
    other = NAN._replace(cause="FloatingPointError at train.py:31")
    for n, (conclusion, step) in enumerate([(NAN, 5), (other, 5), (NAN, 6), (NAN, 7)]):
        assert rules.judge(conclusion._replace(step=step), StepProgress(step, n), n).again


@pytest.mark.parametrize("step", [-1, 10], ids=["no step is noted", "steps start anew"])
def test_failures_with_a_save_in_between_are_not_alike(step):
    rules = RestartRules(Restarts(100, False))
    failed = NAN._replace(step=step)
    assert all(rules.judge(failed, StepProgress(step, 10 * n), n).again for n in range(5))
    assert not rules.judge(failed, StepProgress(step, 40), 5).again
    rules = RestartRules(Restarts(100, False))
    assert rules.judge(failed, StepProgress(step, 9), 0).again
    assert rules.judge(KILLED, StepProgress(step, 19), 1).again
    assert rules.judge(failed, StepProgress(step, 19), 2).again


def test_a_preemption_is_no_crash_loop():
    preempted = Conclusion(75)
    rules = RestartRules(Restarts(100, True))
    assert all(rules.judge(preempted, StepProgress(), n).again for n in range(50))
    assert rules.judge(NAN, StepProgress(), 50).again
    assert rules.judge(preempted, StepProgress(), 51).again
    judged = rules.judge(NAN, StepProgress(), 52)  # the program itself has failed twice
    assert judged.lines[0].startswith("No new attempt: two failed alike, ")


def test_failures_from_outside_are_no_crash_loop():
    rules = RestartRules(Restarts(100, False))
    assert all(rules.judge(KILLED, StepProgress(), n).again for n in range(50))
    assert rules.judge(NAN, StepProgress(), 50).again
    assert rules.judge(KILLED, StepProgress(), 51).again
    assert not rules.judge(NAN, StepProgress(), 52).again  # the program itself has failed twice
    rules = RestartRules(Restarts(2, False))
    assert [rules.judge(KILLED, StepProgress(), n).again for n in range(3)] == [True, True, False]


def test_the_last_attempt_is_known_before():
    rules = RestartRules(Restarts(1, True))
    assert not rules.is_last
    rules.judge(Conclusion(75), StepProgress(), 0)  # does not count
    assert not rules.is_last
    rules.judge(Conclusion(1), StepProgress(1), 1)
    assert rules.is_last
    assert RestartRules(None).is_last
    assert RestartRules(Restarts(0, True)).is_last
