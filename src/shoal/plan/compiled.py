"""Collectives of a compiled program and the bytes they send, parsed from the text of its HLO.

XLA prints each instruction as `%name = shape opcode(operands), attribute=…, attribute=…`, and each
computation as a block in braces. A collective in the body of a loop counts once per iteration,
where XLA knows the trip count (`known_trip_count`), or `trips_of` can infer it.

XLA's TPU compiler prints two things in its own way. A reduce-scatter is a fusion named
`all-reduce-scatter`: an all-reduce of which each device keeps its part. And a collective that
overlaps with computation is spread over several fusions (*async collective fusion*): one that
starts it, those that continue it, and one that finishes it; all name the same `chain_id`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import check_kind, integer
from shoal.colour import local

__all__ = ["Collective", "collectives_of", "received_bytes_of"]

IntArray = NDArray[np.int64]

_OPCODES = (
    "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast",
    "reduce-scatter", "all-reduce",
)  # fmt: skip
_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "token": 0,
}  # fmt: skip
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) (" + "|".join(_OPCODES) + r")(-start)?\((.*)$"
)
_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')


class Collective(NamedTuple):
    """One collective of a program."""

    name: str
    opcode: str
    result_bytes: int  # held by a device afterwards
    group_size: int  # devices per group; 0: all of them
    receivers: tuple[int, ...]  # of a permute: the receiving devices, by position
    times: int  # how often it runs
    op_name: str  # JAX's name of the operation, or ""
    frame: int  # its stack_frame_id; 0: none

    def received_bytes(self, num_devices: int) -> IntArray:
        """Return the bytes received by each device [devices], counted as in `transfer.steps`."""
        size = self.group_size or num_devices
        if self.opcode == "collective-permute":
            received = np.zeros(num_devices, np.int64)
            known = [device for device in self.receivers if device < num_devices]
            received[known] = self.result_bytes * self.times
            return received
        others = {
            "all-gather": self.result_bytes // size * (size - 1),
            "all-to-all": self.result_bytes // size * (size - 1),
            "ragged-all-to-all": self.result_bytes,
            "collective-broadcast": self.result_bytes,
            "reduce-scatter": self.result_bytes * (size - 1),
            "all-reduce": 2 * (self.result_bytes * (size - 1) // size),
        }
        return np.full(num_devices, others[self.opcode] * self.times, np.int64)


@local
def collectives_of(hlo: str) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program, in the order of the text.

    Local.

    Args:
      hlo: the text of a compiled program, such as `jitted.lower(…).compile().as_text()`.

    Raises:
      UsageError: `hlo` is not text.

    Example:
      >>> text = '''ENTRY %main (p: f32[2]) -> f32[8] {
      ...   ROOT %g = f32[8]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
      ... }'''
      >>> [(one.opcode, one.result_bytes, one.group_size) for one in collectives_of(text)]
      [('all-gather', 32, 4)]
    """
    check_kind("collectives_of", hlo, str, "the text of a compiled program")
    blocks = _blocks(hlo)
    times = _times(blocks, trips_of(instructions_of(hlo)))
    return tuple(
        _collective(match, line, times[name], name.startswith("all-reduce-scatter"))
        for name, (_, lines) in blocks.items()
        for line in lines
        if times[name] and (match := _INSTRUCTION.match(line)) and not _is_going_on(line, lines)
    )


@local
def received_bytes_of(hlo: str, num_devices: int) -> int:
    """Return the number of bytes received by the device that receives most.

    Local.

    Args:
      hlo: the text of a compiled program.
      num_devices: number of devices that it runs on.

    Raises:
      UsageError: `hlo` is not text, or there are no devices.
    """
    check_kind("received_bytes_of", hlo, str, "the text of a compiled program")
    num_devices = integer("received_bytes_of", "num_devices", num_devices, least=1)
    each = [collective.received_bytes(num_devices) for collective in collectives_of(hlo)]
    return int(sum(each, np.zeros(num_devices, np.int64)).max(initial=0))


