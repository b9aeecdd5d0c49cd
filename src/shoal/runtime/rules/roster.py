"""The processes of a job: their state, their last words, and the losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from shoal.runtime.rules.gathering import Gathering, WaitingProcess
from shoal.runtime.rules.meeting_answers import (
    Explanation,
    Loss,
    ProcessesGone,
    ServicesLost,
    SurvivorsMet,
)
from shoal.runtime.rules.messages import Abandoned, Beat
from shoal.runtime.rules.point import AGO, LASTING, STEP, Departure, Member, Point, aged
from shoal.runtime.system.foreign_text import headline_of

To = TypeVar("To", bound=Hashable)

_LAST_AT = "last at"  # a place that a process has left
_MOST_EXPLANATIONS = 8  # kept, of differences that processes have found
_MOST_EXPLAINED = 32 << 10  # characters of one


class Roster(Generic[To]):
    """One record for each process, and the losses."""

    def __init__(self, hosts: Sequence[str], now: float, pids: Sequence[int]) -> None:
        pids = pids or [0] * len(hosts)
        self._records: Mapping[int, Record[To]] = {
            p: Record(p, host, pids[p], now) for p, host in enumerate(hosts)
        }
        self._losses = Losses(self.departure)
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

    def departure(self, process: int) -> Departure:
        """Return how a process has left the job."""
        return self._records[process].departure

    def last_call(self, now: float, process: int) -> dict[str, Any]:
        """Return the step and the last call of a process."""
        return self._records[process].last_call(now)

    def states(self, now: float) -> list[dict[str, Any]]:
        """Return the state of each process as facts, for the report of a failure."""
        return [record.facts(now) for record in self._records.values()]

    def record_step(self, process: int, step: int | None) -> None:
        """Record the step of a process; None: in none yet."""
        if step is not None:
            self._records[process].step = step

    def record_activity(
        self, now: float, process: int, words: str, *, is_ending: bool = False
    ) -> None:
        """Record a process's activity; `is_ending`: see `Member`."""
        if process not in self._gone:
            self._records[process].note(now, words)
            self._records[process].is_ending = is_ending

    def beat(self, now: float, process: int, beat: Beat) -> None:
        """Record a heartbeat."""
        if process not in self._gone:
            self._records[process].take_beat(now, beat)

    @property
    def gone(self) -> Mapping[int, str]:
        """The state of each process that is gone: "left", "failed" or "lost"."""
        return self._gone

    def set_idle_text(self, process: int, words: str) -> None:
        """Record that a process makes no progress: for how long, and where; empty: it does."""
        self._records[process].idle = words

    def mark_silent(self, process: int, silent_since: float | None) -> None:
        """Record that a process is silent since then; None: no longer."""
        if process not in self._gone:
            record = self._records[process]
            record.silent_since = silent_since
            record.state = "here" if silent_since is None else "silent"

    def stop(self, now: float, of: Iterable[int], stopped: Collection[int]) -> None:
        """Record a host agent's report: which of these processes are stopped."""
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

    `departure` returns how a process has left the job.
    """

    def __init__(self, departure: Callable[[int], Departure]) -> None:
        self.states: dict[int, str] = {}  # of processes: "left" | "failed" | "lost"
        self.services: list[tuple[str, str]] = []  # name, words
        self._departure = departure

    def affect(self, members: Collection[int]) -> bool:
        """Return whether any process was lost or failed, or one of `members` is gone in any way."""
        lost = any(state != "left" or p in members for p, state in self.states.items())
        return lost or bool(self.services)

    def survivors(self, alive: Collection[int], members: Collection[int]) -> SurvivorsMet:
        """Return the answer to the living: each of `members` that is gone, and the services."""
        gone = [(p, state) for p, state in self.states.items() if p in members]
        rows = [(p, state, self._departure(p).words) for p, state in gone]
        return SurvivorsMet([*alive], rows, list(self.services))

    def gone_answer(self, members: Collection[int], cause: int | None = None) -> ProcessesGone:
        """Return the answer about those of `members` that are gone: the lost ones, or the others.

        The cause comes first, with its whole report; the rest with their headlines.

        Args:
          members: at least one of them is gone, unless `cause` is given.
          cause: a process that is gone; None: the first that did not leave in order, or the first.
        """
        gone = [p for p in self.states if p in members]
        if cause is None:
            cause = next((p for p in gone if self.states[p] != "left"), gone[0])
        is_lost = self.states[cause] == "lost"
        pairs = [(cause, self._departure(cause))]
        for process in gone:
            is_alike = (self.states[process] == "lost") is is_lost
            if process != cause and is_alike:
                departure = self._departure(process)
                pairs.append((process, departure._replace(words=headline_of(departure.words))))
        return ProcessesGone("lost" if is_lost else "failed", pairs)

    def service_answer(self) -> ServicesLost:
        """Return the answer about lost services."""
        return ServicesLost(list(self.services))

    def any_answer(self, members: Collection[int]) -> Loss:
        """Return the answer about any loss; about `members` first."""
        if not self.states:
            return self.service_answer()
        return self.gone_answer(members if any(p in members for p in self.states) else self.states)


# ---- A meeting's record of one process, and its description in messages.


class Activity(NamedTuple):
    """What a process did last."""

    words: str
    point: Point | None  # completes the words, on demand
    when: float
    has_met: bool = False  # the others there, and gone on


class LastPlace(NamedTuple):
    """What a process did last, and where: the newer one of arrivals and beats."""

    words: str
    place: str
    since: float
    has_met: bool  # it has gone on from there


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
        "departure",
        "end",
        "gone_at",
        "host",
        "idle",
        "index",
        "is_ending",
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
        self.stopped_since: float | None = None  # since the host agent reported it as stopped
        self.departure = Departure("", "here")  # once it has left the job
        self.is_ending = False  # see `Member`
        self.end = ""  # what it has recorded of its failure, as JSON
        self.gone_at: Mapping[str, Any] = {}  # where it was then
        self.met_after = 0  # number of losses when it last met survivors
        self.acknowledged = 0  # number of lost services that it has acknowledged
        self.blocked: dict[str, Gathering[To]] = {}  # the gathering at which it waits, by lane
        self.arrivals: dict[str, int] = {}  # number of arrivals, by lane
        self.abandoned: dict[str, int] = {}  # number of abandoned calls, by lane

    def note(self, now: float, words: str, point: Point | None = None) -> None:
        """Record words, and the point that they are about."""
        self.activity = Activity(words, point, now)

    def note_met(self, now: float, point: Point) -> None:
        """Record that it has gone on from a point."""
        self.activity = Activity(_LAST_AT, point, now, has_met=True)

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
        """Record a heartbeat."""
        self.beat, self.beat_came = beat, now - beat.since_s
        self.step = self.step if beat.step is None else beat.step

    def stop(self, now: float, *, is_stopped: bool) -> None:
        """Record that a signal has stopped it, or that it was continued."""
        if not is_stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now

    def leave(self, now: float, departure: Departure, end: str = "") -> None:
        """Record that it is gone; `end`: what it has recorded of its failure, as JSON."""
        text = departure.words
        if "\n" not in text.strip():  # else a traceback says where
            departure = departure._replace(words=text + self._last_seen(now))
        self.departure, self.gone_at, self.end = departure, self.last_call(now), end
        self.state, self.silent_since, self.stopped_since = departure.state, None, None
        self.note(now, text)

    def last_call(self, now: float) -> dict[str, Any]:
        """Return its step and its last call, for the launcher's report."""
        waits = self._waits()
        last = self._last()
        since = waits[0].since if waits else last.since
        point = self._point()
        return {
            "step": self.step,
            "call": point.call,
            "name": point.name,
            "site": point.site,
            "age_s": round(max(0.0, now - since), 3),
            "waits": bool(waits),
            "met": last.has_met and point.call != STEP and not (waits or self._still(now)),
        }

    def facts(self, now: float) -> dict[str, Any]:
        """Return its state as facts; a failure as it has recorded it."""
        if self.state not in ("left", "lost", "failed"):
            return {"state": self.state, "at": self.last_call(now)}
        facts = {**self.departure._asdict(), "words": headline_of(self.departure.words)}
        facts |= {"at": self.gone_at, "since_s": max(0.0, now - self.activity.when)}
        return {**facts, "end": self.end} if self.end else facts

    def last_words(self, now: float) -> str:
        """Return its last words: where it waits, its last call, or why it is gone."""
        if self.state in ("left", "lost", "failed"):
            text, when = self.activity.words, self.activity.when
            return aged(text.rstrip(), AGO, max(0.0, now - when))
        return "; ".join(filter(None, [self._still(now), self._where(now)]))

    def _still(self, now: float) -> str:
        if self.stopped_since is not None:
            return f"stopped (SIGSTOP?) for {now - self.stopped_since:.1f} s"
        if self.silent_since is not None:
            return f"silent for {now - self.silent_since:.1f} s"
        return self.idle

    def _last_seen(self, now: float) -> str:
        waits = self._waits()
        _, place, since, _ = self._last()
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
            aged(f"waits at {wait.point.place}", LASTING, now - wait.since)
            for wait in self._waits()
        )
        if waits:
            return step + waits
        last = self._last()
        text = f"{last.words} {last.place}".strip()
        return aged(f"{step}{text}", AGO, max(0.0, now - last.since))

    def member(self, now: float) -> Member:
        """Return its state."""
        waits = self._waits()
        _, place, since, _ = self._last()
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
            how=self.departure.how,
            follows=self.departure.follows,
            lane=waits[0].point.chosen_lane if waits else "",
            is_ending=self.is_ending,
            call=self._point().call,
            still="" if self.state in ("left", "lost", "failed") else self._still(now),
        )

    def _waits(self) -> list[WaitingProcess[To]]:
        """Return its waits, the main lane first."""
        lanes = sorted(self.blocked, key=lambda lane: lane != "main")
        return [self.blocked[lane].arrived[self.index] for lane in lanes]

    def _point(self) -> Point:
        """Return where it waits, or its last call."""
        waits, place = self._waits(), self._last().place
        point = self.activity.point
        if waits:
            return waits[0].point
        if self.beat is not None and place == self.beat.place and any(self.beat.at):
            call, name, site = self.beat.at
            return Point(name, operation=call, site=site)
        if point is None or place != point.place:
            return Point("", site=place)
        return point

    def _last(self) -> LastPlace:
        """Return its last place.

        A beat after an arrival may report the same arrival: it then names the same place.
        """
        text, point, when, has_met = self.activity
        beat, place = self.beat, point.place if point else ""
        if beat and beat.place and beat.place != place and self.beat_came > when:
            return LastPlace(_LAST_AT, beat.place, self.beat_came, has_met=True)
        return LastPlace(text, place, when, has_met)
