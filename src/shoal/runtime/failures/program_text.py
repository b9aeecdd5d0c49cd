"""Programs that only some processes have compiled, as sentences: see `rules.programs`."""

from __future__ import annotations

import dataclasses

from shoal.errors import counted
from shoal.runtime.failures.facts import JobFailure
from shoal.runtime.failures.process_text import is_one, listed_ranges
from shoal.runtime.rules.point import Ranges
from shoal.runtime.rules.programs import CompiledProgram, Differences, ProgramDifference
from shoal.runtime.system.callsite import line_of

# Kinds of failures that a program which only some processes run may explain.
_OF_PROGRAMS = ("deadline", "diverged", "host_lost", "lost", "signal", "stalled")


def with_programs(failure: JobFailure, programs: Differences) -> JobFailure:
    """Return a failure with the programs that only some processes had compiled."""
    if failure.kind not in _OF_PROGRAMS:
        return failure
    return dataclasses.replace(failure, programs=tuple(program_lines(programs)))


def program_lines(differences: Differences) -> list[str]:
    """Return a sentence for each difference, and at the end how many more there are."""
    lines = [*map(_difference_text, differences.shown)]
    return [*lines, f"and {differences.left_out} more"] if differences.left_out else lines


def program_warning(differences: Differences) -> str:
    """Return the first difference, and how many more there are.

    >>> program = CompiledProgram("d1", "jit(f)", "f32[8]", 8, "train.py:3 (main)")
    >>> one = ProgramDifference(program, ((0, 0),), ((1, 1),), owners=((0, 1),), instead=None)
    >>> program_warning(Differences((one,), left_out=2))
    'process 0 alone has compiled jit(f) for 8 devices of processes 0-1 at train.py:3; if it runs \
it, it may wait for the others (2 more differences: shoal.job_status())'
    """
    first, *others = differences.shown
    more = len(others) + differences.left_out
    rest = f" ({counted(more, 'more difference')}: shoal.job_status())" if more else ""
    return f"{_difference_text(first)}{rest}"


def _difference_text(difference: ProgramDifference) -> str:
    program, owners = difference.program, _processes(difference.owners)
    devices = f"{counted(program.num_devices, 'device')} of {owners}"
    if difference.instead is not None:
        pairs = sorted([(difference.have, program), (difference.lack, difference.instead)])
        sites = [
            f"{_processes(of)}{_site(program) or ' at an unknown line'}" for of, program in pairs
        ]
        function = program.name.partition("(")[2].rstrip(")") or "f"
        return (
            f"processes have compiled different programs {program.name} for {devices}, with "
            f"arguments {program.types or 'of no type'}: {'; '.join(sites)}. "
            f"`shoal.assert_same_program({function}, …)` shows the first line that differs"
        )
    have, lack = _processes(difference.have), _processes(difference.lack)
    what = f"{program.name} for {devices}{_site(program)}"
    if is_one(difference.have):
        return f"{have} alone has compiled {what}; if it runs it, it may wait for the others"
    verb = "has" if is_one(difference.lack) else "have"
    run = "if they run it, they may wait for the others"
    return f"{have} have compiled {what}, and {lack} {verb} not; {run}"


def _processes(ranges: Ranges) -> str:
    return listed_ranges(ranges, most=5)


def _site(program: CompiledProgram) -> str:
    return f" at {line_of(program.site)}" if program.site else ""
