"""Def-use chains of a program's instructions, and their source locations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from shoal.plan.compiled.hlo_instructions import instructions_of

_MOVED = ("copy", "bitcast", "transpose", "reshape", "convert", "all-gather", "get-tuple-element")


class SourceLine(NamedTuple):
    """A line of source that led to an instruction."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


class ProgramFlow(NamedTuple):
    """The instructions of a program."""

    users: Mapping[str, tuple[tuple[str, int], ...]]  # of each: (user, operand number)
    opcodes: Mapping[str, str]
    bodies: Mapping[str, Mapping[int, str]]  # of each fusion: the parameters of its computation

    def is_cut_again(self, name: str) -> bool:
        """Is the result of an instruction only passed on until a device slices out its part?

        This is where XLA's partitioner found no better path between two layouts ("involuntary full
        rematerialization").
        """
        seen, left = set(), [name]
        while left:
            here = left.pop()
            for user, number in self.users.get(here, ()):
                opcode = self.opcodes[user]
                if opcode == "dynamic-slice" and number == 0:
                    return True
                if user not in seen and opcode in _MOVED:
                    left.append(user)
                elif user not in seen and number in self.bodies.get(user, {}):
                    left += [user] if self._is_copy(user) else []
                    left.append(self.bodies[user][number])
                seen.add(user)
        return False

    def _is_copy(self, fusion: str) -> bool:
        return fusion.startswith(("wrapped_copy", "copy", "bitcast", "transpose"))


def flow_of(hlo: str) -> ProgramFlow:
    """Return the data flow of a compiled program.

    Args:
      hlo: its text. Names of instructions are unique in a module.
    """
    users: dict[str, list[tuple[str, int]]] = {}
    parameters: dict[str, dict[int, str]] = {}
    fusions: dict[str, str] = {}
    instructions = instructions_of(hlo)
    for name, one in instructions.items():
        for number, operand in enumerate(one.operands):
            users.setdefault(operand, []).append((name, number))
        if one.opcode == "parameter":
            parameters.setdefault(one.computation, {})[int(one.inside)] = name
        if called := one.called("calls"):
            fusions[name] = called
    return ProgramFlow(
        {name: tuple(rows) for name, rows in users.items()},
        {name: one.opcode for name, one in instructions.items()},
        {name: parameters.get(body, {}) for name, body in fusions.items()},
    )


def frames_of(hlo: str) -> dict[int, tuple[SourceLine, ...]]:
    """Return the stack of each `stack_frame_id`, innermost frame first.

    Args:
      hlo: the text of a compiled program, whose head lists files, functions, lines and frames.
    """
    head = hlo.split("\n\n%", 1)[0]
    files, functions = (_names(head, title) for title in ("FileNames", "FunctionNames"))
    places = {
        int(number): SourceLine(
            files.get(int(file), "?"), int(line), functions.get(int(function), "?")
        )
        for number, file, function, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", head, re.M
        )
    }
    parents = {
        int(number): (int(place), int(parent))
        for number, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", head, re.M
        )
    }
    return {number: tuple(_walk(number, parents, places)) for number in parents}


def _names(head: str, title: str) -> dict[int, str]:
    block = re.search(rf'^{title}\n((?:\d+ ".*"\n)*)', head, re.M)
    rows = re.findall(r'^(\d+) "(.*)"$', block[1], re.M) if block else []
    return {int(number): name for number, name in rows}


def _walk(
    number: int, parents: Mapping[int, tuple[int, int]], places: Mapping[int, SourceLine]
) -> list[SourceLine]:
    """Follow the parents of a frame. XLA prints a parent's number plus one: 1 means no parent."""
    found: list[SourceLine] = []
    while number in parents:
        place, parent = parents[number]
        if place in places:
            found.append(places[place])
        number = min(parent, number) - 1  # a parent is printed before its children
    return found
