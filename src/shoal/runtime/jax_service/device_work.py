"""Tell whether the devices of this process have finished what they were given to compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from shoal.runtime.jax_service.jax_runtime import backend_exists, is_starting
from shoal.runtime.jax_service.own_programs import own_programs


def is_idle() -> bool:
    """Return whether all arrays of this process have been computed. Never blocks."""
    return all(map(_is_computed, _arrays()))


def may_poll() -> bool:
    """Return whether a wait for devices may use the processor: they are no CPUs. Never blocks."""
    if not backend_exists() or is_starting():
        return False
    import jax

    return bool(jax.default_backend() != "cpu")


def issued_work() -> Callable[[], bool]:
    """Return a function that tells whether all that was started until now has been computed.

    Also what has no array any more: a program may drop its last results, and end while other
    processes wait for this one's part of them. A device computes in the order in which it is
    given work, and XLA's CPU client runs one program of several devices at a time: so a last
    program of all local devices ends after all others. It is started after the arrays are
    computed: a device takes a limited number of programs at a time, so that starting one more
    blocks while these wait for other processes.

    On the CPU this leaves out programs of one local device that were started in another thread,
    or that use one of several local devices.
    """
    arrays = _arrays()
    marks: list[Any] | None = None

    def is_done() -> bool:
        nonlocal arrays, marks
        arrays = [array for array in arrays if not _is_computed(array)]
        if arrays:
            return False
        if marks is None:
            marks = [mark for mark in map(_mark, _device_sets()) if mark is not None]
        return all(mark.is_ready() for mark in marks)

    return is_done


def _arrays() -> list[Any]:
    if not backend_exists():
        return []
    import jax

    return list(jax.live_arrays())


def _is_computed(array: Any) -> bool:
    try:
        return bool(array.is_deleted() or array.is_ready())
    except RuntimeError:  # deleted meanwhile, in another thread
        return True


def _device_sets() -> list[Sequence[Any]]:
    """Return the local devices of the default backend, and the host's beside an accelerator."""
    if not backend_exists():
        return []
    import jax

    sets = [jax.local_devices()]
    if sets[0][0].platform != "cpu":
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave it out
            sets.append(jax.local_devices(backend="cpu"))
    return sets


def _mark(devices: Sequence[Any]) -> Any:
    """Start a program of these devices, and return its result; None: they take no more."""
    import jax
    import jax.numpy as jnp

    with contextlib.suppress(Exception):  # the process ends all the same
        mesh = jax.sharding.Mesh(devices, "d")
        layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        with jax.set_mesh(mesh), own_programs():  # the program's own may be of other devices
            return jax.jit(lambda: jnp.zeros(len(devices), bool), out_shardings=layout)()
    return None
