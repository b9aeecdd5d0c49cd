"""DTensor's functions that move arrays onto meshes, off them and between layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from shoal.arguments import PLAIN_KINDS
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.bridge.use_mesh import default_mesh as block_mesh
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.moving.relayout import relayout as move
from shoal.arrays.placing import pack as packing
from shoal.arrays.placing.create import created
from shoal.arrays.placing.put import put
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.shard_alike import shard_alike
from shoal.colour import collective, local, logically_collective
from shoal.compat.arguments import function, takes
from shoal.compat.dtensor import config
from shoal.compat.dtensor.layout import (
    Layout,
    LayoutType,
    array_of,
    is_on_mesh,
    layout_for,
    mesh_for,
    value_of,
)
from shoal.compat.dtensor.mesh import Mesh
from shoal.compat.dtensor.numbers import array_from
from shoal.compat.dtensor.refused import check_eager, prefix_errors
from shoal.errors import UsageError, UsageTypeError
from shoal.tracebacks import block_at_caller

__all__ = [
    "call_with_layout",
    "check_layout",
    "copy_to_mesh",
    "default_mesh",
    "device_name",
    "fetch_layout",
    "get_default_mesh",
    "is_dtensor",
    "pack",
    "relayout",
    "relayout_like",
    "run_on",
    "unpack",
]


@collective("the processes of both meshes")
def relayout(tensor: Any, layout: Layout, name: str | None = None) -> jax.Array:
    """Return an array with the same values in another layout, or a host value on a mesh.

    Collective over the processes of both meshes.

    `shoal.relayout`; for a host value, or an array on one device, `shoal.put`; inside `jit`
    `shoal.constrain`. Differentiable.

    Args:
      tensor: an array, a host value that is equal on all processes, or a DVariable.
      layout: the target layout; `MATCH` keeps the current split of a dim.
      name: ignored; XLA names its operations itself.
    """
    value = value_of(tensor)
    with prefix_errors("relayout"):
        wanted = layout_for("relayout", value, layout)
        wanted.check_shape(np.shape(value))
        if is_tracing():
            return constrain(value, wanted)
        if is_on_mesh(value) or isinstance(value, jax.core.Tracer):
            return move(value, wanted)
        return put(_array(value), wanted)


def _array(value: Any) -> Any:
    """Return a list of numbers as one array, in JAX's default dtype; other values unchanged."""
    if not isinstance(value, list | tuple):
        return value
    return array_from("relayout", value)


@collective("the processes of both meshes")
def copy_to_mesh(tensor: Any, layout: Layout, source_layout: Layout | None = None) -> jax.Array:
    """Return a value on a mesh: `relayout`, or `shoal.put`; `source_layout` is ignored.

    Collective over the processes of both meshes.
    """
    return relayout(tensor, layout)


@collective("the processes of both meshes")
def relayout_like(tensor: Any, layout_tensor: Any, name: str | None = None) -> jax.Array:
    """Return an array in the layout of another: `shoal.relayout`; inside `jit` `shoal.shard_alike`.

    Collective over the processes of both meshes.
    """
    if is_tracing():
        with prefix_errors("relayout_like"):
            return shard_alike(value_of(tensor), value_of(layout_tensor))[0]
    value = value_of(tensor)
    like = array_of("relayout_like", layout_tensor)
    with prefix_errors("relayout_like"):
        wanted = layout_of(like)
        if is_on_mesh(value) or isinstance(value, jax.core.Tracer):
            return move(_array(value), wanted)
        return put(_array(value), wanted)


@logically_collective("shapes and dtypes of pieces, and the layout,")
def pack(tensors: Sequence[Any], layout: Layout) -> jax.Array:
    """Assemble one array from one piece per device: `shoal.compat.pack`.

    Logically collective: shapes and dtypes of pieces, and the layout, must be equal.

    Args:
      tensors: one piece for each of this process's devices, in the order of
        `mesh.local_device_ids()`; host values, or arrays on one device.
      layout: the layout of the result.
    """
    check_eager("pack", "constrain (shoal.constrain) pins a value inside")
    if not isinstance(tensors, list | tuple):
        raise UsageTypeError(
            f"dtensor.pack: the pieces must be a list, not {type(tensors).__name__}"
        )
    if any(hasattr(tensor, "read_value") for tensor in tensors):
        raise UsageError("dtensor.pack: Variable input is not supported; pass its read_value()")
    pieces = [_array(tensor) for tensor in tensors]
    with prefix_errors("pack"):
        wanted = layout_for("pack", pieces[0] if pieces else 0.0, layout)
        ids = layout.mesh.local_device_ids()
        if len(ids) == len(pieces):
            pieces = [pieces[place] for place in np.argsort(ids)]
        for leaf in jax.tree.leaves(pieces[:1]):
            wanted.check_shape(np.shape(leaf))
        return packing.pack(pieces, wanted)


