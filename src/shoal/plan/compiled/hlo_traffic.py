"""Collectives of a compiled program and the bytes they send, parsed from the text of its HLO.

XLA prints each instruction as `%name = shape opcode(operands), attribute=…, attribute=…`, and each
computation as a block in braces. A collective in the body of a loop counts once per iteration,
where XLA knows the trip count (`known_trip_count`), or `hlo_loops` can infer it.

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
from shoal.plan.compiled.hlo_instructions import instructions_of
from shoal.plan.compiled.hlo_loops import trips_of

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
            found = np.zeros(num_devices, np.int64)
            known = [device for device in self.receivers if device < num_devices]
            found[known] = self.result_bytes * self.times
            return found
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
        _collective(found, line, times[name], name.startswith("all-reduce-scatter"))
        for name, (_, lines) in blocks.items()
        for line in lines
        if times[name] and (found := _INSTRUCTION.match(line)) and not _is_going_on(line, lines)
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
    each = [one.received_bytes(num_devices) for one in collectives_of(hlo)]
    return int(sum(each, np.zeros(num_devices, np.int64)).max(initial=0))


Blocks = Mapping[str, tuple[bool, list[str]]]  # name → is it the entry, its lines


def _blocks(hlo: str) -> Blocks:
    """Return the computations of a program."""
    found: dict[str, tuple[bool, list[str]]] = {}
    lines: list[str] | None = None
    for line in hlo.splitlines():
        if lines is None:
            if head := _HEAD.match(line):
                lines = []
                found[head[2]] = (head[1] is not None, lines)
        elif line.startswith("}"):
            lines = None
        else:
            lines.append(line)
    return found


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


def _collective(found: re.Match[str], line: str, times: int, is_scattered: bool) -> Collective:
    name, shapes, opcode, is_start, rest = found.groups()
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
    frame = int(at[1]) if (at := re.search(r"\bstack_frame_id=(\d+)", line)) else 0
    return Collective(name, opcode, held, size, receivers, times, op_name, frame)


def _bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype, 8 if dtype.startswith("f8") else 4)  # f4e2m1fn and its like
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _group_size(attributes: str) -> int:
    """Return the number of devices in a group: XLA prints groups in three ways."""
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", attributes):
        groups: list[str] = re.findall(r"\{([\d,]*)\}", listed[1])
        return max(group.count(",") + 1 for group in groups)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[1])
    named = re.search(r"replica_groups=mesh\[([^]]*)\](?:, device_ids=\([^)]*(?:\([^)]*\))?\))? "
                      r"\{([^}]*)\}", attributes)  # fmt: skip
    if named is None:
        return 0
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
    axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part) if part else sizes[axis] for axis, part in axes)
