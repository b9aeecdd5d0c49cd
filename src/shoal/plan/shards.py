"""Which processes hold each region of an array, and which one of them writes it.

Two rules decide where an uneven dim is cut:

* "ceil": every shard has ceil(dim / shards) indices, clamped to the dim. XLA's rule.
* "axis_by_axis": each axis in turn cuts what the previous axis left, by the same rule. The rule of
  PyTorch's DTensor. 9 over x=4, y=2: 2,1,2,1,2,1,0,0 and not 2,2,2,2,1,0,0,0.

Either way a shard may be empty; an empty region is at the end of its dim. Devices that hold the
same shard are replicas of each other, numbered 0..k-1 in mesh order, as in JAX's
`Shard.replica_id`. A dim of size 0 has one shard, held by all devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.errors import UsageError, nearest
from shoal.plan.layout import Layout, check_layout
from shoal.plan.mesh import Mesh, coords_of

__all__ = ["Owners", "Uneven", "owners", "region", "replica_index"]
IntArray = NDArray[np.int64]
Uneven = Literal["ceil", "axis_by_axis"]
_MOST_INDICES = 1 << 62  # so that edges past the end of a dim fit in 64 bits


@local
def region(
    layout: Layout, shape: Sequence[int], device_id: int, uneven: Uneven = "ceil"
) -> tuple[slice, ...]:
    """Return the indices of the array that a device holds.

    Local.

    Two regions are either equal or disjoint, and every index of the array is in one.

    Args:
      layout: the layout.
      shape: the shape of the whole array [rank].
      device_id: the id of a device of the mesh (not its position).
      uneven: "ceil" or "axis_by_axis"; the same where shards divide the dims evenly.

    Returns:
      one slice for each dim, with start and stop always set.

    Raises:
      UsageError: the mesh has no such device, or the shape does not fit the layout.

    Example:
      >>> from shoal import Mesh
      >>> region(Layout(Mesh({"x": 4, "y": 2}), "x", None), (7, 3), device_id=6)
      (slice(6, 7, None), slice(0, 3, None))
    """
    check_layout("region", layout)
    sizes = layout.check_shape(shape)
    coords = _coords_by_axis(layout, device_id)
    cut = _rule(uneven)
    slices = []
    for axes, size in zip(layout.axes_of_dims, sizes, strict=True):
        counts = [layout.mesh.axes[axis] for axis in axes]
        start, stop = cut(size, counts, [coords[axis] for axis in axes])
        slices.append(slice(start, stop))
    return tuple(slices)


@local
def replica_index(
    layout: Layout, shape: Sequence[int], device_id: int, uneven: Uneven = "ceil"
) -> int:
    """Return the number of a device among those that hold the same shard, in mesh order.

    Local.

    Args:
      layout: the layout.
      shape: the shape of the whole array [rank].
      device_id: the id of a device of the mesh.
      uneven: "ceil" or "axis_by_axis".

    Returns:
      0..k-1, where k devices hold the same shard.

    Raises:
      UsageError: the mesh has no such device, or the shape does not fit the layout.

    Example:
      >>> from shoal import Mesh
      >>> replica_index(Layout(Mesh({"x": 4, "y": 2}), "x"), (8,), device_id=5)
      1
    """
    check_layout("replica_index", layout)
    split = {axis for axes in _splits(layout, layout.check_shape(shape)) for axis in axes}
    _rule(uneven)
    coords = _coords_by_axis(layout, device_id)
    index = 0
    for axis, size in layout.mesh.axes.items():
        index = index if axis in split else index * size + coords[axis]
    return index


@dataclass(frozen=True, eq=False)
class Owners:
    """The holders and the writer of each box, over all devices of a mesh in mesh order.

    A box is what one shard covers. Boxes are numbered row-major over the shards of the dims; those
    past the end of an uneven dim are empty.
    """

    start: IntArray
    """First index of each device's region [devices, rank]."""
    stop: IntArray
    """One past its last index [devices, rank]."""
    box: IntArray
    """The number of its box [devices]; the devices of a box are replicas of each other."""
    replica: IntArray
    """Its number among the devices of the same box, in mesh order [devices]."""
    writer: IntArray
    """The one process that writes each box [boxes]: one that holds it, balanced by bytes."""

    @property
    def num_boxes(self) -> int:
        """Number of boxes, including empty ones."""
        return len(self.writer)


