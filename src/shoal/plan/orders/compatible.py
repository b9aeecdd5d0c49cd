"""Dispatch to the device orders of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import not_flags, not_one_of
from shoal.errors import UsageError
from shoal.plan.hardware.wiring import Topology
from shoal.plan.orders import dtensor_order, jax_order, torch_xla_order

IntArray = NDArray[np.int64]

LIBRARIES = ("jax", "torch_xla", "dtensor")

# Of a topology, the sizes of the mesh's axes, how much of each axis spans the slow network (None:
# unspecified), and whether two axes may share a dim: the ids in order [sizes].
OrderFunction = Callable[[Topology, Sequence[int], Sequence[int] | None, bool], IntArray]


class OrderOptions(NamedTuple):
    """The options of `place` beside the mesh; see there."""

    library: str | OrderFunction | None
    allow_split: bool | None
    contiguous: bool
    rings: dtensor_order.Rings | None

    def problems(self) -> list[str]:
        """Report options that cannot be combined."""
        library = self.library
        problems_found = not_flags(contiguous_submeshes=self.contiguous)
        if self.allow_split is not None:
            problems_found += not_flags(allow_split_physical_axes=self.allow_split)
        if library is not None and not callable(library):
            problems_found += not_one_of("compatible_with", library, LIBRARIES)
        if problems_found:
            return problems_found
        if self.contiguous and library in ("torch_xla", "dtensor"):
            problems_found.append(
                f"contiguous_submeshes has no effect under compatible_with={library!r}"
            )
        if self.rings is not None and library != "dtensor":
            problems_found.append("rings requires compatible_with='dtensor'")
        if self.rings is not None and not isinstance(self.rings, dtensor_order.Rings):
            problems_found.append(f"rings={self.rings!r} must be a placement.Rings")
        if self.allow_split is not None and library == "dtensor":
            problems_found.append(
                "allow_split_physical_axes has no effect under compatible_with='dtensor'"
            )
        return problems_found

    def order(
        self, topology: Topology, sizes: Sequence[int], outer: Sequence[int] | None
    ) -> IntArray:
        """Return the ids [sizes] in the order of that library.

        Args:
          topology: the devices.
          sizes: of the mesh's axes, in all.
          outer: how much of each axis spans the slow network; None: unspecified.

        Raises:
          UsageError: that library raises an error.
        """
        if callable(self.library):
            return self.library(topology, sizes, outer, bool(self.allow_split))
        if self.library == "torch_xla":
            split = self.allow_split is not False
            return torch_xla_order.order(topology, sizes, outer, allow_split=split)
        if self.library == "dtensor":
            if outer is not None:
                raise UsageError("across has no effect under compatible_with='dtensor'")
            return dtensor_order.order(topology, sizes, self.rings or dtensor_order.Rings())
        if outer is None:
            return jax_order.order(
                topology,
                sizes,
                allow_split_physical_axes=bool(self.allow_split),
                contiguous_submeshes=self.contiguous,
            )
        inner = [size // part for size, part in zip(sizes, outer, strict=True)]
        return jax_order.hybrid_order(
            topology, inner, outer, allow_split_physical_axes=bool(self.allow_split)
        )
