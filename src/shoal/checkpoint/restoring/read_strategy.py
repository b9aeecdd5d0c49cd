"""Decide how each leaf is read, directly or by exchange, and what that costs. Reads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.checkpoint.blocks.reader import plan_boxes
from shoal.checkpoint.planning.read_plan import Boxes
from shoal.checkpoint.restoring.target import LeafRequest
from shoal.checkpoint.store.opening import Checkpoint
from shoal.checkpoint.tree.dtypes import dtype_of, storage_of
from shoal.errors import counted

_WORTH = 1.5  # exchange if direct reads exceed this multiple of the leaf
_LARGE_BYTES = 1 << 20  # smaller leaves are always read directly
_MOST_SAMPLED = 8  # processes sampled to decide for a leaf


Row = tuple[int, Sequence[Any], Sequence[Any]]  # a leaf; origins and extents of its boxes


class Geometry(NamedTuple):
    """The device facts that this module needs, as callables."""

    boxes: Callable[[Any, tuple[int, ...], int], tuple[Sequence[Any], Sequence[Any]]]
    """(place, shape, process) → origins and extents of the distinct boxes there."""
    processes: Callable[[Any], Sequence[int]]  # of a place
    intermediates: Callable[[Any, tuple[int, ...]], Sequence[Any]]  # (place, shape) → places


class ReadStrategy(NamedTuple):
    """How each leaf is read."""

    intermediate: Mapping[int, Any]  # index of the request → intermediate sharding; else direct
    why: str


class Costs(NamedTuple):
    """The cost of a restore for one process."""

    process: int
    read_bytes: int
    needed_bytes: int  # of the boxes that this process reads
    num_files: int
    num_requests: int
    memory_bytes: int  # of the distinct boxes that it holds at the end


def choose(
    checkpoint: Checkpoint, requests: Sequence[LeafRequest], mode: str, geometry: Geometry | None
) -> ReadStrategy:
    """Choose how each leaf is read, alike on all processes.

    A leaf is exchanged if processes would directly read more than 1.5 times its bytes, because they
    hold replicas, or because their boxes have short rows.
    """
    if mode == "direct" or geometry is None:
        return ReadStrategy(
            {}, "as requested" if mode == "direct" else "nothing is placed on devices"
        )
    known: dict[object, Any] = {}
    intermediate: dict[int, Any] = {}
    wanted = 0
    chunks = checkpoint.chunks
    sizes = np.bincount(chunks.leaf, chunks.end - chunks.begin, len(checkpoint.manifest.leaves))
    is_large = (sizes >= (_LARGE_BYTES if mode == "auto" else 1)).tolist()
    for index, request in enumerate(requests):
        record = checkpoint.manifest.leaves[request.leaf]
        if request.place is None or record.kind != "array" or not is_large[request.leaf]:
            continue
        if storage_of(request.dtype or dtype_of(record.dtype)).per_byte > 1:
            continue  # XLA's CPU collectives corrupt such elements and write out of bounds
        wanted += 1
        key = (request.place, record.shape, record.dtype, _pattern(checkpoint, request.leaf))
        if key not in known:
            known[key] = _intermediate(checkpoint, request, mode, geometry)
        if known[key] is not None:
            intermediate[index] = known[key]
    detail = f"{len(intermediate)} of {wanted} leaves that are large, or meant to be, are exchanged"
    if not intermediate:
        detail = "direct reads cost at most 1.5 times what is needed, or nothing fits"
    return ReadStrategy(intermediate, detail)


def _intermediate(
    checkpoint: Checkpoint, request: LeafRequest, mode: str, geometry: Geometry
) -> Any:
    """Return the intermediate sharding of a leaf; None if it is read directly."""
    shape = checkpoint.manifest.leaves[request.leaf].shape
    processes = geometry.processes(request.place)
    candidates = geometry.intermediates(request.place, shape)
    if len(processes) < 2 or not candidates:
        return None
    share = len(processes) / len(_some(processes))

    def cost(place: Any) -> float:
        total = 0
        for process in _some(processes):
            boxes = _boxes(checkpoint, [(request.leaf, *geometry.boxes(place, shape, process))])
            total += plan_boxes(checkpoint, boxes).read_bytes
        return total * share

    best = min(candidates, key=cost)
    if mode == "exchange":
        return best
    direct = cost(request.place)
    is_worth = direct > _WORTH * _size(checkpoint, request.leaf) and cost(best) < direct
    return best if is_worth else None


def _some(processes: Sequence[int]) -> Sequence[int]:
    return processes[:: -(-len(processes) // _MOST_SAMPLED)]


def cost_of(
    checkpoint: Checkpoint,
    requests: Sequence[LeafRequest],
    strategy: ReadStrategy,
    geometry: Geometry | None,
    process: int,
    num_processes: int,
) -> Costs:
    """Return the cost of a restore for one process.

    Args:
      process: its index in JAX.
      num_processes: of the job. If other processes saved, `merge=` gets the values of all of them.
    """
    rows: list[Row] = []
    memory_bytes = 0
    for index, request in enumerate(requests):
        record = checkpoint.manifest.leaves[request.leaf]
        if record.kind == "per_process":
            saved = checkpoint.values_of(request.leaf)
            own = [process] if len(saved) == num_processes else sorted(saved)
            values = [saved[holder] for holder in own]
            origins = [(first,) for first, _ in values]
            rows.append((request.leaf, origins, [(size,) for _, size in values]))
            memory_bytes += sum(size for _, size in values)
        elif record.has_data:
            row, kept = _held(
                checkpoint,
                request,
                intermediate=strategy.intermediate.get(index),
                geometry=geometry,
                process=process,
            )
            rows.append(row)
            item_bytes = (request.dtype or dtype_of(record.dtype)).itemsize
            memory_bytes += sum(math.prod(extent) for extent in kept) * item_bytes
    plan = plan_boxes(checkpoint, _boxes(checkpoint, rows))
    return Costs(
        process=process,
        read_bytes=plan.read_bytes,
        needed_bytes=plan.needed_bytes,
        num_files=len(plan.files),
        num_requests=plan.num_requests,
        memory_bytes=memory_bytes,
    )


def _held(
    checkpoint: Checkpoint,
    request: LeafRequest,
    intermediate: Any,
    geometry: Geometry | None,
    process: int,
) -> tuple[Row, Sequence[Any]]:
    """Return the boxes of a leaf that a process reads, and the extents of those it keeps."""
    record = checkpoint.manifest.leaves[request.leaf]
    if request.place is None or geometry is None:
        whole = [record.stored_shape]
        return (request.leaf, [(0,) * len(record.stored_shape)], whole), whole
    key_words, zeros = record.words, (0,) * len(record.words)
    place = request.place if intermediate is None else intermediate
    origins, extents = geometry.boxes(place, record.shape, process)
    kept = geometry.boxes(request.place, record.shape, process)[1]
    row = (
        request.leaf,
        [origin + zeros for origin in origins],
        [extent + key_words for extent in extents],
    )
    return row, [extent + key_words for extent in kept]


@dataclass(frozen=True)
class RestorePlan:
    """The cost of a restore. Its `str` is a table."""

    path: str
    mode: str  # "direct", or "exchange" if some leaves are
    why: str  # a sentence
    num_leaves: int
    exchanged: tuple[str, ...]  # names of the leaves exchanged between devices
    leaves_bytes: int  # of the leaves in files, each counted once
    processes: tuple[Costs, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes read by all processes together."""
        return sum(costs.read_bytes for costs in self.processes)

    @property
    def needed_bytes(self) -> int:
        """Bytes of the boxes read; exceeds `leaves_bytes` where several processes read one."""
        return sum(costs.needed_bytes for costs in self.processes)

    def __str__(self) -> str:
        heads = ("process", "read", "needed", "files", "requests", "memory")
        rows = [
            (
                str(costs.process),
                _amount(costs.read_bytes),
                _amount(costs.needed_bytes),
                str(costs.num_files),
                str(costs.num_requests),
                _amount(costs.memory_bytes),
            )
            for costs in self.processes
        ]
        if len(rows) > 1:
            total = (_amount(self.read_bytes), _amount(self.needed_bytes))
            requests = sum(costs.num_requests for costs in self.processes)
            memory = sum(costs.memory_bytes for costs in self.processes)
            rows.append(("all", *total, "", str(requests), _amount(memory)))
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (heads, *rows)
        ]
        leaves = counted(self.num_leaves, "leaf", "leaves")
        head = f"{self.path}: {leaves}, {_amount(self.leaves_bytes)}, {self.mode}"
        return "\n".join([f"{head} ({self.why})", *lines])


