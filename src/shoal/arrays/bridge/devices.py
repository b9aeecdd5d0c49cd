"""Mesh ⇄ `jax.sharding.Mesh`: find the JAX devices that a mesh names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import jax
import numpy as np
from jax.extend.backend import get_backend
from jax.sharding import AxisType

from shoal.arguments import check_kind
from shoal.colour import local
from shoal.errors import UsageError
from shoal.plan.mesh import Mesh, mesh_of
from shoal.plan.notation.words import runs_to_text


@local
def jax_mesh(
    mesh: Mesh | jax.sharding.Mesh, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Return the JAX mesh over the devices that a mesh names.

    Local.

    For planned meshes: those of `planning.place` and `Mesh.host_mesh`, and of devices that
    this job does not have. `Mesh.of` is the way back. Devices are found by kind and id, and must
    belong to the processes that the mesh gives. The CPU mesh that `Mesh.host_mesh` makes of a mesh
    of accelerators has their ids: each stands for its `twins`. JAX's meshes have no labels, hold
    devices, and cannot be pickled.

    Args:
      mesh: the planned mesh; a JAX mesh is returned unchanged.
      devices: the devices to search, such as those that
        `jax.experimental.topologies.get_topology_desc` describes: programs can be compiled for
        them, but not run. None: those of this job.

    Returns:
      The JAX mesh with the same axes and axis types. Equal meshes give the same object.

    Raises:
      UsageError: devices that do not exist, or belong to other processes, or axis names that XLA
        cannot compile; names all.

    Example:
      >>> import shoal
      >>> shoal.jax_mesh(shoal.Mesh({"x": 1})).axis_names
      ('x',)
    """
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    planned = mesh_of("jax_mesh", mesh)
    among = listed_devices("jax_mesh", devices)
    return _jax_mesh(planned, among, backend_of(planned.kind))


def backend_of(kind: str) -> object:
    """Return JAX's client for a platform, which is another one after `jax.clear_backends`."""
    try:
        return get_backend(kind)
    except RuntimeError:  # there is none; the search for devices says so
        return None


def listed_devices(
    operation: str, devices: Iterable[jax.Device] | None
) -> tuple[jax.Device, ...] | None:
    """Return the devices that a caller gave, checked to be JAX's; None if none were given."""
    if devices is None:
        return None
    check_kind(operation, devices, Iterable, "a list of JAX's devices")
    listed = tuple(devices)
    for device in listed:
        check_kind(operation, device, jax.Device, "one of JAX's devices")
    return listed


def twins(
    devices: Mapping[int, int], accelerators: Mapping[int, int], cpus: Mapping[int, int]
) -> dict[int, int]:
    """Return the CPU device that stands for each accelerator: the n-th of each process for the
    n-th, both by ascending id.

    Args:
      devices, accelerators, cpus: id → process; of the mesh, and of all devices JAX has.

    Returns:
      accelerator id → CPU id, for those of `devices` that have one.

    Example:
      >>> twins({5: 1, 2: 0}, {0: 0, 2: 0, 4: 1, 5: 1}, {0: 0, 1: 0, 2048: 1, 2049: 1})
      {5: 2049, 2: 1}
    """
    hosts: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        hosts.setdefault(cpus[cpu], []).append(cpu)
    twin_of: dict[int, int] = {}
    for device in sorted(accelerators):
        free = hosts.get(accelerators[device])
        if free:
            twin_of[device] = free.pop(0)
    return {
        device: twin_of[device]
        for device, process in devices.items()
        if device in twin_of and accelerators[device] == process
    }


def twins_needed(devices: Mapping[int, int], accelerators: Mapping[int, int]) -> int:
    """Return how many CPU devices each process needs so that all of `devices` have twins.

    Example:
      >>> twins_needed({5: 1, 2: 0}, {0: 0, 2: 0, 4: 1, 5: 1, 6: 1})
      2
    """
    places: dict[int, int] = {}
    needed = 0
    for device in sorted(accelerators):
        process = accelerators[device]
        places[process] = places.get(process, 0) + 1
        if devices.get(device) == process:
            needed = max(needed, places[process])
    return needed


@lru_cache(maxsize=256)
def _jax_mesh(
    mesh: Mesh, among: tuple[jax.Device, ...] | None, backend: object
) -> jax.sharding.Mesh:
    _check_names(mesh)
    devices = np.empty(mesh.size, dtype=object)
    devices[:] = _find(mesh) if among is None else _described(mesh, among)
    types = tuple(
        AxisType.Explicit if kind == "explicit" else AxisType.Auto
        for kind in mesh.axis_types.values()
    )
    return jax.sharding.Mesh(devices.reshape(mesh.shape), mesh.axis_names, axis_types=types)


