"""Turn answers of the coordinator into exceptions.

The answers are those of `meeting_answers`; both job clients raise through this module, so a
message reads the same over TCP and in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shoal.errors import (
    DeadlineError,
    DivergenceError,
    PeerFailedError,
    ProcessLostError,
    ShoalError,
)
from shoal.runtime.failures.comparison import (
    Kind,
    ShownSide,
    compare_lines,
    divergence_error,
    failed_before,
    headline,
    needs,
    shown_line,
    with_late,
)
from shoal.runtime.failures.exception_text import fate_of
from shoal.runtime.failures.process_text import listed
from shoal.runtime.failures.stack_text import threads_of
from shoal.runtime.rules.first_difference import ENDED, excerpts, first_difference
from shoal.runtime.rules.meeting_answers import (
    CallLeft,
    CycleSide,
    FailingSince,
    Failure,
    MeetingSide,
    ProcessesGone,
    RecordsApart,
    ServicesLost,
    SidesDiffer,
    StillMissing,
    TooLate,
    WaitCycle,
)
from shoal.runtime.rules.point import Departure, Fingerprint, Point
from shoal.runtime.rules.record_marks import RecordVersion
from shoal.runtime.system.foreign_text import one_line, particulars_of

_NAME_HINT = "If these are one call made at several places, pass the same name= in each."
_PATIENCE_HINT = "\nif they are merely slow, raise timeout_s= or SHOAL_TIMEOUT_S"
_MOST_WORDS = 2000  # characters of a reason
_LINES = 8  # processes listed in a message; the attributes hold all


class ThisProcess(NamedTuple):
    """The name of this process in messages, and those of the others."""

    process: int
    hosts: Sequence[str]

    def __str__(self) -> str:
        return f"process {self.process} of {len(self.hosts)} ({self.hosts[self.process]})"

    @property
    def speaker(self) -> str:
        """What its messages begin with."""
        return f"{self}: "

    def name(self, process: int) -> str:
        """Return the name of another process, with its host."""
        return f"process {process} ({self.hosts[process]})"


def speakers(hosts: Sequence[str]) -> list[str]:
    """Return what messages begin with, of each process of the job."""
    return [ThisProcess(process, hosts).speaker for process in range(len(hosts))]


class HiddenDifference(DivergenceError):
    """All make the same call at the same place; the difference is in a long specification of which
    only a digest was sent. `calls` holds what is known of each side; `late` is this process, if it
    arrived after they were found, and one of the side that it is on."""

    late: tuple[int, int] | None = None

    def __init__(
        self, whose: str, where: str, calls: Sequence[ShownSide], failed_since: str
    ) -> None:
        self.whose, self.where, self.calls = whose, where, calls
        self.failed_since = failed_since
        plain = self.explained({})
        super().__init__(str(plain), sides=plain.sides, difference=plain.difference)

    def explained(self, lines: Mapping[int, str]) -> DivergenceError:
        """Return the error with the line of each side's first process, if known."""
        texts = [lines.get(side.processes[0], side.said) for side in self.calls]
        if set(lines) >= {side.processes[0] for side in self.calls}:
            kind, texts = compare_lines(texts, ENDED)
        else:
            kind = Kind()
        call, name = self.calls[0].call, self.calls[0].name
        heading = f"{self.whose}{headline(kind, call, name)}{self.where}"
        advice = needs(call, kind.what)
        rows = [side._replace(said=text) for side, text in zip(self.calls, texts, strict=True)]
        failed_since = self.failed_since
        error = divergence_error(heading, rows, kind=kind, advice=advice, failed_since=failed_since)
        return error if self.late is None else with_late(error, *self.late)


class RecordsDiffer(DivergenceError):
    """The call records of the members differ; the first different call is not known yet.

    `lane` is the lane concerned, if it is not that of the point.
    """

    def __init__(self, versions: Sequence[RecordVersion], lane: str | None = None) -> None:
        super().__init__("processes made different calls")
        self.versions, self.lane = versions, lane


def disagreement(
    heading: str, sides: Iterable[tuple[str, Sequence[int]]], advice: str = ""
) -> DivergenceError:
    """Return the error that shows each side, as text, and its processes."""
    return divergence_error(heading, [ShownSide(who, side) for side, who in sides], advice=advice)


def error_of(answer: Failure, me: ThisProcess, point: Point, waited_s: float) -> ShoalError:
    """Return the exception for an answer that is not a success."""
    what = f"{me}: {point.place} cannot complete"
    match answer:
        case TooLate():
            return _deadline_error(answer, me, point, waited_s)
        case CallLeft(process, words):
            left = f"{me.name(process)} left this call: {words}"
            return PeerFailedError(f"{what}: {left}", failed={process: words})
        case ServicesLost(services):
            return service_error(services, what)
        case ProcessesGone(kind, gone):
            return gone_error(kind, dict(gone), me, what)
        case SidesDiffer(sides, since):
            error = _sides_error(sides, me, point, _failed_since(since))
            is_late = not any(me.process in side.processes for side in sides)
            return _late_error(error, sides, me, point) if is_late else error
        case WaitCycle(sides):
            return _cycle_error(sides, me, point)
        case RecordsApart(found):
            return RecordsDiffer(*found)


