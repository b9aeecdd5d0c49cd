"""DTensor meshes ⇄ shoal meshes: the JAX devices that device names refer to."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from shoal.compat.dtensor.text.device_spec import DeviceSpec
from shoal.compat.dtensor.text.mesh_fields import MeshFields
from shoal.errors import UsageError
from shoal.plan.mesh import Mesh
from shoal.runtime.process import process_index, registered

__all__ = ["devices_of", "fields_of", "placed", "spec_texts"]


def devices_of(kind: str) -> dict[int, list[int]]:
    """Return the ids of each process's devices of a platform, ascending."""
    owned: dict[int, list[int]] = {}
    try:
        devices = jax.devices(kind)
    except RuntimeError:  # no such devices
        return owned
    for device in sorted(devices, key=lambda one: one.id):
        owned.setdefault(device.process_index, []).append(device.id)
    return owned


def placed(fields: MeshFields) -> Mesh:
    """Return the shoal mesh over the devices that a DTensor mesh names.

    Raises:
      UsageError: it names no devices, or devices that do not exist.
    """
    if not fields.size and not fields.single:
        raise UsageError("dtensor.Mesh: the empty mesh has no devices")
    kind = fields.device_type.lower()
    specs = [DeviceSpec.from_string(fields.single)] if fields.single else _specs(fields)
    present, me = devices_of(kind), process_index()
    owners = [me if spec.task is None else spec.task for spec in specs]
    found = [_id(spec, owner, present) for spec, owner in zip(specs, owners, strict=True)]
    ids = [one for one in found if one is not None]
    if len(ids) < len(specs):
        missing = [spec.to_string() for spec, one in zip(specs, found, strict=True) if one is None]
        counts = {owner: len(own) for owner, own in sorted(present.items())}
        detail = f"no such {kind} devices: {', '.join(missing[:8])}; processes have {counts}"
        raise UsageError(f"dtensor.Mesh: {detail}")
    return registered(
        Mesh(fields.dims, device_ids=ids, processes=owners, kind=kind, label=fields.name)
    )


def _id(spec: DeviceSpec, owner: int, present: dict[int, list[int]]) -> int | None:
    own, place = present.get(owner, []), spec.device_index or 0
    return own[place] if place < len(own) else None


def _specs(fields: MeshFields) -> list[DeviceSpec]:
    """Return the device at each position; by DTensor's rule if only local devices are named.

    The rule: each process has the same number of consecutive devices, with the same indices.
    """
    if fields.global_devices:
        return [DeviceSpec.from_string(text) for text in fields.global_devices]
    pairs = sorted(zip(fields.local_ids, fields.local_devices, strict=True))
    own = [DeviceSpec.from_string(text) for _, text in pairs]
    first, me = pairs[0][0], process_index()
    is_block = [one - first for one, _ in pairs] == [*range(len(own))]
    if not is_block or (first - fields.first_id != me * len(own) and len(own) < fields.size):
        raise UsageError(
            f"dtensor.Mesh: local_device_ids={list(fields.local_ids)} do not determine the "
            "devices of other processes; give global_devices=, or use create_distributed_mesh"
        )
    others = range(fields.size // len(own))
    return own if len(own) == fields.size else [s.replace(task=n) for n in others for s in own]


def fields_of(mesh: Mesh, *, job: str, use_xla_spmd: bool = False) -> MeshFields:
    """Return DTensor's description of a shoal mesh in this process.

    A device's id is its position. Those of this process are in mesh order; on TPUs, as in DTensor,
    in the order of chip numbers.
    """
    me = process_index()
    positions = {int(one): place for place, one in enumerate(mesh.device_ids.ravel())}
    own = [int(one) for one in mesh.local(me)]
    own = sorted(own) if mesh.kind == "tpu" else own
    names = spec_texts(mesh.kind, job, me, own)
    local_ids = tuple(positions[one] for one in own)
    dims = tuple(mesh.axes.items())
    others = () if own else tuple(_everywhere(mesh, job))
    return MeshFields(mesh.label, dims, 0, local_ids, tuple(names), others, use_xla_spmd)


def _everywhere(mesh: Mesh, job: str) -> list[str]:
    """Return the names of all devices, for a process that has none of them."""
    pairs = zip(mesh.device_ids.ravel().tolist(), mesh.processes.ravel().tolist(), strict=True)
    return [spec_texts(mesh.kind, job, owner, [one])[0] for one, owner in pairs]


def spec_texts(kind: str, job: str, process: int, ids: Sequence[int]) -> list[str]:
    """Return the names of devices of one process."""
    present = devices_of(kind).get(process, sorted(ids))
    return [
        f"/job:{job}/replica:0/task:{process}/device:{kind.upper()}:{present.index(one)}"
        for one in ids
    ]
