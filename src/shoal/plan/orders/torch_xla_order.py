"""The device order of `torch_xla.distributed.spmd.HybridMesh`.

This is the general rule of JAX's `mesh_utils`, of which torch_xla has a copy, without JAX's rings
for small slices. From torch_xla 2.7 on axes may share a dim of the torus; before, they could not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.plan.hardware.wiring import Slices, Topology, Torus
from shoal.plan.hardware.wiring_checks import text_of
from shoal.plan.orders import jax_order

IntArray = NDArray[np.int64]


def order(
    topology: Topology, sizes: Sequence[int], outer: Sequence[int] | None, *, allow_split: bool
) -> IntArray:
    """Return the device ids [sizes] in the order of `HybridMesh`.

    Args:
      topology: one TPU slice, or several.
      sizes: of the mesh: `ici_mesh_shape` times `dcn_mesh_shape`.
      outer: `dcn_mesh_shape`; None or all 1 for one slice.
      allow_split: may two axes share a dim?

    Raises:
      UsageError: torch_xla would fail, or it is not a TPU.

    >>> from shoal.plan.topology import parse
    >>> order(parse("v5e:4x2"), (8,), None, allow_split=True).tolist()  # no ring
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    if not isinstance(topology, Torus | Slices):
        raise UsageError(f"torch_xla's HybridMesh is for TPUs, and {topology.text} is not")
    if isinstance(topology, Torus):
        if outer is not None and np.prod(outer) > 1:
            raise UsageError(
                f"across: torch_xla's HybridMesh has one slice here, {topology.text}, and nothing "
                "spans it (Invalid dcn_mesh_shape for single slice mesh)"
            )
        return _in_slice(topology, sizes, allow_split)
    if outer is None:
        raise UsageError(
            f"torch_xla's HybridMesh needs the division of {topology.text}: name the axes that "
            "span its slices with across= (Provide dcn_mesh_shape)"
        )
    inner = [size // part for size, part in zip(sizes, outer, strict=True)]
    meshes = [_in_slice(part, inner, allow_split) for part in topology.parts()]
    return jax_order.interleaved(meshes, inner, outer)


def _in_slice(torus: Torus, sizes: Sequence[int], allow_split: bool) -> IntArray:
    if torus.cores != 1 or any(torus.origin):
        raise UsageError(
            "torch_xla's HybridMesh supports only slices that begin at (0, 0, 0) with one device a "
            f"chip; {torus.text} begins at {torus.origin or (0, 0, 0)} with {torus.cores}"
        )
    if np.prod(sizes) != torus.num_devices:
        raise UsageError(
            f"a slice's mesh of {text_of(sizes)} has {np.prod(sizes)} devices, and {torus.text} "
            f"has {torus.num_devices}"
        )
    grid = torus.device_ids.reshape((*torus.shape, 1, 1)[:3])
    return jax_order.torus_order(grid, sizes, allow_split=allow_split)[0]
