"""Which steps a history keeps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.planning.policies import (
    Best,
    EverySeconds,
    EverySteps,
    Keep,
    Last,
    LastSeconds,
    Multiples,
    Pinned,
    Saved,
    doomed,
    policy_of,
)
from shoal.errors import UsageError, UsageTypeError

MARGINS = st.one_of(st.floats(-5, 5), st.just(math.nan), st.just(math.inf), st.none())

HISTORIES = st.lists(
    st.tuples(st.integers(0, 60), st.floats(0, 1000), MARGINS, st.booleans()),
    max_size=12,
    unique_by=lambda row: row[0],
).map(
    lambda rows: [
        Saved(step, at, {} if loss is None else {"loss": loss}, pinned)
        for step, at, loss, pinned in sorted(rows, key=lambda row: row[0])
    ]
)

SINGLE = st.one_of(
    st.integers(1, 5).map(Last),
    st.integers(1, 30).map(EverySteps),
    st.integers(1, 30).map(Multiples),
    st.floats(0.1, 500).map(EverySeconds),
    st.floats(0.1, 500).map(LastSeconds),
    st.builds(Best, st.integers(1, 4), st.just("loss"), st.sampled_from(["min", "max"])),
    st.just(Pinned()),
)
POLICIES = st.lists(SINGLE, min_size=1, max_size=3).map(
    lambda parts: parts[0] if len(parts) == 1 else parts[0] | parts[1] | (parts[2:] or [2])[0]
)


@given(HISTORIES, POLICIES)
def test_the_newest_and_the_pinned_stay(saved, keep):
    gone = doomed(saved, keep)
    assert list(gone) == sorted(set(gone)), "oldest first, each once"
    assert saved == [] or saved[-1].step not in gone
    assert not {one.step for one in saved if one.is_pinned} & set(gone)
    assert not keep.kept(saved) & set(gone)


@given(HISTORIES, POLICIES, st.integers(0, 12))
def test_a_deletion_that_was_interrupted_goes_on_where_it_stopped(saved, keep, done):
    gone = doomed(saved, keep)
    left = [one for one in saved if one.step not in gone[:done]]
    assert doomed(left, keep) == gone[done:]


@given(HISTORIES, SINGLE, SINGLE)
def test_joined_policy_keeps_the_union(saved, one, other):
    assert (one | other).kept(saved) == one.kept(saved) | other.kept(saved)
    assert (one | other).kept(saved) == (other | one).kept(saved)


@given(HISTORIES, st.integers(1, 30))
def test_steps_that_are_kept_are_apart_and_nothing_between_them_is_missing(saved, n):
    kept = sorted(EverySteps(n).kept(saved))
    steps = [one.step for one in saved]
    assert kept[:1] == steps[:1]
    for left, right in zip(kept, (*kept[1:], math.inf), strict=bool(kept)):
        assert right - left >= n
        assert not any(left + n <= step < right for step in steps)


@given(HISTORIES, st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_the_best_are_better_than_the_rest(saved, n, mode):
    kept = Best(n, "loss", mode).kept(saved)
    losses = {one.step: one.metrics.get("loss", math.nan) for one in saved}
    known = {step: loss for step, loss in losses.items() if not math.isnan(loss)}
    assert kept <= set(known)
    assert len(kept) == min(n, len(known))
    worst = [known[step] if mode == "min" else -known[step] for step in kept]
    rest = [loss if mode == "min" else -loss for s, loss in known.items() if s not in kept]
    assert not worst or not rest or max(worst) <= min(rest)


@given(HISTORIES, st.lists(st.sampled_from(["loss", "speed"]), min_size=1, max_size=2))
def test_best_alone_deletes_no_step_that_it_does_not_rank(saved, names):
    rest = {one.step for one in saved if not set(names) & set(one.metrics)}
    alone = Best(1, names[0]) if len(names) == 1 else Best(1, names[0]) | Best(1, names[1])
    ranked = [one for one in saved if one.step not in rest]
    newest = {one.step for one in saved[-1:]}
    expected = {one.step for one in ranked if not one.is_pinned} - alone.kept(ranked) - newest
    assert set(doomed(saved, alone)) == expected
    for beside in (Last(3), Pinned()):
        keep = alone | beside
        kept = keep.kept(saved) | newest
        stays = kept | {one.step for one in saved if one.is_pinned}
        assert {one.step for one in saved} - set(doomed(saved, keep)) == stays


def test_best_prefers_the_newer_of_equal_steps():
    saved = [Saved(step, 0.0, {"loss": 1.0}) for step in (1, 2, 3)]
    assert Best(2, "loss").kept(saved) == {2, 3}


def test_a_clock_that_went_back_is_a_distance():
    saved = [Saved(1, 5000.0), Saved(2, 100.0), Saved(3, 150.0), Saved(4, 700.0)]
    assert EverySeconds(600).kept(saved) == {1, 2, 4}


@given(HISTORIES, st.integers(1, 30))
def test_multiples_are_of_the_steps_that_are_saved(saved, n):
    kept = Multiples(n).kept(saved)
    assert kept == set(range(0, 61, n)) & {one.step for one in saved}


def test_an_age_is_counted_from_the_newest_step_by_stored_times(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e12)  # nothing was saved for long: no step is older
    saved = [Saved(1, 0.0), Saved(2, 39.9), Saved(3, 40.0), Saved(4, 500.0), Saved(5, 100.0)]
    assert LastSeconds(60).kept(saved) == {3, 4, 5}, "4 is of a clock that was ahead"
    assert doomed(saved, LastSeconds(60) | Multiples(2)) == (1,)
    assert doomed([*saved, Saved(6, 9e9)], LastSeconds(60) | 2) == (1, 2, 3, 4)


def test_no_policy_keeps_everything():
    assert doomed([Saved(1, 0.0), Saved(2, 0.0)], policy_of(None)) == ()
    assert doomed([], Last(1)) == ()


def test_a_number_means_the_last():
    assert policy_of(3) == Last(3)
    assert policy_of(EverySteps(5) | 3).policies == (EverySteps(5), Last(3))
    assert policy_of(3 | EverySteps(5)).policies == (EverySteps(5), Last(3))
    saved = [Saved(step, 0.0) for step in range(8)]
    assert (EverySteps(5) | 3).kept(saved) == {0, 5, 6, 7}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Last(0), "n=0 must be at least 1"),
        (lambda: EverySteps(-1), "n=-1 must be at least 1"),
        (lambda: Multiples(0), "^Multiples: n=0 must be at least 1"),
        (lambda: LastSeconds(0), "^LastSeconds: s=0 must be a positive number"),
        (lambda: EverySeconds(math.inf), "s=inf must be a positive and finite number"),
        (lambda: EverySeconds(math.nan), "s=nan must be a positive number"),
        (lambda: Best(1, "loss", "mim"), "did you mean 'min'"),
        (lambda: policy_of(0), "^keep=0 must be at least 1: the newest .* None keeps all"),
        (lambda: Checkpoints("never-made", keep=Last(2) | -1), "^keep=-1 must be at least 1"),
        (lambda: Checkpoints("never-made", keep=0), "keep=0 must be at least 1"),
    ],
)
def test_wrong_values_are_refused(build, words):
    with pytest.raises(UsageError, match=words):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Last(True),
        lambda: Last(2.0),
        lambda: EverySeconds("60"),
        lambda: Best(1, None),
        lambda: policy_of("2"),
        lambda: policy_of(Last),
        lambda: Last(1) | None,
        lambda: Last(1) | "2",
    ],
)
def test_wrong_types_are_refused(build):
    with pytest.raises(UsageTypeError):
        build()


class Own(Keep):
    """A policy of the user's own, which returns what it is given."""

    def __init__(self, found):
        self.found = found

    def kept(self, saved):
        return self.found(saved)


def even(saved):
    return (one.step for one in saved if one.step % 2 == 0)


@pytest.mark.parametrize(
    "collect", [frozenset, set, list, tuple, dict.fromkeys, lambda it: np.array([*it], np.int32)]
)
def test_a_policy_of_ones_own_returns_any_collection(collect):
    saved = [Saved(step, 0.0) for step in range(7)]
    keep = Own(lambda saved: collect(even(saved)))
    assert doomed(saved, keep) == doomed(saved, keep | 1) == (1, 3, 5)
    assert doomed(saved, Own(lambda saved: [100, 2])) == (0, 1, 3, 4, 5), "100 may come later"


@pytest.mark.parametrize(
    "found",
    [
        lambda saved: None,
        lambda saved: True,
        lambda saved: 3,
        lambda saved: "3",
        even,
        list,  # of Saved
        lambda saved: [one.step % 2 == 0 for one in saved],  # as orbax's
        lambda saved: [float(one.step) for one in saved],
    ],
)
def test_anything_else_is_refused_by_name(found):
    for keep in (Own(found), Own(found) | Last(2)):
        with pytest.raises(UsageTypeError, match=r"^keep=Own\(\): kept\(\) returned"):
            doomed([Saved(step, 0.0) for step in range(6)], keep)
