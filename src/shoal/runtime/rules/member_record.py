"""A meeting's record of one process, and its description in messages."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.runtime.rules.gathering import Gathering, Reply, WaitingProcess, Waits
from shoal.runtime.rules.meeting_answers import Answer
from shoal.runtime.rules.messages import Abandoned, Beat
from shoal.runtime.rules.point import Member, Point

To = TypeVar("To", bound=Hashable)


class Activity(NamedTuple):
    """What a process did last."""

    words: str
    point: Point | None  # completes the words, on demand
    when: float


class Record(Generic[To]):
    """One process: its last words, its last beat, and where it waits."""

    __slots__ = (
        "abandoned",
        "acknowledged",
        "activity",
        "arrivals",
        "beat",
        "beat_came",
        "blocked",
        "departure_reason",
        "host",
        "idle",
        "index",
        "met_after",
        "pid",
        "silent_since",
        "state",
        "step",
        "stopped_since",
    )

    def __init__(self, index: int, host: str, pid: int, now: float) -> None:
        self.index = index
        self.host = host
        self.pid = pid
        self.state = "here"
        self.activity = Activity("joined", None, now)
        self.step: int | None = None
        self.beat: Beat | None = None
        self.beat_came = now  # when it reached the place in its last beat
        self.silent_since: float | None = None
        self.idle = ""  # for how long it has made no progress, and where; empty: it makes some
        self.stopped_since: float | None = None  # since the keeper reported it as stopped
        self.departure_reason = ""  # why it is gone, and its last place
        self.met_after = 0  # number of losses when it last met survivors
        self.acknowledged = 0  # number of lost services that it has acknowledged
        self.blocked: dict[str, Gathering[To]] = {}  # the gathering at which it waits, by lane
        self.arrivals: dict[str, int] = {}  # number of arrivals, by lane
        self.abandoned: dict[str, int] = {}  # number of abandoned calls, by lane

    def note(self, now: float, words: str, point: Point | None = None) -> None:
        """Record words, and the point that they are about."""
        self.activity = Activity(words, point, now)

    def count_arrival(self, point: Point, step: int | None) -> None:
        """Record an arrival at a point, and its step if given."""
        arrivals, lane = self.arrivals, point.lane
        arrivals[lane] = arrivals.get(lane, 0) + 1
        if step is not None:
            self.step = step

    def abandon(self, now: float, left: Abandoned) -> Point:
        """Record that it left a call; return the next point of that call.

        If the last arrival that it sent has not been taken, that one is not a part of the call.
        """
        lane = left.point.lane
        missed = left.sent - self.arrivals.get(lane, 0)
        self.arrivals[lane], self.abandoned[lane] = left.sent, left.number
        self.note(now, f"left a call ({left.words}), last at", left.point)
        return left.point._replace(follows=left.arrivals > missed)

    def take_beat(self, now: float, beat: Beat) -> None:
        """Record a sign of life."""
        self.beat, self.beat_came = beat, now - beat.since_s
        self.step = self.step if beat.step is None else beat.step

    def stop(self, now: float, *, is_stopped: bool) -> None:
        """Record that a signal has stopped it, or that it was continued."""
        if not is_stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now

    def leave(self, now: float, state: str, words: str) -> None:
        """Record that it is gone."""
        is_trace = "\n" in words.strip()  # a traceback says where
        self.departure_reason = words if is_trace else words + self._last_seen(now)
        self.state, self.silent_since, self.stopped_since = state, None, None
        self.note(now, words)

    def whereabouts(self, now: float) -> dict[str, Any]:
        """Return its step and its last call, for the launcher's report."""
        waits = self._waits()
        _, place, since = self._last()
        point = self.activity.point
        if waits:
            point, since = waits[0].point, waits[0].since
        elif point is None or place != point.place:
            point = Point("", site=place)
        return {
            "step": self.step,
            "call": point.call,
            "name": point.name,
            "site": point.site,
            "age_s": round(max(0.0, now - since), 3),
            "waits": bool(waits),
        }

    def last_words(self, now: float) -> str:
        """Return its last words: where it waits, its last call, or why it is gone."""
        if self.state in ("left", "lost", "failed"):
            words, _, when = self.activity
            return f"{words.rstrip()}, {now - when:.1f} s ago"
        return self._still(now) + self._where(now)

    def _still(self, now: float) -> str:
        if self.stopped_since is not None:
            return f"stopped (SIGSTOP?) for {now - self.stopped_since:.1f} s; "
        if self.silent_since is not None:
            return f"silent for {now - self.silent_since:.1f} s; "
        return f"{self.idle}; " if self.idle else ""

    def _last_seen(self, now: float) -> str:
        waits = self._waits()
        _, place, since = self._last()
        if waits:
            text = f"waited at {waits[0].point.place} for {now - waits[0].since:.1f} s"
        elif place:
            text = f"last at {place}, {now - since:.1f} s before"
        else:
            return ""
        return "; " + ("" if self.step is None else f"step {self.step}, ") + text

    def _where(self, now: float) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        waits = "; ".join(
            f"waits at {wait.point.place} for {now - wait.since:.1f} s" for wait in self._waits()
        )
        if waits:
            return step + waits
        words, place, since = self._last()
        text = f"{words} {place}".strip()
        if text.startswith(step.removesuffix(", ")):
            step = ""  # they are words of its own about the step
        return f"{step}{text}, {now - since:.1f} s ago"

    def member(self, now: float) -> Member:
        """Return its state."""
        waits = self._waits()
        _, place, since = self._last()
        if waits:
            place, since = waits[0].point.place, waits[0].since
        if self.state in ("left", "lost", "failed"):
            since = self.activity.when
        return Member(
            self.index,
            self.host,
            self.state if self.stopped_since is None else "stopped",
            self.last_words(now),
            step=self.step,
            place=place,
            since_s=max(0.0, now - since),
            is_waiting=bool(waits),
            step_s=self.beat.step_s if self.beat else None,
            memory_bytes=self.beat.memory_bytes if self.beat else 0,
            pid=self.pid,
            wait_s=self.beat.wait_s if self.beat else 0.0,
        )

    def _waits(self) -> list[WaitingProcess[To]]:
        """Return its waits, the main lane first."""
        lanes = sorted(self.blocked, key=lambda lane: lane != "main")
        return [self.blocked[lane].arrived[self.index] for lane in lanes]

    def _last(self) -> tuple[str, str, float]:
        """Return its last action, place and time: the newer one of arrivals and beats.

        A beat after an arrival may report the same arrival: it then names the same place.
        """
        words, point, when = self.activity
        beat, place = self.beat, point.place if point else ""
        if beat and beat.place and beat.place != place and self.beat_came > when:
            return "last at", beat.place, self.beat_came
        return words, place, when


def end_waits(
    records: Mapping[int, Record[To]],
    now: float,
    gathering: Gathering[To],
    arrived: Waits[To],
    answer: Answer,
    gone: Container[int],
) -> list[Reply[To]]:
    """Record that the waits at a gathering have ended; return one reply to each destination:
    processes that arrived together share theirs."""
    lane = gathering.line.lane
    replies: list[Reply[To]] = []
    last, to, activity = None, None, Activity("", None, now)
    for process, wait in arrived.items():
        if wait is not last:  # those that arrived together may also share one wait
            last, activity = wait, Activity("last at", wait.point, now)
            if wait.to is not to:
                to = wait.to
                replies.append(Reply(wait.to, wait.ticket, answer))
        record = records[process]
        if record.blocked.get(lane) is gathering:
            del record.blocked[lane]
        if process not in gone:
            record.activity = activity
    return replies
