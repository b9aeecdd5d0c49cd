"""Step of a move among the devices of one mesh: a collective, or a slice that sends nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.plan.layout import Layout, shard_of
from shoal.plan.transfer.blocks import missing, tile_numbers, tiles_of
from shoal.plan.transfer.same_devices import in_one_order

IntArray = NDArray[np.int64]


class Step(NamedTuple):
    """One operation of all devices at once. Layouts are over digits of the axes: see `digits`."""

    kind: str
    """slice, all_gather, all_to_all, permute, exchange, reduce_scatter or all_reduce."""
    axes: tuple[str, ...]  # digits that each group of devices spans; () of a permute or exchange
    dim: (
        int | None
    )  # a gather joins it, a slice or a reduce-scatter cuts it, an all-to-all joins it
    to_dim: int | None  # an all-to-all cuts it
    before: Layout
    after: Layout

    def __str__(self) -> str:
        over = f" over {'+'.join(self.axes)}" if self.axes else ""
        dims = {
            "slice": f"dim {self.dim}",
            "all_gather": f"dim {self.dim}",
            "reduce_scatter": f"dim {self.dim}",
            "all_to_all": f"dim {self.dim} → dim {self.to_dim}",
        }
        of = f" of {dims[self.kind]}" if self.kind in dims else ""
        return f"{self.kind}{over}{of}"


def received_bytes(step: Step, shape: Sequence[int], item_bytes: int) -> IntArray:
    """Return the bytes received by each device, by its position in the mesh before the step.

    In an all-gather, all that the others of its group hold; in an all-to-all or a reduce-scatter,
    its part of that; in an all-reduce the sum of both (Thakur, Rabenseifner and Gropp, IJHPCA 19,
    2005). Devices that keep their shard in a permute receive nothing.
    """
    held = math.prod(shard_of(step.before, shape)) * item_bytes
    size = math.prod(step.before.mesh.axes[axis] for axis in step.axes)
    if step.kind == "exchange":
        old, new = tiles_of(step.before), tiles_of(step.after, step.before.mesh)
        blocks = math.prod(map(max, old.counts, new.counts))
        return missing(old, new) * (math.prod(shape) // blocks * item_bytes)
    if step.kind == "permute":
        received = np.zeros(step.before.mesh.size, np.int64)
        received[[receiver for _, receiver in pairs(step.before, step.after)]] = held
        return received
    each = {
        "slice": 0,
        "all_gather": held * (size - 1),
        "all_to_all": held // size * (size - 1),
        "reduce_scatter": held // size * (size - 1),
        "all_reduce": 2 * (held // size * (size - 1)),
    }
    return np.full(step.before.mesh.size, each[step.kind], np.int64)


def spans_processes(step: Step) -> bool:
    """Do devices of several processes take part in one collective?

    All devices run a permute or an exchange as one collective, whichever of them send.

    Example:
      >>> from shoal import Mesh
      >>> mesh = Mesh({"host": 2, "own": 2}, device_ids=range(4), processes=[0, 0, 1, 1])
      >>> before, after = Layout(mesh, "host", "own"), Layout(mesh, "host", None)
      >>> spans_processes(Step("all_gather", ("own",), 1, None, before, after))
      False
    """
    if step.kind == "slice":
        return False
    mesh = step.before.mesh
    dims = [mesh.axis_names.index(axis) for axis in step.axes or mesh.axis_names]
    owners = mesh.processes
    # Equal along each of these axes: equal within each group.
    return any((owners != owners.take([0], axis=dim)).any() for dim in dims)


def pairs(before: Layout, after: Layout) -> tuple[tuple[int, int], ...]:
    """Return the (sender, receiver) pairs of shards that turn one layout into the other.

    Both cut every dim into equally many tiles, over the same devices in any order. A device that
    already holds its new shard keeps it; every other one receives once and sends at most once. A
    sender in the receiver's own process is preferred.

    Returns:
      (sender, receiver), positions in the mesh of `before`.

    Example:
      >>> from shoal import Mesh
      >>> mesh = Mesh({"x": 2, "y": 2})
      >>> pairs(Layout(mesh, ("x", "y")), Layout(mesh, ("y", "x")))
      ((2, 1), (1, 2))
    """
    held, wanted = tile_numbers(tiles_of(before)), tile_numbers(tiles_of(after, before.mesh))
    processes = before.mesh.processes.ravel()
    changing = np.flatnonzero(held != wanted)
    near: dict[tuple[int, int], list[int]] = {}  # senders of a tile in a process
    for device in changing[::-1].tolist():
        near.setdefault((int(held[device]), int(processes[device])), []).append(device)
    sender_of: dict[int, int] = {}
    for receiver in changing.tolist():
        have = near.get((int(wanted[receiver]), int(processes[receiver])))
        if have:
            sender_of[receiver] = have.pop()
    far: dict[int, list[int]] = {}
    for (tile, _), left in near.items():
        far.setdefault(tile, []).extend(left)
    for receiver in changing.tolist():
        if receiver not in sender_of:
            sender_of[receiver] = far[int(wanted[receiver])].pop()
    return tuple((sender_of[receiver], receiver) for receiver in changing.tolist())


# A large move in chunks: the same steps on one part of the array after another.
#
# If all layouts on the way together cut a dim into L tiles of n items each, the items at position
# k of all tiles form an array, for every k of 0..n-1. All these arrays move by the same steps. A
# chunk is a run of them.

CHUNK_BYTES = 64 << 20  # temporary memory of a move
_MOST_TIMES = 4  # up to this many times the needed chunks, for equal sizes: more cost time
_PIECES = 4  # copies of a part that exist at the same time: cut out, in flight, received, joined


class ChunkCut(NamedTuple):
    """How an array is cut into chunks."""

    dim: int
    tiles: int  # L
    parts: int  # number of chunks of one size
    width: int  # items of each tile in a chunk
    rest: int  # remainder for one more chunk


def chunks_of(steps: Sequence[Step], shape: Sequence[int], item_bytes: int) -> ChunkCut | None:
    """Return the chunks of a move; None if chunking gains nothing.

    That is the case for a small array, for one whose dims have too few items per tile, and for a
    single step that sends nothing or is a permute, which needs no memory besides both shards
    (except on TPUs, where XLA copies the result of a permute). The first possible dim is cut,
    since chunks along it are contiguous rows; preferably one in which a chunk has several
    items of each tile, since for a single item XLA may copy the whole shard into another
    order.

    >>> from shoal import Layout
    >>> from shoal import Mesh
    >>> mesh = Mesh({"x": 4})
    >>> rows, columns = Layout(mesh, "x", None), Layout(mesh, None, "x")
    >>> move = [Step("all_to_all", ("x",), 0, 1, rows, columns)]
    >>> chunks_of(move, (1 << 14, 1 << 14), 4)
    ChunkCut(dim=0, tiles=4, parts=16, width=256, rest=0)
    """
    layouts = [layout for step in steps for layout in (step.before, step.after)]
    largest = max(math.prod(shard_of(layout, shape)) for layout in layouts) * item_bytes
    if largest <= CHUNK_BYTES or (len(steps) == 1 and _is_lean(steps[0], shape)):
        return None
    wanted = -(-largest * _PIECES // CHUNK_BYTES)
    cuts = []
    for dim, size in enumerate(shape):
        tiles = math.lcm(*(layout.num_shards(dim) for layout in layouts))
        places = size // tiles if size % tiles == 0 else 1
        if places >= wanted:
            even = range(wanted, min(places, _MOST_TIMES * wanted) + 1)
            parts = next((parts for parts in even if places % parts == 0), wanted)
            cuts.append(ChunkCut(dim, tiles, parts, width=places // parts, rest=places % parts))
    return next((chunks for chunks in cuts if chunks.width > 1), cuts[0] if cuts else None)


def _is_lean(step: Step, shape: Sequence[int]) -> bool:
    """Does a step need no temporary memory?"""
    if step.kind == "permute":
        return step.before.mesh.kind != "tpu"
    is_within = in_one_order(step.before.mesh, step.after.mesh)
    return is_within and not received_bytes(step, shape, 1).any()
