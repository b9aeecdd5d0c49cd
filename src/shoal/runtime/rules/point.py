"""Points where processes meet, and members: plain values and their validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from shoal.arguments import as_integer
from shoal.errors import UsageError, UsageTypeError, raise_all
from shoal.runtime.system.callsite import line_of
from shoal.runtime.wire.frames import MAX_PAYLOAD_BYTES, FrameError

_MAX_TEXT = 32_768  # characters of all texts of a point
STEP = "step"  # the call at which a process says where it is, and meets no other
AGO, LASTING = ", {} s ago", " for {} s"  # how last words end: with `Member.since_s`
Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of processes, inclusive


class Fingerprint(NamedTuple):
    """What else must be equal at a point: the call's place, and everything that it was given."""

    site: str  # the call site; empty if a name declares all calls to be one
    digest: str  # of all lines, with their number; empty if `text` holds them all
    text: str  # the lines, or their beginning if there is a digest

    @classmethod
    def of(cls, row: object) -> Fingerprint | None:
        """Undo its form in JSON; None if there was none.

        Raises:
          FrameError: the row is not a fingerprint.
        """
        match row:
            case None:
                return None
            case [str(site), str(digest), str(text)]:
                return cls(site, digest, text)
        raise FrameError("a fingerprint is not three texts")

    @property
    def lines(self) -> Sequence[str]:
        """The options, then the leaves; the last one may be cut."""
        return self.text.split("\n") if self.text else ()

    def cut(self, most: int) -> Fingerprint:
        """Return it with at most so many characters in each text."""
        return Fingerprint(self.site[:most], self.digest[:most], self.text[:most])


class Point(NamedTuple):
    """One point where processes meet, as one of them sees it.

    The points of a group in a lane are counted, for each process, and processes meet by that count:
    the n-th arrival of each is one meeting. `name`, `operation` and `fingerprint` must then be
    equal, or all of them get a DivergenceError. A lane is one line of execution: "main", or a name
    of its own for a background thread.
    """

    name: str
    group: tuple[int, ...] | None = None  # the processes that meet here; None: all of the job
    lane: str = "main"
    operation: str = ""  # "barrier"; empty: `name` is that of the call
    site: str = ""  # the call site, "train.py:31 (main)"; shown, never compared
    survivors: bool = False  # lost processes are not waited for; else a loss is an error
    follows: bool = False  # a later point of the process's current call; else it begins one
    call_record: str = ""  # of the calls before it, see `call_record`; filled in by job clients
    fingerprint: Fingerprint | None = None  # None: the operation has nothing else to compare

    @property
    def place(self) -> str:
        """Its call and name, its lane unless that is the main one, and the program's line.

        >>> Point("epoch", operation="barrier", site="train.py:31 (main)").place
        "barrier 'epoch' (train.py:31)"
        """
        what = repr(self.name)
        if self.operation:
            what = self.name if self.name == self.operation else f"{self.operation} {what}"
        lane = f" in lane {self.lane!r}" if self.chosen_lane else ""
        return f"{what}{lane}" + (f" ({line_of(self.site)})" if self.site else "")

    @property
    def chosen_lane(self) -> str:
        """Its lane, unless that is the main one, or a call's own, such as "save 5447d6786ecf"."""
        is_own = self.lane == "main" or self.lane.startswith(f"{self.call} ")
        return "" if is_own else self.lane

    @property
    def call(self) -> str:
        """The call that it belongs to: "barrier"."""
        return self.operation or self.name


