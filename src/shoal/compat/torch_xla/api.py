"""Interoperability with DTensor meshes and placements, of torch or of `placements`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from shoal.colour import collective, local
from shoal.compat.arguments import or_none, row, takes
from shoal.compat.torch_xla.annotate import mark_sharding
from shoal.compat.torch_xla.errors import NoMeaningHere, SpmdError, SpmdTypeError
from shoal.compat.torch_xla.mesh import Mesh, mesh_or_global
from shoal.compat.torch_xla.placements import spec_of_placements

__all__ = [
    "auto_policy",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "with_xla",
    "xla_distribute_module",
    "xla_distribute_tensor",
]

T = TypeVar("T", bound=Callable[..., Any])


@local
def with_xla(func: T) -> T:
    """Return the function unchanged: nothing needs to be enabled.

    Local.
    """

    @wraps(func)
    def called(*args: Any, **options: Any) -> Any:
        return func(*args, **options)

    return called  # type: ignore[return-value]


@local
def auto_policy(mod_name: str, mod: Any, mesh: Any) -> None:
    """Raise: shoal does not search layouts for a whole program.

    Local.

    Raises:
      NotImplementedError: always; it is a UsageError as well.
    """
    raise NoMeaningHere(
        "torch_xla auto_policy (shoal.match_layouts): layouts are not searched; "
        "shoal.match_layouts takes rules for parameters by path, and inside jit the compiler lays "
        "out the rest"
    )


@local
def convert_to_xla_mesh(dt_mesh: Any) -> Mesh:
    """Return the mesh of a torch `DeviceMesh`: an object with `mesh` and `mesh_dim_names`.

    Local.

    Args:
      dt_mesh: the device mesh, or a mesh of this module.
    """
    if isinstance(dt_mesh, Mesh):
        return dt_mesh
    if not hasattr(dt_mesh, "mesh"):
        raise SpmdTypeError(
            f"torch_xla convert_to_xla_mesh (shoal.Mesh): {dt_mesh!r} has no mesh of device ids"
        )
    ids = np.asarray(dt_mesh.mesh)
    return Mesh(ids.ravel(), ids.shape, getattr(dt_mesh, "mesh_dim_names", None))


@local
def convert_to_xla_partition_spec(tensor: Any, placements: Sequence[Any]) -> tuple[Any, ...]:
    """Return the partition spec equivalent to placements, by axis index.

    Local.

    Args:
      tensor: an array.
      placements: for each axis of a mesh a `Shard` or a `Replicate`, torch's too.

    Raises:
      UsageError: a placement is neither, or splits no dim of the array (IndexError).
    """
    return spec_of_placements(placements, np.ndim(tensor))


@collective("the mesh's processes")
@takes("torch_xla ", placements=or_none(row))
def xla_distribute_tensor(
    tensor: Any, device_mesh: Any, placements: Sequence[Any] | None = None
) -> Any:
    """Return an array in the layout given by placements (`mark_sharding`).

    Collective over the mesh's processes.

    Args:
      tensor: a host value, or an array.
      device_mesh: as for `convert_to_xla_mesh`.
      placements: one for each axis; None: every device holds the whole array.

    Raises:
      UsageError: there must be one placement per axis; and as `mark_sharding`.
    """
    mesh = convert_to_xla_mesh(device_mesh)
    if placements is not None and len(placements) != len(mesh.mesh_shape):
        raise SpmdError(
            f"torch_xla xla_distribute_tensor (shoal.put): {len(placements)} placements for the "
            f"{len(mesh.mesh_shape)} axes of {mesh!r}"
        )
    spec = convert_to_xla_partition_spec(tensor, () if placements is None else placements)
    return mark_sharding(tensor, mesh, spec)


@collective("the mesh's processes")
def xla_distribute_module(
    module: Any,
    device_mesh: Any = None,
    partition_fn: Callable[[str, Any, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> Any:
    """Lay out the parameters of a module by a function called for each submodule.

    Collective over the mesh's processes.

    Args:
      module: an object with `named_modules()`.
      device_mesh: as for `convert_to_xla_mesh`; None: the global mesh.
      partition_fn: called with name, submodule and mesh; it sets the submodule's parameters to
        the results of `mark_sharding`.
      input_fn, output_fn: called with the module, its inputs or outputs, and the mesh; their
        results replace those.

    Returns:
      the module.
    """
    mesh = mesh_or_global(None) if device_mesh is None else convert_to_xla_mesh(device_mesh)
    for name, part in module.named_modules() if partition_fn else ():
        partition_fn(name, part, mesh)  # type: ignore[misc]
    if input_fn or output_fn:
        module.forward = _between(module.forward, module, mesh, input_fn, output_fn)
    return module


def _between(
    forward: Callable[..., Any], module: Any, mesh: Mesh, before: Any, after: Any
) -> Callable[..., Any]:
    def forwarded(*inputs: Any, **options: Any) -> Any:
        moved = before(module, inputs, mesh) if before else inputs
        result = forward(*(moved if isinstance(moved, tuple) else (moved,)), **options)
        return after(module, result, mesh) if after else result

    return forwarded
