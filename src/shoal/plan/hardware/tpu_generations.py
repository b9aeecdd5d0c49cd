"""TPU generations: wiring and speed of their chips.

Shapes, host blocks and bandwidths are those of the system architecture pages of Cloud TPU
(https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and the page of each generation). A
page that gives the bandwidth of a chip counts all of its links: 4 in two dimensions, 6 in three.
The latency of a hop, about a microsecond, is that of https://jax-ml.github.io/scaling-book/tpus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

HOP_S = 1e-6


class Generation(NamedTuple):
    """One TPU generation."""

    name: str  # as in "v5p:4x4x4"
    kinds: tuple[str, ...]  # JAX's `device_kind`s
    dims: int  # of the network of a slice: 2 or 3
    cores: int  # devices per chip, as seen by a program
    host: tuple[int, int, int]  # chips of one host: x, y, z
    link_bytes_per_s: float  # of one link, in one direction
    wrap_unit: int  # a dim wraps around at multiples of this size
    all_or_none: bool  # whether dims wrap around only together
    pod: tuple[int, ...]  # chips of the largest network, along each dim
    source: str

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Return for each dim of a slice whether it wraps around.

        >>> GENERATIONS["v5p"].wraps((4, 4, 8)), GENERATIONS["v5p"].wraps((2, 4, 4))
        ((True, True, True), (False, False, False))
        >>> GENERATIONS["v5e"].wraps((8, 16, 1))
        (False, True, False)
        """
        by_dim = tuple(size >= self.wrap_unit and size % self.wrap_unit == 0 for size in shape)
        if self.all_or_none and not all(by_dim[: self.dims]):
            return tuple(False for _ in shape)
        return by_dim

    @property
    def latency_s(self) -> float:
        """Minimum latency of one hop in seconds."""
        return HOP_S


_V2, _V3, _V4 = "system architecture: v2", "system architecture: v3", "system architecture: v4"
_CUBE = (4, True)  # optical switches join cubes of 4 x 4 x 4 chips into a torus
_SIDE = (16, False)  # only a full side of the pod of 16 x 16 chips has its ends linked

GENERATIONS: Mapping[str, Generation] = {
    one.name: one
    for one in (
        # 4 links of 496 Gbit/s; two cores a chip are two devices.
        Generation("v2", ("TPU v2",), 2, 2, (2, 2, 1), 62e9, 16, False, (16, 16), _V2),
        # 4 links of 656 Gbit/s.
        Generation("v3", ("TPU v3",), 2, 2, (2, 2, 1), 82e9, 32, False, (32, 32), _V3),
        # 6 links, 2400 Gbit/s a chip.
        Generation("v4", ("TPU v4",), 3, 1, (2, 2, 1), 50e9, *_CUBE, (16, 16, 16), _V4),
        # 4 links, 1600 Gbit/s a chip.
        Generation("v5e", ("TPU v5 lite", "TPU v5e"), 2, 1, (2, 2, 1), 50e9, *_SIDE, (16, 16),
                   "Cloud TPU: v5e"),
        # 6 links, 4800 Gbit/s a chip; libtpu says "TPU v5".
        Generation("v5p", ("TPU v5", "TPU v5p"), 3, 1, (2, 2, 1), 100e9, *_CUBE, (16, 20, 28),
                   "Cloud TPU: v5p"),
        # 4 links, 800 GB/s a chip in both directions.
        Generation("v6e", ("TPU v6 lite", "TPU v6e"), 2, 1, (2, 2, 1), 100e9, *_SIDE, (16, 16),
                   "Cloud TPU: v6e"),
        # 6 links, 1200 GB/s a chip in both directions; two chiplets are two devices.
        Generation("tpu7x", ("TPU7x", "TPU v7x", "TPU7"), 3, 2, (2, 2, 1), 100e9, *_CUBE,
                   (16, 24, 24), "Cloud TPU: TPU7x"),
    )
}  # fmt: skip


def generation_of_kind(kind: str) -> Generation | None:
    """Return the generation of a JAX `device_kind`; None if unknown."""
    return next(
        (generation for generation in GENERATIONS.values() if kind in generation.kinds), None
    )