Blocks = Mapping[str, tuple[bool, list[str]]]  # name → is it the entry, its lines


def _blocks(hlo: str) -> Blocks:
    """Return the computations of a program."""
    blocks: dict[str, tuple[bool, list[str]]] = {}
    lines: list[str] | None = None
    for line in hlo.splitlines():
        if lines is None:
            head = _HEAD.match(line)
            if head:
                lines = []
                blocks[head[2]] = (head[1] is not None, lines)
        elif line.startswith("}"):
            lines = None
        else:
            lines.append(line)
    return blocks


def _times(blocks: Blocks, trips: Mapping[str, int]) -> dict[str, int]:
    """Return how often each computation runs. Callers are printed after their callees.

    All branches of a conditional count, and a loop with an unknown trip count counts once.

    Args:
      trips: of the bodies of loops, where the text of their conditions says it.
    """
    times = {name: int(is_entry) for name, (is_entry, _) in blocks.items()}
    for name in reversed(list(blocks)):
        for line in blocks[name][1]:
            known = _TRIPS.search(line)
            if "-done(" in line:  # counted at its start
                continue
            for called in _called(line):
                if called in times:
                    times[called] += times[name] * (
                        int(known[1]) if known else trips.get(called, 1)
                    )
    return times


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in names.split(","))


def _is_going_on(line: str, lines: list[str]) -> bool:
    """Does a computation continue a collective that started in another one?"""
    return "chain_id=" in line and not any("AsyncCollectiveStart" in each for each in lines)


def _collective(match: re.Match[str], line: str, times: int, is_scattered: bool) -> Collective:
    name, shapes, opcode, is_start, rest = match.groups()
    parts = [_bytes(*each) for each in _TYPE.findall(shapes)]
    held = sum(parts)
    if is_start and opcode == "all-gather":  # (operands, results)
        held = sum(parts[len(parts) // 2 :])
    elif is_start and opcode == "collective-permute":  # (operand, result, …)
        held = parts[1]
    size = _group_size(rest)
    if is_scattered and opcode == "all-reduce" and size:
        opcode, held = "reduce-scatter", held // size
    operation = re.search(r'op_name="([^"]*)"', line)
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
    sends = re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else []
    receivers = tuple(sorted(int(receiver) for sender, receiver in sends if sender != receiver))
    op_name = operation[1] if operation else ""
    stack_frame = re.search(r"\bstack_frame_id=(\d+)", line)
    frame = int(stack_frame[1]) if stack_frame else 0
    return Collective(name, opcode, held, size, receivers, times, op_name, frame)


def _bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype, 8 if dtype.startswith("f8") else 4)  # f4e2m1fn and its like
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _group_size(attributes: str) -> int:
    """Return the number of devices in a group: XLA prints groups in three ways."""
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", attributes)
    if listed:
        groups: list[str] = re.findall(r"\{([\d,]*)\}", listed[1])
        return max(group.count(",") + 1 for group in groups)
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes)
    if iota:
        return int(iota[1])
    named = re.search(r"replica_groups=mesh\[([^]]*)\](?:, device_ids=\([^)]*(?:\([^)]*\))?\))? "
                      r"\{([^}]*)\}", attributes)  # fmt: skip
    if named is None:
        return 0
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
    axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part) if part else sizes[axis] for axis, part in axes)


# Parse the instructions of a compiled program from the text of its HLO.
#
# XLA prints each as `%name = shape opcode(operands), attribute=…, attribute=…`, and each
# computation as a block in braces. Shapes include their layout; on TPUs with tiles, as in
# `f32[8,128]{1,0:T(8,128)}`.


