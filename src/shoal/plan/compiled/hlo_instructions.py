"""Parse the instructions of a compiled program from the text of its HLO.

XLA prints each as `%name = shape opcode(operands), attribute=…, attribute=…`, and each computation
as a block in braces. Shapes include their layout; on TPUs with tiles, as in
`f32[8,128]{1,0:T(8,128)}`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = .*?\b([a-z][a-z0-9-]*)\((.*)$")
_NAME = re.compile(r"%([\w.-]+)")


class Instruction(NamedTuple):
    """One instruction."""

    computation: str
    is_root: bool
    opcode: str
    operands: tuple[str, ...]
    rest: str  # the text after the opcode and its opening bracket

    @property
    def inside(self) -> str:
        """The text between the brackets: the operands, or a constant's value."""
        return self.rest.split(")")[0]

    def called(self, attribute: str) -> str:
        """Return the computation that an attribute such as `calls` or `body` names, or nothing."""
        found = re.search(rf"\b{attribute}=%?([\w.-]+)", self.rest)
        return found[1] if found else ""


def instructions_of(hlo: str) -> dict[str, Instruction]:
    """Return the instructions of a compiled program, in the order of the text.

    Args:
      hlo: its text.

    Returns:
      name → instruction; names are unique in a program.
    """
    found: dict[str, Instruction] = {}
    computation = ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif match := _INSTRUCTION.match(line):
            root, name, opcode, rest = match.groups()
            operands = tuple(_NAME.findall(rest.split(")")[0]))
            found[name] = Instruction(computation, bool(root), opcode, operands, rest)
    return found
