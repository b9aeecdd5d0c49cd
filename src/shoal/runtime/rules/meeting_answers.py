"""The answers of the meeting, one type each, and their form on the wire.

All members that wait at one gathering get one answer object, hence all or none. On the wire an
answer is its `kind` and, as JSON, its `facts`; payloads have a binary form of their own. `kind` and
`is_success` are those of the type; they are fields so that answers of two kinds are never equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from shoal.runtime.rules.point import Departure, Fingerprint, Member, Point
from shoal.runtime.rules.programs import Differences
from shoal.runtime.rules.record_marks import Found, RecordVersion, RecordVersions
from shoal.runtime.rules.requested_saves import SaveState
from shoal.runtime.wire.frames import FrameError

Facts: TypeAlias = dict[str, Any]


class AllMet(NamedTuple):
    """All members arrived."""

    payloads: Mapping[int, bytes]

    kind: Literal["ok"] = "ok"
    is_success: Literal[True] = True


class SurvivorsMet(NamedTuple):
    """All living members arrived."""

    alive: Sequence[int] = ()
    gone: Sequence[tuple[int, str, str]] = ()  # process, state, words
    services: Sequence[tuple[str, str]] = ()  # name and words of each lost service

    kind: Literal["live"] = "live"
    is_success: Literal[True] = True

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        rows = {"gone": _rows(self.gone), "services": _rows(self.services)}
        return {"alive": [*self.alive], **rows}


MOST_TEXT = 1000  # characters of each text of a side, which is sent to all members


class MeetingSide(NamedTuple):
    """The processes that arrived with one point."""

    name: str
    operation: str
    site: str
    processes: Sequence[int]
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(cls, point: Point, processes: Sequence[int], name: str = "") -> MeetingSide:
        """Return the side of processes that arrived with this point; `name`: an excerpt of its
        own."""
        name, operation, site = (
            text[:MOST_TEXT] for text in (name or point.name, point.operation, point.site)
        )
        fingerprint = point.fingerprint and point.fingerprint.cut(MOST_TEXT)
        return cls(name, operation, site, processes, fingerprint)

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> MeetingSide:
        """Undo its form in JSON."""
        name, operation, site, processes, fingerprint = row
        return cls(name, operation, site, processes, fingerprint=Fingerprint.of(fingerprint))

    @property
    def compared_site(self) -> str:
        """Its call site, if that is compared."""
        return "" if self.fingerprint is None else self.fingerprint.site


class FailingSince(NamedTuple):
    """The first of the calls of a group in a lane that have failed in a row."""

    call: int  # its number, from 1
    place: str

    @classmethod
    def at(cls, call: int, point: Point) -> FailingSince:
        """Return the call with this number, and its place."""
        return cls(call, point.place[:MOST_TEXT])


class SidesDiffer(NamedTuple):
    """Processes arrived with different points."""

    sides: Sequence[MeetingSide]
    since: FailingSince | None = None  # if calls before it have failed, too

    kind: Literal["diverged"] = "diverged"
    is_success: Literal[False] = False

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"sides": _rows(self.sides), **_since(self.since)}


class RecordsApart(NamedTuple):
    """Processes differ in earlier calls, which sent nothing."""

    found: RecordVersions

    kind: Literal["diverged"] = "diverged"
    is_success: Literal[False] = False

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        lane = {} if self.found.lane is None else {"lane": self.found.lane}
        return {"trails": _rows(self.found.versions), **lane}


class CycleSide(NamedTuple):
    """The processes that wait at one gathering of a cycle."""

    side: MeetingSide
    group: str  # see `group_text`
    awaited: Sequence[int]


def group_text(group: Iterable[int] | None, num_processes: int) -> str:
    """Return a group as it is given to a call.

    >>> group_text([1, 0], 3), group_text(None, 3)
    ('processes=[0, 1]', 'all 3 processes')
    """
    if group is None:
        return f"all {num_processes} processes"
    return f"processes={sorted(group)}"[:MOST_TEXT]


class WaitCycle(NamedTuple):
    """Processes wait for each other, each at another point."""

    sides: Sequence[CycleSide]

    kind: Literal["diverged"] = "diverged"
    is_success: Literal[False] = False

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"circle": _rows(self.sides)}


class StillMissing(NamedTuple):
    """The members missing where a process waits, which it may query meanwhile."""

    missing: Sequence[int]
    words: Sequence[tuple[int, str]]  # of the first of them: process, its last words
    at: Sequence[tuple[int, Facts]] = ()  # of these: see `Record.last_call`

    kind: Literal["waiting"] = "waiting"

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        last_calls = {"where": _rows(self.at)} if self.at else {}
        return {"missing": [*self.missing], "words": _rows(self.words), **last_calls}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> StillMissing:
        """Undo `facts`."""
        last_calls = _pairs(facts["where"]) if "where" in facts else ()
        return cls(facts["missing"], _pairs(facts["words"]), last_calls)


class TooLate(NamedTuple):
    """The earliest deadline of those that waited has passed."""

    waiting: StillMissing
    by: int  # the process with that deadline
    timeout_s: float
    at: str = ""  # where the members waited that had arrived
    stacks: Sequence[tuple[int, str]] = ()  # process and text of each late member
    since: FailingSince | None = None  # as of `SidesDiffer`

    kind: Literal["deadline"] = "deadline"
    is_success: Literal[False] = False

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        limit = {"by": self.by, "timeout_s": self.timeout_s, "at": self.at}
        stacks = {"stacks": _rows(self.stacks)}
        return {**self.waiting.facts, **limit, **stacks, **_since(self.since)}


class ProcessesGone(NamedTuple):
    """Required processes are gone; the cause comes first."""

    kind: str  # "lost" | "failed"
    gone: Sequence[tuple[int, Departure]]

    is_success: Literal[False] = False

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"gone": _rows(self.gone)}


class ServicesLost(NamedTuple):
    """A service that all processes need is lost."""

    services: Sequence[tuple[str, str]]  # name, words

    kind: Literal["lost"] = "lost"
    is_success: Literal[False] = False

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"gone": [], "services": _rows(self.services)}


class CallLeft(NamedTuple):
    """A process has left the call."""

    process: int
    words: str

    kind: Literal["abandoned"] = "abandoned"
    is_success: Literal[False] = False

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"process": self.process, "words": self.words}


class MembersKnown(NamedTuple):
    """The state of every process and of the services."""

    members: Sequence[Member]
    services: Sequence[Sequence[str]]
    programs: Differences = Differences()

    kind: Literal["members"] = "members"

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"members": self.members, "services": self.services, "programs": self.programs}


class StacksHeard(NamedTuple):
    """The stacks of the processes that sent them in time."""

    stacks: Mapping[int, str]

    kind: Literal["stacks"] = "stacks"

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"stacks": {**self.stacks}}


class StepsAwaited(NamedTuple):
    """The processes that have not reported their step since a notice was opened."""

    processes: Sequence[int]

    kind: Literal["awaited"] = "awaited"

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"awaited": self.processes}


class EndsCompared(NamedTuple):
    """The differences that are known when a program has ended, or in programs that have."""

    differences: Sequence[Found]

    kind: Literal["ended"] = "ended"

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"differences": _rows(self.differences)}


class Explanation(NamedTuple):
    """What the processes that found a difference have learned of it."""

    text: str | None  # None: they look for it; empty: they will not tell

    kind: Literal["explanation"] = "explanation"

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"text": self.text}


class ReportAsked(NamedTuple):
    """Whether the process that asked is to report the failure of its job; if so, the states of all
    processes, in order."""

    reports: bool
    states: Sequence[Facts]  # see `Roster.states`
    programs: Differences = Differences()

    kind: Literal["report"] = "report"

    @property
    def facts(self) -> Facts:
        """Return the facts as sent."""
        return {"reports": self.reports, "states": self.states, "programs": self.programs}


Success: TypeAlias = AllMet | SurvivorsMet
Loss: TypeAlias = ProcessesGone | ServicesLost
Divergence: TypeAlias = SidesDiffer | RecordsApart | WaitCycle
Failure: TypeAlias = Divergence | TooLate | Loss | CallLeft
Outcome: TypeAlias = Success | Failure  # of a gathering
Known: TypeAlias = (
    MembersKnown | StacksHeard | StepsAwaited | EndsCompared | Explanation | ReportAsked | SaveState
)
Answer: TypeAlias = Outcome | StillMissing | Known


def outcome_of(kind: str, facts: Mapping[str, Any]) -> SurvivorsMet | Failure:
    """Return the outcome with this kind and these facts.

    Raises:
      FrameError: the kind is unknown.
    """
    match kind:
        case "live":
            rows = [(process, state, reason) for process, state, reason in facts["gone"]]
            return SurvivorsMet(facts["alive"], rows, _pairs(facts["services"]))
        case "diverged":
            return _divergence_of(facts)
        case "deadline":
            by, timeout_s, place = facts["by"], facts["timeout_s"], facts["at"]
            waiting, stacks = StillMissing.of(facts), _pairs(facts["stacks"])
            return TooLate(waiting, by, timeout_s, place, stacks, since=_since_of(facts))
        case "abandoned":
            return CallLeft(facts["process"], facts["words"])
        case "lost" | "failed":
            if facts["gone"]:
                gone = [(process, Departure(*row)) for process, row in facts["gone"]]
                return ProcessesGone(kind, gone)
            return ServicesLost(_pairs(facts["services"]))
    raise FrameError(f"unknown answer {kind[:40]!r}")


def _divergence_of(facts: Mapping[str, Any]) -> Divergence:
    if "trails" in facts:
        versions = [RecordVersion(*row) for row in facts["trails"]]
        return RecordsApart(RecordVersions(versions, facts.get("lane")))
    if "circle" in facts:
        rows = facts["circle"]
        return WaitCycle([CycleSide(MeetingSide.of_row(side), *rest) for side, *rest in rows])
    return SidesDiffer([MeetingSide.of_row(row) for row in facts["sides"]], _since_of(facts))


def _since(since: FailingSince | None) -> Facts:
    return {} if since is None else {"since": [*since]}


def _since_of(facts: Mapping[str, Any]) -> FailingSince | None:
    return FailingSince(*facts["since"]) if "since" in facts else None


def _rows(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    return [[*row] for row in rows]


def _pairs(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, Any]]:
    return [(first, second) for first, second in rows]
