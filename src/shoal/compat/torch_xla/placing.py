"""Place a value in the layout of a partition spec, inside `jit` and outside."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shoal.arrays.host.upload import is_tracing
from shoal.arrays.moving.relayout import relayout
from shoal.arrays.placing.put import put
from shoal.arrays.traced.constrain import constrain
from shoal.compat.torch_xla.mesh import Mesh
from shoal.compat.torch_xla.specs import layout_of_spec
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout

__all__ = ["fitted", "is_traced", "placed"]


def fitted(value: Any, mesh: Mesh, spec: Any) -> Layout:
    """Return the layout on devices for a value and a spec.

    Raises:
      UsageError: the spec is wrong, or has another rank than the value.
    """
    if not isinstance(mesh, Mesh):
        raise UsageTypeError(f"the mesh must be a shoal.compat.torch_xla.Mesh, not {mesh!r}")
    layout = layout_of_spec(mesh.on_devices(), spec)
    if layout.rank != np.ndim(value):
        raise UsageError(
            f"Partition spec length ({layout.rank}) should be equal to the input rank "
            f"({np.ndim(value)}): {tuple(spec)!r} and shape {np.shape(value)}"
        )
    return layout


def placed(value: Any, layout: Layout, *, gradient: bool = False) -> jax.Array:
    """Return a value in a layout: pinned inside `jit` or under `grad`, else moved."""
    if is_traced(value):
        return constrain(value, layout, gradient=gradient)
    if isinstance(value, jax.Array) and _is_spread(value, layout):
        return relayout(value, layout)
    return put(value, layout)


def is_traced(value: Any) -> bool:
    """True for a value inside `jit`, `grad` or `vmap`."""
    return isinstance(value, jax.core.Tracer) or is_tracing()


def _is_spread(array: jax.Array, layout: Layout) -> bool:
    """True for an array that moves between devices; other values are a process's host values."""
    return not array.is_fully_addressable or len(layout.mesh.process_indices) == 1
