"""The default mesh of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar

import jax

from shoal.arrays.bridge.devices import mesh_of
from shoal.colour import local
from shoal.errors import UsageTypeError
from shoal.plan.mesh import Mesh
from shoal.tracebacks import block_at_caller

_mesh: ContextVar[Mesh | None] = ContextVar("shoal_default_mesh", default=None)


@local
@block_at_caller
def use_mesh(mesh: Mesh | jax.sharding.Mesh) -> Iterator[Mesh]:
    """Set the mesh for plain tuples, names and PartitionSpecs given as layouts.

    Local.

    Applies to the block, in this thread and asyncio task: a thread started inside has no default
    mesh until it enters one. Blocks nest; leaving one restores the previous mesh. It does not enter
    `jax.set_mesh`: under that, even `jnp.ones(3)` becomes a program of all the mesh's devices,
    which every process would have to run.

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


def default_mesh() -> Mesh | None:
    """Return the mesh of the innermost `use_mesh` block, or None."""
    return _mesh.get()
