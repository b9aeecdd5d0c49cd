"""Upload host arrays to device buffers that are never aliased.

On CPU, JAX adopts the memory of a host array aligned to 64 bytes, whatever `may_alias` says (jax
0.10 to 0.12): a later change of the host array changes the result, and donation frees nothing. Such
memory is never left shared. A small array is first moved to an unaligned address, from which JAX
copies. A large one is shared for a moment and then copied on the device, so that nothing is held
twice: the buffer that shared memory had none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.arrays.host.host_values import device_dtype, device_form
from shoal.errors import UsageError
from shoal.runtime.jax_service import jax_runtime

HostArray = np.ndarray[Any, Any]

_SHARED_AT = 64
_SMALL_BYTES = 1 << 16


def is_tracing() -> bool:
    """True while a function is traced, as by `jit`; not under `grad` or `vmap` alone."""
    with jax.transfer_guard("allow"):
        return isinstance(jax.device_put(np.int8(0)), jax.core.Tracer)


def refuse_inside_jit() -> None:
    """Raise a UsageError while a function is traced."""
    if is_tracing():
        raise UsageError(
            "put, pack: inside jit no value is on a device yet; place host values outside, and "
            "pass them in; constrain pins a value inside"
        )


def upload_shards(value: HostArray, target: NamedSharding) -> jax.Array:
    """Return a host array as a sharded one. Wait for it before changing the host array.

    Each distinct box is cut once, and only then converted to its form on devices.
    """
    boxes = target.addressable_devices_indices_map(value.shape)
    views: dict[tuple[Any, ...], HostArray] = {}
    for index in boxes.values():
        if _box(index) not in views:
            piece = value[(*index, ...)]  # the ellipsis keeps scalars arrays
            views[_box(index)] = device_form(piece)
    dtype = device_dtype(value.dtype)
    on_cpu = any(device.platform == "cpu" for device in boxes)
    if on_cpu:
        views = {box: _unshared(view) for box, view in views.items()}
    if not boxes or (on_cpu and any(map(_is_large_and_shared, views.values()))):
        buffers = upload([views[_box(index)] for index in boxes.values()], [*boxes])
        return jax.make_array_from_single_device_arrays(value.shape, target, buffers, dtype=dtype)
    with jax_runtime.explicit_transfers():
        return jax.make_array_from_callback(
            value.shape, target, lambda index: views[_box(index)], dtype=dtype
        )


def upload(views: Sequence[HostArray], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Return each host array on its device. Wait for them before changing the host arrays."""
    buffers: list[jax.Array] = jax.device_put(list(views), list(devices))
    shared = [
        place
        for place, (view, buffer) in enumerate(zip(views, buffers, strict=True))
        if devices[place].platform == "cpu"
        and view.size
        and buffer.unsafe_buffer_pointer() == view.ctypes.data
    ]
    copies = jax.device_put(
        [buffers[place] for place in shared], [devices[place] for place in shared], may_alias=False
    )
    for place, copy in zip(shared, copies, strict=True):
        buffers[place] = copy
    return buffers


def _box(index: tuple[slice, ...]) -> tuple[Any, ...]:
    """Return a hashable key: slices are unhashable before Python 3.12."""
    return tuple((piece.start, piece.stop) for piece in index)


def _would_be_shared(view: HostArray) -> bool:
    return view.flags.c_contiguous and view.size > 0 and view.ctypes.data % _SHARED_AT == 0


def _is_large_and_shared(view: HostArray) -> bool:
    """After `_unshared` only large arrays can be shared; the size is cheaper to check."""
    return view.nbytes > _SMALL_BYTES and _would_be_shared(view)


def _unshared(view: HostArray) -> HostArray:
    """Return a small array that JAX must copy: itself, or a copy at an unaligned address."""
    if view.nbytes > _SMALL_BYTES or not _would_be_shared(view):
        return view
    memory = np.empty(view.nbytes + 1, np.uint8)
    odd = memory[1 - memory.ctypes.data % 2 :][: view.nbytes]
    moved = odd.view(view.dtype).reshape(view.shape)
    moved[...] = view
    return moved


def with_shards_of_its_layout(result: jax.Array) -> jax.Array:
    """Return a program's result; an empty one gets the shards of its layout.

    JAX 0.10 gives such an array whole shards, at which `np.asarray` and a transfer fail.
    """
    if isinstance(result, jax.core.Tracer) or result.size:
        return result
    if jax.dtypes.issubdtype(result.dtype, jax.dtypes.extended):
        return result
    shape = result.sharding.shard_shape(result.shape)
    if all(shard.data.shape == shape for shard in result.addressable_shards):
        return result
    return jax.make_array_from_callback(
        result.shape, result.sharding, lambda _: np.zeros(shape, result.dtype)
    )
