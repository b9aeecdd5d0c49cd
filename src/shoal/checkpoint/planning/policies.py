"""Policies of a history: when it saves, and which steps it keeps.

`a | b` keeps what either keeps. Each policy also keeps what it kept before other steps were
deleted: no deletion makes it drop another step, so retention may be interrupted at any point and
repeated.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from shoal.arguments import as_integer, count, not_flags, seconds, shown
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all

_MOST_NAMED = 8
FREE = "free"  # in `every`: whenever no save runs

__all__ = [
    "AnyOf",
    "Best",
    "EverySeconds",
    "EverySteps",
    "Keep",
    "Last",
    "LastSeconds",
    "Multiples",
    "Pinned",
    "Saved",
    "doomed",
    "policy_of",
    "unranked",
]


class Saved(NamedTuple):
    """One committed step, as policies see it."""

    step: int
    saved_s: float  # when its save began, seconds since 1970
    metrics: Mapping[str, float] = {}
    is_pinned: bool = False


class Keep(ABC):
    """A retention policy. For one of your own, define `kept` in a subclass.

    >>> class Thousands(Keep):
    ...     def kept(self, saved):
    ...         return [one.step for one in saved if one.step % 1000 == 0]
    >>> doomed([Saved(step, 0.0) for step in (500, 1000, 1500, 2000)], Thousands() | Last(1))
    (500, 1500)
    """

    @abstractmethod
    def kept(self, saved: Sequence[Saved]) -> Collection[int]:
        """Return the steps to keep out of all saved ones, which are sorted.

        Before a save, each process calls it with the new step alone, to check what it returns;
        after the commit, process 0 calls it with all steps. It may return steps that are not saved.
        """

    def __or__(self, other: Keep | Rule | int | timedelta) -> AnyOf:
        """Keep what either keeps; in `every`, save what either selects.

        What else than a policy is joined is parsed where it is used: 4 is `Last(4)` in `keep`, and
        `EverySteps(4)` in `every`.
        """
        if other is None:
            raise UsageTypeError("keep: None keeps every step; leave the rest out")
        if not (_is_plain_rule(other) or isinstance(other, Keep)):
            raise UsageTypeError(
                f"{self!r} | {other!r}: the right side must be a number of steps, or a policy; in "
                f"every= also a timedelta, {FREE!r}, or a function of the step"
            )
        return AnyOf((*_parts(self), *_parts(other)))

    __ror__ = __or__

    def __repr__(self) -> str:  # equal on all processes, which compare it
        return f"{type(self).__qualname__}()"


@local
@dataclass(frozen=True)
class Last(Keep):
    """Keep the `n` newest steps. `keep=2` means this.

    Local.

    >>> Last(2).kept([Saved(step, 0.0) for step in (10, 20, 30)]) == {20, 30}
    True
    """

    n: int

    def __post_init__(self) -> None:
        _count(self)

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return frozenset(save.step for save in saved[-self.n :])


@local
@dataclass(frozen=True)
class EverySteps(Keep):
    """Keep the oldest step, and after each kept step the next at least `n` steps later.

    Local.

    So it does not depend on the steps at which the program saves: `EverySteps(100)` keeps
    99, 199, 299 as well as 0, 100, 200.

    >>> EverySteps(100).kept([Saved(step, 0.0) for step in (49, 99, 149, 199)]) == {49, 149}
    True
    """

    n: int

    def __post_init__(self) -> None:
        _count(self)

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return _spread([save.step for save in saved], [save.step for save in saved], self.n)


@local
@dataclass(frozen=True)
class Multiples(Keep):
    """Keep the steps whose number is a multiple of `n`, step 0 included.

    Local.

    It keeps none of the steps that `every=10` saves, which are 9, 19, 29: keep these by
    `EverySteps`, or save by `every=lambda step: step % 10 == 0`.

    >>> Multiples(100).kept([Saved(step, 0.0) for step in (0, 50, 99, 100, 300)]) == {0, 100, 300}
    True
    """

    n: int

    def __post_init__(self) -> None:
        _count(self)

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return frozenset(save.step for save in saved if save.step % self.n == 0)


@local
@dataclass(frozen=True)
class EverySeconds(Keep):
    """Keep the oldest step, and after each kept step the next that began `s` seconds later.

    Local.

    >>> EverySeconds(3600).kept([Saved(step, 600.0 * step) for step in range(13)]) == {0, 6, 12}
    True
    """

    s: float

    def __post_init__(self) -> None:
        _seconds(self)

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return _spread([save.step for save in saved], [save.saved_s for save in saved], self.s)


@local
@dataclass(frozen=True)
class LastSeconds(Keep):
    """Keep the newest step, and all steps that began at most `s` seconds before it.

    Local.

    Only stored times are compared: the time that passes while nothing is saved deletes no step. A
    step with a later time than the newest is kept. The times are those of the clocks of the hosts
    that saved: `LastSeconds(86400) | Last(2)` keeps two steps also if a clock jumps forward.

    >>> saved = [Saved(step, 600.0 * step) for step in range(13)]
    >>> sorted(LastSeconds(1800).kept(saved))
    [9, 10, 11, 12]
    """

    s: float

    def __post_init__(self) -> None:
        _seconds(self)

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return frozenset(save.step for save in saved if saved[-1].saved_s - save.saved_s <= self.s)


@local
@dataclass(frozen=True)
class Best(Keep):
    """Of the steps with a `metric`, as given to `save(metrics=…)`, keep the `n` best.

    Local.

    NaN is worse than any number, and never among the best. Of equals the newer is better. Steps
    without the metric are not ranked: they are kept, unless another policy is joined by `|`, which
    then decides about them: `Best(2, "loss") | Last(3)`. Policies that rank by several metrics keep
    the steps that have none of these.

    A save whose metrics lack this one is refused, since the name may be misspelled; `missing_ok`
    permits it, where it is evaluated at some steps alone. A save without metrics is not refused.

    >>> losses = [0.9, 0.3, 0.5]
    >>> saved = [Saved(step, 0.0, {"loss": loss}) for step, loss in enumerate(losses)]
    >>> Best(2, "loss").kept(saved) == {1, 2}
    True
    """

    n: int
    metric: str
    mode: str = "min"
    missing_ok: bool = False

    def __post_init__(self) -> None:
        problems = not_flags(missing_ok=self.missing_ok)
        if not isinstance(self.metric, str) or not self.metric:
            problems.append(WrongType(f"metric={self.metric!r} must be the name of a metric"))
        if not isinstance(self.mode, str) or self.mode not in ("min", "max"):
            near = nearest(self.mode, ("min", "max"))
            problems.append(f"mode={self.mode!r} must be 'min' or 'max'{near}")
        _count(self, problems)

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(
            (sign * save.metrics[self.metric], -save.step)
            for save in saved
            if not math.isnan(save.metrics.get(self.metric, math.nan))
        )
        return frozenset(-negative for _, negative in ranked[: self.n])


@local
@dataclass(frozen=True)
class Pinned(Keep):
    """Keep pinned steps (`Checkpoints.pin`). Every policy does; this one keeps nothing else.

    Local.

    >>> Pinned().kept([Saved(1, 0.0, {}, True), Saved(2, 0.0)]) == {1}
    True
    """

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return frozenset(save.step for save in saved if save.is_pinned)


@dataclass(frozen=True)
class AnyOf(Keep):
    """Keep what any of these policies keeps; the result of `|`."""

    policies: tuple[Any, ...]  # as given: a number means another policy in `keep` than in `every`

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        policies = filter(None, map(policy_of, self.policies))
        return frozenset().union(*(steps_kept(policy, saved) for policy in policies))


def policy_of(keep: object) -> Keep | None:
    """Parse `keep=` of `Checkpoints`; None: keep every step.

    Raises:
      UsageError: it is neither a policy nor an integer of at least 1.
    """
    if isinstance(keep, AnyOf):
        return AnyOf(tuple(map(policy_of, keep.policies)))
    if keep is None or isinstance(keep, Keep):
        return keep
    num_steps = as_integer(keep)
    if num_steps is None:
        raise UsageTypeError(
            f"keep={keep!r} must be a number of steps, or a policy: Last(2) | EverySteps(100)"
        )
    if num_steps < 1:
        raise UsageError(
            f"keep={num_steps} must be at least 1: the newest step is never deleted; None keeps all"
        )
    return Last(num_steps)


def steps_kept(keep: Keep, saved: Sequence[Saved]) -> frozenset[int]:
    """Return what a policy keeps.

    Raises:
      UsageTypeError: its `kept` does not return a collection of steps.
    """
    kept: object = keep.kept(saved)
    steps = [*map(as_integer, kept)] if isinstance(kept, Collection) else [None]
    if None in steps:
        raise UsageTypeError(
            f"keep={keep!r}: kept() returned {shown(kept)}, not a collection of step numbers, "
            "such as [one.step for one in saved if one.step % 1000 == 0]"
        )
    return frozenset(step for step in steps if step is not None)


def wrong_kept(keep: Keep | None, save: Saved) -> list[str]:
    """Return why a policy of the user's own is refused, from what it returns of one step alone.

    What it raises is not reported: it may need the steps that are saved, as after the commit.
    """
    try:
        if keep is not None:
            steps_kept(keep, [save])
    except UsageTypeError as error:
        return [WrongType(str(error))]
    except Exception:  # noqa: BLE001 - of the user's function
        return []
    return []


def unranked(keep: Keep | None, metrics: object) -> list[str]:
    """Return a line for each policy whose metric a save lacks, so that it cannot rank the step.

    >>> unranked(Last(2) | Best(1, "los"), {"loss": 0.5})
    ["keep=Best(1, 'los'): the metrics have no 'los', but loss; did you mean 'loss'?"]
    """
    given = metrics if isinstance(metrics, Mapping) else {}
    known = ", ".join(sorted(map(str, given))[:_MOST_NAMED]) or "nothing"
    return [
        f"keep=Best({part.n}, {part.metric!r}): the metrics have no {part.metric!r}, but {known}"
        f"{nearest(part.metric, map(str, given))}"
        for part in _parts(keep)
        if isinstance(part, Best) and part.metric not in given and not part.missing_ok
    ]


def metrics_ranked(keep: Keep | None) -> frozenset[str]:
    """Return the metrics by which `keep` ranks steps, if it does nothing else.

    Steps with none of these are kept.

    >>> metrics_ranked(Best(2, "loss")), metrics_ranked(Best(2, "loss") | Last(3))
    (frozenset({'loss'}), frozenset())
    """
    ranks = [part.metric for part in _parts(keep) if isinstance(part, Best)]
    return frozenset(ranks if len(ranks) == len(_parts(keep)) else ())


def not_ranked(saved: Iterable[Saved], keep: Keep | None) -> frozenset[int]:
    """Return the steps that are kept because they have no metric that `keep` ranks by."""
    names = metrics_ranked(keep)
    return frozenset(save.step for save in saved if names and names.isdisjoint(save.metrics))


def _parts(joined: object) -> tuple[Any, ...]:
    return joined.policies if isinstance(joined, AnyOf) else (joined,)


def doomed(saved: Iterable[Saved], keep: Keep | None) -> tuple[int, ...]:
    """Return the steps to delete, oldest first.

    It is impossible that the newest step or a pinned one is among them.

    >>> doomed([Saved(step, 0.0) for step in (1, 2, 3)], Last(1))
    (1, 2)
    """
    ordered = sorted(saved, key=lambda save: save.step)
    if keep is None or not ordered:
        return ()
    stays = steps_kept(keep, ordered) | not_ranked(ordered, keep) | {ordered[-1].step}
    return tuple(save.step for save in ordered if not (save.is_pinned or save.step in stays))


def _spread(steps: Sequence[int], places: Sequence[float], least: float) -> frozenset[int]:
    """Return steps at least `least` apart, from the first; backward clock jumps count too."""
    kept: list[int] = []
    last = 0.0
    for step, place in zip(steps, places, strict=True):
        if not kept or abs(place - last) >= least:
            kept.append(step)
            last = place
    return frozenset(kept)


def _count(policy: Keep, problems: Sequence[str] = ()) -> None:
    """Check `n` of a policy and make it a Python int: `repr` and equality follow from it."""
    wrong = list(problems)
    n = count("n", policy.n, wrong, least=1)  # type: ignore[attr-defined]
    raise_all(type(policy).__name__, wrong)
    object.__setattr__(policy, "n", n)


def _seconds(policy: Keep) -> None:
    """Check `s` of a policy and make it a Python number."""
    wrong: list[str] = []
    s = seconds("s", policy.s, wrong, is_finite=True)  # type: ignore[attr-defined]
    raise_all(type(policy).__name__, wrong)
    object.__setattr__(policy, "s", s)


# ---- When a history saves: every n steps, every n seconds, whenever it can, or as a function says.
#
# All processes must decide alike. Step numbers are equal on all; clocks are not, so the lead's
# clock counts, and reading it takes a meeting. That does not happen at each step, but after half
# of the steps that the lead expects to remain: a save every ten minutes costs about ten meetings.
# If steps become slower, the save is late by at most the time that half of those steps then take.
#
# Whether a save is still running differs between processes, too. At the end of each save its
# threads agree on the step at which the next one begins, so no step waits for a round trip.


Rule = EverySteps | EverySeconds | str | Callable[[int], Any]


def due_by_steps(n: int, step: int, last: int) -> bool:
    """Has another `n`-th step ended since step `last` was saved (-1: none was)?

    Steps are numbered from 0 by the step that has just ended, so n = 10 gives 9, 19, 29. A loop
    that skips 19 saves at the next step it reaches.

    >>> [step for step in range(30) if due_by_steps(10, step, step - 1)]
    [9, 19, 29]
    >>> due_by_steps(10, 21, 14)
    True
    """
    return (step + 1) // n > (last + 1) // n


def steps_to_look(every_s: float, elapsed_s: float, steps: int) -> int:
    """Return after how many steps to read the clock again; `steps` took `elapsed_s` so far.

    >>> steps_to_look(600.0, 60.0, 100)
    450
    >>> steps_to_look(600.0, 599.9, 100)
    1
    """
    if elapsed_s <= 0 or steps < 1:
        return 1
    left = (every_s - elapsed_s) * steps / elapsed_s
    return max(1, min(int(left / 2), 8 * steps))


class Cadence:
    """Decides whether to save a step."""

    def __init__(
        self,
        every: object,
        from_lead: Callable[[Callable[[], str]], str],
        *,
        is_free: Callable[[], bool] = lambda: True,
        last: int = -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare for the step after `last`.

        Args:
          from_lead: calls its argument on the lead and returns the result on all.
          is_free: whether no save runs; called once a step, with the same result on all.
        """
        self._rules = rules_of(every)
        self._from_lead = from_lead
        self._is_free = is_free
        self._clock = clock
        self._answer: tuple[int, bool] | None = None
        # The newest step that was asked for, and how far it was from the one before.
        self._asked, self._stride = last, 1
        self.last, self._began = last, clock()
        self.begin(last)

    def begin(self, step: int) -> None:
        """Record that a save of this step has begun; -1: nothing is saved yet."""
        self._earlier = self.last, self._began
        self.last, self._began = step, self._clock()
        self._restart()

    def undo(self, step: int) -> None:
        """Record that the save of this step has failed: it is due as before, if it began last."""
        if step == self.last:
            self.last, self._began = self._earlier
            self._restart()

    def _restart(self) -> None:
        self._first: int | None = None  # the first step queried since then
        self._look_at = -math.inf
        self._answer = None

    @property
    def wants_every_step(self) -> bool:
        """Whether each step that is passed to `save` is saved."""
        return self._rules is None

    @property
    def looks_next(self) -> bool:
        """Whether the next step of the loop, if that goes on in equal strides, reads the clock.

        Nothing else is evaluated for this: "free" and functions come after the time.
        """
        step = self._asked + self._stride
        if self._rules is None or step <= self.last:
            return False
        for rule in self._rules:  # in this order, as `wants`
            if isinstance(rule, EverySeconds):
                return self._first is None or not self._first <= step < self._look_at
            if isinstance(rule, EverySteps) and due_by_steps(rule.n, step, self.last):
                return False
        return False

    def wants(self, step: int) -> bool:
        """Should `step` be saved? Repeated calls agree until a save begins.

        If the loop returns to an earlier step, counting restarts there.
        """
        if self._rules is None:
            return True
        if step != self._asked:
            self._asked, self._stride = step, max(1, step - self._asked)
        if step < self.last:
            self.last = step - 1
        if self._answer is None or self._answer[0] != step:
            self._answer = step, any(self._is_due(rule, step) for rule in self._rules)
        return self._answer[1]

    def _is_due(self, rule: Rule, step: int) -> bool:
        if isinstance(rule, EverySteps):
            return due_by_steps(rule.n, step, self.last)
        if isinstance(rule, EverySeconds):
            return step > self.last and self._is_time(rule.s, step)
        if isinstance(rule, str):
            return step > self.last and self._is_free()
        return bool(rule(step))

    def _is_time(self, every_s: float, step: int) -> bool:
        if self._first is None or step < self._first:
            self._first, self._look_at = step, step
        if step < self._look_at:
            return False
        first = self._first

        def look() -> str:
            elapsed_s = self._clock() - self._began
            pause = steps_to_look(every_s, elapsed_s, step - first)
            return json.dumps([elapsed_s >= every_s, step + pause])

        is_due, self._look_at = json.loads(self._from_lead(look))
        return bool(is_due)


