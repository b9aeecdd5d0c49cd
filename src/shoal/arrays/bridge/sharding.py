"""Layout ⇄ `jax.sharding.NamedSharding`: the only conversion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shoal.arrays.bridge.devices import backend_of, jax_mesh
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, counted, with_article
from shoal.plan.layout import Dim, Layout
from shoal.plan.mesh import Mesh


def sharding_of(layout: Layout, *, devices: Sequence[jax.Device] | None = None) -> NamedSharding:
    """Return the JAX sharding of a layout: the same object for equal ones.

    Args:
      devices: those to search for the mesh's; None: those of this job.

    Raises:
      UsageError: devices that do not exist, or pending reductions that JAX cannot express.
    """
    among = None if devices is None else tuple(devices)
    return _sharding(layout, among, backend_of(layout.mesh.kind))


@local
def layout_of(x: jax.Array | jax.ShapeDtypeStruct | NamedSharding) -> Layout:
    """Return the layout of an array.

    Local.

    Args:
      x: an array, a `jax.ShapeDtypeStruct` with a sharding, or a NamedSharding (of which the
        layout has as many dims as its PartitionSpec). An array on a single device has a layout on
        the mesh of that device, which has no axes.

    Raises:
      UsageError: `x` has no layout: a host value, a value inside `jit`, a sharding of another
        kind, or one that leaves dims to the compiler.

    Example:
      >>> import jax.numpy as jnp, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> shoal.layout_of(shoal.put(jnp.ones((8, 3)), NamedSharding(mesh, P("x")))).dims
      ('x', None)
    """
    if isinstance(x, NamedSharding):
        return layout_of_sharding(x, len(x.spec))
    if isinstance(x, jax.core.Tracer):
        raise UsageError(
            f"layout_of: {jax.typeof(x)} is a value inside jit: the compiler has not placed it "
            "yet; constrain it, or ask for the layout of the result"
        )
    if isinstance(x, PartitionSpec):
        raise UsageTypeError(f"layout_of: {x} names no mesh: write shoal.Layout(mesh, {x})")
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        raise UsageTypeError(
            f"layout_of: {with_article(type(x).__name__)} has no layout: put it on a mesh"
        )
    if x.sharding is None:
        raise UsageError(f"layout_of: {x} names no sharding")
    return layout_of_sharding(x.sharding, len(x.shape))


def layout_of_sharding(given: jax.sharding.Sharding, rank: int) -> Layout:
    """Return the layout of arrays of `rank` dims under a sharding.

    Raises:
      UsageError: the sharding is not equivalent to a layout.
    """
    if not isinstance(given, NamedSharding | SingleDeviceSharding):
        raise UsageError(
            f"layout_of: {with_article(type(given).__name__)} does not say which axes split "
            "which dims; relayout the array, or pass out_shardings to the jit that made it"
        )
    return _layout_of(given, rank)


@lru_cache(maxsize=4096)
def _sharding(
    layout: Layout, devices: tuple[jax.Device, ...] | None, backend: object
) -> NamedSharding:
    partial = layout.partial
    other = sorted({reduction for reduction in partial.values() if reduction != "sum"})
    if other:
        raise UsageError(
            f"named_sharding: {layout!r} has pending reductions other than sums: "
            f"{', '.join(other)}; JAX supports only sums"
        )
    auto = [axis for axis in partial if layout.mesh.axis_types[axis] == "auto"]
    if auto:
        raise UsageError(
            f"named_sharding: {layout!r} has pending sums over Auto axes ({', '.join(auto)}); "
            "JAX supports them only over Explicit axes: Mesh(…, axis_types='explicit')"
        )
    return NamedSharding(jax_mesh(layout.mesh, devices=devices), spec_of(layout))


def spec_of(layout: Layout) -> PartitionSpec:
    """Return the PartitionSpec of a layout, whose pending reductions are sums."""
    unreduced = {"unreduced": set(layout.partial)} if layout.partial else {}
    return PartitionSpec(*layout.dims, **unreduced)


def memory_of(given: Sharding) -> str:
    """Return the memory kind that a sharding names; "" if it is the devices' default memory."""
    kind = given.memory_kind
    if kind is None or kind == _default_memory(_platform(given)):
        return ""
    return str(kind)


def _platform(given: Sharding) -> str:
    return next(iter(given.device_set)).platform


@lru_cache(maxsize=16)
def _default_memory(platform: str) -> str:
    """Return the default memory of this process's devices; remote ones cannot be queried."""
    here = jax.local_devices(backend=platform)
    return str(here[0].default_memory().kind) if here else ""


@lru_cache(maxsize=4096)
def _layout_of(given: NamedSharding | SingleDeviceSharding, rank: int) -> Layout:
    if isinstance(given, SingleDeviceSharding):
        (device,) = given.device_set
        mesh = Mesh(
            {}, device_ids=[device.id], processes=device.process_index, kind=device.platform
        )
        return Layout.replicated(mesh, rank)
    dims = padded_dims(given.spec, rank)
    kind = getattr(given.spec, "unreduced_kind", None)  # jax 0.11 and later
    if kind is not None and kind.name != "sum":
        raise UsageError(f"layout_of: {given.spec} has a pending {kind.name}: only sums are known")
    return Layout(given.mesh, *dims, partial=dict.fromkeys(given.spec.unreduced, "sum"))


def padded_dims(spec: PartitionSpec, rank: int) -> tuple[Dim, ...]:
    """Return the dims of a PartitionSpec, padded to the rank as JAX does.

    Raises:
      UsageError: the spec has more entries than dims, or leaves some to the compiler.
    """
    dims = spec.partitions
    if len(dims) > rank:
        raise UsageError(
            f"{spec} has {counted(len(dims), 'entry', 'entries')} for {counted(rank, 'dim')}"
        )
    if any(dim is PartitionSpec.UNCONSTRAINED for dim in dims):
        raise UsageError(f"{spec} leaves dims to the compiler: a layout places every dim")
    return (*dims, *[None] * (rank - len(dims)))
