"""The facts of a failure: what `failure.json` holds and every report is printed from.

All are frozen values. `to_json` leaves out what is absent, which is what equals its default, and
writes processes as inclusive ranges; `of_json` ignores fields that it does not know, so that a
reader of version 1 can read what a later writer adds.
"""

from __future__ import annotations

import dataclasses
import time
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from shoal.errors import UsageError
from shoal.runtime.rules.point import Ranges, ranges_of

FORMAT, VERSION = "shoal-failure", 1
MESSAGE_CHARACTERS = 8192
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_MOST_PROCESSES = 1 << 20

T = TypeVar("T")


class ProcessSet(tuple[int, ...]):
    """Indices of processes, in order."""

    __slots__ = ()

    def __new__(cls, numbers: Iterable[int] = ()) -> ProcessSet:
        return super().__new__(cls, sorted(set(numbers)))

    @classmethod
    def of_ranges(cls, ranges: Iterable[tuple[int, int]]) -> ProcessSet:
        """Return the processes of inclusive ranges.

        Raises:
          UsageError: they are too many for a job.
        """
        ranges = [(int(first), int(last)) for first, last in ranges]
        if sum(max(0, last - first) for first, last in ranges) > _MOST_PROCESSES:
            raise UsageError("a list of processes is too long")
        return cls(process for first, last in ranges for process in range(first, last + 1))

    @property
    def ranges(self) -> Ranges:
        """Inclusive ranges of consecutive indices."""
        return ranges_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlace:
    """A shoal call in the program, or the line at which a process stood."""

    call: str = ""  # "barrier"; empty: not in one
    name: str = ""  # of the point: barrier 'step'
    file: str = ""
    line: int = 0
    source: str = ""
    age_s: float | None = None  # how old it is at the failure
    columns: tuple[int, ...] = ()  # in `source`: where the expression begins, and its end


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    source: str = ""
    columns: tuple[int, ...] = ()  # in `source`: where the failing expression begins, and its end


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFacts:
    """An exception."""

    type: str  # without its module
    module: str = "builtins"
    message: str = ""  # at most MESSAGE_CHARACTERS
    message_characters: int | None = None  # if there are more
    speaker: str = ""  # what the message begins with: "process 1 of 3 (node1): "
    notes: tuple[str, ...] = ()
    caused_by: tuple[ErrorFacts, ...] = ()
    place: str = ""  # "conf.py:12", of one in `caused_by`
    leaves: tuple[ErrorFacts, ...] = ()  # of an exception group
    more_leaves: int = 0
    repeats: int = 0  # frames that recursion repeats, and `frames` leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceSide:
    """What a group of processes gave or called."""

    processes: ProcessSet
    said: str  # without the path
    place: CallPlace | None = None
    path: str = ""  # of the leaf, where it differs, too
    dtype: str = ""  # or the type of a Python value: "float32", "int"
    shape: tuple[int | None, ...] | None = None  # None: unknown, or none; of a dim: any
    layout: str = ""
    value: str = ""  # or its digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What processes disagree on; the smallest group first."""

    what: str  # call name step tree shape dtype value group program layout replica
    call: str = ""
    path: str = ""  # of the leaf
    name: str = ""  # of the point
    sides: tuple[DivergenceSide, ...] = ()
    found_at: CallPlace | None = None  # where a call that sends nothing was compared
    step: int | None = None  # in which that call was made
    failed_since: str = ""  # the first call of those that failed in a row before
    late: DivergenceSide | None = None  # the process that recorded it, if it arrived later


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Where processes stood when a wait ended."""

    processes: ProcessSet
    place: CallPlace | None = None
    frames: tuple[StackFrame, ...] = ()
    last_met: CallPlace | None = None
    words: str = ""  # "runs (pid 24012); it has not called initialize"
    # In a stall: "others", in a call of shoal; "reader", its own, in `feed`; "left": nothing, since
    # it has left the job.
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait that ended before all had arrived."""

    call: str
    name: str = ""
    limit_s: float | None = None
    arrived: tuple[Waiting, ...] = ()
    missing: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A checkpoint that cannot be read or written."""

    path: str
    step: int | None = None
    file: str = ""
    leaf: str = ""
    offset_bytes: int | None = None
    damage: str = ""  # "its hash is not the one saved"
    read_well: ProcessSet = dataclasses.field(default_factory=ProcessSet)  # which found no damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a process that was killed, and of its cgroup."""

    peak_bytes: int | None = None
    cgroup_oom_kills: int | None = None
    cgroup_peak_bytes: int | None = None
    cgroup_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A failure of processes' own."""

    processes: ProcessSet
    kind: str
    at_s: float | None = None  # after the start
    exit_code: int | None = None  # None: the launcher had to end it
    signal: str = ""
    sent_by_launcher: bool | None = None
    error: ErrorFacts | None = None
    is_bug: bool = False  # of shoal
    first: int | None = None  # the earliest of several processes, if known
    thread: str = ""  # empty: the main thread
    thread_age_s: float | None = None  # how long before the failure the thread had raised
    frames: tuple[StackFrame, ...] = ()  # the outermost first
    more_frames: int = 0  # left out in the middle
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)  # package -> frames
    step: int | None = None
    place: CallPlace | None = None
    last_met: CallPlace | None = None  # where it last met the others
    memory: Memory | None = None
    difference: Difference | None = None
    wait: Wait | None = None
    checkpoint: CheckpointFacts | None = None
    words: tuple[str, ...] = ()  # sentences of evidence, where no other field holds it
    last_output: tuple[str, ...] = ()
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BystanderState:
    """Processes that did not fail themselves and share one state and place."""

    processes: ProcessSet
    state: str  # waiting running left ended stopped unknown
    place: CallPlace | None = None
    exit_code: int | None = None
    ended_by: str = ""  # "SIGTERM", sent by the launcher
    joined_by_jax: bool = False  # alone: then SIGTERM would not have ended them
    at_s: float | None = None
    step: int | None = None
    peak_bytes: int | None = None  # the largest of them
    words: str = ""  # the predicate, where the state does not tell: "was killed by SIGABRT"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """The failure of a job."""

    kind: str
    headline: str  # without time
    exit_code: int
    started: str = ""  # UTC
    failed_after_s: float | None = None
    ended_after_s: float | None = None
    attempt: int = 1
    attempts: int = 1
    num_processes: int = 1
    hosts: Mapping[str, ProcessSet] = dataclasses.field(default_factory=dict)
    causes: tuple[Cause, ...] = ()
    others: tuple[BystanderState, ...] = ()
    programs: tuple[str, ...] = ()  # that only some processes had compiled, as sentences
    advice: tuple[str, ...] = ()
    as_before: bool = False  # equal to the failure of the attempt before: the report is short
    signal: str = ""  # that interrupted it
    step: int | None = None  # in which it was interrupted or preempted
    logs: str = ""  # the folder, as given
    text: str = ""  # the report as printed to a file


