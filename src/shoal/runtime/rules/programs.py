"""Programs that processes have compiled for devices of several of them: evidence, never a verdict.

JAX compares nothing of what processes run under `jit`. If one of them runs a program over a global
array that the others do not run, it may wait for them for ever. So each process notes the programs
that it compiles, or loads from a cache, for devices of several processes, and its heartbeats carry
the notes. The coordinator keeps them as sets of digests, one for each set of owners, and neither
compares their order nor their call sites.

A process that lacks a program may only be behind. So each process counts its meetings with the
other owners, and each note carries the count at that time. A difference *counts* once the owners
have met twice since by their last heartbeats, and one still lacks the program: so those that only
have not sent theirs yet are not named. Before that, it is shown only when nothing moves.

A process may compile a program that it never runs (a cost analysis), and a program without
collectives waits for no other process: hence evidence. A program that all have compiled, and that
one of them runs once more, leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from shoal.runtime.rules.point import Ranges, ranges_of
from shoal.runtime.wire.frames import FrameError

Owners: TypeAlias = tuple[int, ...] | None  # None: all processes of the job
MOST_PROGRAMS = 512  # that a process notes, for one set of owners
MOST_GROUPS = 16  # sets of owners of a process
MOST_SENT = 64  # programs in one heartbeat
MOST_LARGE = 32  # elements of a constant whose values are compared
_MOST_KNOWN = 4096  # programs that not all owners have compiled, at the coordinator
MOST_TEXT = 200  # characters of a name, the types of its arguments, or a call site
_MOST_DIFFERENCES = 32  # of which all facts are known outside
_MEETINGS = 2


class CompiledProgram(NamedTuple):
    """A compiled program."""

    digest: str
    name: str  # "jit(eval_step)"
    types: str  # of its arguments: "f32[8,4], i32[] and 3 more"
    num_devices: int
    site: str  # where the program has called it: "eval.py:31 (main)"


class Noted(NamedTuple):
    """What a heartbeat carries of the programs of one set of owners."""

    owners: Owners
    met: int  # meetings of the process with all of them
    total: int  # programs that it has noted; more than were sent: not all are known
    programs: Sequence[tuple[CompiledProgram, int]]  # new ones, each with `met` at its time


def noted_rows(noted: Iterable[Noted]) -> list[list[Any]]:
    """Return notes as a heartbeat carries them."""
    return [
        [note.owners, note.met, note.total, [[*program, met] for program, met in note.programs]]
        for note in noted
    ]


def noted_of(
    header: Mapping[str, Any], group_of: Callable[[object], tuple[int, ...] | None]
) -> list[Noted]:
    """Parse the notes in a heartbeat.

    Args:
      group_of: parses a set of owners: see `messages`.
    """
    rows = header.get("programs", [])
    if not isinstance(rows, list) or len(rows) > 2 * MOST_GROUPS:
        raise FrameError("field 'programs' is not a list of notes")
    return [_noted_of(row, group_of) for row in rows]


def _noted_of(row: object, group_of: Callable[[object], tuple[int, ...] | None]) -> Noted:
    kinds = [int, int, list]
    if not isinstance(row, list) or len(row) != 4 or [*map(type, row[1:])] != kinds:
        raise FrameError("field 'programs' holds an invalid note")
    owners, met, total, rows = row
    programs = []
    for fields in rows:
        if not isinstance(fields, list) or not fields or type(fields[-1]) is not int:
            raise FrameError("field 'programs' holds an invalid program")
        programs.append((_program_of(fields[:-1]), fields[-1]))
    return Noted(None if owners is None else group_of(owners), met, total, programs)


class ProgramDifference(NamedTuple):
    """A program that some of its owners have compiled, and others have not."""

    program: CompiledProgram
    have: Ranges
    lack: Ranges
    owners: Ranges
    instead: CompiledProgram | None  # of `lack`, with the same name and types of arguments


class Differences(NamedTuple):
    """Programs that only some of their owners have compiled, the first ones first."""

    shown: tuple[ProgramDifference, ...] = ()
    left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.shown)

    def joined(self, later: Differences) -> Differences:
        """Return these, and those of `later` that are not among them."""
        shown = tuple(dict.fromkeys([*self.shown, *later.shown]))
        return _first_of(shown, max(self.left_out, later.left_out))

    def most(self, count: int) -> Differences:
        """Return the first ones."""
        return _first_of(self.shown, self.left_out, most=count)


def _first_of(
    shown: tuple[ProgramDifference, ...], left_out: int, most: int = _MOST_DIFFERENCES
) -> Differences:
    return Differences(shown[:most], left_out + max(0, len(shown) - most))


def differences_of(row: object) -> Differences:
    """Parse differences as they are sent: in JSON, a tuple is a list.

    Raises:
      FrameError: they are not.
    """
    if not isinstance(row, list) or [*map(type, row)] != [list, int]:
        raise FrameError("field 'programs' holds no differences")
    rows, left_out = row
    return Differences(tuple(map(_difference_of, rows)), left_out)


def _difference_of(row: object) -> ProgramDifference:
    if not isinstance(row, list) or len(row) != len(ProgramDifference._fields):
        raise FrameError("field 'programs' holds an invalid difference")
    program, have, lack, owners, instead = row
    return ProgramDifference(
        _program_of(program),
        have=_ranges(have),
        lack=_ranges(lack),
        owners=_ranges(owners),
        instead=None if instead is None else _program_of(instead),
    )


def _ranges(row: object) -> Ranges:
    if not isinstance(row, list) or not row:
        raise FrameError("field 'programs' lists no processes")
    for ends in row:
        if not isinstance(ends, list) or [*map(type, ends)] != [int, int]:
            raise FrameError("field 'programs' holds an invalid range of processes")
    return tuple((first, last) for first, last in row)


def _program_of(row: object) -> CompiledProgram:
    if not isinstance(row, list) or [*map(type, row)] != [str, str, str, int, str]:
        raise FrameError("field 'programs' holds an invalid program")
    digest, name, types, num_devices, site = row
    digest, name, types, site = (text[:MOST_TEXT] for text in (digest, name, types, site))
    return CompiledProgram(digest, name, types, num_devices, site)


class _Partial:
    """A program that not all of its owners have compiled."""

    def __init__(self, program: CompiledProgram, met: int) -> None:
        self.program = program
        self.met = met  # the least at which one of them has compiled it
        self.have: set[int] = set()
        self.counts = False  # as a difference


class _Report:
    """What a process has reported of the programs of one set of owners."""

    def __init__(self) -> None:
        self.met = self.total = self.received = 0

    @property
    def is_whole(self) -> bool:
        """Whether all programs that it has noted are known."""
        return self.received >= self.total


class ProgramSets:
    """The coordinator's sets of programs.

    >>> program = CompiledProgram("d1", "jit(f)", "f32[8]", 8, "train.py:3 (main)")
    >>> sets = ProgramSets(2)
    >>> sets.receive(0, [Noted(None, 4, 1, [(program, 4)])])
    False
    >>> sets.receive(0, [Noted(None, 6, 1, [])])
    False
    >>> sets.receive(1, [Noted(None, 6, 0, [])])
    True
    >>> [(one.program.name, one.have, one.lack) for one in sets.differences().shown]
    [('jit(f)', ((0, 0),), ((1, 1),))]
    """

    def __init__(self, num_processes: int) -> None:
        self._all = tuple(range(num_processes))
        self._known: dict[Owners, dict[str, _Partial]] = {}  # in the order of their first note
        self._reports: dict[Owners, dict[int, _Report]] = {}

    def receive(self, process: int, noted: Iterable[Noted]) -> bool:
        """Take the notes of a process; return whether a difference counts from now on."""
        return bool(sum(self._receive(process, note) for note in noted))

    def _receive(self, process: int, noted: Noted) -> bool:
        owners = noted.owners
        known = self._known.setdefault(owners, {})
        report = self._reports.setdefault(owners, {}).setdefault(process, _Report())
        report.met, report.total = noted.met, noted.total
        for program, met in noted.programs:
            report.received += 1
            self._add(process, owners, known, program, met)
        return self._judge(owners, [entry for entry in known.values() if not entry.counts])

    def _add(
        self,
        process: int,
        owners: Owners,
        known: dict[str, _Partial],
        program: CompiledProgram,
        met: int,
    ) -> None:
        """Record that a process has a program; forget that once all owners have it."""
        if program.digest not in known:
            if sum(map(len, self._known.values())) >= _MOST_KNOWN:
                return
            known[program.digest] = _Partial(program, met)
        entry = known[program.digest]
        entry.have.add(process)
        entry.met = min(entry.met, met)
        if len(entry.have) == len(owners or self._all):
            del known[program.digest]

    def _judge(self, owners: Owners, partial: Collection[_Partial]) -> bool:
        """Return whether one of these programs counts as a difference from now on."""
        if not partial:  # nearly always
            return False
        members = owners or self._all
        reports = self._reports[owners]
        least = min(reports[process].met for process in members if process in reports)
        for program in partial:
            has_met = least >= program.met + _MEETINGS
            program.counts = has_met and any(self._lacks(p, reports, program) for p in members)
        return any(program.counts for program in partial)

    def differences(self, *, still: Collection[int] | None = None) -> Differences:
        """Return the differences.

        Args:
          still: processes that do not move, all of which have sent a heartbeat since they stopped.
            If one of them lacks a program, that is a difference although it has not met the others
            since. None: only the differences that count.
        """
        differences = [
            difference
            for owners, known in self._known.items()
            for difference in self._of(owners, known, still)
        ]
        return _first_of(tuple(differences), 0)

    def _of(
        self, owners: Owners, known: Mapping[str, _Partial], still: Collection[int] | None
    ) -> Iterator[ProgramDifference]:
        members, reports = owners or self._all, self._reports.get(owners, {})
        paired = set[str]()
        for digest, entry in known.items():
            if still is None and not entry.counts:
                continue
            lack = [process for process in members if self._lacks(process, reports, entry)]
            is_shown = entry.counts or not {*lack}.isdisjoint(still or ())
            if digest in paired or not lack or not is_shown:
                continue
            other = self._instead(entry, known)
            instead = None
            if other is not None:
                paired.add(other.program.digest)
                lack, instead = sorted(other.have), other.program
            yield ProgramDifference(
                entry.program,
                have=ranges_of(sorted(entry.have)),
                lack=ranges_of(lack),
                owners=ranges_of(members),
                instead=instead,
            )

    def _lacks(self, process: int, reports: Mapping[int, _Report], entry: _Partial) -> bool:
        """Return whether a process has not compiled a program, as far as it has reported."""
        report = reports.get(process)
        return process not in entry.have and report is not None and report.is_whole

    def _instead(self, entry: _Partial, known: Mapping[str, _Partial]) -> _Partial | None:
        """Return the program that other processes have compiled where these have this one."""
        for other in known.values():
            is_alike = other.program[1:4] == entry.program[1:4]
            if other is not entry and is_alike and entry.have.isdisjoint(other.have):
                return other
        return None