@local
def owners(layout: Layout, shape: Sequence[int], uneven: Uneven = "ceil") -> Owners:
    """Return the holders over all devices, and the writer of each distinct box.

    Local.

    Every box is written by exactly one process, which holds it. Partial layouts are refused: no
    device holds a value.

    Args:
      layout: the layout.
      shape: the shape of the whole array [rank].
      uneven: "ceil" or "axis_by_axis".

    Raises:
      UsageError: the shape does not fit the layout, or the layout is partial.

    Example:
      >>> from shoal import Mesh
      >>> held = owners(Layout(Mesh({"x": 2, "y": 2}, processes=[0, 0, 1, 1]), "y"), (4,))
      >>> held.start.ravel(), held.box, held.replica, held.writer
      (array([0, 2, 0, 2]), array([0, 1, 0, 1]), array([0, 0, 1, 1]), array([0, 1]))
    """
    check_layout("owners", layout)
    sizes = layout.check_shape(shape)
    if layout.partial:
        raise UsageError(
            f"owners: {layout!r} is partial: reduce it first, so that every value has an owner"
        )
    mesh, rank = layout.mesh, layout.rank
    if max(sizes, default=0) > _MOST_INDICES:
        raise UsageError(f"owners: shape {sizes} has a dim of more than 2^62 indices")
    start = np.empty((mesh.size, rank), dtype=np.int64)
    stop = np.empty((mesh.size, rank), dtype=np.int64)
    box: IntArray = np.zeros((1,) * len(mesh.shape), dtype=np.int64)
    share = np.ones(1)  # of the array, by box: large arrays have more elements than 64 bits count
    splits = _splits(layout, sizes)
    for dim, (axes, size) in enumerate(zip(splits, sizes, strict=True)):
        starts, stops = _cuts([mesh.axes[axis] for axis in axes], size, uneven)
        shard = _shard_numbers(mesh, axes)
        start[:, dim] = _spread(starts[shard], mesh)
        stop[:, dim] = _spread(stops[shard], mesh)
        box = box * len(starts) + shard
        share = np.multiply.outer(share, (stops - starts) / max(size, 1)).reshape(-1)
    writer = choose_writers(_holders(mesh, splits), share)
    return Owners(
        start, stop, box=_spread(box, mesh), replica=_replicas(mesh, splits), writer=writer
    )


def _coords_by_axis(layout: Layout, device_id: int) -> dict[str, int]:
    mesh = layout.mesh
    coords = coords_of(mesh.position(device_id), mesh.shape)
    return dict(zip(mesh.axis_names, coords, strict=True))


def _rule(uneven: str) -> Callable[[int, Sequence[int], Sequence[int]], tuple[int, int]]:
    rules = {"ceil": _cut_at_once, "axis_by_axis": _cut_in_turn}
    if not isinstance(uneven, str) or uneven not in rules:
        known = " or ".join(map(repr, rules))
        raise UsageError(f"uneven={uneven!r} must be {known}{nearest(uneven, rules)}")
    return rules[uneven]