def service_error(services: Iterable[Sequence[str]], what: str) -> ProcessLostError:
    """Return the exception about lost services; `what` is the operation that failed."""
    text = "; ".join(f"{name} is lost: {reason}" for name, reason in services)
    return ProcessLostError(f"{what}: {text}")


def gone_error(kind: str, gone: Mapping[int, Departure], me: ThisProcess, what: str) -> ShoalError:
    """Return the exception about "lost" or "failed" processes, the cause first."""
    cause, first = next(iter(gone.items()))
    reasons = {process: departure.words for process, departure in gone.items()}
    others = f" (also gone: {listed(p for p in gone if p != cause)})" if len(gone) > 1 else ""
    if kind == "lost":
        text = f"{me.name(cause)} is lost: {one_line(first.words, _MOST_WORDS)}{others}"
        return ProcessLostError(f"{what}: {text}", lost=reasons, ends=gone)
    text = f"{me.name(cause)} {fate_of(first)}{others}"
    details = indented(particulars_of(first.words))
    return PeerFailedError(f"{what}: {text}", failed=reasons, details=details, ends=gone)


def waiting_line(waiting: StillMissing, me: ThisProcess, point: Point, waited_s: float) -> str:
    """Return the log line of a long wait."""
    text = "; ".join([*_last_words(waiting, me), *filter(None, [_more(waiting)])])
    missing = listed(waiting.missing)
    return f"{me}: {point.place} has waited {waited_s:.0f} s for {missing} [{text}]"


# What other code needs to know of a deadline it takes from the attributes. Of the text, reports
# show the first line alone, without the `{me}: ` that it begins with; docs/messages.md quotes it.
def _deadline_error(late: TooLate, me: ThisProcess, point: Point, waited_s: float) -> DeadlineError:
    waiting, missing = late.waiting, late.waiting.missing
    whose = "its deadline" if late.by == me.process else f"the deadline of process {late.by}"
    if me.process in missing:
        ended = f"the wait at {late.at}, which had ended after {late.timeout_s:g} s"
        summary = f"missed {ended} ({whose})"
        also = [process for process in missing if process != me.process]
        if also:
            summary += f"; {listed(also)} did not arrive in time either"
    else:
        summary = f"waited {waited_s:.1f} s until {whose} ({late.timeout_s:g} s)"
        summary += f"; {listed(missing)} did not arrive in time"
    lines = [f"{me}: {point.place} {summary}"]
    stacks = dict(late.stacks)
    for (process, _), line in zip(waiting.words, _last_words(waiting, me), strict=False):
        lines.append(line)
        threads = threads_of(stacks.get(process, ""))
        frames = 1 if len(missing) > 1 else 3
        lines += [f"  {line}" for line in (threads[0].lines(frames) if threads else ())]
    lines += filter(None, [_more(waiting), failed_before(_failed_since(late.since))])
    return DeadlineError(
        "\n  ".join(lines) + _PATIENCE_HINT,
        name=point.name,
        waited_s=waited_s,
        missing=missing,
        last_words=dict(waiting.words),
        stacks=stacks,
        places=dict(waiting.at),
    )


def _late_error(
    error: DivergenceError, sides: Sequence[MeetingSide], me: ThisProcess, point: Point
) -> DivergenceError:
    """Return the error of a process that arrived after the sides were found."""
    mine = MeetingSide.of(point, [me.process])
    alike = [  # at another line, perhaps
        side for side in sides if side._replace(site=mine.site, processes=mine.processes) == mine
    ]
    if not alike:
        shown = _sides_error([*sides, mine], me, point, "")
        return with_late(error, me.process, me.process, shown)
    like = alike[0].processes[0]
    if isinstance(error, HiddenDifference):
        error.late = me.process, like
    return with_late(error, me.process, like)


def _failed_since(since: FailingSince | None) -> str:
    return "" if since is None else f"call {since.call}, {since.place}"


def _lane(point: Point) -> str:
    return "" if point.lane == "main" else f" (lane {point.lane!r})"


def _cycle_error(sides: Sequence[CycleSide], me: ThisProcess, point: Point) -> DivergenceError:
    calls = _calls([side.side for side in sides])
    if len({(side.side.name, side.side.operation, side.side.compared_site) for side in sides}) == 1:
        return _groups_error(sides, calls, me, point)
    heading = f"{me}: processes wait for each other in a cycle{_lane(point)}"
    rows = [
        call._replace(said=f"wait{'s' * (len(call.processes) == 1)} for {listed(side.awaited)}")
        for call, side in zip(calls, sides, strict=True)
    ]
    return divergence_error(heading, rows, kind=Kind("call"), advice=needs("", "call"))