def rules_of(every: object) -> tuple[Rule, ...] | None:
    """Parse `every=` of `Checkpoints`; None: every step passed to `save` is saved.

    Raises:
      UsageError: it is not an integer, a timedelta, "free", EverySteps, EverySeconds, several of
        them joined by `|`, or a function.
    """
    if every is None:
        return None
    rules = [_rule(part) for part in _parts(every)]
    if any(rule is None for rule in rules):
        near = nearest(every, [FREE]) if isinstance(every, str) else ""
        raise UsageTypeError(
            f"every={every!r} must be a number of steps, a timedelta, {FREE!r} (whenever no save "
            "runs), EverySteps, EverySeconds, a function of the step, or several of these joined "
            f"by |{near}"
        )
    by_steps = [rule for rule in rules if isinstance(rule, EverySteps)]
    by_time = sorted((rule for rule in rules if isinstance(rule, EverySeconds)), key=lambda r: r.s)
    free = [rule for rule in rules if isinstance(rule, str)]
    others = [rule for rule in rules if rule and not isinstance(rule, Keep | str)]
    return (*by_steps, *by_time[:1], *free[:1], *others)  # in this order: see `looks_next`


def _rule(part: Any) -> Rule | None:
    """Return a part of `every` as a rule; None: it is not one."""
    if isinstance(part, timedelta):
        return EverySeconds(part.total_seconds())
    steps = as_integer(part)
    if steps is not None:
        return EverySteps(steps)
    is_rule = isinstance(part, EverySteps | EverySeconds) or _is_plain_rule(part)
    return part if is_rule else None


def _is_plain_rule(part: object) -> bool:
    """Return whether it is a number, a time, "free" or a function, which `|` joins to a policy."""
    is_function = callable(part) and not isinstance(part, type | Keep)
    is_text = isinstance(part, str) and part == FREE
    return is_function or is_text or isinstance(part, timedelta) or as_integer(part) is not None


def rule_text(every: object) -> str:
    """Return the text of a rule, equal on all processes for equal rules."""
    if isinstance(every, AnyOf):
        return " | ".join(map(rule_text, every.policies))
    if isinstance(every, Keep) or not callable(every):
        return repr(every)
    return str(getattr(every, "__qualname__", type(every).__qualname__))
