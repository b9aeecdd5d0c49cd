"""The losses of a job, and the answers about them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shoal.runtime.rules.meeting_answers import (
    Loss,
    ProcessesGone,
    ServicesLost,
    SurvivorsMet,
)
from shoal.runtime.system.failure_words import headline_of


class Losses:
    """The processes that are gone, in the order of their loss, and the lost services.

    `words` returns a process's own report of how it ended.
    """

    def __init__(self, words: Callable[[int], str]) -> None:
        self.states: dict[int, str] = {}  # of processes: "left" | "failed" | "lost"
        self.services: list[tuple[str, str]] = []  # name, words
        self._words = words

    def affect(self, members: Collection[int]) -> bool:
        """Return whether any process was lost or failed, or one of `members` is gone in any way."""
        lost = any(state != "left" or p in members for p, state in self.states.items())
        return lost or bool(self.services)

    def survivors(self, alive: Collection[int], members: Collection[int]) -> SurvivorsMet:
        """Return the answer to the living: each of `members` that is gone, and the services."""
        gone = [(p, state) for p, state in self.states.items() if p in members]
        rows = [(p, state, self._words(p)) for p, state in gone]
        return SurvivorsMet([*alive], rows, list(self.services))

    def answer(self, members: Collection[int], cause: int | None = None) -> ProcessesGone:
        """Return the answer about those of `members` that are gone.

        The first that did not leave in order is the cause; its report is not cut.
        """
        gone = [p for p in self.states if p in members]
        if cause is None:
            cause = next((p for p in gone if self.states[p] != "left"), gone[0])
        kind = "lost" if self.states[cause] == "lost" else "failed"
        alike = [p for p in gone if (self.states[p] == "lost") == (kind == "lost")]
        pairs = [(cause, self._words(cause))]
        pairs += [(p, headline_of(self._words(p))) for p in alike if p != cause]
        return ProcessesGone(kind, pairs)

    def service_answer(self) -> ServicesLost:
        """Return the answer about lost services."""
        return ServicesLost(list(self.services))

    def any_answer(self, members: Collection[int]) -> Loss:
        """Return the answer about any loss; about `members` first."""
        if not self.states:
            return self.service_answer()
        return self.answer(members if any(p in members for p in self.states) else self.states)
