"""`dtensor.Mesh` on JAX devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.compat.arguments import row, takes, text
from shoal.compat.dtensor.refused import NotPossible
from shoal.compat.dtensor.text import (
    EMPTY,
    DeviceSpec,
    MeshFields,
    checked_fields,
    ids_of,
    read_mesh,
    single_device_mesh,
    write_mesh,
)
from shoal.errors import UsageError, UsageTypeError, nearest
from shoal.plan import mesh as plan_mesh
from shoal.plan.mesh import coords_of
from shoal.runtime.process import process_index, registered

__all__ = ["Mesh", "MeshDimension", "devices_of", "fields_of", "placed", "spec_texts"]


class MeshDimension(NamedTuple):
    """A name and a size."""

    name: str
    size: int


@local
class Mesh:
    """DTensor's mesh: named dims over consecutively numbered devices.

    Local.

    A value: immutable, hashable, equal by content, with the text form that TensorFlow reads.
    `shoal_mesh` is the `shoal.Mesh` over the same devices, equal on all processes.

    Args:
      dim_names: a list of names, major first.
      global_device_ids: the ids [mesh shape], ascending by one; the position of a device is its id
        less the first.
      local_device_ids: a list of the ids of this process's devices.
      local_devices: a list of their names, such as "CPU:0", or DeviceSpecs.
      mesh_name: a label, part of equality.
      global_devices: a list of the names of all devices; required unless every process has the
        same number of consecutive devices.
      use_xla_spmd: for TPUs; stored, without effect: JAX always compiles with XLA's SPMD.

    Raises:
      UsageError: names all problems.

    >>> import numpy as np
    >>> mesh = Mesh(["x", "y"], np.arange(4).reshape(2, 2), [0, 1, 2, 3], [f"CPU:{i}"
    ...     for i in range(4)])
    >>> mesh.shape(), mesh.dim_size("y"), mesh.coords(2).tolist()
    ([2, 2], 2, [1, 0])
    """

    __slots__ = ("_fields", "_placed")

    _fields: MeshFields
    _placed: plan_mesh.Mesh | Mesh | None  # on these devices, or on the host CPUs of that mesh

    @takes("dtensor.", dim_names=row)
    def __init__(
        self, dim_names: list[str], global_device_ids: NDArray[np.int64],
        local_device_ids: list[int], local_devices: list[DeviceSpec | str], mesh_name: str = "",
        global_devices: list[DeviceSpec | str] | None = None, use_xla_spmd: bool = False,
    ) -> None:  # fmt: skip
        shape, ids = ids_of(global_device_ids)
        if ids and len(shape) != len(dim_names):
            raise UsageError(
                "dtensor.Mesh: Number of mesh dimensions does not match number of dimension "
                f"names: {len(shape)} and {len(dim_names)}"
            )
        dims = list(zip(dim_names, shape, strict=False))
        given = (local_device_ids, local_devices, mesh_name, global_devices, use_xla_spmd)
        self._fill(checked_fields("dtensor.Mesh", dims, ids, *given))

    def _fill(self, fields: MeshFields, placed: plan_mesh.Mesh | Mesh | None = None) -> None:
        object.__setattr__(self, "_fields", fields)
        object.__setattr__(self, "_placed", placed)

    @classmethod
    def _of(cls, fields: MeshFields, placed: plan_mesh.Mesh | Mesh | None = None) -> Mesh:
        mesh = object.__new__(cls)
        mesh._fill(fields, placed)
        return mesh

    @classmethod
    def from_shoal(
        cls, mesh: plan_mesh.Mesh, *, job: str = "localhost", use_xla_spmd: bool = False
    ) -> Mesh:
        """Return this process's DTensor view of a mesh, JAX's or a planned one."""
        planned = plan_mesh.mesh_of("dtensor.Mesh.from_shoal", mesh)
        return cls._of(fields_of(planned, job=job, use_xla_spmd=use_xla_spmd), planned)

    @classmethod
    @takes("dtensor.", device=text)
    def from_device(cls, device: str) -> Mesh:
        """Return the mesh of one device, by its name."""
        return cls._of(single_device_mesh(device))

    @classmethod
    def from_string(cls, mesh_str: str) -> Mesh:
        """Read the text that `to_string`, or TensorFlow, wrote."""
        if not isinstance(mesh_str, str):
            raise UsageTypeError(f"dtensor.Mesh.from_string: {mesh_str!r} must be a string")
        return cls._of(read_mesh(mesh_str))

    @classmethod
    def from_proto(cls, proto: Any) -> Mesh:
        """Read a TensorFlow MeshProto, or any object with the same fields."""
        device = getattr(proto, "single_device", "")
        if device:
            return cls.from_device(device)
        dims = [(dimension.name, dimension.size) for dimension in proto.mesh_dimensions]
        if not dims and not list(proto.global_device_ids):
            return cls._of(EMPTY)
        rows = [list(proto.local_device_ids), list(proto.local_devices), proto.name]
        rows += [list(proto.global_devices), proto.use_xla_spmd]
        return cls._of(
            checked_fields("dtensor.Mesh.from_proto", dims, [*proto.global_device_ids], *rows)
        )

    def as_proto(self) -> Any:
        """Refuse: protocol buffers are TensorFlow's; its `Mesh.from_string` reads our text."""
        raise NotPossible(
            "dtensor.Mesh.as_proto: there are no protocol buffers here; TensorFlow's "
            "Mesh.from_string reads to_string()"
        )

    @property
    def shoal_mesh(self) -> plan_mesh.Mesh:
        """The `shoal.Mesh` over the same devices, accepted by all of shoal."""
        if isinstance(self._placed, Mesh):
            return self._placed.shoal_mesh.host_mesh()
        return placed(self._fields) if self._placed is None else self._placed

    @property
    def dim_names(self) -> list[str]:
        """The names of the dims, major first."""
        return [name for name, _ in self._fields.dims]

    @property
    def name(self) -> str:
        """The label."""
        return self._fields.name

    @property
    def size(self) -> int:
        """Number of devices; 0 for a single-device mesh."""
        return self._fields.size

    @property
    def strides(self) -> list[int]:
        """Distance in ids of neighbors along each dim."""
        shape = self.shape()
        return [math.prod(shape[place + 1 :]) for place in range(len(shape))] or [1]

    @property
    def single_device(self) -> str:
        """The name of the device of a single-device mesh; "" for any other."""
        return self._fields.single

    def shape(self) -> list[int]:
        """Return the sizes of the dims."""
        return list(self._fields.shape)

    def dim_size(self, dim_name: str) -> int:
        """Return the size of a dim.

        Raises:
          UsageError: the mesh has no such dim.
        """
        return self[dim_name].size

    def __getitem__(self, dim_name: str) -> MeshDimension:
        if not self.contains_dim(dim_name):
            known = ", ".join(self.dim_names)
            hint = nearest(dim_name, self.dim_names)
            raise UsageError(
                f"dtensor.Mesh: Dimension {dim_name} does not exist in mesh. Available "
                f"dimensions: {known}{hint}"
            )
        return MeshDimension(dim_name, dict(self._fields.dims)[dim_name])

    def contains_dim(self, dim_name: str) -> bool:
        """Return whether the mesh has a dim of this name."""
        if not isinstance(dim_name, str):
            raise UsageTypeError(f"dtensor.Mesh: a dim's name must be a string, not {dim_name!r}")
        return dim_name in dict(self._fields.dims)

    __contains__ = contains_dim

    def coords(self, device_idx: int) -> NDArray[np.int64]:
        """Return the index along each dim of a position [dims]; positions wrap around."""
        return np.array([
            device_idx // stride % size
            for stride, size in zip(self.strides, self.shape(), strict=False)
        ], np.int64)  # fmt: skip

    def device_location(self, offset: int) -> list[int]:
        """Return the index along each dim of a position, which must be in the mesh."""
        if not 0 <= offset < self.size:
            raise UsageError(
                "dtensor.Mesh: Mesh offset cannot be negative or exceed Mesh's size "
                f"{self.size}: {offset}"
            )
        return list(coords_of(offset, self.shape()))

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Return position → dim → index, for all positions."""
        return {place: self._named(place) for place in range(self.size)}

    def local_device_locations(self) -> list[dict[str, int]]:
        """Return dim → index for each device of this process, in the order of its ids."""
        return [
            self._named(device_id - self._fields.first_id) for device_id in self._fields.local_ids
        ]

    def _named(self, position: int) -> dict[str, int]:
        return dict(zip(self.dim_names, coords_of(position, self.shape()), strict=True))

    def global_device_ids(self) -> NDArray[np.int64]:
        """Return the ids of all devices [mesh shape]."""
        first = self.min_global_device_id()
        return np.arange(first, first + self.size, dtype=np.int64).reshape(self.shape())

    def min_global_device_id(self) -> int:
        """Return the first id.

        Raises:
          UsageError: the mesh has no ids: it has a single device, or is empty.
        """
        if not self.size:
            raise UsageError(f"dtensor.Mesh: {self.to_string()!r} has no global device ids")
        return self._fields.first_id

    def local_device_ids(self) -> list[int]:
        """Return the ids of this process's devices, in the order of `pack` and `unpack`."""
        return list(self._fields.local_ids)

    def local_devices(self) -> list[str]:
        """Return the names of this process's devices."""
        return list(self._fields.local_devices)

    def global_devices(self) -> list[str]:
        """Return the names of all devices, if they were given."""
        return list(self._fields.global_devices)

    def num_local_devices(self) -> int:
        """Return the number of the mesh's devices in this process."""
        return len(self._fields.local_ids)

    def device_type(self) -> str:
        """Return "CPU", "GPU" or "TPU"; "" for the empty mesh."""
        return self._fields.device_type

    def is_remote(self) -> bool:
        """Return whether this process has none of the devices."""
        return self.size > 0 and not self._fields.local_ids

    def is_single_device(self) -> bool:
        """Return whether the mesh is a single device, without dims."""
        return bool(self._fields.single)

    def use_xla_spmd(self) -> bool:
        """Return the constructor's argument."""
        return self._fields.use_xla_spmd

    def host_mesh(self) -> Mesh:
        """Return the same grid of host CPU devices: `shoal.Mesh.host_mesh`."""
        if not self.size:
            return self._of(EMPTY)
        specs = [DeviceSpec.from_string(text) for text in self._fields.local_devices]
        names = tuple(spec.replace(device_type="CPU").to_string() for spec in specs)
        fields = self._fields._replace(
            name="", local_devices=names, global_devices=(), use_xla_spmd=False
        )
        is_placed = self._placed is not None or self.device_type() != "CPU"
        return self._of(fields, self if is_placed else None)

    def to_string(self) -> str:
        """Return the text that `from_string` reads, here and in TensorFlow."""
        return write_mesh(self._fields)

    def __eq__(self, other: object) -> bool:
        return self._fields == other._fields if isinstance(other, Mesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields)

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(f"a dtensor.Mesh is immutable; {field} cannot be set")

    def __repr__(self) -> str:
        return f"Mesh.from_string({self.to_string()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh._of, (self._fields, self._placed)