class Member(NamedTuple):
    """The state of one process of the job."""

    process: int
    host: str
    state: str  # "here" | "silent" (runs, no sign of life) | "left" | "lost" | "failed"
    last_words: str  # its last words: where it waits, its last call, or why it is gone
    step: int | None = None  # the last `step` that it began
    place: str = ""  # its last call of shoal: what, and file:line (function)
    since_s: float = 0.0  # seconds since it reached or left that place
    is_waiting: bool = False  # whether it waits for others there
    step_s: float | None = None  # median time of its last steps, seconds
    memory_bytes: int = 0  # resident
    pid: int = 0
    wait_s: float = 0.0  # the part of `step_s` spent waiting for others in calls of shoal
    how: str = ""  # it has failed: "raised" | "found" | "exited": see `Departure`
    follows: bool = False  # it has failed because of others, as it reported
    lane: str = ""  # in which it waits, if the program chose it; empty: the main one
    is_ending: bool = False  # its program has ended, and it waits for its devices
    call: str = ""  # that of `place`: "barrier"; empty: none
    still: str = ""  # for how long it is stopped, is silent or makes no progress; empty: it runs

    @property
    def own_s(self) -> float | None:
        """The compute time of a step: `step_s` without waits for others, seconds."""
        return None if self.step_s is None else self.step_s - self.wait_s


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return the inclusive ranges of consecutive numbers in sorted ones.

    >>> ranges_of([0, 1, 2, 5])
    ((0, 2), (5, 5))
    """
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


class Departure(NamedTuple):
    """How a process has left its job, as the other processes know it."""

    words: str  # what it reported; of a lost one, why it is lost and where it was last
    state: str = "failed"  # "left" | "failed" | "lost"
    how: str = ""  # "raised" | "found" (an error of all that met) | "exited"; empty: unknown
    # Why it is lost, if `words` say more: "its connection closed"; of one that left in order by
    # `sys.exit`, the call site.
    why: str = ""
    follows: bool = False  # others have led to it, as it reported

    @property
    def is_in_order(self) -> bool:
        """Whether it left the job without a failure."""
        return self.state == "left" and self.how != "exited"


def aged(text: str, ending: str, seconds: float) -> str:
    """Return last words with their age; `ending`: `AGO` or `LASTING`."""
    return text + ending.format(f"{seconds:.1f}")


def without_age(member: Member) -> tuple[str, str]:
    """Return last words without the age at their end, and its form; empty: they have none.

    >>> without_age(Member(0, "h", "here", "waits at 'epoch' for 3.0 s", since_s=3.01))
    ("waits at 'epoch'", ' for {} s')
    """
    for ending in (AGO, LASTING):
        age = aged("", ending, member.since_s)
        if member.last_words.endswith(age):
            return member.last_words.removesuffix(age), ending
    return member.last_words, ""


def checked(
    point: Point, payload: bytes, timeout_s: float, *, process: int, num_processes: int
) -> Point:
    """Return `point` in canonical form: its group sorted, or None if it is all processes.

    Raises:
      UsageError: a process of the group does not exist or is given twice, or the caller is not in
        it; `timeout_s` is not positive; a text or the payload is too long. All problems at once.
    """
    problems = []
    name, group, lane, operation, site = point[:5]
    given = sum(map(len, point.fingerprint or ()))
    if len(name) + len(lane) + len(operation) + len(site) + given > _MAX_TEXT:
        lengths = f"name {len(name)}, lane {len(lane)}, operation {len(operation)}"
        lengths += f", site {len(site)}, fingerprint {given} characters"
        problems.append(f"{lengths}; {_MAX_TEXT} in total are allowed")
    if not timeout_s > 0:
        problems.append(f"timeout_s={timeout_s!r} must be a positive number of seconds")
    if len(payload) > MAX_PAYLOAD_BYTES:
        problems.append(f"the payload has {len(payload)} bytes; {MAX_PAYLOAD_BYTES} are allowed")
    if group is not None:
        group = tuple(sorted(index_of(member) for member in group))
        problems += group_problems(group, process, num_processes)
    if problems:
        raise_all(point._replace(name=name[:200]).place, problems)
    if group is None:
        return point
    return point._replace(group=None if len(group) == num_processes else group)


def group_of(caller: str, processes: Iterable[int] | None) -> tuple[int, ...] | None:
    """Return the processes that a caller names; the indices are `checked` later.

    Raises:
      UsageTypeError: it is a single number, or not a list of processes.
    """
    if processes is None:
        return None
    if isinstance(processes, str) or not isinstance(processes, Iterable):
        expected = "must be a list of process indices, such as [0, 1]"
        raise UsageTypeError(f"{caller}: processes={processes!r} {expected}")
    return tuple(processes)


def checked_processes(
    caller: str, processes: Iterable[int] | None, num_processes: int
) -> tuple[int, ...]:
    """Return the processes that a query is about, sorted; None: all of the job.

    Raises:
      UsageError: one does not exist.
    """
    if processes is None:
        return tuple(range(num_processes))
    group = tuple(sorted({index_of(member) for member in processes}))
    outside = [member for member in group if not 0 <= member < num_processes]
    if outside:
        raise UsageError(f"{caller}: the job has processes 0..{num_processes - 1}, not {outside}")
    return group


def index_of(member: object) -> int:
    """Return the index of a process.

    Raises:
      UsageTypeError: it is not an integer.
    """
    index = as_integer(member)
    if index is None:
        raise UsageTypeError(f"process indices are integers, not {member!r}")
    return index


def group_problems(group: tuple[int, ...], process: int, num_processes: int) -> list[str]:
    """Return why these processes cannot be a group of `process`; empty if they can."""
    problems = []
    outside = [member for member in group if not 0 <= member < num_processes]
    if outside:
        problems.append(f"the job has processes 0..{num_processes - 1}, not {outside}")
    twice = sorted(member for member, count in Counter(group).items() if count > 1)
    if twice:
        problems.append(f"named more than once: {twice}")
    if process not in group:
        problems.append(f"process {process} (this one) is not among the processes {list(group)}")
    return problems
