"""Parse a target as the user gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import (
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.layout_functions import short_text, wrong_arguments
from shoal.arrays.bridge.leaf_layouts import (
    Leaf,
    is_mesh,
    mesh_in_force,
    must_divide,
    padded,
    sharding_in,
)
from shoal.arrays.bridge.sharding import layout_of_sharding, memory_of, sharding_of
from shoal.arrays.bridge.use_mesh import on_current_mesh
from shoal.arrays.host.host_values import X64, cannot_hold, narrowed
from shoal.checkpoint.format.records import LeafRecord, in_memory, layout_and_memory
from shoal.checkpoint.restoring.target import Fit, TargetLeaf
from shoal.checkpoint.tree import flatten
from shoal.checkpoint.tree.dtypes import dtype_of
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.checkpoint.tree.jax_nodes import JaxNodes
from shoal.checkpoint.tree.names import ROOT, name_of
from shoal.checkpoint.tree.plain_values import kind_of, remedy
from shoal.collectives.leaves import leaf_of
from shoal.errors import UsageError, UsageTypeError, raise_all, with_article
from shoal.plan.layout import Layout
from shoal.plan.mesh import mesh_of

STORED = "stored"
_NUMBERS = ("bool", "int", "float", "complex")
_TARGETS = 'pass a layout, a mesh, a jax.ShapeDtypeStruct, an array or "stored"'
_LEAF = "a jax.ShapeDtypeStruct of its shape and dtype"  # the second argument of a function
_MOST_DEVICES = 1 << 20  # of a mesh named in a file: a larger one would exhaust memory


class Target(NamedTuple):
    """The parsed target, leaf by leaf."""

    leaves: list[TargetLeaf]
    given: list[Any]  # the leaves as given in the target
    rebuild: Callable[[Iterable[Any]], Any]  # the tree with other leaves, of its own classes


class _Chosen(NamedTuple):
    """A function that chooses the placement of each leaf."""

    choose: Callable[[LeafRecord], Any]


def target_of(target: Any) -> Target:
    """Parse a target.

    Raises:
      UsageError: leaves that cannot be targets; names all.
    """
    if _is_layout(target) or _is_stored(target):
        return Target([_target_leaf(ROOT, target)], [target], _first)
    if _is_function(target):  # after the others: JAX's meshes are callable
        why = wrong_arguments(target, _LEAF)
        if why:
            raise UsageTypeError(f"restore: target: {why}")
        return Target([_target_leaf(ROOT, target)], [target], _first)
    pairs, _ = flatten.flatten_tree(
        target, JaxNodes(), is_leaf=is_placement, operation="restore: target"
    )
    problems: list[str] = []
    leaves = []
    for path, value in pairs:
        name = name_of(path)
        try:
            leaves.append(_target_leaf(name, value))
        except UsageError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    raise_all("restore: target", problems)
    rebuild = partial(flatten.refilled, target, nodes=JaxNodes(), is_leaf=is_placement)
    return Target(leaves, [value for _, value in pairs], rebuild)


def _first(leaves: Iterable[Any]) -> Any:
    return next(iter(leaves))


def fit(leaf: TargetLeaf, record: LeafRecord, dtype: np.dtype[Any] | None) -> Fit:
    """Return where a leaf belongs, and any problem with that.

    Args:
      dtype: of the result; None for keys.
    """
    given = leaf.place
    try:
        if isinstance(given, _Chosen):
            given = given.choose(record)
        if given is None:
            return Fit(None)
        if not _is_layout(given):
            detail = "return a Layout, a sharding, a Mesh, or None for a NumPy array"
            text = f"the target's function returned {short_text(given)}, not a layout; {detail}"
            return Fit(None, problem=text)
        if dtype is not None:
            why = _refused(dtype, bool(jax.config.jax_enable_x64))
            if why:
                return Fit(None, problem=why)
        place = _sharding(_on_mesh(given), record.shape)
        is_free = _is_default(place) if leaf.is_free is None else leaf.is_free
        return Fit(place, is_free)
    except UsageError as error:
        return Fit(None, problem=str(error))


def _is_default(place: Sharding) -> bool:
    """True for the device that JAX itself would choose, named without a mesh.

    A sharding does not say whether its array was committed. On this device one that was not works
    wherever one that was does, and computes there, too.
    """
    if isinstance(place, NamedSharding) and place.mesh.axis_names:
        return False
    if jax.config.jax_default_device is not None:  # perhaps only here: later it is another one
        return False
    is_plain = isinstance(place, NamedSharding | SingleDeviceSharding) and not memory_of(place)
    return is_plain and place.device_set == {jax.local_devices()[0]}


def _target_leaf(name: str, value: Any) -> TargetLeaf:
    if isinstance(value, Format):
        value = sharding_in(value)
    if isinstance(value, NamedSharding):
        value = on_current_mesh(value)
    if _is_layout(value):
        has_dims = not is_mesh(value)
        return TargetLeaf(name, value, is_layout=True, has_dims=has_dims, text=_text(value))
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return _like(name, value)
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("=")
        return TargetLeaf(name, None, value.shape, dtype, is_array=True, text="on the host")
    if _is_stored(value):
        return TargetLeaf(name, _Chosen(_stored_layout), is_layout=True, text="as stored")
    if _is_function(value):
        return _by_function(name, value)
    if isinstance(value, PerProcess):
        return TargetLeaf(name, own=value, text="per process")
    if value is None:
        return TargetLeaf(name, text="as stored", is_none=True)
    kind = kind_of(value)
    if kind:
        is_number = kind in _NUMBERS or isinstance(value, np.number | np.bool_)
        why = f"is {short_text(value)}; {_TARGETS}"
        return TargetLeaf(name, text="as stored", no_array=why, is_number=is_number)
    return _no_target(name, value)


def _no_target(name: str, value: Any) -> TargetLeaf:
    """Return what is an error at the place of an array, with what to write."""
    why = f"is {with_article(type(value).__name__)}; {_TARGETS}"
    if isinstance(value, jax.Device):
        why = "is a device; pass jax.sharding.SingleDeviceSharding(device)"
    dtype = _given_dtype(value)
    if dtype is not None:
        why = f"is the dtype {dtype}; pass jax.ShapeDtypeStruct(shape, {str(dtype)!r})"
    hint = f"it {why}"
    if isinstance(value, Enum) or is_dataclass(value):
        hint = remedy(value)
    return TargetLeaf(name, text="as stored", hint=hint, no_array=why)


def _is_stored(value: Any) -> bool:
    return isinstance(value, str) and value == STORED


def _given_dtype(value: Any) -> np.dtype[Any] | None:
    """Return the dtype that is given: np.float32, "jnp.float32", float, np.dtype("float32")."""
    if not isinstance(value, np.dtype | type):
        return None
    dtype = np.dtype(value)
    if dtype.hasobject and isinstance(value, type):  # any class is an object
        return None
    return dtype


def _by_function(name: str, function: Callable[[str, Any], Any]) -> TargetLeaf:
    """Ask for a function's result; a wrong signature is reported only where it is used."""
    why = wrong_arguments(function, _LEAF)
    if why:

        def refuse(record: LeafRecord) -> NoReturn:
            raise UsageError(why)

        return TargetLeaf(name, _Chosen(refuse), text="as stored", hint=why)
    chosen = _Chosen(lambda record: function(record.name, _abstract(record)))
    return TargetLeaf(name, chosen, is_layout=True, is_function=True, text="by a function")


