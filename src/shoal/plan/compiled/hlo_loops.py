"""Infer trip counts of a compiled program's loops where XLA does not print them, as on TPUs.

A loop carries a tuple. Its condition compares a counter with a limit; both are elements of the
tuple, or constants. The body increments the counter, and passes loop invariants through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.plan.compiled.hlo_instructions import Instruction

_PASSED_ON = ("copy", "bitcast", "convert")


class _Sum(NamedTuple):
    """An element of a computation's parameter, plus a constant."""

    element: int | None  # None: a constant alone
    constant: int


class _Progress(NamedTuple):
    """How a number changes in one iteration."""

    first: int
    step: int


def trips_of(instructions: Mapping[str, Instruction]) -> dict[str, int]:
    """Return the trip count of each loop whose counter changes by constants.

    Args:
      instructions: as `instructions_of` returns them.

    Returns:
      Name of the loop's body → trip count. Loops with unknown counts are missing.
    """
    return _Loops(instructions).trips()


class _Loops:
    """The loops of a program."""

    def __init__(self, instructions: Mapping[str, Instruction]) -> None:
        self.instructions = instructions
        self.roots = {each.computation: each for each in instructions.values() if each.is_root}
        found = [each for each in instructions.values() if each.opcode == "while"]
        self.of_body = {each.called("body"): each for each in found}

    def trips(self) -> dict[str, int]:
        found = {body: self._trips(loop) for body, loop in self.of_body.items()}
        return {body: trips for body, trips in found.items() if trips is not None}

    def _trips(self, loop: Instruction) -> int | None:
        test = self.roots.get(loop.called("condition"))
        if test is None or test.opcode != "compare" or len(test.operands) != 2:
            return None
        sides = [self._progress(loop, self._sum(operand)) for operand in test.operands]
        if "direction=GT" in test.rest or "direction=GE" in test.rest:
            sides.reverse()
        low, high = sides
        if low is None or high is None or low.step <= high.step:
            return None
        missing = high.first - low.first
        if "direction=LE" in test.rest or "direction=GE" in test.rest:
            missing += 1
        elif "direction=LT" not in test.rest and "direction=GT" not in test.rest:
            return None
        return max(0, -(-missing // (low.step - high.step)))

    def _sum(self, name: str) -> _Sum | None:
        """Return a number as a sum of its computation's parameters; None if it is not one."""
        one = self.instructions.get(name)
        if one is None:
            return None
        if one.opcode == "constant":
            return _Sum(None, int(one.inside)) if one.inside.lstrip("-").isdigit() else None
        if one.opcode in _PASSED_ON and len(one.operands) == 1:
            return self._sum(one.operands[0])
        if one.opcode == "get-tuple-element":
            given = self.instructions.get(one.operands[0])
            is_given = given is not None and given.opcode == "parameter"
            return _Sum(int(one.rest.split("index=")[1].split(",")[0]), 0) if is_given else None
        if one.opcode != "add":
            return None
        terms = [self._sum(operand) for operand in one.operands]
        elements = [term.element for term in terms if term and term.element is not None]
        if None in terms or len(elements) > 1:
            return None
        return _Sum(elements[0] if elements else None, sum(term.constant for term in terms if term))

    def _progress(self, loop: Instruction, given: _Sum | None) -> _Progress | None:
        """Return how a number of the condition changes in one iteration."""
        if given is None or given.element is None:
            return None if given is None else _Progress(given.constant, 0)
        first = self._first(loop, given.element)
        body = self.roots.get(loop.called("body"))
        if first is None or body is None or body.opcode != "tuple":
            return None
        after = self._sum(body.operands[given.element])
        if after is None or after.element != given.element:
            return None
        return _Progress(first + given.constant, after.constant)

    def _first(self, loop: Instruction, element: int) -> int | None:
        """Return an element's initial value; inside another loop, if invariant there."""
        given = self.instructions.get(loop.operands[0])
        if given is None or given.opcode != "tuple":
            return None
        number = self._sum(given.operands[element])
        if number is None or number.element is None:
            return None if number is None else number.constant
        outer = self.of_body.get(loop.computation)
        found = None if outer is None else self._progress(outer, number)
        return found.first if found is not None and found.step == 0 else None
