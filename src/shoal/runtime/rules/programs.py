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

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from shoal.errors import counted
from shoal.hashing import content_digest
from shoal.runtime.failures.shortening import process_ranges
from shoal.runtime.system.callsite import line_of
from shoal.runtime.wire.frames import FrameError

Owners: TypeAlias = tuple[int, ...] | None  # None: all processes of the job
MOST_PROGRAMS = 512  # that a process notes, for one set of owners
MOST_GROUPS = 16  # sets of owners of a process
MOST_SENT = 64  # programs in one heartbeat
MOST_LARGE = 32  # elements of a constant whose values are compared
_MOST_KNOWN = 4096  # programs that not all owners have compiled, at the coordinator
_MOST_TEXT = 200  # characters of a name, the types of its arguments, or a call site
_MOST_LINES = 32  # differences in words
_TYPES = 3  # arguments whose types are shown
_MEETINGS = 2
_MODULE = re.compile(rb"module @\"?([^\s\"]+)")
_MAIN = re.compile(rb"@main\((.*)")
_ARGUMENT = re.compile(rb"%arg\d+: tensor<((?:\d+x)*)([^>]*)>")
_COMPLEX = {b"complex<f32": b"c64", b"complex<f64": b"c128"}
# These are called by an address, which differs between processes.
_ADDRESS = re.compile(
    rb'(@(?:CustomSPMDPartitioning|InspectSharding)[^\n]*?)backend_config = "[^"]*"'
)


class CompiledProgram(NamedTuple):
    """A compiled program."""

    digest: str
    name: str  # "jit(eval_step)"
    types: str  # of its arguments: "f32[8,4], i32[] and 3 more"
    num_devices: int
    site: str  # where the program has called it: "eval.py:31 (main)"


def program_of(text: bytes, device_ids: Sequence[int], site: str) -> CompiledProgram:
    """Return a program as it is noted.

    Args:
      text: its StableHLO, as `assert_same_program` compares it.
      device_ids: of its devices, in order.

    >>> text = b"module @jit_f {\\n func.func public @main(%arg0: tensor<8x4xf32>) -> () {}}"
    >>> program_of(text, [0, 1], "train.py:3")[1:]
    ('jit(f)', 'f32[8,4]', 2, 'train.py:3')
    """
    module, main = _MODULE.search(text), _MAIN.search(text)
    name = module[1].decode(errors="replace") if module else "a program"
    types = [_type(*one) for one in _ARGUMENT.findall(main[1])] if main else []
    shown = ", ".join(types[:_TYPES])
    more = len(types) - _TYPES
    text = without_addresses(text)
    digest = content_digest(text + repr([*device_ids]).encode()).hex()
    kind, _, function = name.partition("_")
    return CompiledProgram(
        digest,
        name=(f"{kind}({function})" if function else name)[:_MOST_TEXT],
        types=(f"{shown} and {more} more" if more > 0 else shown)[:_MOST_TEXT],
        num_devices=len(device_ids),
        site=site[:_MOST_TEXT],
    )


def without_addresses(text: bytes) -> bytes:
    """Return the StableHLO of a program as it is compared between processes."""
    return _ADDRESS.sub(rb"\1", text)


def _type(dims: bytes, element: bytes) -> str:
    kind = _COMPLEX.get(element, element).decode(errors="replace")
    return f"{kind}[{dims.decode().rstrip('x').replace('x', ',')}]"


class Noted(NamedTuple):
    """What a heartbeat carries of the programs of one set of owners."""

    owners: Owners
    met: int  # meetings of the process with all of them
    total: int  # programs that it has noted; more than were sent: not all are known
    programs: Sequence[tuple[CompiledProgram, int]]  # new ones, each with `met` at its time