def _is_function(value: Any) -> bool:
    """Return whether this is a function of leaves: no node of a tree, and no dtype (`np.int8`)."""
    return callable(value) and JaxNodes().flatten(value) is None and _given_dtype(value) is None


def _like(name: str, value: Any) -> TargetLeaf:
    """Ask for an array like a given one, or like its description."""
    if isinstance(value, jax.core.Tracer):
        raise UsageError("is a value inside jit or grad; restore outside")
    place, impl, dtype = _with_devices(value.sharding), "", value.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        leaf = leaf_of(name, jax.ShapeDtypeStruct((), dtype))
        impl, dtype = str(getattr(leaf, "impl", "")), None
    text = "on the host" if place is None else _text(place)
    dtype = None if dtype is None else np.dtype(dtype)
    is_free = not value.committed if isinstance(value, jax.Array) else None
    return TargetLeaf(
        name,
        place,
        shape=tuple(value.shape),
        dtype=dtype,
        impl=impl,
        is_array=True,
        is_free=is_free,
        text=text,
    )


def _with_devices(place: Any) -> Any:
    """Return a sharding with devices: on the current mesh, if its own is abstract."""
    return on_current_mesh(place) if isinstance(place, NamedSharding) else place


def _is_layout(value: Any) -> bool:
    return isinstance(value, Layout | Sharding | PartitionSpec) or is_mesh(value)


