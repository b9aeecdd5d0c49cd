"""What a meeting knows of one process, and how that is said."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from shoal.runtime.coordinator import Member, Point
from shoal.runtime.gathering import Gathering, Wait, place_text
from shoal.runtime.messages import Beat

__all__ = ["Record"]

To = TypeVar("To", bound=Hashable)

_SAME_S = 0.1  # a beat tells of an arrival again; it comes later by less than this


class Record(Generic[To]):
    """One process: its last words, its last beat, and where it waits."""

    __slots__ = (
        "acknowledged",
        "beat",
        "beat_came",
        "blocked",
        "host",
        "index",
        "pid",
        "point",
        "silent_since",
        "state",
        "step",
        "when",
        "words",
    )

    def __init__(self, index: int, host: str, pid: int, now: float) -> None:
        self.index = index
        self.host = host
        self.pid = pid
        self.state = "here"
        self.words = "joined"
        self.point: Point | None = None  # completes the words: put together only when asked for
        self.when = now
        self.step: int | None = None
        self.beat: Beat | None = None
        self.beat_came = now  # when it came to the place that its beat tells
        self.silent_since: float | None = None
        self.acknowledged = 0  # so many lost services are none of its errors any more
        self.blocked: dict[str, Gathering[To]] = {}  # where it waits, by lane

    def note(self, now: float, words: str, point: Point | None = None) -> None:
        """Remember words, and the point that they are about."""
        self.words, self.point, self.when = words, point, now

    def hear(self, now: float, beat: Beat) -> None:
        """Remember what a beat says."""
        self.beat, self.beat_came = beat, now - beat.since_s
        self.step = self.step if beat.step is None else beat.step

    def said(self, now: float) -> str:
        """Return its last words: where it waits or what it last did; or why it is gone."""
        if self.state in ("left", "lost", "failed"):
            return f"{self.words.rstrip()}, {now - self.when:.1f} s ago"
        silent = (
            "" if self.silent_since is None else f"silent for {now - self.silent_since:.1f} s; "
        )
        step = "" if self.step is None else f"step {self.step}, "
        waits = "; ".join(
            f"waits at {place_text(wait.point)} since {now - wait.since:.1f} s"
            for wait in self._waits()
        )
        if waits:
            return silent + step + waits
        words, place, since = self._last()
        told = f"{words} {place}".strip()
        if told.startswith(step.removesuffix(", ")):
            step = ""  # they are words of its own about the step
        return f"{silent}{step}{told}, {now - since:.1f} s ago"

    def member(self, now: float) -> Member:
        """Return all that is known."""
        waits = self._waits()
        _, place, since = self._last()
        if waits:
            place, since = place_text(waits[0].point), waits[0].since
        if self.state in ("left", "lost", "failed"):
            since = self.when
        return Member(
            self.index,
            self.host,
            self.state,
            self.said(now),
            step=self.step,
            place=place,
            since_s=max(0.0, now - since),
            is_waiting=bool(waits),
            step_s=self.beat.step_s if self.beat else None,
            memory_bytes=self.beat.memory_bytes if self.beat else 0,
            pid=self.pid,
            wait_s=self.beat.wait_s if self.beat else 0.0,
        )

    def _waits(self) -> list[Wait[To]]:
        """Return where it waits, the main line first."""
        lanes = sorted(self.blocked, key=lambda lane: lane != "main")
        return [self.blocked[lane].arrived[self.index] for lane in lanes]

    def _last(self) -> tuple[str, str, float]:
        """Return what it did last, where, and when: the newer one of arrivals and beats."""
        if self.beat and self.beat.place and self.beat_came > self.when + _SAME_S:
            return "last at", self.beat.place, self.beat_came
        return self.words, place_text(self.point) if self.point else "", self.when
