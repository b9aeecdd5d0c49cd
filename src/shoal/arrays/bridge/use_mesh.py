"""The default mesh of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, NamedSharding

from shoal.arrays.bridge.devices import jax_mesh
from shoal.colour import local
from shoal.errors import UsageError
from shoal.plan.mesh import Mesh, mesh_of
from shoal.runtime.jax_service import jax_runtime
from shoal.tracebacks import block_at_caller

AnyMesh: TypeAlias = Mesh | jax.sharding.Mesh

_mesh: ContextVar[Mesh | None] = ContextVar("shoal_default_mesh", default=None)


@local
@block_at_caller
def use_mesh(mesh: AnyMesh) -> Iterator[AnyMesh]:
    """Set the mesh for PartitionSpecs, plain tuples and names given as layouts.

    Local.

    Applies to the block, in this thread and asyncio task: a thread started inside has no default
    mesh until it enters one. Blocks nest; leaving one restores the previous mesh. Outside all of
    them the mesh of `jax.set_mesh`, else that of JAX's `with mesh:`, is the default.

    It is a default for specs given to shoal and nothing else: JAX does not see it, and
    `jit(out_shardings=…)` takes `shoal.named_sharding(specs)` in this block. Under
    `jax.set_mesh`, which models with specs of their own may need (`nnx.with_partitioning`,
    Explicit axes), even `jnp.ones(3)` becomes a program of all the mesh's devices, which every
    process has to run.

    Args:
      mesh: a `jax.sharding.Mesh`, or a planned one.

    Returns:
      A context manager that yields `mesh`, or a decorator of functions. One that is dropped
      without being entered does nothing, and warns so (RuntimeWarning).

    Raises:
      UsageError: `mesh` is not a mesh.

    Example:
      >>> import jax, numpy as np, shoal
      >>> with shoal.use_mesh(shoal.make_mesh({"x": -1})):
      ...     w = shoal.put(np.ones((8, 3), np.float32), jax.P("x"))
      >>> w.sharding.spec
      P('x',)
    """
    token = _mesh.set(mesh_of("use_mesh", mesh))
    try:
        yield mesh
    finally:
        _mesh.reset(token)


def on_current_mesh(place: NamedSharding) -> NamedSharding:
    """Return a sharding on devices: one on an abstract mesh, as of `jax.eval_shape`, on the mesh in
    force; any other unchanged.

    Raises:
      UsageError: neither `use_mesh` nor `jax.set_mesh` has a mesh of its axes in force.
    """
    if not isinstance(place.mesh, AbstractMesh):
        return place
    axes = dict(place.mesh.shape)
    mesh = default_mesh()
    if mesh is None or dict(mesh.axes) != axes:
        sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        raise UsageError(
            f"is on an abstract mesh of axes {sizes}, as jax.eval_shape gives it, and the current "
            f"one is {mesh!r}: call this inside `with use_mesh(mesh):` or jax.set_mesh(mesh), or "
            "pass a NamedSharding on the mesh itself"
        )
    return NamedSharding(jax_mesh(mesh), place.spec, memory_kind=place.memory_kind)


def default_mesh() -> Mesh | None:
    """Return the mesh in force: of `use_mesh`, else `jax.set_mesh`, else `with mesh:`; or None."""
    mesh = _mesh.get()
    if mesh is not None:
        return mesh
    current = jax_runtime.current_mesh()
    return None if current is None else mesh_of("the mesh in force", current)
