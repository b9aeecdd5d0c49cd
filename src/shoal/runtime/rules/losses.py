"""Who of a job is gone, and what those are told who need them."""

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
    """The processes that are gone, in the order in which they went, and the lost services.

    `words` is how a process went, in its own words.
    """

    def __init__(self, words: Callable[[int], str]) -> None:
        self.states: dict[int, str] = {}  # of processes: "left" | "failed" | "lost"
        self.services: list[tuple[str, str]] = []  # name, words
        self._words = words

    def concern(self, members: Collection[int]) -> bool:
        """Has anybody been lost or failed, or one of these gone in any way?"""
        lost = any(state != "left" or p in members for p, state in self.states.items())
        return lost or bool(self.services)

    def survivors(self, alive: Collection[int], members: Collection[int]) -> SurvivorsMet:
        """Return what those that live are told of all members that are gone."""
        gone = [(p, state) for p, state in self.states.items() if p in members]
        rows = [(p, state, self._words(p)) for p, state in gone]
        return SurvivorsMet([*alive], rows, list(self.services))

    def answer(self, members: Collection[int], cause: int | None = None) -> ProcessesGone:
        """Return what is told of those of them that are gone.

        The first that did not leave in peace is the cause; its words are kept whole.
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
        """Return what is told of services that are lost."""
        return ServicesLost(list(self.services))

    def any_answer(self, members: Collection[int]) -> Loss:
        """Return what is told of whoever is gone; of these first."""
        if not self.states:
            return self.service_answer()
        return self.answer(members if any(p in members for p in self.states) else self.states)