def noted_rows(noted: Iterable[Noted]) -> list[list[Any]]:
    """Return notes as a heartbeat carries them."""
    return [
        [one.owners, one.met, one.total, [[*program, met] for program, met in one.programs]]
        for one in noted
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
    for one in rows:
        if not isinstance(one, list) or [*map(type, one)] != [str, str, str, int, str, int]:
            raise FrameError("field 'programs' holds an invalid program")
        digest, name, types, num_devices, site, at = one
        digest, name, types, site = (text[:_MOST_TEXT] for text in (digest, name, types, site))
        programs.append((CompiledProgram(digest, name, types, num_devices, site), at))
    return Noted(None if owners is None else group_of(owners), met, total, programs)


class ProgramDifference(NamedTuple):
    """A program that some of its owners have compiled, and others have not."""

    program: CompiledProgram
    have: tuple[int, ...]
    lack: tuple[int, ...]
    owners: tuple[int, ...]
    instead: CompiledProgram | None  # of `lack`, with the same name and types of arguments

    @property
    def text(self) -> str:
        """A sentence."""
        program, owners = self.program, process_ranges(self.owners)
        devices = f"{counted(program.num_devices, 'device')} of {owners}"
        if self.instead is not None:
            pairs = sorted([(self.have, program), (self.lack, self.instead)])
            sites = [
                f"{process_ranges(of)}{_site(one) or ' at an unknown line'}" for of, one in pairs
            ]
            function = program.name.partition("(")[2].rstrip(")") or "f"
            return (
                f"processes have compiled different programs {program.name} for {devices}, with "
                f"arguments {program.types or 'of no type'}: {'; '.join(sites)}. "
                f"`shoal.assert_same_program({function}, …)` shows the first line that differs"
            )
        have, lack = process_ranges(self.have), process_ranges(self.lack)
        what = f"{program.name} for {devices}{_site(program)}"
        if len(self.have) == 1:
            return f"{have} alone has compiled {what}; if it runs it, it may wait for the others"
        verb = "has" if len(self.lack) == 1 else "have"
        run = "if they run it, they may wait for the others"
        return f"{have} have compiled {what}, and {lack} {verb} not; {run}"


def _site(program: CompiledProgram) -> str:
    return f" at {line_of(program.site)}" if program.site else ""


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
    >>> sets.lines()
    ['process 0 alone has compiled jit(f) for 8 devices of processes 0-1 at train.py:3; if it runs \
it, it may wait for the others']
    """

    def __init__(self, num_processes: int) -> None:
        self._all = tuple(range(num_processes))
        self._known: dict[Owners, dict[str, _Partial]] = {}  # in the order of their first note
        self._reports: dict[Owners, dict[int, _Report]] = {}

    def receive(self, process: int, noted: Iterable[Noted]) -> bool:
        """Take the notes of a process; return whether a difference counts from now on."""
        return bool(sum(self._receive(process, one) for one in noted))

    def _receive(self, process: int, noted: Noted) -> bool:
        owners = noted.owners
        known = self._known.setdefault(owners, {})
        report = self._reports.setdefault(owners, {}).setdefault(process, _Report())
        report.met, report.total = noted.met, noted.total
        for program, met in noted.programs:
            report.received += 1
            self._add(process, owners, known, program, met)
        return self._judge(owners, [one for one in known.values() if not one.counts])

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
        one = known[program.digest]
        one.have.add(process)
        one.met = min(one.met, met)
        if len(one.have) == len(owners or self._all):
            del known[program.digest]

    def _judge(self, owners: Owners, partial: Collection[_Partial]) -> bool:
        """Return whether one of these programs counts as a difference from now on."""
        if not partial:  # nearly always
            return False
        members = owners or self._all
        reports = self._reports[owners]
        least = min(reports[process].met for process in members if process in reports)
        for one in partial:
            has_met = least >= one.met + _MEETINGS
            one.counts = has_met and any(self._lacks(p, reports, one) for p in members)
        return any(one.counts for one in partial)

    def lines(self, *, still: Collection[int] | None = None) -> list[str]:
        """Return the differences in words, the first ones first, and at the end how many more.

        Args:
          still: processes that do not move, all of which have sent a heartbeat since they stopped.
            If one of them lacks a program, that is a difference although it has not met the others
            since. None: only the differences that count.
        """
        found = [one.text for one in self.differences(still=still)]
        more = len(found) - _MOST_LINES
        return [*found[:_MOST_LINES], f"and {more} more"] if more > 0 else found

    def differences(self, *, still: Collection[int] | None = None) -> list[ProgramDifference]:
        """Return the differences: see `lines`."""
        return [
            difference
            for owners, known in self._known.items()
            for difference in self._of(owners, known, still)
        ]

    def _of(
        self, owners: Owners, known: Mapping[str, _Partial], still: Collection[int] | None
    ) -> Iterator[ProgramDifference]:
        members, reports = owners or self._all, self._reports.get(owners, {})
        paired = set[str]()
        for digest, one in known.items():
            if still is None and not one.counts:
                continue
            lack = [process for process in members if self._lacks(process, reports, one)]
            is_shown = one.counts or not {*lack}.isdisjoint(still or ())
            if digest in paired or not lack or not is_shown:
                continue
            other = self._instead(one, known)
            have = tuple(sorted(one.have))
            if other is None:
                yield ProgramDifference(
                    one.program, have, lack=tuple(lack), owners=members, instead=None
                )
            else:
                paired.add(other.program.digest)
                theirs = tuple(sorted(other.have))
                yield ProgramDifference(one.program, have, theirs, members, other.program)

    def _lacks(self, process: int, reports: Mapping[int, _Report], one: _Partial) -> bool:
        """Return whether a process has not compiled a program, as far as it has reported."""
        report = reports.get(process)
        return process not in one.have and report is not None and report.is_whole

    def _instead(self, one: _Partial, known: Mapping[str, _Partial]) -> _Partial | None:
        """Return the program that other processes have compiled where these have this one."""
        for other in known.values():
            is_alike = other.program[1:4] == one.program[1:4]
            if other is not one and is_alike and one.have.isdisjoint(other.have):
                return other
        return None