_OPERATION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = .*?\b([a-z][a-z0-9-]*)\((.*)$")
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
        match = re.search(rf"\b{attribute}=%?([\w.-]+)", self.rest)
        return match[1] if match else ""


def instructions_of(hlo: str) -> dict[str, Instruction]:
    """Return the instructions of a compiled program, in the order of the text.

    Args:
      hlo: its text.

    Returns:
      name → instruction; names are unique in a program.
    """
    instructions: dict[str, Instruction] = {}
    computation = ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        elif match := _OPERATION.match(line):
            root, name, opcode, rest = match.groups()
            operands = tuple(_NAME.findall(rest.split(")")[0]))
            instructions[name] = Instruction(
                computation, is_root=bool(root), opcode=opcode, operands=operands, rest=rest
            )
    return instructions


# Def-use chains of a program's instructions, and their source locations.


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
            for user, place in self.users.get(here, ()):
                opcode = self.opcodes[user]
                if opcode == "dynamic-slice" and place == 0:
                    return True
                if user not in seen and opcode in _MOVED:
                    left.append(user)
                elif user not in seen and place in self.bodies.get(user, {}):
                    left += [user] if self._is_copy(user) else []
                    left.append(self.bodies[user][place])
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
    for name, instruction in instructions.items():
        for place, operand in enumerate(instruction.operands):
            users.setdefault(operand, []).append((name, place))
        if instruction.opcode == "parameter":
            parameters.setdefault(instruction.computation, {})[int(instruction.inside)] = name
        called = instruction.called("calls")
        if called:
            fusions[name] = called
    return ProgramFlow(
        {name: tuple(rows) for name, rows in users.items()},
        {name: instruction.opcode for name, instruction in instructions.items()},
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
        int(location): SourceLine(
            files.get(int(file), "?"), int(line), functions.get(int(function), "?")
        )
        for location, file, function, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", head, re.M
        )
    }
    parents = {
        int(frame): (int(place), int(parent))
        for frame, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", head, re.M
        )
    }
    return {frame: tuple(_walk(frame, parents, places)) for frame in parents}


def _names(head: str, title: str) -> dict[int, str]:
    block = re.search(rf'^{title}\n((?:\d+ ".*"\n)*)', head, re.M)
    rows = re.findall(r'^(\d+) "(.*)"$', block[1], re.M) if block else []
    return {int(number): name for number, name in rows}


def _walk(
    frame: int, parents: Mapping[int, tuple[int, int]], places: Mapping[int, SourceLine]
) -> list[SourceLine]:
    """Follow the parents of a frame. XLA prints a parent's number plus one: 1 means no parent."""
    lines: list[SourceLine] = []
    while frame in parents:
        place, parent = parents[frame]
        if place in places:
            lines.append(places[place])
        frame = min(parent, frame) - 1  # a parent is printed before its children
    return lines


# Infer trip counts of a compiled program's loops where XLA does not print them, as on TPUs.
#
# A loop carries a tuple. Its condition compares a counter with a limit; both are elements of the
# tuple, or constants. The body increments the counter, and passes loop invariants through.


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
        loops = [each for each in instructions.values() if each.opcode == "while"]
        self.of_body = {each.called("body"): each for each in loops}

    def trips(self) -> dict[str, int]:
        by_body = {body: self._trips(loop) for body, loop in self.of_body.items()}
        return {body: trips for body, trips in by_body.items() if trips is not None}

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
        """Return an instruction's value as an element plus a constant; None if it is not that."""
        instruction = self.instructions.get(name)
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            text = instruction.inside
            return _Sum(None, int(text)) if text.lstrip("-").isdigit() else None
        if instruction.opcode in _PASSED_ON and len(instruction.operands) == 1:
            return self._sum(instruction.operands[0])
        if instruction.opcode == "get-tuple-element":
            source = self.instructions.get(instruction.operands[0])
            if source is None or source.opcode != "parameter":
                return None
            return _Sum(int(instruction.rest.split("index=")[1].split(",")[0]), 0)
        if instruction.opcode != "add":
            return None
        terms = [self._sum(operand) for operand in instruction.operands]
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
        start = self._sum(given.operands[element])
        if start is None or start.element is None:
            return None if start is None else start.constant
        outer = self.of_body.get(loop.computation)
        progress = None if outer is None else self._progress(outer, start)
        if progress is None or progress.step != 0:
            return None
        return progress.first