def plan_all(
    checkpoint: Checkpoint,
    requests: Sequence[LeafRequest],
    strategy: ReadStrategy,
    geometry: Geometry | None,
    processes: Sequence[int],
) -> RestorePlan:
    """Return the cost of a restore for all processes."""
    leaves = {request.leaf for request in requests}
    names = [
        checkpoint.manifest.leaves[requests[n].leaf].name for n in sorted(strategy.intermediate)
    ]
    count = len(processes)
    costs = tuple(
        cost_of(checkpoint, requests, strategy, geometry, process, count) for process in processes
    )
    return RestorePlan(
        path=checkpoint.store.path,
        mode="exchange" if strategy.intermediate else "direct",
        why=strategy.why,
        num_leaves=len(requests),
        exchanged=tuple(names),
        leaves_bytes=sum(_size(checkpoint, leaf) for leaf in leaves),
        processes=costs,
    )


def _boxes(checkpoint: Checkpoint, rows: Sequence[Row]) -> Boxes:
    """Return boxes as arrays: leaf, origin and extent of each row."""
    rank = checkpoint.chunks.origin.shape[1]
    count = sum(len(origins) for _, origins, _ in rows)
    leaf = np.zeros(count, np.int64)
    origin, extent = np.zeros((count, rank), np.int64), np.ones((count, rank), np.int64)
    row = 0
    for leaf_index, origins, extents in rows:
        for first, sizes in zip(origins, extents, strict=True):
            leaf[row] = leaf_index
            origin[row, : len(first)], extent[row, : len(sizes)] = first, sizes
            row += 1
    return Boxes(leaf, origin, extent)


def _size(checkpoint: Checkpoint, leaf: int) -> int:
    """Return the size of a leaf in files."""
    low, high = _rows(checkpoint, leaf)
    return int((checkpoint.chunks.end[low:high] - checkpoint.chunks.begin[low:high]).sum())


def _rows(checkpoint: Checkpoint, leaf: int) -> tuple[int, int]:
    low, high = np.searchsorted(checkpoint.chunks.leaf, [leaf, leaf + 1])
    return int(low), int(high)


def _pattern(checkpoint: Checkpoint, leaf: int) -> tuple[bytes, bytes]:
    """Return a key for how a leaf is split."""
    low, high = _rows(checkpoint, leaf)
    chunks = checkpoint.chunks
    return chunks.origin[low:high].tobytes(), chunks.extent[low:high].tobytes()


def _amount(num_bytes: int) -> str:
    """Format a number of bytes."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
