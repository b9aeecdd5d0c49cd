"""Host arrays → buffers of devices that nothing else can change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shoal.errors import UsageError

__all__ = ["upload"]


def upload(views: Sequence[np.ndarray[Any, Any]], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Return each host array on its device. When it returns, the host arrays may be changed.

    On CPU, JAX takes the memory of an aligned host array for its own, whatever `may_alias` says
    (jax 0.10 to 0.12), so that a later change of the host array changes the result. Such buffers
    are copied once, and nothing is held twice: the buffer that shared memory had none of its own.

    Raises:
      UsageError: inside `jit`.
    """
    if not views:
        return []
    buffers = jax.device_put(list(views), list(devices))
    if isinstance(buffers[0], jax.core.Tracer):
        raise UsageError(
            "put, pack: inside jit no value is on a device yet; place host values outside, and "
            "pass them in; constrain pins a value inside"
        )
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
    jax.block_until_ready(buffers)  # a transfer under way still reads the host array
    return buffers
