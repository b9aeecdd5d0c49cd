"""DTensor layouts of JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.bridge.use_mesh import default_mesh as block_mesh
from shoal.compat.dtensor import config
from shoal.compat.dtensor.layout import Layout, LayoutType
from shoal.compat.dtensor.layout_checks import MATCH, UNSHARDED
from shoal.compat.dtensor.mesh import Mesh
from shoal.compat.dtensor.refused import EagerOnly
from shoal.errors import UsageError, UsageTypeError, with_article
from shoal.plan import layout as plan_layout
from shoal.plan.mesh import Mesh as PlanMesh
from shoal.runtime.process import meshes

__all__ = ["array_of", "is_on_mesh", "layout_for", "mesh_for", "named", "value_of"]


_PLACE = "copy_to_mesh (shoal.put) places it"


def value_of(value: Any) -> Any:
    """Return the value of a DVariable; return other values unchanged."""
    return value.read_value() if hasattr(value, "read_value") else value


def is_on_mesh(value: Any) -> bool:
    """Is it an array on a mesh?"""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and isinstance(value.sharding, NamedSharding)


def array_of(operation: str, value: Any) -> jax.Array:
    """Return an array on a mesh; for a DVariable, its value.

    Raises:
      UsageError: it is not on a mesh.
    """
    value = value_of(value)
    if not isinstance(value, jax.Array):
        detail = f"Expecting an array on a mesh, not {with_article(type(value).__name__)}; {_PLACE}"
        raise UsageTypeError(f"dtensor.{operation}: {detail}")
    if isinstance(value, jax.core.Tracer):
        raise EagerOnly(
            f"dtensor.{operation} must be called eagerly: inside jit and grad the value has no "
            "layout yet; fetch that of an argument or a result"
        )
    if not is_on_mesh(value):
        detail = f"an array on a mesh, and this one is on {value.sharding}; {_PLACE}"
        raise UsageError(f"dtensor.{operation} expects {detail}")
    return value


def mesh_for(mesh: PlanMesh) -> Mesh:
    """Return the DTensor mesh for a shoal mesh, whose name is lost if it came from a JAX mesh.

    The name is that of the default mesh if it has the same grid, else of the newest such mesh.
    """
    default = block_mesh()
    known = [entry.mesh for entry in meshes()] + ([default] if default is not None else [])
    same = [one for one in known if named(one, mesh.label) == mesh]
    found = mesh if mesh.label or not same else same[-1]
    return Mesh.from_shoal(found, job=config.job_name())


def named(mesh: PlanMesh, name: str) -> PlanMesh:
    """Return a mesh under another name."""
    ids, owners = mesh.device_ids, mesh.processes
    return PlanMesh(
        mesh.axes,
        device_ids=ids,
        processes=owners,
        kind=mesh.kind,
        label=name,
        axis_types=mesh.axis_types,
    )


def layout_for(operation: str, value: Any, layout: Layout) -> plan_layout.Layout:
    """Return the target layout of a value, with `match` resolved from its current layout.

    Raises:
      UsageError: it is not a DTensor layout, or uses `match` for a value of unknown layout.
    """
    if not isinstance(layout, Layout):
        raise UsageTypeError(f"dtensor.{operation}: {layout!r} must be a dtensor.Layout")
    if layout.type == LayoutType.SINGLE_DEVICE:
        return plan_layout.Layout.replicated(layout.mesh.shoal_mesh, np.ndim(value))
    if MATCH not in layout.sharding_specs:
        return layout.shoal_layout
    return _matched(operation, value, layout)


def _matched(operation: str, value: Any, layout: Layout) -> plan_layout.Layout:
    """Return a layout with `match` replaced by the value's split of that dim."""
    if isinstance(value, jax.core.Tracer):
        raise EagerOnly(
            f"dtensor.{operation}: {MATCH!r} keeps the current split, which is unknown inside jit "
            "and grad; name the mesh dim"
        )
    has = [*(layout_of(value).dims if is_on_mesh(value) else ()), *[None] * layout.rank]
    named = {UNSHARDED: None}
    dims = [has[dim] if spec == MATCH else named.get(spec, spec)
            for dim, spec in enumerate(layout.sharding_specs)]  # fmt: skip
    return plan_layout.Layout(layout.mesh.shoal_mesh, *dims)