def grouped(causes: Iterable[Cause], *, is_ordered: bool = False) -> tuple[Cause, ...]:
    """Return causes with those that are alike as one, of all their processes; the order stays.

    Args:
      causes: each of one process.
      is_ordered: whether they are in the order of their times: then it is known which was first.
    """
    groups: dict[object, list[Cause]] = {}
    for cause in causes:
        error = cause.error
        said: tuple[object, ...] = (cause.kind, cause.signal, cause.exit_code, cause.words)
        # Of an exception not how the process ended: it may have been sent a signal on its way out.
        if error is not None:
            said = error.type, error.message.removeprefix(error.speaker)
        key = said, cause.frames, cause.thread
        groups.setdefault(key, []).append(cause)
    joined = []
    for first, *others in groups.values():
        processes = ProcessSet(p for of in (first, *others) for p in of.processes)
        was_first = first.processes[0] if is_ordered else None
        if not others:
            was_first = None
        joined.append(dataclasses.replace(first, processes=processes, first=was_first))
    return tuple(joined)


def utc(at_s: float) -> str:
    """Return a time as `failure.json` holds it.

    >>> utc(0.5)
    '1970-01-01T00:00:00.500Z'
    """
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
    return f"{whole}.{int(at_s % 1 * 1000):03d}Z"


def to_json(value: Any) -> Any:
    """Return facts as what `json.dumps` takes."""
    if isinstance(value, JobFailure):
        return {"format": FORMAT, "version": VERSION, **_fields(value)}
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, ProcessSet):
        return [list(pair) for pair in value.ranges]
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def _fields(value: Any) -> dict[str, Any]:
    always = ("causes", "others", "attempt", "attempts", "num_processes", "module")
    return {
        field.name: to_json(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name in always or getattr(value, field.name) != _default(field)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; MISSING, which equals no value, if there is none."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def of_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return the facts of what `to_json` returned, or of what a later version wrote.

    Raises:
      UsageError, or another of UNREADABLE: it is something else.
    """
    if kind is JobFailure and data.get("format") != FORMAT:
        raise UsageError(f"not {FORMAT}: {data.get('format')!r}")
    hints = _hints(typing.cast(Any, kind))
    return kind(**{name: _value(hints[name], item) for name, item in data.items() if name in hints})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(hint: Any, data: Any) -> Any:
    """Return JSON data as a field's type: the inverse of `to_json`."""
    arguments = typing.get_args(hint)
    if type(None) in arguments:  # every optional field is annotated `X | None`, None last
        return None if data is None else _value(arguments[0], data)
    if hint is ProcessSet:
        return ProcessSet.of_ranges(data)
    if dataclasses.is_dataclass(hint):
        return of_json(typing.cast(type, hint), data)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in data)
    if origin is Mapping:
        return {str(key): _value(arguments[1], item) for key, item in data.items()}
    return hint(data)  # str, int, float or bool
