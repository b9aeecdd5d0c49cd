"""The processes of a job: who is here, what each said last, and who is gone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from shoal.runtime.rules.losses import Losses
from shoal.runtime.rules.member_record import Record
from shoal.runtime.rules.messages import Beat
from shoal.runtime.rules.point import Member

To = TypeVar("To", bound=Hashable)


class Roster(Generic[To]):
    """One record for each process, and the losses."""

    def __init__(self, hosts: Sequence[str], now: float, pids: Sequence[int]) -> None:
        pids = pids or [0] * len(hosts)
        self._records: list[Record[To]] = [
            Record(p, host, pids[p], now) for p, host in enumerate(hosts)
        ]
        self._losses = Losses(self.epitaph)
        self._gone = self._losses.states

    def has_gone(self, process: int) -> bool:
        """Has this process left, failed or been lost?"""
        return process in self._gone

    def end_lane(self, process: int, lane: str) -> None:
        """A process makes no more calls in a lane: nothing is to be counted there."""
        self._records[process].arrivals.pop(lane, None)
        self._records[process].abandoned.pop(lane, None)

    def abandoned(self, process: int, lane: str) -> int:
        """Return how many calls this process has abandoned in a lane."""
        return self._records[process].abandoned.get(lane, 0)

    def epitaph(self, process: int) -> str:
        """Return why it is gone, and where it was last."""
        return self._records[process].epitaph

    def say(self, now: float, process: int, words: str) -> None:
        """Remember what a process is doing."""
        if process not in self._gone:
            self._records[process].note(now, words)

    def beat(self, now: float, process: int, beat: Beat) -> None:
        """Remember what a process says of itself with a sign of life."""
        if process not in self._gone:
            self._records[process].hear(now, beat)

    def hush(self, process: int, silent_since: float | None) -> None:
        """A process has given no sign of life since then; None: it does again."""
        if process not in self._gone:
            record = self._records[process]
            record.silent_since = silent_since
            record.state = "here" if silent_since is None else "silent"

    def stop(self, now: float, of: Iterable[int], stopped: Collection[int]) -> None:
        """Their host's keeper says which of these are stopped."""
        for process in set(of) - self._gone.keys():
            self._records[process].stop(now, is_stopped=process in stopped)

    def members(self, now: float) -> tuple[Member, ...]:
        """Return what is known of each process, in order."""
        return tuple(record.member(now) for record in self._records)

    def _lose(self) -> None:
        """Something that others may need is gone: it is news until survivors have met."""
        for record in self._records:
            record.has_lost = True