def is_placement(value: Any) -> bool:
    """Does a leaf of a target only say where an array shall be, or of what shape?"""
    return _is_layout(value) or isinstance(value, jax.ShapeDtypeStruct)


def _abstract(record: LeafRecord) -> jax.ShapeDtypeStruct:
    """Return the abstract value passed to a layout function; for keys, that of their words."""
    return jax.ShapeDtypeStruct(record.shape, dtype_of(record.dtype))


def _stored_layout(record: LeafRecord) -> Layout | NamedSharding | None:
    """Return the saved layout of a leaf; None if it has none."""
    if not record.layout:
        return None
    text, memory = layout_and_memory(record.layout)
    try:
        layout = Layout.parse(text)
        if layout.mesh.size > _MOST_DEVICES:
            raise UsageError(f"its mesh has {layout.mesh.size} devices")
        place = sharding_of(layout)
    except UsageError as error:
        raise UsageError(
            f"was saved as {record.layout}, which does not fit here: {error}; "
            "pass a target of layouts"
        ) from None
    try:
        return place.with_memory_kind(memory) if memory else layout
    except ValueError as error:
        detail = f"was saved in {memory} memory, which devices here lack: {error}"
        raise UsageError(f"{detail}; pass a target of layouts") from None


@lru_cache(maxsize=256)
def _refused(dtype: np.dtype[Any], is_wide: bool) -> str:
    """Return why no device can hold a dtype, or that JAX as configured would narrow it."""
    value = np.empty(0, dtype)
    why = cannot_hold(value)
    if why:
        return why
    change = None if is_wide else narrowed(value)
    if change is None:
        return ""
    return f"{' would become '.join(change)}; restore it to the host, cast it, or {X64}"


def _on_mesh(given: Any) -> Any:
    """Put a PartitionSpec on the mesh of `use_mesh`; a mesh alone replicates the leaf."""
    if is_mesh(given):
        return NamedSharding(jax_mesh(given), PartitionSpec())
    if not isinstance(given, PartitionSpec):
        return given
    return NamedSharding(jax_mesh(mesh_in_force(given)), given)


@lru_cache(maxsize=4096)
def _sharding(given: Any, shape: tuple[int, ...]) -> Sharding:
    """Return the sharding for arrays of a shape.

    Raises:
      UsageError: it does not fit.
    """
    if isinstance(given, Layout | NamedSharding):
        layout = given if isinstance(given, Layout) else layout_of_sharding(given, len(shape))
        layout = padded(layout, len(shape))
        layout.check_shape(shape)
        if layout.partial:
            raise UsageError(f"{layout!r} is partial; values are never partial: leave it out")
        problems: list[str] = []
        must_divide(Leaf("", np.broadcast_to(np.int8(0), shape), layout), problems)
        if problems:
            raise UsageError("; ".join(problem.removeprefix(": ") for problem in problems))
        return given if isinstance(given, NamedSharding) else sharding_of(given)
    sharding: Sharding = given
    try:
        sharding.shard_shape(shape)
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{sharding} does not fit {shape}: {error}") from None
    return sharding


@lru_cache(maxsize=4096)
def _text(given: Any) -> str:
    """Return a placement's text for comparison between processes: equal if they mean the same."""
    if isinstance(given, Layout):
        return given.text
    if is_mesh(given):
        return f"replicated on {mesh_of('restore', given).text}"
    if isinstance(given, PartitionSpec):
        return str(given)
    if jax.process_count() > 1 and len({device.process_index for device in given.device_set}) == 1:
        return "on devices of one process"  # each its own, or all the same: reads are independent
    try:
        layout = layout_of_sharding(given, len(getattr(given, "spec", ())))
        return in_memory(layout.text, memory_of(given))
    except UsageError:
        return str(given)
