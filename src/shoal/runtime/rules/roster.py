"""The processes of a job: their state, their last words, and the losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from shoal.runtime.rules.meeting_answers import (
    Explanation,
    Loss,
    ProcessesGone,
    ServicesLost,
    SurvivorsMet,
)
from shoal.runtime.rules.member_record import Record
from shoal.runtime.rules.messages import Beat
from shoal.runtime.rules.point import Member
from shoal.runtime.system.failure_words import headline_of

To = TypeVar("To", bound=Hashable)

_MOST_EXPLANATIONS = 8  # kept, of differences that processes have found
_MOST_EXPLAINED = 32 << 10  # characters of one


class Roster(Generic[To]):
    """One record for each process, and the losses."""

    def __init__(self, hosts: Sequence[str], now: float, pids: Sequence[int]) -> None:
        pids = pids or [0] * len(hosts)
        self._records: Mapping[int, Record[To]] = {
            p: Record(p, host, pids[p], now) for p, host in enumerate(hosts)
        }
        self._losses = Losses(self.departure_reason)
        self._gone = self._losses.states
        self._num_losses = 0  # of processes and services
        self._last_loss = 0  # `_num_losses` at the last that was not a process leaving in order
        self._explanations: dict[str, str] = {}  # oldest first

    def has_gone(self, process: int) -> bool:
        """Return whether this process has left, failed or been lost."""
        return process in self._gone

    def end_lane(self, process: int, lane: str) -> None:
        """Drop the counts of a lane in which a process makes no more calls."""
        self._records[process].arrivals.pop(lane, None)
        self._records[process].abandoned.pop(lane, None)

    def abandoned(self, process: int, lane: str) -> int:
        """Return the number of calls that this process has abandoned in a lane."""
        return self._records[process].abandoned.get(lane, 0)

    def explain(self, key: str, text: str) -> None:
        """Keep what the processes that found a difference tell those that arrive later."""
        self._explanations.pop(key, None)
        self._explanations[key] = text if len(text) <= _MOST_EXPLAINED else ""
        while len(self._explanations) > _MOST_EXPLANATIONS:
            del self._explanations[next(iter(self._explanations))]

    def explanation(self, key: str, process: int) -> Explanation:
        """Return what this process tells about a difference, if it has not done so and is gone."""
        return Explanation(self._explanations.get(key, "" if process in self._gone else None))

    def departure_reason(self, process: int) -> str:
        """Return why a process is gone, and its last place."""
        return self._records[process].departure_reason

    def whereabouts(self, now: float, process: int) -> dict[str, Any]:
        """Return the step and the last call of a process."""
        return self._records[process].whereabouts(now)

    def record_step(self, process: int, step: int | None) -> None:
        """Record the step of a process; None: in none yet."""
        if step is not None:
            self._records[process].step = step

    def record_activity(self, now: float, process: int, words: str) -> None:
        """Record a process's activity."""
        if process not in self._gone:
            self._records[process].note(now, words)

    def beat(self, now: float, process: int, beat: Beat) -> None:
        """Record a sign of life."""
        if process not in self._gone:
            self._records[process].take_beat(now, beat)

    @property
    def gone(self) -> Mapping[int, str]:
        """The state of each process that is gone: "left", "failed" or "lost"."""
        return self._gone

    def mark_idle(self, process: int, words: str) -> None:
        """Record that a process makes no progress: for how long, and where; empty: it does."""
        self._records[process].idle = words

    def mark_silent(self, process: int, silent_since: float | None) -> None:
        """Record that a process is silent since then; None: no longer."""
        if process not in self._gone:
            record = self._records[process]
            record.silent_since = silent_since
            record.state = "here" if silent_since is None else "silent"

    def stop(self, now: float, of: Iterable[int], stopped: Collection[int]) -> None:
        """Record a keeper's report: which of these processes are stopped."""
        for process in set(of) - self._gone.keys():
            self._records[process].stop(now, is_stopped=process in stopped)

    def members(self, now: float) -> tuple[Member, ...]:
        """Return the state of each process, in order."""
        return tuple(record.member(now) for record in self._records.values())

    def owes_losses(self, processes: Iterable[int]) -> bool:
        """Return whether one of these has not met the survivors of a loss yet."""
        return any(self._records[process].met_after < self._last_loss for process in processes)

    def _has_lost(self, process: int) -> bool:
        """Return whether there was a loss since this process last met survivors."""
        return self._num_losses > self._records[process].met_after


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
