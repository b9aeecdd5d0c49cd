"""Drain the devices of a mesh, on all its processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shoal.arrays.bridge.devices import jax_mesh
from shoal.collectives.arguments import deadline_of
from shoal.collectives.owners import owner_indices
from shoal.collectives.transport.device_transfer import DeviceTransfer
from shoal.colour import collective
from shoal.errors import DivergenceError, UsageError, UsageTypeError
from shoal.plan.mesh import Mesh, mesh_of
from shoal.runtime.agreement import Call
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.rules.spec_lines import SpecLine
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client

_LOG = logging.getLogger("shoal")


def _owners(
    client: JobClient, mesh: object = None, *_: object, **__: object
) -> tuple[int, ...] | None:
    """Return the processes of a mesh, as far as known before they meet."""
    try:
        return mesh_of("sync_devices", mesh).process_indices
    except UsageError:
        return None


@collective("the mesh's processes")
@uses_client
@collective_scope("sync_devices", among=_owners)
def sync_devices(
    client: JobClient,
    mesh: Mesh | jax.sharding.Mesh,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Wait until every device of a mesh has finished what was issued before, on all processes.

    Collective over the mesh's processes.

    First all processes synchronize, and agree on the earliest of their deadlines. Then each process
    waits until its own arrays on the mesh's devices are computed and its effects done. Then the
    devices synchronize by a small sum over all of them, whose result must be the size of the mesh.
    The call never returns while a process of the mesh has not called it, or while an array on the
    mesh, created before the call, is not computed. Processes without a device in the mesh do not
    take part, and other meshes are not disturbed.

    On CPU, a computation without effects whose results were all dropped may still be running. An
    array whose computation failed counts as finished: reading it raises.

    Start and end are logged, level INFO, with the name.

    Args:
      mesh: the mesh, equal on all.
      name: a label for messages, equal on all; None: "sync_devices".
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.

    Raises:
      DeadlineError: on all that arrived: a process did not arrive in time, or devices, which are
        named, were still busy.
      DivergenceError: on all that arrived: others arrived at another point, or with another mesh;
        or the devices that took part are not those of the mesh.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong, this process has no device in the mesh. The
        others get PeerFailedError.

    >>> from shoal import make_mesh
    >>> sync_devices(make_mesh({"x": -1}), name="before the timer starts")
    """
    name = "sync_devices" if name is None else name
    if not isinstance(name, str):
        raise UsageTypeError(f"sync_devices: name={name!r} must be a string")
    deadline = deadline_of(f"sync_devices({name!r})", name, timeout_s, "main")
    mesh = mesh_of(f"sync_devices({name!r})", mesh)
    devices = tuple(jax_mesh(mesh).devices.flat)
    own = [device for device in devices if device.process_index == jax.process_index()]
    group = tuple(sorted(owner_indices(client, devices, deadline.left_s).values()))
    if client.process not in group:
        raise UsageError(
            f"sync_devices({name!r}): process {client.process} has no device in {mesh!r}: "
            f"processes {list(group)} call it"
        )
    call = Call("sync_devices", name, callsite(), (SpecLine("mesh", value=mesh.text).packed,))
    transfer = DeviceTransfer(client, call, deadline.left_s, group=group)
    began = time.monotonic()
    _LOG.info("%s: enters sync_devices %r (%s) of %r", transfer.me, name, call.site, mesh)
    fault_points.reach("sync_devices.before_arrive", client.process)
    transfer.meet("all are here")
    transfer.together("what was issued", lambda: _finish(own), lambda: _busy(own))
    fault_points.reach("sync_devices.after_arrive", client.process)
    total = transfer.together(
        "the devices", lambda: _sum_and_finish(devices, own), lambda: _busy(own)
    )
    if total != len(devices):
        raise DivergenceError(
            f"{transfer.me}: sync_devices {transfer.name}: {total} devices took part in the sum "
            f"over {mesh!r}, which has {len(devices)}"
        )
    _LOG.info(
        "%s: leaves sync_devices %r after %.3f s", transfer.me, name, time.monotonic() - began
    )


def _finish(own: Sequence[jax.Device]) -> None:
    """Wait for all arrays on these devices, and for effects such as `jax.debug.callback`.

    Arrays deleted meanwhile, by another thread or by donation, need no wait: the arrays that
    replace them are waited for.
    """
    jax.effects_barrier()
    for array in _arrays(own):
        try:
            array.block_until_ready()
        except RuntimeError:  # deleted, or its computation failed: finished
            continue


def _busy(own: Sequence[jax.Device]) -> str:
    """Name the devices with unfinished arrays."""
    waiting = [array for array in _arrays(own) if not (array.is_deleted() or array.is_ready())]
    names = [str(device) for device in own if any(device in a.devices() for a in waiting)]
    return f"{', '.join(names)} not finished" if names else "waits for the other devices"


def _arrays(own: Sequence[jax.Device]) -> list[jax.Array]:
    here = set(own)
    live = jax.live_arrays(own[0].platform)
    return [array for array in live if not array.is_deleted() and here & array.devices()]


def _sum_and_finish(devices: tuple[jax.Device, ...], own: Sequence[jax.Device]) -> int:
    """Sum one over all devices."""
    program, sharding = _sum(devices)
    ones = [jax.device_put(np.ones(1, np.int32), device) for device in own]
    array = jax.make_array_from_single_device_arrays((len(devices),), sharding, ones)
    total = program(array)
    _finish(own)
    return int(total.addressable_data(0))


@lru_cache(maxsize=64)
def _sum(devices: tuple[jax.Device, ...]) -> tuple[Any, NamedSharding]:
    line = jax.sharding.Mesh(np.array(devices, dtype=object), "device")
    sharding = NamedSharding(line, PartitionSpec("device"))

    def total(one: jax.Array) -> jax.Array:
        return jax.lax.psum(one[0], "device")

    summed = jax.shard_map(total, mesh=line, in_specs=sharding.spec, out_specs=PartitionSpec())
    ones = jax.ShapeDtypeStruct((len(devices),), np.int32, sharding=sharding)
    return jax.jit(summed).lower(ones).compile(), sharding
