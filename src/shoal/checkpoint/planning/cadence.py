"""When a history saves: every n steps, every n seconds, or as a function says.

All processes must decide alike. Step numbers are equal on all; clocks are not, so the lead's clock
counts, and reading it takes a meeting. That does not happen at each step, but after half of the
steps that the lead expects to remain: a save every ten minutes costs about ten meetings. If steps
become slower, the save is late by at most the time that half of those steps then take.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from shoal.arguments import as_integer
from shoal.checkpoint.retention import AnyOf, EverySeconds, EverySteps, Keep
from shoal.errors import UsageTypeError

Rule = EverySteps | EverySeconds | Callable[[int], Any]


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
        last: int = -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`from_lead` calls its argument on the lead and returns the result on all."""
        self._rules = rules_of(every)
        self._from_lead = from_lead
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
        """Whether the next step of the loop, if that goes on in equal strides, reads the clock."""
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
      UsageError: it is not an integer, a timedelta, EverySteps, EverySeconds, several of
        them joined by `|`, or a function.
    """
    if every is None:
        return None
    if isinstance(every, timedelta):
        return (EverySeconds(every.total_seconds()),)
    if (steps := as_integer(every)) is not None:
        return (EverySteps(steps),)
    parts: tuple[object, ...] = every.policies if isinstance(every, AnyOf) else (every,)
    by_steps = [part for part in parts if isinstance(part, EverySteps)]
    by_time = [part for part in parts if isinstance(part, EverySeconds)]
    if len(by_steps) + len(by_time) == len(parts):
        return (*by_steps, *sorted(by_time, key=lambda one: one.s)[:1])
    if callable(every) and not isinstance(every, type | Keep):
        return (every,)
    raise UsageTypeError(
        f"every={every!r} must be a number of steps, a timedelta, EverySteps, EverySeconds, "
        "or a function of the step"
    )


def rule_text(every: object) -> str:
    """Return the text of a rule, equal on all processes for equal rules."""
    if isinstance(every, Keep) or not callable(every):
        return repr(every)
    return str(getattr(every, "__qualname__", type(every).__qualname__))