# ---- DTensor meshes ⇄ shoal meshes: the JAX devices that device names refer to.


def devices_of(kind: str) -> dict[int, list[int]]:
    """Return the ids of each process's devices of a platform, ascending."""
    owned: dict[int, list[int]] = {}
    try:
        devices = jax.devices(kind)
    except RuntimeError:  # no such devices
        return owned
    for device in sorted(devices, key=lambda device: device.id):
        owned.setdefault(device.process_index, []).append(device.id)
    return owned


def placed(fields: MeshFields) -> plan_mesh.Mesh:
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
    found_ids = [_id(spec, owner, present) for spec, owner in zip(specs, owners, strict=True)]
    ids = [device_id for device_id in found_ids if device_id is not None]
    if len(ids) < len(specs):
        missing = [
            spec.to_string()
            for spec, device_id in zip(specs, found_ids, strict=True)
            if device_id is None
        ]
        counts = {owner: len(own) for owner, own in sorted(present.items())}
        detail = f"no such {kind} devices: {', '.join(missing[:8])}; processes have {counts}"
        raise UsageError(f"dtensor.Mesh: {detail}")
    return registered(
        plan_mesh.Mesh(fields.dims, device_ids=ids, processes=owners, kind=kind, label=fields.name)
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
    is_block = [device_id - first for device_id, _ in pairs] == [*range(len(own))]
    if not is_block or (first - fields.first_id != me * len(own) and len(own) < fields.size):
        raise UsageError(
            f"dtensor.Mesh: local_device_ids={list(fields.local_ids)} do not determine the "
            "devices of other processes; pass global_devices=, or use create_distributed_mesh"
        )
    others = range(fields.size // len(own))
    return own if len(own) == fields.size else [s.replace(task=n) for n in others for s in own]


def fields_of(mesh: plan_mesh.Mesh, *, job: str, use_xla_spmd: bool = False) -> MeshFields:
    """Return DTensor's description of a shoal mesh in this process.

    A device's id is its position. Those of this process are in mesh order; on TPUs, as in DTensor,
    in the order of chip numbers.
    """
    me = process_index()
    positions = {int(device_id): place for place, device_id in enumerate(mesh.device_ids.ravel())}
    own = [int(device_id) for device_id in mesh.local(me)]
    own = sorted(own) if mesh.kind == "tpu" else own
    names = spec_texts(mesh.kind, job, me, own)
    local_ids = tuple(positions[device_id] for device_id in own)
    dims = tuple(mesh.axes.items())
    others = () if own else tuple(_everywhere(mesh, job))
    return MeshFields(
        name=mesh.label,
        dims=dims,
        first_id=0,
        local_ids=local_ids,
        local_devices=tuple(names),
        global_devices=others,
        use_xla_spmd=use_xla_spmd,
    )


def _everywhere(mesh: plan_mesh.Mesh, job: str) -> list[str]:
    """Return the names of all devices, for a process that has none of them."""
    pairs = zip(mesh.device_ids.ravel().tolist(), mesh.processes.ravel().tolist(), strict=True)
    return [spec_texts(mesh.kind, job, owner, [device_id])[0] for device_id, owner in pairs]


def spec_texts(kind: str, job: str, process: int, ids: Sequence[int]) -> list[str]:
    """Return the names of devices of one process."""
    present = devices_of(kind).get(process, sorted(ids))
    return [
        f"/job:{job}/replica:0/task:{process}/device:{kind.upper()}:{present.index(device_id)}"
        for device_id in ids
    ]
