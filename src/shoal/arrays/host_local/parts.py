"""One global array ⇄ the part that this process's devices hold. Nothing is sent between processes,
and no byte is copied where the devices already hold the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import concrete_or_error
from jax.sharding import NamedSharding

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.bridge.sharding import layout_of_sharding, sharding_of
from shoal.arrays.host.host_values import as_numpy, device_dtype
from shoal.arrays.host.record_call import record_call_of_parts
from shoal.arrays.moving.move import move, relabelled
from shoal.arrays.moving.planned_move import ArrayMove
from shoal.arrays.placing.put import place_leaves
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.process_boxes import ProcessBox, process_box
from shoal.runtime.jax_service.own_programs import own_programs

Shape = tuple[int, ...]

_CANNOT_PASS = "under vmap it cannot pass unchanged: convert it before, or leave it out"


class PartsCall(NamedTuple):
    """The name and options of a call of `from_host_local` or `to_host_local`."""

    operation: str
    site: str  # the call site; "": where it is executed
    check_values: bool = True
    lane: str | None = None
    nodes: tuple[str, ...] = ()  # the line of its tree, which must be equal
    is_derivative: bool = False  # of tangents or cotangents, which autodiff may place anywhere

    def of_derivative(self) -> PartsCall:
        """Return the call that JAX makes for tangents or cotangents."""
        if self.is_derivative:
            return self
        return self._replace(operation=f"gradient of {self.operation}", is_derivative=True)


def own_box(layout: Layout) -> ProcessBox:
    """Return the box of this process.

    Raises:
      UsageError: processes do not hold boxes of one shape.
    """
    return process_box(layout, jax.process_index())


def global_shape(layout: Layout, shape: Sequence[int]) -> Shape:
    """Return the global shape for parts of `shape`."""
    return tuple(s * n for s, n in zip(shape, own_box(layout).boxes, strict=True))


def local_shape(layout: Layout, shape: Sequence[int]) -> Shape:
    """Return the shape of a process's part of an array."""
    return tuple(s // n for s, n in zip(shape, own_box(layout).boxes, strict=True))


def _own_slices(layout: Layout, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the indices of this process's part in the global array."""
    part = local_shape(layout, shape)
    places = own_box(layout).place
    return tuple(slice(n * size, (n + 1) * size) for n, size in zip(places, part, strict=True))


def join_own_parts(leaves: Sequence[Leaf], call: PartsCall) -> list[jax.Array]:
    """Return the global arrays assembled from the processes' parts, and record the call.

    Raises:
      UsageError: a part is on devices of other processes.
    """
    for leaf in leaves:
        if not is_local(leaf.value):
            raise UsageError(f"{call.operation}: {leaf.path}: is global already; {_CANNOT_PASS}")
    record_call_of_parts(
        call.operation,
        leaves,
        lane=call.lane,
        options=(f"check_values={call.check_values}",),
        nodes=call.nodes,
        values=call.check_values,
        site=call.site,
    )
    return [_whole_of_own(leaf) for leaf in leaves]


def _whole_of_own(leaf: Leaf) -> jax.Array:
    box = own_box(leaf.layout)
    if box.layout is None:
        return _nothing_here(leaf)
    (part,) = place_leaves([leaf.on(box.layout)])
    return jax.make_array_from_single_device_arrays(
        global_shape(leaf.layout, part.shape),
        leaf.sharding,
        [shard.data for shard in part.addressable_shards],
        dtype=part.dtype,
    )


@own_programs()
def cut_own_part(leaf: Leaf, call: PartsCall) -> jax.Array:
    """Return this process's part of an array.

    Raises:
      UsageError: the array is not in its layout (cotangents are moved), or this process has no part
        of it.
    """
    path, value, layout = leaf.path, leaf.value, leaf.layout
    box, target = own_box(layout), sharding_of(layout)
    if box.layout is None:
        raise UsageError(
            f"{call.operation}: {path}: process {jax.process_index()} owns no device of "
            f"{layout.mesh!r}: it has no part to compute with"
        )
    current = _laid_out(leaf, target, call)
    if current is None:
        part = value[(*_own_slices(layout, value.shape), ...)]  # the dots keep a scalar an array
        return place_leaves([Leaf(path, part, box.layout)])[0]
    return jax.make_array_from_single_device_arrays(
        local_shape(layout, current.shape),
        sharding_of(box.layout),
        [shard.data for shard in current.addressable_shards],
        dtype=current.dtype,
    )


def lies_elsewhere(array: jax.Array, layout: Layout) -> str:
    """Return why an array is not in a layout, or an empty string."""
    target = sharding_of(layout)
    if array.sharding.is_equivalent_to(target, array.ndim):
        return ""
    if array.sharding.device_set != target.device_set:
        return "is on other devices than those of the layout's mesh"
    try:
        current = layout_of_sharding(array.sharding, array.ndim)
    except UsageError:
        return f"is not in {layout!r}; relayout moves it there"
    if current == layout:  # only the memory differs
        kind = array.sharding.memory_kind
        return f"is in {kind} memory; jax.device_put(…, shoal.named_sharding(layout)) moves it"
    return f"is in {current!r}; relayout moves it to {layout!r}"


def _laid_out(leaf: Leaf, target: NamedSharding, call: PartsCall) -> jax.Array | None:
    """Return an array in the layout; None if it is not global, but whole in this process."""
    path, value, layout = leaf.path, leaf.value, leaf.layout
    is_array = isinstance(value, jax.Array)
    if is_array:
        array = relabelled(value, target)
        if array is not None:
            return array
    is_here = is_array and value.sharding.device_set == target.device_set
    if call.is_derivative and is_here and not value.is_fully_addressable:
        return move([ArrayMove(value, value, target)])[0]
    if call.is_derivative and (not is_array or value.is_fully_addressable):
        return None
    why = f"is local already; {_CANNOT_PASS}"
    if is_here or not is_local(value):
        why = lies_elsewhere(value, layout)
    raise UsageError(f"{call.operation}: {path}: {why}")


def seen(value: Any) -> Any:
    """Return a value, or under `grad` the primal behind it; None if it is not visible."""
    if not isinstance(value, jax.core.Tracer):
        return value
    try:
        return concrete_or_error(None, value)
    except jax.errors.ConcretizationTypeError:
        return None


def is_local(value: Any) -> bool:
    """True for data that this process holds alone: host values, and arrays on its own devices."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _nothing_here(leaf: Leaf) -> jax.Array:
    """Return an array of which this process holds nothing."""
    value, layout = leaf.value, leaf.layout
    value = value if hasattr(value, "dtype") else as_numpy(value)
    shape = global_shape(layout, value.shape)
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        dtype = device_dtype(np.dtype(value.dtype))
        return jax.make_array_from_single_device_arrays(shape, sharding_of(layout), [], dtype=dtype)
    key_words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, value.dtype))
    whole = Layout(layout.mesh, *layout.dims, *[None] * (len(key_words.shape) - len(shape)))
    empty = jax.make_array_from_single_device_arrays(
        key_words.shape, sharding_of(whole), [], dtype=key_words.dtype
    )
    return jax.random.wrap_key_data(empty, impl=value.dtype)
