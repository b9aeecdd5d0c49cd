"""Retention policies: which steps of a history to keep. `a | b` keeps what either keeps.

Each policy also keeps what it kept before other steps were deleted: no deletion makes it drop
another step, so retention may be interrupted at any point and repeated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.arguments import as_integer, count, not_flags, seconds
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, WrongType, nearest, raise_all

_MOST_NAMED = 8

__all__ = [
    "AnyOf",
    "Best",
    "EverySeconds",
    "EverySteps",
    "Keep",
    "Last",
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
    """A retention policy."""

    @abstractmethod
    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """Return the steps to keep out of all saved ones, which are sorted."""

    def __or__(self, other: Keep | int) -> AnyOf:
        """Keep what either keeps."""
        right = policy_of(other)
        if right is None:
            raise UsageTypeError("keep: None keeps every step; leave the rest out")
        parts = (
            part
            for one in (self, right)
            for part in (one.policies if isinstance(one, AnyOf) else (one,))
        )
        return AnyOf(tuple(parts))

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
        return frozenset(one.step for one in saved[-self.n :])


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
        return _spread([one.step for one in saved], [one.step for one in saved], self.n)


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
        problems: list[str] = []
        object.__setattr__(self, "s", seconds("s", self.s, problems, is_finite=True))
        raise_all("EverySeconds", problems)

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return _spread([one.step for one in saved], [one.saved_s for one in saved], self.s)


@local
@dataclass(frozen=True)
class Best(Keep):
    """Keep the `n` steps with the best `metric`, as given to `save(metrics=…)`.

    Local.

    Steps without the metric, or with NaN, do not count. Of equals the newer is better. A save
    whose metrics lack this one is refused, for a misspelled name would have the best step deleted;
    `missing_ok` permits it, where it is evaluated at some steps alone. A save without metrics is
    not refused.

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
            (sign * one.metrics[self.metric], -one.step)
            for one in saved
            if not math.isnan(one.metrics.get(self.metric, math.nan))
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
        return frozenset(one.step for one in saved if one.is_pinned)


@dataclass(frozen=True)
class AnyOf(Keep):
    """Keep what any of these policies keeps; the result of `|`."""

    policies: tuple[Keep, ...]

    def kept(self, saved: Sequence[Saved]) -> frozenset[int]:
        """See `Keep`."""
        return frozenset().union(*(policy.kept(saved) for policy in self.policies))


def policy_of(keep: object) -> Keep | None:
    """Parse `keep=` of `Checkpoints`; None: keep every step.

    Raises:
      UsageError: it is neither a policy nor an integer of at least 1.
    """
    if keep is None or isinstance(keep, Keep):
        return keep
    number = as_integer(keep)
    if number is None:
        raise UsageTypeError(
            f"keep={keep!r} must be a number of steps, or a policy: Last(2) | EverySteps(100)"
        )
    if number < 1:
        raise UsageError(
            f"keep={number} must be at least 1: the newest step is never deleted; None keeps all"
        )
    return Last(number)


def unranked(keep: Keep | None, metrics: object) -> list[str]:
    """Return a line for each policy whose metric a save lacks, so that it cannot rank the step.

    >>> unranked(Last(2) | Best(1, "los"), {"loss": 0.5})
    ["keep=Best(1, 'los'): the metrics have no 'los', but loss; did you mean 'loss'?"]
    """
    given = metrics if isinstance(metrics, Mapping) else {}
    known = ", ".join(sorted(map(str, given))[:_MOST_NAMED]) or "nothing"
    policies = keep.policies if isinstance(keep, AnyOf) else (keep,)
    return [
        f"keep=Best({one.n}, {one.metric!r}): the metrics have no {one.metric!r}, but {known}"
        f"{nearest(one.metric, map(str, given))}"
        for one in policies
        if isinstance(one, Best) and one.metric not in given and not one.missing_ok
    ]


def doomed(saved: Iterable[Saved], keep: Keep | None) -> tuple[int, ...]:
    """Return the steps to delete, oldest first.

    It is impossible that the newest step or a pinned one is among them.

    >>> doomed([Saved(step, 0.0) for step in (1, 2, 3)], Last(1))
    (1, 2)
    """
    ordered = sorted(saved, key=lambda one: one.step)
    if keep is None or not ordered:
        return ()
    stays = keep.kept(ordered) | {ordered[-1].step}
    return tuple(one.step for one in ordered if not (one.is_pinned or one.step in stays))


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
    found = list(problems)
    number = count("n", policy.n, found, least=1)  # type: ignore[attr-defined]
    raise_all(type(policy).__name__, found)
    object.__setattr__(policy, "n", number)