@local
def unpack(tensor: Any) -> list[jax.Array]:
    """Return the pieces of an array held by this process's devices: `shoal.compat.unpack`.

    Local.

    They come in the order of `mesh.local_device_ids()`.
    """
    check_eager("unpack", "shoal.manual gives each device its piece inside")
    if hasattr(tensor, "read_value"):
        raise UsageTypeError("dtensor.unpack: a Variable is not an array; unpack its read_value()")
    array = array_of("unpack", tensor)
    pieces = packing.unpack(array)
    if len(pieces) < 2:
        return pieces
    ids = mesh_for(layout_of(array).mesh).local_device_ids()
    by_id = dict(zip(sorted(ids), pieces, strict=True))
    return [by_id[device_id] for device_id in ids]


@local
def fetch_layout(tensor: Any) -> Layout | None:
    """Return the layout of an array or a DVariable, None for a Python number: `shoal.layout_of`.

    Local.
    """
    check_eager("fetch_layout", "fetch the layout of an argument or a result")
    if isinstance(tensor, bool | int | float | complex):
        return None
    layout = layout_of(array_of("fetch_layout", tensor))
    mesh = mesh_for(layout.mesh)
    if mesh.is_single_device():
        return Layout.from_single_device_mesh(mesh)
    return Layout.from_shoal(layout, mesh)


@local
def check_layout(tensor: Any, layout: Layout) -> None:
    """Raise a UsageError, which is a ValueError, unless an array has a layout.

    Local.

    Mesh names are not compared: an array has none.
    """
    actual = fetch_layout(tensor)
    wanted = layout_for("check_layout", value_of(tensor), layout)
    # the layout of an array on one device says nothing of its dims
    is_any_rank = layout.type == LayoutType.SINGLE_DEVICE
    is_same = actual is not None and (is_any_rank or actual.sharding_specs == layout.sharding_specs)
    if (
        actual is None
        or not is_same
        or sharding_of(layout_of(value_of(tensor))) != sharding_of(wanted)
    ):
        raise UsageError(
            f"dtensor.check_layout: Layout of tensor: {actual}, did not match expected layout: "
            f"{layout}"
        )


@local
def is_dtensor(tensor: Any) -> bool:
    """Return whether a value is an array on a mesh, or a DVariable.

    Local.
    """
    check_eager("is_dtensor", "inside, all values are the program's")
    return is_on_mesh(value_of(tensor))


@local
@block_at_caller
def default_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make a mesh the default in a block, or in a decorated function: `shoal.use_mesh`.

    Local.

    The previous default is restored however the block ends.
    """
    if not isinstance(mesh, Mesh):
        raise UsageTypeError(f"dtensor.default_mesh: Expect `mesh` to be `Mesh`, got {mesh!r}")
    with use_mesh(mesh.shoal_mesh):
        yield mesh


run_on = default_mesh


@local
def get_default_mesh() -> Mesh | None:
    """Return the mesh of the innermost `default_mesh` block, or None.

    Local.
    """
    mesh = block_mesh()
    return None if mesh is None else mesh_for(mesh)


@local
def device_name() -> str:
    """Return TensorFlow's name of the device for all meshes.

    Local.
    """
    return f"/job:{config.full_job_name()}/device:CUSTOM:0"


@collective("the mesh's processes")
@takes("dtensor.", fn=function)
def call_with_layout(
    fn: Callable[..., Any], layout: Layout | None, *args: Any, **kwargs: Any
) -> Any:
    """Run a function so that its results are created in a layout: `shoal.create`.

    Collective over the mesh's processes.

    Each device computes what it holds. Inside `jit` the results are pinned to the layout.

    Args:
      fn: a function that returns arrays of the layout's rank.
      layout: the layout of the results; None: only call the function.
      args, kwargs: its arguments, equal on all processes, as for `shoal.create`; arrays may be on
        the mesh, other values are compiled in.
    """
    if layout is None:
        return fn(*args, **kwargs)
    with prefix_errors("call_with_layout"):
        wanted = layout_for("call_with_layout", 0.0, layout)
        if is_tracing():
            return constrain(fn(*args, **kwargs), wanted)
        bound, arrays = _split(fn, args, kwargs)
        return created(bound, (*arrays,), wanted, _compiled_in(args, kwargs))


def _split(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """Return a function of the arrays among the arguments, and those arrays."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    rest = [None if own else leaf for leaf, own in zip(leaves, is_array, strict=True)]
    arrays = [leaf for leaf, own in zip(leaves, is_array, strict=True) if own]
    return _bind(fn, treedef, is_array, rest), arrays


def _compiled_in(args: Any, kwargs: Any) -> list[str]:
    """Return a line for each plain value that is compiled in: equal on all processes."""
    pairs = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    return [
        f"argument {jax.tree_util.keystr(path)}: {value!r}"
        for path, value in pairs
        if type(value) in PLAIN_KINDS or isinstance(value, np.generic)
    ]


def _bind(fn: Any, treedef: Any, is_array: Sequence[bool], rest: Sequence[Any]) -> Any:
    """Return a function of the arrays alone; a new one each time.

    So it is traced each time: values that `fn` closes over, and random numbers, may have changed.
    """

    def bound(*arrays: Any) -> Any:
        given = iter(arrays)
        leaves = [next(given) if own else value for own, value in zip(is_array, rest, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return fn(*args, **kwargs)

    return bound
