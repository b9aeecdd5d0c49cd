"""Differentiation, batching and tracing rules of `from_host_local` and `to_host_local`.

Both are linear, and each is the inverse of the other, so each is the other's transpose: a cotangent
of the whole array goes back to each process's part, and cotangents of the parts make up that of the
whole. Data that several processes hold are one value, not a term of a sum on each: their cotangent
is one value, too, which these processes must compute alike. Under `vmap` a layout gets one more
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.bridge.sharding import layout_of_sharding, padded_dims, sharding_of
from shoal.arrays.host_local.parts import (
    PartsCall,
    cut_own_part,
    global_shape,
    join_own_parts,
    local_shape,
    own_box,
    seen,
)
from shoal.arrays.moving.move import move, relabelled
from shoal.arrays.moving.planned_move import ArrayMove
from shoal.arrays.placing.put import dtype_problems
from shoal.errors import UsageError, raise_all
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.jax_service.own_programs import own_programs

IN_JIT = {
    "from_host_local": (
        "from_host_local: inside jit (or scan, cond, checkpoint, eval_shape) every array is global "
        "already: call it outside and pass the result in; constrain pins a layout inside"
    ),
    "to_host_local": (
        "to_host_local: inside jit (or scan, cond, checkpoint, eval_shape) every array is global: "
        "return the array, and call it on the result"
    ),
}


class Where(NamedTuple):
    """A leaf without its value."""

    path: str
    layout: Layout
    given: Layout | None = None
    """The layout of the operand, if it is visible."""
    result: Layout | None = None
    """The layout of the result, if its type differs; the parts are the same. None: `layout`."""

    def lay_out(self, array: jax.Array) -> jax.Array:
        """Place a result in its layout."""
        if self.result is None:
            return array
        target = sharding_of(self.result)
        same = relabelled(array, target)
        if same is not None:
            array = same
        return move([ArrayMove(array, array, target)])[0]


def join_traced(leaves: Sequence[Leaf], call: PartsCall) -> list[Any]:
    """Return global arrays for parts that JAX is differentiating or batching."""
    return _bind(_JOIN, leaves, call)


def cut_traced(leaves: Sequence[Leaf], call: PartsCall) -> list[Any]:
    """Return parts of global arrays that JAX is differentiating or batching."""
    return _bind(_CUT, leaves, call)


def _bind(primitive: Primitive, leaves: Sequence[Leaf], call: PartsCall) -> list[Any]:
    places = tuple(Where(leaf.path, leaf.layout, _layout_seen(leaf.value)) for leaf in leaves)
    bound: list[Any] = primitive.bind(*(leaf.value for leaf in leaves), places=places, call=call)
    return bound


def _layout_seen(value: Any) -> Layout | None:
    array = seen(value)
    if not isinstance(array, jax.Array):
        return None
    try:
        return layout_of_sharding(array.sharding, array.ndim)
    except UsageError:
        return None


@own_programs()
def _leaves(values: Sequence[Any], places: Sequence[Where], call: PartsCall) -> list[Leaf]:
    """Return the concrete leaves: arrays, and what JAX made of Python numbers."""
    leaves = []
    for value, place in zip(values, places, strict=True):
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            with jax_runtime.explicit_transfers():
                value = jnp.asarray(value)
        leaves.append(Leaf(place.path, value, place.layout))
    raise_all(call.operation, dtype_problems((leaf.path, leaf.value) for leaf in leaves))
    return leaves


def _join(*parts: Any, places: tuple[Where, ...], call: PartsCall) -> list[jax.Array]:
    joined = join_own_parts(_leaves(parts, places, call), call)
    return [place.lay_out(array) for place, array in zip(places, joined, strict=True)]


def _cut(*arrays: Any, places: tuple[Where, ...], call: PartsCall) -> list[jax.Array]:
    parts = [cut_own_part(leaf, call) for leaf in _leaves(arrays, places, call)]
    return [place.lay_out(part) for place, part in zip(places, parts, strict=True)]


def _types_of_wholes(*parts: Any, places: tuple[Where, ...], call: PartsCall) -> list[Any]:
    return [
        _type(part, global_shape(where.layout, part.shape), where.result or where.layout)
        for part, where in zip(parts, places, strict=True)
    ]


def _types_of_parts(*arrays: Any, places: tuple[Where, ...], call: PartsCall) -> list[Any]:
    return [
        _type(array, local_shape(where.layout, array.shape), where.result or _own(where.layout))
        for array, where in zip(arrays, places, strict=True)
    ]


def _type(like: Any, shape: tuple[int, ...], layout: Layout | None) -> Any:
    target = None if layout is None else sharding_of(layout)
    return jax.typeof(jax.ShapeDtypeStruct(shape, like.dtype, sharding=target))


def _own(layout: Layout) -> Layout | None:
    return own_box(layout).layout


def _push_forward(
    primitive: Primitive,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    places: tuple[Where, ...],
    call: PartsCall,
) -> tuple[list[Any], list[Any]]:
    """JVP: the map is linear, so the tangent is mapped like the value."""
    results = primitive.bind(*primals, places=places, call=call)
    pushed = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    return results, _apply(
        primitive, values=tangents, places=places, call=call.of_derivative(), zeros=pushed
    )


def _pull_back(
    inverse: Primitive,
    cotangents: Sequence[Any],
    *operands: Any,
    places: tuple[Where, ...],
    call: PartsCall,
) -> list[Any]:
    """Transpose: the cotangent is mapped by the inverse."""
    zeros = [ad.Zero(operand.aval.to_ct_aval()) for operand in operands]
    nominal = (lambda layout: layout) if inverse is _JOIN else _own
    back = tuple(
        place._replace(given=None, result=_as_type(nominal(place.layout), place.given, zero.aval))
        for place, zero in zip(places, zeros, strict=True)
    )
    return _apply(
        primitive=inverse, values=cotangents, places=back, call=call.of_derivative(), zeros=zeros
    )


def _as_type(layout: Layout | None, given: Layout | None, wanted: Any) -> Layout | None:
    """Return the layout of a cotangent, so that it has the type of its primal value.

    Explicit axes are part of types: an ordinary array that became part of an array over Explicit
    axes has a cotangent over Auto ones. It takes the nominal layout, if that has the type; else
    that of the operand; if that is unknown, one on a mesh of the same sizes.
    """
    if layout is None:
        return None
    for known in (layout, given):
        if known and _type(wanted, wanted.shape, known).sharding == wanted.sharding:
            return known
    mesh, there = layout.mesh, wanted.sharding.mesh
    pairs = zip(there.axis_names, there.axis_types, strict=True)
    explicit = [name for name, kind in pairs if kind == AxisType.Explicit]
    if explicit and dict(there.shape) != dict(mesh.axes):
        return layout  # which JAX rejects
    types = {name: "explicit" if name in explicit else "auto" for name in mesh.axis_names}
    mesh = Mesh(
        mesh.axes,
        device_ids=mesh.device_ids,
        processes=mesh.processes,
        kind=mesh.kind,
        label=mesh.label,
        axis_types=types,
    )
    dims = padded_dims(wanted.sharding.spec, len(wanted.shape)) if explicit else layout.dims
    return Layout(mesh, *dims)


def _apply(
    primitive: Primitive,
    values: Sequence[Any],
    places: Sequence[Where],
    call: PartsCall,
    zeros: list[Any],
) -> list[Any]:
    """Apply the primitive to the values; symbolic zeros stay zero."""
    live = [index for index, value in enumerate(values) if type(value) is not ad.Zero]
    results = list(zeros)
    if live:
        where = tuple(places[index] for index in live)
        of_live = primitive.bind(*(values[index] for index in live), places=where, call=call)
        for index, result in zip(live, of_live, strict=True):
            results[index] = result
    return results


def _batch(
    primitive: Primitive,
    axis: Any,
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    places: tuple[Where, ...],
    call: PartsCall,
) -> tuple[list[Any], Sequence[int | None]]:
    batched = tuple(
        place if dim is None else _with_batch(place, dim, axis, call)
        for place, dim in zip(places, dims, strict=True)
    )
    return primitive.bind(*values, places=batched, call=call), dims


def _with_batch(place: Where, dim: int, axis: Any, call: PartsCall) -> Where:
    """Return the layouts with a dim for the batch: split as `vmap` says, or by no axis.

    The batch has one size under `vmap`, so no process may hold only a part of it.
    """
    must, names = axis.spmd_name is not None, axis.spmd_name
    if not must:
        names = axis.explicit_mesh_axis
    result = None if place.result is None else _inserted(place.result, dim, names)
    split = whole = _inserted(place.layout, dim, None)
    try:
        split = _inserted(place.layout, dim, names, must=must)
        why = _cannot_split(split, dim, axis.size)
    except UsageError as error:
        why = str(error)
    if why and must:
        raise UsageError(f"{call.operation}: {place.path}: spmd_axis_name={names!r} of vmap: {why}")
    return place._replace(layout=whole if why else split, given=None, result=result)


def _cannot_split(layout: Layout, dim: int, size: int) -> str:
    """Return why the batch cannot be split as a layout says, or an empty string."""
    if own_box(layout).boxes[dim] > 1:
        return (
            f"it splits the batch between processes, so that its size, {size}, would change inside "
            f"vmap; convert the whole batch outside, as {layout!r}"
        )
    count = layout.num_shards(dim)
    return f"{count} shards do not divide a batch of {size}" if size % count else ""


def _inserted(layout: Layout, dim: int, names: Any, *, must: bool = False) -> Layout:
    """Return a layout with one more dim, split by these axes; unsplit, or an error if it `must`
    be split, where they cannot."""
    dims = list(layout.dims)
    axes = names
    if not (names is None or isinstance(names, tuple)):
        axes = (names,)
    try:
        return Layout(layout.mesh, *dims[:dim], axes, *dims[dim:])
    except UsageError:
        if must:
            raise
        return Layout(layout.mesh, *dims[:dim], None, *dims[dim:])


def _refuse(name: str, *given: Any, **params: Any) -> NoReturn:
    raise UsageError(IN_JIT[name])


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    batching.fancy_primitive_batchers[primitive] = partial(_batch, primitive)
    ad.primitive_jvps[primitive] = partial(_push_forward, primitive)
    mlir.register_lowering(primitive, partial(_refuse, name))
    return primitive


_JOIN, _CUT = _primitive("from_host_local"), _primitive("to_host_local")
_JOIN.def_impl(_join)
_CUT.def_impl(_cut)
_JOIN.def_abstract_eval(_types_of_wholes)
_CUT.def_abstract_eval(_types_of_parts)
ad.primitive_transposes[_JOIN] = partial(_pull_back, _CUT)
ad.primitive_transposes[_CUT] = partial(_pull_back, _JOIN)