def _groups_error(
    sides: Sequence[CycleSide], calls: Sequence[ShownSide], me: ThisProcess, point: Point
) -> DivergenceError:
    """Return the error of processes that gave one call different groups."""
    rows = [call._replace(said=side.group) for call, side in zip(calls, sides, strict=True)]
    return _compared(Kind("group"), rows, me, point)


def _compared(
    kind: Kind,
    calls: Sequence[ShownSide],
    me: ThisProcess,
    point: Point,
    *,
    advice: str = "",
    failed_since: str = "",
) -> DivergenceError:
    """Return the error about calls: made instead of each other, or one that was given this."""
    call, name = calls[0].call, calls[0].name
    return divergence_error(
        f"{me}: {headline(kind, call, name)}{_lane(point)}",
        calls,
        kind=kind,
        advice=advice or needs(call, kind.what),
        failed_since=failed_since,
    )


def _sides_error(
    sides: Sequence[MeetingSide], me: ThisProcess, point: Point, failed_since: str
) -> DivergenceError:
    """Show only the first difference: operation or name, else the place, else the first line."""
    sides = sorted(sides, key=lambda side: [*side.processes])
    calls = _calls(sides)
    known = [side.fingerprint for side in sides if side.fingerprint is not None]
    same_call = len({(side.operation, side.name) for side in sides}) == 1
    if len(known) < len(sides) or not same_call:
        one_place = len({(side.site, call.call) for side, call in zip(sides, calls, strict=True)})
        if one_place == 1 and calls[0].call and len({call.name for call in calls}) > 1:
            named = [
                call._replace(said=repr(call.name) if call.name else "(no name)", name="")
                for call in calls
            ]
            return _compared(Kind("name"), named, me, point, failed_since=failed_since)
        return _compared(Kind("call"), calls, me, point, failed_since=failed_since)
    are_elsewhere = len({fingerprint.site for fingerprint in known}) > 1
    index = first_difference([fingerprint.lines for fingerprint in known])
    is_hidden = len({fingerprint.digest for fingerprint in known}) > 1
    if index is not None and all(index < len(f.lines) or not f.digest for f in known):
        lines = [f.lines[index] if index < len(f.lines) else ENDED for f in known]
        kind, lines = compare_lines(lines, ENDED)
        pairs = zip(calls, excerpts(lines), strict=True)
        rows = [call._replace(said=line) for call, line in pairs]
        return _compared(kind, rows, me, point, failed_since=failed_since)
    if is_hidden and not are_elsewhere:
        # Those that were found apart look for the difference together; see `agreement`.
        hidden = [
            call._replace(said=_digest_of(fingerprint))
            for call, fingerprint in zip(calls, known, strict=True)
        ]
        return HiddenDifference(f"{me}: ", _lane(point), hidden, failed_since)
    advice = "" if is_hidden else _NAME_HINT
    return _compared(Kind("call"), calls, me, point, advice=advice, failed_since=failed_since)


def _digest_of(fingerprint: Fingerprint) -> str:
    """Return what is known of a long specification: the number of its lines, and their digest."""
    return fingerprint.digest or "; ".join(map(shown_line, fingerprint.lines)) or ENDED


def call_at(point: Point) -> ShownSide:
    """Return the call of this process at a point."""
    return _calls([MeetingSide.of(point, ())])[0]


def _calls(sides: Sequence[MeetingSide]) -> list[ShownSide]:
    """Return each side's call and call site."""
    names = excerpts([side.name for side in sides])
    some_unnamed = any(side.compared_site for side in sides)
    calls = []
    for side, name in zip(sides, names, strict=True):
        call = side.operation
        is_unnamed = side.name == call != "barrier" and (
            side.fingerprint is None or not some_unnamed or bool(side.compared_site)
        )
        calls.append(
            ShownSide(
                side.processes,
                said="",
                call=call,
                name="" if is_unnamed else name,
                site=side.site[:200],
            )
        )
    return calls


def _last_words(waiting: StillMissing, me: ThisProcess) -> list[str]:
    """Return the last words of the first missing processes."""
    return [f"{me.name(process)}: {last_words}" for process, last_words in waiting.words[:_LINES]]


def _more(waiting: StillMissing) -> str:
    more = len(waiting.missing) - min(_LINES, len(waiting.words))
    return f"and {more} more" if more else ""


def indented(text: str) -> str:
    """Return another process's text, with a bar before each of its printable lines."""
    lines = (one_line(line.expandtabs(), len(line) * 8) for line in text.strip("\n").splitlines())
    return "\n".join(f"  | {line}" for line in lines)
