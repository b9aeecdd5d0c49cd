"""Device orders beside those of JAX and DTensor, judged by hops on the wires, and what they take.

Every v4, v5p, v5e and v6e slice up to LARGEST chips, every mesh of up to three axes. A peer's order
of a mesh is judged by the longest hop of each axis's closed rings, and by all hops of the worst
ring. One row for each peer: `worse` (this order is longer on the last axis), `dominated` (the
peer's is as good on every axis by both numbers, and better by one), `better` (this order is shorter
on the last axis; or, that being equal, on the first axis before it where they differ), and the
largest factor by which the hops of a last axis's ring are shorter. Each of the peer's options
stands for itself; the peer's shapes that it refuses are counted apart.

    python benchmarks/placement.py            (LARGEST=64: a few seconds; 512: some minutes)
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from rows import compare

from shoal.errors import UsageError
from shoal.plan import placement, torus_order
from shoal.plan.orders import dtensor_order, jax_order
from shoal.plan.orders.dtensor_order import Rings
from shoal.plan.schedules.ring import _walk
from shoal.plan.topology import Topology, Torus, parse

LARGEST = int(os.environ.get("LARGEST", "512"))
IntArray = NDArray[np.int64]
Sizes = tuple[int, ...]


def slices() -> Iterator[Torus]:
    """Yield the slices that are sold: planes of v5e and v6e, boxes of v4 and v5p."""
    for x, y in [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]:
        yield from (parse(f"{name}:{x}x{y}") for name in ("v5e", "v6e"))
    small = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    cubes = [box for box in itertools.product(range(4, LARGEST + 1, 4), repeat=3)
             if box == tuple(sorted(box)) and math.prod(box) <= LARGEST]  # fmt: skip
    for x, y, z in small + cubes:
        yield from (parse(f"{name}:{x}x{y}x{z}") for name in ("v4", "v5p"))


def meshes(count: int) -> Iterator[Sizes]:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    for rank in (1, 2, 3):
        for sizes in itertools.product(divisors, repeat=rank):
            if math.prod(sizes) == count and (rank == 1 or 1 not in sizes):
                yield sizes


def judged(torus: Torus, ids: IntArray) -> tuple[tuple[int, int], ...]:
    """Return (longest hop, all hops) of the rings of each axis, at the worst ring [axes]."""
    cells = np.argsort(torus.device_ids, axis=None)[ids.ravel()]
    coords = np.stack(np.unravel_index(cells, torus.grid)[: len(torus.shape)], axis=-1)
    coords = coords.reshape(*ids.shape, -1)
    rings = np.where(torus.wrap, torus.shape, 0)
    found = []
    for axis in range(ids.ndim):
        apart = np.abs(coords - np.roll(coords, -1, axis=axis))
        hops = np.where(rings > 0, np.minimum(apart, rings - apart), apart).sum(axis=-1)
        found.append((int(hops.max()), int(hops.sum(axis=axis).max())))
    return tuple(found)


def peers(torus: Torus, sizes: Sizes) -> Iterator[tuple[str, Callable[[], IntArray]]]:
    for split in (False, True):
        name = "jax" + " allow_split_physical_axes" * split
        yield (
            name,
            lambda split=split: jax_order.order(torus, sizes, allow_split_physical_axes=split),
        )
    yield "dtensor", lambda: dtensor_order.order(torus, sizes, Rings())
    for dims in sorted({-1, len(sizes)}):
        rings = Rings(dims=dims, build_ring_across_rings=True)
        name = f"dtensor rings of {'the last axis' if dims < 0 else 'all axes'}, in a ring"
        yield name, lambda rings=rings: dtensor_order.order(torus, sizes, rings)


def survey() -> None:
    counts: dict[str, Counter[str]] = {}
    largest: dict[str, tuple[float, str]] = {}
    for torus in slices():
        if torus.num_chips > LARGEST:
            continue
        for sizes in meshes(torus.num_chips):
            axes = [(f"a{axis}", size) for axis, size in enumerate(sizes)]
            ours = judged(torus, placement.place(torus, axes).device_ids)
            for name, order in peers(torus, sizes):
                count = counts.setdefault(name, Counter())
                try:
                    theirs = judged(torus, order())
                except UsageError:
                    count["refused"] += 1
                    continue
                note(count, ours, theirs, f"{name} {torus.text} {sizes} {ours} {theirs}")
                if ours[-1][1]:
                    factor = theirs[-1][1] / ours[-1][1]
                    where = f"{torus.text} as {'x'.join(map(str, sizes))}"
                    largest[name] = max(largest.get(name, (0.0, "")), (factor, where))
    for name, count in counts.items():
        factor, where = largest[name]
        print(json.dumps({"benchmark": "hops", "peer": name, **count,
                          "largest factor": round(factor, 2), "at": where}))  # fmt: skip


def note(
    count: Counter[str], ours: tuple[Sizes, ...], theirs: tuple[Sizes, ...], where: str
) -> None:
    count["compared"] += 1
    count["better"] += ours[::-1] < theirs[::-1]
    for word, is_so in (
        ("worse", ours[-1] > theirs[-1]),
        ("dominated", ours != theirs and (np.array(theirs) <= np.array(ours)).all()),
    ):
        count[word] += bool(is_so)
        if is_so:
            print(json.dumps({word: where}))


def times() -> None:
    for text, sizes in [
        ("v5p:8x8x8", (8, 64)),
        ("v5p:8x8x8", (4, 16, 8)),
        ("v5p:4x8x16", (4, 16, 8)),
        ("v5p:16x16x32 x 16 slices", (64, 32, 64)),
    ]:
        axes = [(f"a{axis}", size) for axis, size in enumerate(sizes)]
        case = {"topology": text, "mesh": "x".join(map(str, sizes))}
        compare("place, cold", case, {"shoal": functools.partial(cold, parse(text), axes)})


def cold(topology: Topology, axes: list[tuple[str, int]]) -> None:
    torus_order._best.cache_clear()
    _walk.cache_clear()
    placement.place(topology, axes)


if __name__ == "__main__":
    survey()
    times()