def _cut_at_once(size: int, counts: Sequence[int], coords: Sequence[int]) -> tuple[int, int]:
    """Cut `size` into prod(counts) shards; return start and stop of the one at `coords`.

    7 over counts (2, 2): shards of 2 are 0..2, 2..4, 4..6, 6..7; coords (1, 1) is shard 3: (6, 7).
    """
    shard = 0
    for count, coord in zip(counts, coords, strict=True):
        shard = shard * count + coord
    length = -(-size // math.prod(counts))
    return min(shard * length, size), min((shard + 1) * length, size)


def _cut_in_turn(size: int, counts: Sequence[int], coords: Sequence[int]) -> tuple[int, int]:
    """Cut `size` by the first count, the piece by the second, and so on.

    9 over counts (4, 2): pieces 0..3, 3..6, 6..9, 9..9, each cut into 2 and 1; at (1, 1): (5, 6).
    """
    start, stop = 0, size
    for count, coord in zip(counts, coords, strict=True):
        first, last = _cut_at_once(stop - start, (count,), (coord,))
        start, stop = start + first, start + last
    return (start, stop) if start < stop else (size, size)


def _splits(layout: Layout, sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """The axes that split each dim; none split a dim of size 0."""
    return [axes if size else () for axes, size in zip(layout.axes_of_dims, sizes, strict=True)]


def _cuts(counts: Sequence[int], size: int, uneven: str) -> tuple[IntArray, IntArray]:
    """Start and stop of every shard of a dim that axes of these sizes split, by shard number."""
    start, stop = np.zeros(1, dtype=np.int64), np.full(1, size, dtype=np.int64)
    for count in counts if _rule(uneven) is _cut_in_turn else [math.prod(counts)]:
        length = -((start - stop) // count)  # the ceiling of each piece's share
        edges = np.multiply.outer(length, np.arange(count + 1, dtype=np.int64))
        edges = np.minimum(start[:, None] + edges, stop[:, None])
        start, stop = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    return np.where(start < stop, start, size), np.where(start < stop, stop, size)


def _spread(values: IntArray, mesh: Mesh) -> IntArray:
    """Values that broadcast to the mesh's shape, as a row over its devices [devices]."""
    return np.broadcast_to(values, mesh.shape).reshape(-1)


def _shard_numbers(mesh: Mesh, axes: Sequence[str]) -> IntArray:
    """The shard number at every position along a dim, in a shape that broadcasts to the mesh's.

    x=2, y=3 and the dim ("y", "x"): number = y · 2 + x, so [[0, 2, 4], [1, 3, 5]].
    """
    numbers = np.zeros((1,) * len(mesh.shape), dtype=np.int64)
    for axis in axes:
        size, own_index = mesh.axes[axis], mesh.axis_names.index(axis)
        along = [size if axis_index == own_index else 1 for axis_index in range(len(mesh.shape))]
        numbers = numbers * size + np.arange(size, dtype=np.int64).reshape(along)
    return numbers


def _replicas(mesh: Mesh, splits: Sequence[Sequence[str]]) -> IntArray:
    """The replica number of every device [devices]: its place along the axes that split nothing."""
    split = {axis for axes in splits for axis in axes}
    free = [1 if axis in split else size for axis, size in mesh.axes.items()]
    numbers = np.arange(math.prod(free), dtype=np.int64).reshape(free)
    return _spread(numbers, mesh)


def _holders(mesh: Mesh, splits: Sequence[Sequence[str]]) -> IntArray:
    """The processes of the devices that hold each box [boxes, replicas]."""
    used = [mesh.axis_names.index(axis) for axes in splits for axis in axes]
    free = [place for place in range(len(mesh.shape)) if place not in used]
    boxes = math.prod(mesh.shape[place] for place in used)
    return mesh.processes.transpose(used + free).reshape(boxes, -1)


# Decompose a run of array items, in C order, into boxes.

Box: TypeAlias = tuple[tuple[int, int], ...]  # first and end of each dim


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Yield the boxes that the items low ≤ i < high of an array fill, in C order.

    Items 2 to 11 of a [4, 4]: the end of row 0, rows 1 to 1, the beginning of row 2::

        . . a a
        b b b b
        c c c .
    """
    if low >= high:
        return
    if not shape:
        yield ()
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, end = -(-low // row), high // row  # of the whole rows
    cuts = [(low, high)] if first > end else [(low, first * row), (end * row, high)]
    head, *tail = [
        [((r, r + 1), *box) for box in boxes(inner, a - r * row, b - r * row)]
        for a, b in cuts
        for r in (a // row,)
    ]
    yield from head
    if first < end:
        yield ((first, end), *((0, size) for size in inner))
    for more in tail:
        yield from more


# Assign each box of an array to a process that writes it: a holder, balancing the bytes.
#
# Boxes held by the same processes form a class. If the classes share no process, as on every mesh
# whose processes are sub-grids, each class is dealt out by itself: largest box first, back and
# forth over its processes, which is as even as boxes of one size permit. If classes overlap, the
# boxes are assigned one by one, largest first, to the least loaded holder (R. L. Graham, *Bounds
# on multiprocessing timing anomalies*, SIAM J. Appl. Math. 17, 1969), and among equals to the one
# with the fewest other boxes to choose from.


def choose_writers(holders: IntArray, size: NDArray[Any]) -> IntArray:
    """Return the process that writes each box [boxes].

    Args:
      holders: the processes of the devices that hold each box [boxes, replicas].
      size: elements, bytes or share of each box [boxes].

    Example:
      >>> choose_writers(np.array([[0, 1], [0, 1], [2, 2]]), np.array([9, 4, 9]))
      array([0, 1, 2])
    """
    lowest: IntArray = holders.min(axis=1)
    if holders.shape[1] == 1 or (holders == lowest[:, None]).all():
        return lowest
    if holders.max() > 4 * holders.size:  # tables are indexed by process: number them anew
        names, labels = np.unique(holders, return_inverse=True)
        return np.asarray(names[choose_writers(labels.reshape(holders.shape), size)])
    writer = _share_classes(holders, lowest, size)
    return _least_loaded(holders, size) if writer is None else writer


def _share_classes(holders: IntArray, lowest: IntArray, size: NDArray[Any]) -> IntArray | None:
    """Deal each class to its processes, or return None where classes overlap.

    Classes that share no process are distinguished by their lowest process. This holds if every
    process has boxes of one lowest process only, and every box is held by its whole class.
    """
    kind = np.full(int(holders.max()) + 1, -1, dtype=np.int64)
    kind[holders] = lowest[:, None]
    if (kind[holders] != lowest[:, None]).any():
        return None
    members = np.flatnonzero(kind >= 0)
    members = members[np.argsort(kind[members], kind="stable")]
    counts = np.bincount(kind[members])
    ranked = np.sort(holders, axis=1)
    if ((ranked[:, 1:] != ranked[:, :-1]).sum(axis=1) + 1 != counts[lowest]).any():
        return None
    begin = np.cumsum(counts) - counts
    by_size = np.argsort(-size, kind="stable")
    place = np.empty_like(lowest)
    place[by_size] = _rank_in_class(lowest[by_size])
    lap, step = np.divmod(place, counts[lowest])
    forth = lap % 2 == 0
    chosen: IntArray = members[begin[lowest] + np.where(forth, step, counts[lowest] - 1 - step)]
    return chosen


def _rank_in_class(kinds: IntArray) -> IntArray:
    """For each entry, the number of equal ones before it: [5, 7, 5, 5] → [0, 0, 1, 2]."""
    order = np.argsort(kinds, kind="stable")
    ranked = kinds[order]
    is_first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    begin = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    rank = np.empty_like(kinds)
    rank[order] = np.arange(len(kinds)) - begin
    return rank


def _least_loaded(holders: IntArray, size: NDArray[Any]) -> IntArray:
    """Assign each box, fewest holders and then largest first, to its least loaded holder."""
    candidates = [sorted(set(row)) for row in holders.tolist()]
    # the load so far; ties are broken by the number of boxes that it may still receive
    load = {process: [0.0, 0] for row in candidates for process in row}
    for row in candidates:
        for process in row:
            load[process][1] += 1
    writer = np.empty(len(size), dtype=np.int64)
    choice = np.array([len(row) for row in candidates])
    for box in np.lexsort((-size, choice)).tolist():
        chosen = min(candidates[box], key=load.__getitem__)
        load[chosen][0] += float(size[box])
        for process in candidates[box]:
            load[process][1] -= 1
        writer[box] = chosen
    return writer