def _check_names(mesh: Mesh) -> None:
    """Reject names that XLA's text form of programs cannot represent.

    On these the compiler aborts the process ("Unknown escape sequence", jax 0.10.2) or fails
    (quotes, jax 0.12).
    """
    odd = [
        name
        for name in mesh.axis_names
        if not (name.isascii() and name.isprintable()) or set(name) & set("\"'\\")
    ]
    if odd:
        raise UsageError(
            f"{mesh!r}: axis names on devices must be printable ASCII without quotes and "
            f"backslashes, for XLA cannot compile others: {', '.join(map(repr, odd))}"
        )


def _find(mesh: Mesh) -> list[jax.Device]:
    """Return the devices of a mesh in mesh order."""
    try:
        present = {device.id: device for device in jax.devices(mesh.kind)}
    except RuntimeError as error:
        raise UsageError(
            f"{mesh!r}: JAX has no {mesh.kind} devices here; its default is "
            f"{jax.default_backend()} ({str(error).splitlines()[0]})"
            + ("; initialize(host_devices=n) makes some" if mesh.kind == "cpu" else "")
        ) from None
    ids = mesh.device_ids.ravel().tolist()
    owners = dict(zip(ids, mesh.processes.ravel().tolist(), strict=True))
    missing = sorted(device for device in ids if device not in present)
    moved = [
        device
        for device in ids
        if device in present and present[device].process_index != owners[device]
    ]
    if not missing and not moved:
        return [present[device] for device in ids]
    if mesh.kind == "cpu" and jax.default_backend() != "cpu":
        accelerators = _processes(jax.devices())
        twin_of = twins(owners, accelerators, _processes(present.values()))
        if len(twin_of) == len(ids):
            return [present[twin_of[device]] for device in ids]
        if all(accelerators.get(device) == owner for device, owner in owners.items()):
            count = twins_needed(owners, accelerators)
            raise UsageError(_too_few(mesh, count, _processes(present.values())))
    raise UsageError(_absence(mesh, missing, moved, present))


def _described(mesh: Mesh, among: Sequence[jax.Device]) -> list[jax.Device]:
    """Return the devices of a mesh in mesh order, out of a given list."""
    given = {device.id: device for device in among if device.platform == mesh.kind}
    ids, owners = mesh.device_ids.ravel().tolist(), mesh.processes.ravel().tolist()
    missing = sorted(device for device in ids if device not in given)
    moved = [
        device
        for device, owner in zip(ids, owners, strict=True)
        if device in given and given[device].process_index != owner
    ]
    if missing or moved:
        raise UsageError(_absence(mesh, missing, moved, present=given, where="devices="))
    return [given[device] for device in ids]


def _too_few(mesh: Mesh, needed: int, cpus: Mapping[int, int]) -> str:
    """Return the error that names the processes with fewer CPU devices than a host mesh needs."""
    counts = dict.fromkeys(mesh.process_indices, 0)
    for process in cpus.values():
        if process in counts:
            counts[process] += 1
    few = [f"process {p} has {n}" for p, n in sorted(counts.items()) if n < needed]
    shown = ", ".join([*few[:8], *(["…"] if len(few) > 8 else [])])
    return (
        f"{mesh!r}: too few CPU devices for this host mesh: {shown}; "
        f"write initialize(host_devices={needed})"
    )


def _processes(devices: object) -> dict[int, int]:
    return {device.id: device.process_index for device in devices}  # type: ignore[attr-defined]


def _absence(
    mesh: Mesh,
    missing: list[int],
    moved: list[int],
    present: Mapping[int, jax.Device],
    where: str = "JAX",
) -> str:
    lines = []
    if missing:
        there = runs_to_text(np.array(sorted(present)))
        lines.append(
            f"{mesh!r}: no {mesh.kind} device has the id {runs_to_text(np.array(missing))}; "
            f"{where} has {len(present)}: {there}"
        )
    if moved:
        shown = ", ".join(f"{device} (process {present[device].process_index})" for device in moved)
        lines.append(
            f"{mesh!r}: the mesh gives devices to processes that do not own them: {shown}; "
            "make_mesh fills the owners in"
        )
    return "\n".join(lines)
