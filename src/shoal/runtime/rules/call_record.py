"""Call records: what must be equal about calls that send nothing, compared where processes meet.

`put` and `pack` are called by all processes with equal arguments, and send nothing. Each such call
leaves a `RecordedCall` in the call record of its processes and its lane; the recorded calls are
chained into one digest, which is part of the next arrival of that group in that lane. They are
numbered from the beginning and the chain is never cut at a meeting, so a process whose wait was
interrupted still reports the same as the others. Only after a difference, and after survivors of a
loss have met, a call record starts again.

A difference can also be found where its line does not meet: by heartbeats, at the end of the
program (see `endings`), or, beside the main line, where the main lines meet. It is reported there
once, and stays in the call record: the next meeting of its line raises it on all members, also on
those that have not heard of it, and all start again there, from the same call.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from shoal.hashing import call_digest, short_digest
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.record_marks import (
    UNKNOWN,
    Found,
    LaneRecord,
    Marks,
    RecordMarks,
    exact_of,
    lanes_of,
)
from shoal.runtime.rules.spec_lines import with_value

_LOG = logging.getLogger("shoal")
_MOST_ENTRIES = 1024  # kept of a call record, so that the first difference can be named
_MOST_BYTES = 1 << 20  # the same limit, of all their texts
_MOST_REPORTED = 8  # call records in one sign of life
_SPEC_LINES = 50  # a specification of more lines is long

Group = tuple[int, ...] | None  # sorted; None: all processes


class RecordedCall(NamedTuple):
    """One call, by the facts that must be equal."""

    operation: str  # "put"
    site: str  # call site
    spec: tuple[str, ...]  # options, then a line for each leaf
    values: str = ""  # "= [1, 2]", a digest, or nothing, for each of the last lines of `spec`
    step: int | None = None  # in which this process made it; need not be equal

    @property
    def place(self) -> str:
        """The call and its call site: `put at train.py:12 (main)`."""
        return f"{self.operation} at {self.site}" if self.site else self.operation

    @property
    def lines(self) -> list[str]:
        """The specification, with values where known: themselves if they are few, or a digest."""
        values = self.values.split("\n") if self.values else []
        first = len(self.spec) - len(values)
        return [*self.spec[:first], *map(with_value, self.spec[first:], values)]

    def chained(self, before: bytes) -> bytes:
        """Return the digest of the chain up to this call, given that before it."""
        parts = (self.operation, self.site, _spec_of(self.spec).digest, self.values)
        data = [part.encode(errors="surrogatepass") for part in parts]
        return call_digest(before + b"".join([b"%d:" % len(part) + part for part in data]))


class _Spec(NamedTuple):
    digest: str
    num_bytes: int


def _spec_of(spec: tuple[str, ...]) -> _Spec:
    return (_of_short if len(spec) <= _SPEC_LINES else _of_long)(spec)


def _computed(spec: tuple[str, ...]) -> _Spec:
    data = "\n".join([str(len(spec)), *spec]).encode(errors="surrogatepass")
    return _Spec(call_digest(data).hex(), len(data))


_of_short = lru_cache(maxsize=256)(_computed)
_of_long = lru_cache(maxsize=8)(_computed)  # each takes megabytes


class CallRecord:
    """The calls of one group in one lane, by number, from 0; the last of them are kept."""

    def __init__(self, base: str = "") -> None:
        self.base = base  # identifies the call from which it counts
        self.count = 0
        self.digest = b""  # of all calls so far
        self.marks = Marks()
        self.is_unknown = False  # processes may have counted from different calls
        self.is_reported = False  # that it differs; its own meetings compare it once more
        self._before = b""  # digest of all calls before those that are kept
        self._kept: deque[tuple[RecordedCall, bytes, int]] = deque()  # entry, digest so far, size
        self._kept_bytes = 0

    @property
    def text(self) -> str:
        """The call record as sent with an arrival; empty if there was no call."""
        if self.is_unknown:
            return UNKNOWN
        return f"{self.count}:{self.digest.hex()}" if self.count else ""

    @property
    def is_silent(self) -> bool:
        """Whether it is compared at its own meetings at most."""
        return self.is_unknown or self.is_reported

    @property
    def first_kept(self) -> int:
        """The number of the oldest call that is kept."""
        return self.count - len(self._kept)

    def add(self, entry: RecordedCall) -> None:
        """Add a call."""
        self.digest = entry.chained(self.digest)
        self.count += 1
        self.marks.add(self.count, self.digest)
        is_same = bool(self._kept) and self._kept[-1][0].spec == entry.spec
        size = len(entry.values) + len(entry.site)
        size += 0 if is_same else _spec_of(entry.spec).num_bytes
        self._kept.append((entry, self.digest, size))
        self._kept_bytes += size
        while len(self._kept) > 1 and self._is_full():
            self._forget_oldest()

    def forget(self, count: int) -> None:
        """Drop the first `count` calls, on which all have agreed."""
        while self._kept and self.first_kept < count:
            self._forget_oldest()

    def first(self, count: int) -> CallRecord:
        """Return the call record of the first `count` calls."""
        call_record = CallRecord(self.base)
        call_record._before, call_record.count = self._before, count
        call_record._kept = deque(list(self._kept)[: max(0, count - self.first_kept)])
        call_record.digest = self.digest_of(count)
        return call_record

    def entry(self, index: int) -> RecordedCall | None:
        """Return a call, or None if it was not made."""
        return self._kept[index - self.first_kept][0] if index < self.count else None

    def digest_of(self, count: int) -> bytes:
        """Return the digest of the first `count` calls, the last of which must be kept or directly
        precede the first that is kept."""
        first = self.first_kept
        return self._before if count <= first else self._kept[count - first - 1][1]

    def _is_full(self) -> bool:
        return len(self._kept) > _MOST_ENTRIES or self._kept_bytes > _MOST_BYTES

    def _forget_oldest(self) -> None:
        _, self._before, size = self._kept.popleft()
        self._kept_bytes -= size


class CallRecords:
    """All call records of a process. Thread-safe."""

    def __init__(self, process: int, num_processes: int) -> None:
        self._process = process
        self._num_processes = num_processes
        self._lock = threading.Lock()
        self._call_records: dict[tuple[Group, str], CallRecord] = {}
        self._here = threading.local()
        self._main_line = object()  # marks the thread that runs the main line
        self._here.mark = self._main_line
        self._has_warned = False
        self._base = ""  # of call records that begin now
        self._reported: dict[tuple[Group, str], int] = {}  # calls already reported by signs of life
        self._gone: dict[tuple[Group, str], set[int]] = {}  # when survivors last met
        self.found: Found | None = None  # a difference found by signs of life, until raised

    def record(
        self, entry: RecordedCall, *, group: Iterable[int] | None, lane: str | None = None
    ) -> str:
        """Record a call that all of `group` make, unless this process is alone or not a member.

        Return an id of this call, the same on all processes that have made the same calls; empty if
        it was not recorded.

        Args:
          group: the processes; None: all of the job.
          lane: the line of execution; None: the one in which this thread meets other processes. A
            thread that has never done so makes calls that cannot be compared.
        """
        key = self._group(group)
        if self._num_processes == 1 or (
            key is not None and (len(key) < 2 or self._process not in key)
        ):
            return ""
        lane = self.lane if lane is None else lane
        if lane is None:
            self._warn(entry)
            return ""
        with self._lock:
            call_record = self._call_records.setdefault((key, lane), CallRecord(self._base))
            call_record.add(entry)
            among = "" if key is None else f" of {','.join(map(str, key))}"
            return f"call {call_record.base}{call_record.count} in {lane}{among}"

    @property
    def lane(self) -> str | None:
        """The lane of this thread: "main", or the one in which it last met other processes."""
        if getattr(self._here, "mark", None) is self._main_line:
            return "main"
        return getattr(self._here, "lane", None)

    def arrive(self, point: Point) -> Point:
        """Return a point with this process's call record before it."""
        self._note(point.lane)
        if not self._call_records:
            return point
        group = self._group(point.group)
        with self._lock:
            call_record = self._call_records.get((group, point.lane))
            text = "" if call_record is None else call_record.text
            if point.lane == "main":
                text += lanes_of(self._beside(group))
        return point._replace(call_record=text) if text else point

    def agree(self, point: Point, members: Iterable[int]) -> None:
        """Record that members met at a point of `come`: their calls before it were equal, unless
        they are survivors of a loss."""
        group = point.group or range(self._num_processes)
        key = (self._group(point.group), point.lane)
        gone = {*group} - {*members}
        if not point.call_record and not gone:
            return
        with self._lock:
            if gone != self._gone.get(key, set()):
                self._gone[key] = gone
                text = f"{self._base} {sorted(members)}"
                self._base = short_digest(text.encode()).hex()
                self._start_again(*key)
                return
            call_record = self._call_records.get(key)
            if call_record is not None and not call_record.is_unknown:
                count = exact_of(point.call_record).partition(":")[0]
                call_record.forget(int(count or 0))

    def start_anew(self, point: Point, base: str) -> CallRecord:
        """Begin a new call record after a difference known to all; return the old one."""
        key = (self._group(point.group), point.lane)
        with self._lock:
            old = self._call_records.get(key, CallRecord())
            self._call_records[key] = CallRecord(base)
            self._reported.pop(key, None)
            return old

    def mark_reported(self, point: Point, lane: str, count: int) -> CallRecord:
        """Leave the difference of a lane to its next meeting; return the calls that differ."""
        with self._lock:
            call_record = self._call_records.setdefault(
                (self._group(point.group), lane), CallRecord()
            )
            call_record.is_reported = True
            return call_record.first(min(count, call_record.count))

    def beat(self) -> list[RecordMarks]:
        """Return the call records for a heartbeat: those that have grown since the last."""
        if not self._call_records:
            return []
        with self._lock:
            grown = [
                (key, call_record)
                for key, call_record in self._call_records.items()
                if call_record.count != self._reported.get(key, 0) and not call_record.is_silent
            ][:_MOST_REPORTED]
            self._reported.update({key: call_record.count for key, call_record in grown})
            return [
                RecordMarks(*key, call_record.base, call_record.marks.text)
                for key, call_record in grown
            ]

    def all_compared(self) -> list[RecordMarks]:
        """Return all call records that are compared, for the end of the program."""
        with self._lock:
            return [
                RecordMarks(*key, call_record.base, call_record.marks.text)
                for key, call_record in self._call_records.items()
                if not call_record.is_silent
            ]

    def receive(self, difference: Found) -> None:
        """Store a difference that others know of; the main thread's next check raises it."""
        with self._lock:
            if self._is_new(difference):
                self.found = difference

    def take_found(self) -> Found | None:
        """Return the stored difference, once, unless a meeting has reported it meanwhile."""
        difference, self.found = self.found, None
        with self._lock:
            if difference is None or not self._is_new(difference):
                return None
            return difference

    def _is_new(self, difference: Found) -> bool:
        """Return whether the calls of a difference are still compared, and it is not reported."""
        no_call_yet = CallRecord(self._base)
        key = (difference.group, difference.lane)
        call_record = self._call_records.get(key, no_call_yet)
        return call_record.base == difference.base and not call_record.is_silent

    def _beside(self, group: Group) -> list[LaneRecord]:
        """Return the call records of the group's other lanes."""
        return [
            LaneRecord(name, call_record.base, call_record.marks.text)
            for (members, name), call_record in self._call_records.items()
            if members == group
            and name != "main"
            and call_record.count
            and not call_record.is_silent
        ]

    def _start_again(self, group: Group, lane: str) -> None:
        """Start the call record of this lane again: the survivors of a group are at one point of
        it. Their positions in other lanes are unknown: calls there can no longer be compared."""
        for key, call_record in list(self._call_records.items()):
            if group is not None and (key[0] is None or not set(key[0]) <= set(group)):
                continue
            if key[1] == lane:
                del self._call_records[key]
                self._reported.pop(key, None)
            else:
                call_record.is_unknown = True

    def _note(self, lane: str) -> None:
        """Note the lane of this thread. Its sub-lanes "lane: ..." only explain differences."""
        if lane == "main":
            self._here.mark = self._main_line = getattr(self._here, "mark", None) or object()
        if not lane.startswith(f"{getattr(self._here, 'lane', '')}: "):
            self._here.lane = lane

    def _group(self, group: Iterable[int] | None) -> Group:
        """Return a group as the key of a call record; () if invalid, which is refused later."""
        if group is None:
            return None
        try:
            members = tuple(sorted({*group}))
        except TypeError:
            return ()
        return None if len(members) == self._num_processes else members

    def _warn(self, entry: RecordedCall) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "process %d of %d: %s: this thread has never synchronized with other "
                "processes, so its calls are "
                "not compared with theirs; pass lane= to name its lane (logged once)",
                self._process, self._num_processes, entry.place,
            )  # fmt: skip
