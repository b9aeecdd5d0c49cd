"""Messages between members and the coordinator: headers, and parsers, which raise FrameError."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from shoal.runtime.rules.deadline import Allowance
from shoal.runtime.rules.point import Departure, Fingerprint, Point
from shoal.runtime.rules.programs import Noted, noted_of
from shoal.runtime.rules.record_marks import RecordMarks
from shoal.runtime.rules.requested_saves import (
    ANSWERED,
    BY_STEPS,
    COMMITTED,
    EACH_CALL,
    FAILED,
    NO_CHECKPOINTS,
    SaveOrder,
    SaveReport,
)
from shoal.runtime.rules.stopping import (
    EARLIER,
    LAST,
    NOTHING,
    ReceivedNotice,
    StopAgreement,
    Stopped,
    StopReport,
)
from shoal.runtime.wire.frames import (
    Frame,
    FrameError,
    body_value,
    number_field,
    text_field,
    whole_field,
)

MOST_END = 16 << 10  # characters of the record of a failure
_MOST_TEXT = 1000  # characters of any text that a member sends


class Beat(NamedTuple):
    """A heartbeat, with the state of the process."""

    step: int | None
    place: str  # its last call of shoal
    since_s: float  # seconds since then
    step_s: float | None  # median time of its last steps
    memory_bytes: int  # resident
    wait_s: float = 0.0  # the part of `step_s` spent waiting for other processes
    at: tuple[str, str, str] = ("", "", "")  # call, name and call site of `place`, if it is a point


def beat_of(header: Mapping[str, Any]) -> Beat:
    """Parse a heartbeat."""
    step_s = None if header.get("step_s") is None else number_field(header, "step_s")
    since_s = number_field(header, "since_s")
    wait_s = number_field(header, "wait_s") if "wait_s" in header else 0.0
    return Beat(
        step=step_of(header),
        place=text_field(header, "place")[:_MOST_TEXT],
        since_s=0.0 if since_s == math.inf else max(0.0, since_s),
        step_s=step_s,
        memory_bytes=max(0, whole_field(header, "memory_bytes")),
        wait_s=max(0.0, min(wait_s, step_s or 0.0)),
        at=_at_of(header.get("at", ["", "", ""])),
    )


def _at_of(row: object) -> tuple[str, str, str]:
    if not isinstance(row, list) or list(map(type, row)) != [str, str, str]:
        raise FrameError("field 'at' is not a place")
    call, name, site = (text[:_MOST_TEXT] for text in row)
    return call, name, site


def step_of(header: Mapping[str, Any]) -> int | None:
    """Parse the step of a process; None: in none yet."""
    return None if header.get("step") is None else whole_field(header, "step")


def departure_header(departure: Departure) -> dict[str, Any]:
    """Return the header fields of how a process has left the job; its words are the body."""
    state, *rest = departure[1:]
    more = dict(zip(("how", "why", "follows"), rest, strict=True))
    if departure.why == departure.words:
        del more["why"]
    return {"state": state, **{name: value for name, value in more.items() if value}}


def departure_of(frame: Frame) -> Departure:
    """Parse how a process has left the job."""
    header = {"state": "lost", "how": "", "why": "", **frame.header}
    state, how, why = (text_field(header, name) for name in ("state", "how", "why"))
    message = frame.body.decode(errors="replace")
    return Departure(message, state, how, why, follows=bool(header.get("follows")))


def failed_of(frame: Frame) -> tuple[Departure, str]:
    """Parse the failure of a process; return it, and the record that the process has made of it.

    The record is passed on unparsed: JSON for `last_record.record_in`, or empty.
    """
    header = {"how": "", "end": "", **frame.header}
    how, end = text_field(header, "how"), text_field(header, "end")
    if len(end) > MOST_END:
        raise FrameError("field 'end' is too long")
    message = frame.body.decode(errors="replace")
    return Departure(message, how=how[:_MOST_TEXT], follows=bool(header.get("follows"))), end


def records_of(header: Mapping[str, Any], process: int, count: int) -> list[RecordMarks]:
    """Parse the call records in a heartbeat of `process`, in a job of `count`."""
    rows = header.get("trails", [])
    if not isinstance(rows, list):
        raise FrameError("field 'trails' is not a list")
    call_records = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(RecordMarks._fields):
            raise FrameError("field 'trails' holds an invalid call record")
        group, *texts = row
        if not all(type(text) is str for text in texts):
            raise FrameError("field 'trails' lacks a required text")
        members = None if group is None else _group(group, process, count)
        call_records.append(RecordMarks(members, *texts))
    return call_records


def programs_of(header: Mapping[str, Any], process: int, count: int) -> list[Noted]:
    """Parse the programs in a heartbeat of `process`, in a job of `count`."""
    return noted_of(header, lambda members: _group(members, process, count))


def ended_of(frame: Frame, process: int, count: int) -> list[RecordMarks]:
    """Parse the call records of `process`, whose program has ended, in a job of `count`."""
    return records_of({"trails": body_value(frame)}, process, count)


class Arrival(NamedTuple):
    """An arrival at a point; its payload is the body of the frame."""

    point: Point
    timeout_s: float
    step: int | None
    ticket: int  # 0: the answer carries none
    after: int = 0  # number of calls abandoned in this lane before


class Abandoned(NamedTuple):
    """A call that a process left by an exception; the others must not wait for it there."""

    point: Point  # its last point in this call; or the call itself, if there was none
    arrivals: int  # in this call
    sent: int  # arrivals in this lane, in all
    number: int  # of calls it has abandoned in this lane, this one included
    words: str  # the exception, in a line


def arrival_of(header: Mapping[str, Any], process: int, count: int) -> Arrival:
    """Parse an arrival of `process`, in a job of `count`."""
    ticket = whole_field(header, "ticket") if "ticket" in header else 0
    after = whole_field(header, "after") if "after" in header else 0
    point = _point_of(header, process, count)
    timeout_s = number_field(header, "timeout_s")
    if "given_s" in header:
        timeout_s = Allowance(timeout_s, number_field(header, "given_s"))
    return Arrival(point, timeout_s, step=step_of(header), ticket=ticket, after=after)


class ArrivalHeaders:
    """Parses the arrivals of a job. Processes at one point send equal headers, parsed once."""

    def __init__(self) -> None:
        self._last: tuple[Mapping[str, Any], Arrival] | None = None

    def read(self, header: Mapping[str, Any], process: int, count: int) -> Arrival:
        """Parse an arrival; `FrameReader` returns one object for equal headers."""
        if self._last is not None and header is self._last[0]:
            return self._last[1]
        arrival = arrival_of(header, process, count)
        if arrival.point.group is None:  # any process may send it
            self._last = header, arrival
        return arrival


def abandoned_header(left: Abandoned) -> dict[str, Any]:
    """Return the header of an abandoned call; its `words` are the body."""
    counts = {"arrivals": left.arrivals, "sent": left.sent, "number": left.number}
    return {"do": "abandon", "point": left.point, **counts}


def abandoned_of(frame: Frame, process: int, count: int) -> Abandoned:
    """Parse an abandoned call, in a job of `count`."""
    point = _point_of(frame.header, process, count)
    arrivals, sent, number = (
        whole_field(frame.header, name) for name in ("arrivals", "sent", "number")
    )
    if not (0 <= arrivals <= sent and number > 0):
        raise FrameError("an abandoned call with impossible counts")
    message = frame.body.decode(errors="replace")[:_MOST_TEXT]
    return Abandoned(point, arrivals, sent, number, message)


def _point_of(header: Mapping[str, Any], process: int, count: int) -> Point:
    row = header.get("point")
    if not isinstance(row, list) or len(row) != len(Point._fields):
        raise FrameError("field 'point' is not a point")
    point = Point(*row)
    for text in (point.name, point.lane, point.operation, point.site, point.call_record):
        if type(text) is not str:
            raise FrameError("field 'point' lacks a required text")
    if type(point.survivors) is not bool or type(point.follows) is not bool:
        raise FrameError("field 'point' lacks a required boolean")
    group, fingerprint = point.group, Fingerprint.of(point.fingerprint)
    if group is None and fingerprint is None:
        return point
    if group is not None:
        group = _group(group, process, count)
    return point._replace(group=group, fingerprint=fingerprint)


def _group(members: object, process: int, count: int) -> tuple[int, ...] | None:
    """Parse a group: sorted, without repetition, of this job, including its sender."""
    if not isinstance(members, list) or not all(type(member) is int for member in members):
        raise FrameError("a group is not a list of processes")
    group = sorted(set(members))
    if process not in members or group[0] < 0 or group[-1] >= count:
        raise FrameError("a group has processes outside the job, or lacks its sender")
    return None if len(group) == count else tuple(group)


def processes_of(header: Mapping[str, Any], name: str, allowed: Collection[int]) -> list[int]:
    """Parse a field that lists processes, each of `allowed` at most once."""
    listed = header.get(name)
    if not isinstance(listed, list) or not all(type(process) is int for process in listed):
        raise FrameError(f"field {name!r} is not a list of processes")
    if not all(process in allowed for process in listed):
        raise FrameError(f"field {name!r} names processes that its sender must not name")
    return sorted(set(listed))


def notice_header(given: ReceivedNotice) -> dict[str, Any]:
    """Return the header fields of a notice."""
    deadline_s = given.deadline_s
    if deadline_s is not None and not math.isfinite(deadline_s):
        deadline_s = None
    return {
        "reason": given.reason[:_MOST_TEXT],
        "source": given.source[:_MOST_TEXT],
        "deadline_s": deadline_s,
    }


def notice_of(header: Mapping[str, Any]) -> ReceivedNotice:
    """Parse a notice."""
    deadline_s = number_field(header, "deadline_s")
    return ReceivedNotice(
        text_field(header, "reason")[:_MOST_TEXT],
        text_field(header, "source")[:_MOST_TEXT],
        None if deadline_s == math.inf else max(0.0, deadline_s),
    )


def stop_report_header(report: StopReport) -> dict[str, Any]:
    """Return the header of an answer about stopping; the body is `step_text` of its step."""
    knows = report.highest is not None
    header = {"do": "stop", "round": report.round, "knows": knows, "saved": report.has_saved}
    more = {} if report.stopped is None else {"stopped": report.stopped}
    return {**header, **more, "highest_save": report.highest_save}


def stop_report_of(frame: Frame) -> StopReport:
    """Parse an answer about stopping."""
    header = frame.header
    highest = _step_in(frame.body) if header.get("knows") else None
    row, stopped = header.get("stopped"), None
    if row is not None:
        if not isinstance(row, list) or list(map(type, row)) != [int, str, bool]:
            raise FrameError("field 'stopped' is not what a program leaves behind")
        stopped = Stopped(row[0], row[1][:_MOST_TEXT], row[2])
        if stopped.kept not in (NOTHING, EARLIER, LAST):
            raise FrameError("field 'stopped' is not what a program leaves behind")
    highest_save = whole_field(header, "highest_save") if "highest_save" in header else -1
    round_number, has_saved = whole_field(header, "round"), bool(header.get("saved"))
    return StopReport(round_number, highest, has_saved, stopped, highest_save)


def stop_agreement_of(frame: Frame) -> StopAgreement:
    """Parse an agreement on the step."""
    header = frame.header
    save_step = whole_field(header, "save_step") if "save_step" in header else 0
    return StopAgreement(whole_field(header, "round"), _step_in(frame.body), save_step)


def save_order_header(order: SaveOrder) -> dict[str, Any]:
    """Return the header of a request to save, or of its step."""
    more = {} if order.step is None else {"step": order.step}
    return {"is": "save", "number": order.number, "withdrawn": order.is_withdrawn, **more}


def save_order_of(header: Mapping[str, Any]) -> SaveOrder:
    """Parse a request to save, or its step."""
    step = whole_field(header, "step") if "step" in header else None
    return SaveOrder(whole_field(header, "number"), step, bool(header.get("withdrawn")))


def save_report_header(report: SaveReport) -> dict[str, Any]:
    """Return the header of a report about a request to save."""
    return {"do": "save", **report._asdict()}


def save_report_of(header: Mapping[str, Any]) -> SaveReport:
    """Parse a report about a request to save."""
    number, step, pace = (whole_field(header, name) for name in ("number", "step", "pace"))
    state = text_field(header, "state")
    if state not in (ANSWERED, COMMITTED, FAILED) or pace not in (
        NO_CHECKPOINTS,
        EACH_CALL,
        BY_STEPS,
    ):
        raise FrameError("fields 'state' and 'pace' are not of a report about a save")
    return SaveReport(number, state, step, pace)


def step_text(step: int | None) -> bytes:
    """Return the encoding of a step. It may have any size, which JSON numbers may not."""
    return b"" if step is None else b"%x" % step


def _step_in(body: bytes) -> int:
    try:
        return int(body, 16)
    except ValueError:
        raise FrameError("the body is not a step") from None
