"""The default mesh of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import NamedSharding

from shoal.arrays.bridge.devices import jax_mesh, mesh_of
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.mesh import Mesh
from shoal.runtime.jax_service import jax_runtime
from shoal.tracebacks import block_at_caller

_mesh: ContextVar[Mesh | None] = ContextVar("shoal_default_mesh", default=None)


@local
@block_at_caller
def use_mesh(mesh: Mesh | jax.sharding.Mesh) -> Iterator[Mesh]:
    """Set the mesh for plain tuples, names and PartitionSpecs given as layouts.

    Local.

    Applies to the block, in this thread and asyncio task: a thread started inside has no default
    mesh until it enters one. Blocks nest; leaving one restores the previous mesh. Outside all of
    them the mesh of `jax.set_mesh` is the default. This does not enter `jax.set_mesh`: under that,
    even `jnp.ones(3)` becomes a program of all the mesh's devices, which every process would have
    to run.

    Args:
      mesh: a mesh, or JAX's.

    Returns:
      A context manager that yields the mesh, or a decorator of functions. One that is dropped
      without being entered does nothing, and warns so (RuntimeWarning).

    Raises:
      UsageError: `mesh` is not a mesh.

    Example:
      >>> import numpy as np, shoal
      >>> with shoal.use_mesh(shoal.make_mesh({"x": -1})):
      ...     w = shoal.put(np.ones((8, 3), np.float32), ("x", None))
      >>> shoal.layout_of(w).dims
      ('x', None)
    """
    if not isinstance(mesh, Mesh | jax.sharding.Mesh):
        raise UsageTypeError(f"use_mesh: {mesh!r} must be a Mesh")
    token = _mesh.set(mesh if isinstance(mesh, Mesh) else mesh_of(mesh))
    try:
        yield _mesh.get()  # type: ignore[misc]
    finally:
        _mesh.reset(token)


def on_current_mesh(place: NamedSharding) -> NamedSharding:
    """Return a sharding on devices, for one on a mesh that has none, as `jax.eval_shape` gives it.

    Raises:
      UsageError: neither `use_mesh` nor `jax.set_mesh` has a mesh of its axes in force.
    """
    axes = dict(place.mesh.shape)
    mesh = default_mesh()
    if mesh is None or dict(mesh.axes) != axes:
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise UsageError(
            f"is on an abstract mesh of axes {sizes}, as jax.eval_shape gives it, and the current "
            f"one is {mesh!r}: call this inside `with use_mesh(mesh):` or jax.set_mesh(mesh), or "
            "pass a Layout"
        )
    return NamedSharding(jax_mesh(mesh), place.spec, memory_kind=place.memory_kind)


def default_mesh() -> Mesh | None:
    """Return the mesh of the innermost `use_mesh` block, else that of `jax.set_mesh`, or None."""
    mesh = _mesh.get()
    if mesh is not None:
        return mesh
    current = jax_runtime.current_mesh()
    return None if current is None else mesh_of(current)
