"""torch_xla's meshes, built on shoal's: ordered device numbers, a shape, optional names."""

from __future__ import annotations

import ast
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shoal.arrays.bridge.devices import jax_mesh
from shoal.colour import local
from shoal.compat.arguments import or_none, row, takes, text, wholes
from shoal.compat.torch_xla.errors import NoMeaningHere, SpmdTypeError, stands_for
from shoal.compat.torch_xla.specs import OpSharding, layout_of_spec, op_sharding
from shoal.errors import UsageError
from shoal.plan import mesh as plan_mesh
from shoal.plan.hardware.wiring import Slices, Topology, Torus
from shoal.plan.layout import Layout, dim_of
from shoal.plan.placement import place
from shoal.plan.topology import from_devices
from shoal.runtime import process

__all__ = [
    "HybridMesh",
    "Mesh",
    "get_1d_mesh",
    "get_global_mesh",
    "mesh_or_global",
    "numbered_devices",
    "on_numbers",
    "set_global_mesh",
]

IntArray = NDArray[np.int64]

_GLOBAL = "torch_xla: global mesh"


@local
class Mesh:
    """A logical mesh: device numbers reshaped to a shape (`shoal.Mesh`).

    Local.

    Devices are numbered from 0 in the order of JAX's ids. A mesh may use only some of them; whether
    they exist is checked when an array is placed. Equal by content, hashable.

    Args:
      device_ids: the number of the device at each position, row-major.
      mesh_shape: the sizes.
      axis_names: a name for each axis; None: axes are identified by index.

    Raises:
      UsageError: names all problems; also an AssertionError.

    >>> mesh = Mesh(np.arange(8), (4, 2), ("x", "y"))
    >>> dict(mesh.shape())
    {'x': 4, 'y': 2}
    >>> str(mesh.get_op_sharding(("x", None)))
    '{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}'
    """

    device_ids: IntArray
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None

    @stands_for("shoal.Mesh")
    @takes("torch_xla ", mesh_shape=wholes, axis_names=or_none(row))
    def __init__(
        self,
        device_ids: NDArray[Any] | Sequence[int],
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        names = None if axis_names is None else tuple(axis_names)
        flat = np.ravel(device_ids) if isinstance(device_ids, np.ndarray) else device_ids
        self._mesh = plan_mesh.Mesh(_named(tuple(mesh_shape), names), device_ids=flat)
        self.device_ids = self._mesh.device_ids.ravel()
        self.mesh_shape = self._mesh.shape
        self.axis_names = names

    def size(self) -> int:
        """Return the number of devices. Local."""
        return self._mesh.size

    def shape(self) -> OrderedDict[str | int, int]:
        """Return name → size, or index → size if the axes have no names. Local."""
        keys = range(len(self.mesh_shape)) if self.axis_names is None else self.axis_names
        return OrderedDict(zip(keys, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> IntArray:
        """Return the device numbers [mesh shape]. Local."""
        return self._mesh.device_ids

    @takes("torch_xla ", name=text)
    def get_axis_name_idx(self, name: str) -> int | None:
        """Return the index of an axis, or None if none has that name. Local."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    @stands_for("shoal.Layout")
    def get_op_sharding(self, partition_spec: Any) -> OpSharding:
        """Return the XLA sharding of a spec; the same object for equal meshes and specs. Local."""
        return op_sharding(layout_of_spec(self._mesh, partition_spec))

    @stands_for("shoal.Layout")
    def _get_op_sharding_args(
        self, partition_spec: Any
    ) -> tuple[list[Any], list[Any], list[Any], int]:
        sharding = op_sharding(layout_of_spec(self._mesh, partition_spec))
        fields = (sharding.tile_assignment, sharding.group_assignment, sharding.replication_groups)
        return (*(field.tolist() for field in fields), int(sharding.requested_type))

    def __str__(self) -> str:
        ids, names = self.device_ids.tolist(), self.axis_names
        return str({"device_ids": ids, "mesh_shape": self.mesh_shape, "axis_names": names})

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """Parse the result of `str`; None if it is not one. Local.

        >>> mesh = Mesh(np.arange(2), (2,), ("MeshX",))
        >>> Mesh.from_str(str(mesh)) == mesh, Mesh.from_str("garbage")
        (True, None)
        """
        try:
            fields = ast.literal_eval(mesh_str.removeprefix("Mesh"))
            facts = fields["device_ids"], fields["mesh_shape"], fields["axis_names"]
        except (
            AttributeError,
            KeyError,
            MemoryError,
            RecursionError,
            SyntaxError,
            TypeError,
            ValueError,
        ):
            return None
        return Mesh(*facts)

    @stands_for("shoal.Mesh")
    def get_jax_mesh(self) -> jax.sharding.Mesh:
        """Return JAX's mesh over these devices. Local."""
        return jax_mesh(self.on_devices())

    def on_devices(self) -> plan_mesh.Mesh:
        """Return the shoal mesh over the numbered devices. Local.

        Raises:
          UsageError: there are fewer devices.
        """
        present = numbered_devices()
        missing = [n for n in self.device_ids.tolist() if n >= len(present)]
        if missing:
            raise UsageError(f"{self!r}: no device {missing}; JAX has {len(present)} devices")
        chosen = [present[index] for index in self.device_ids]
        ids, owners = ([getattr(d, what) for d in chosen] for what in ("id", "process_index"))
        return plan_mesh.Mesh(
            self._mesh.axes, device_ids=ids, processes=owners, kind=chosen[0].platform
        )

    def __repr__(self) -> str:
        return f"Mesh({self})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._mesh == other._mesh and self.axis_names == other.axis_names

    def __hash__(self) -> int:
        return hash((self._mesh, self.axis_names))


@local
def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """Return a mesh of all devices along one axis.

    Local.

    Args:
      axis_name: its name; None: none.

    Raises:
      InitializeError: this process is one of several, and has not joined them.

    >>> get_1d_mesh("data").mesh_shape == (jax.device_count(),)
    True
    """
    count = len(numbered_devices())
    return Mesh(np.arange(count), (count,), None if axis_name is None else (axis_name,))


@local
def set_global_mesh(mesh: Mesh | None) -> None:
    """Set the mesh of calls without a mesh argument, in all threads, until `shoal.shutdown`.

    Local.

    Args:
      mesh: the mesh; None: unset it.
    Raises:
      UsageError: it is not a mesh of this module; also an AssertionError.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise SpmdTypeError(
            f"torch_xla set_global_mesh (shoal.use_mesh): {mesh!r} must be a "
            "shoal.compat.torch_xla.Mesh"
        )
    process.held()[_GLOBAL] = mesh


@local
def get_global_mesh() -> Mesh | None:
    """Return the mesh set by `set_global_mesh`, or None.

    Local.
    """
    mesh = process.held().get(_GLOBAL)
    return mesh if isinstance(mesh, Mesh) else None


def mesh_or_global(mesh: Mesh | None) -> Mesh:
    """Return a mesh, or the global one.

    Raises:
      UsageError: there is neither.
    """
    chosen = get_global_mesh() if mesh is None else mesh
    if chosen is None:
        raise UsageError(
            "no mesh is given and no global mesh is set: pass mesh=, or set_global_mesh"
        )
    return chosen


def numbered_devices() -> list[jax.Device]:
    """Return all devices of the job; a device's number is its index in this list.

    Raises:
      InitializeError: this process is one of several, and has not joined them.
    """
    process.last_client()
    return sorted(jax.devices(), key=lambda device: device.id)


def device_attributes() -> list[dict[str, Any]]:
    """Return the attributes of each device, by number: `name`, and on TPUs `coords`, …"""
    wanted = ("coords", "core_on_chip", "slice_index")
    return [
        {"name": f"{device.platform.upper()}:{index}"}
        | {name: getattr(device, name) for name in wanted if hasattr(device, name)}
        for index, device in enumerate(numbered_devices())
    ]


def on_numbers(layout: Layout) -> Layout:
    """Return a layout over device numbers instead of JAX's ids."""
    numbers = {device.id: index for index, device in enumerate(numbered_devices())}
    mesh = layout.mesh
    ids = [numbers[device] for device in mesh.device_ids.ravel().tolist()]
    return layout.with_mesh(plan_mesh.Mesh(mesh.axes, device_ids=ids))


def _named(shape: tuple[int, ...], names: tuple[str, ...] | None) -> list[tuple[str, int]]:
    if names is not None and len(names) != len(shape):
        raise UsageError(
            f"number of axis names ({len(names)}) must match mesh dimensions ({len(shape)})"
        )
    return list(zip(_invented(len(shape)) if names is None else names, shape, strict=True))


def _invented(count: int) -> tuple[str, ...]:
    """Return the names that the axes of a mesh without names have in JAX."""
    return tuple(f"axis{index}" for index in range(count))


def spec_of_layout(layout: Layout) -> tuple[Any, ...]:
    """Return the partition spec of a layout: names of axes, or indices where they have none."""
    names = layout.mesh.axis_names
    if names != _invented(len(names)):
        return layout.dims
    index_of = {name: index for index, name in enumerate(names)}
    return tuple(dim_of([index_of[axis] for axis in axes]) for axes in layout.axes_of_dims)


# ---- Meshes of slices over a slower network, in the order of torch_xla's `HybridMesh`.


Sizes = Sequence[int]


@local
class HybridMesh(Mesh):
    """A mesh whose axes follow a slice's wires, and partly span slices (`place`).

    Local.

    On TPUs devices are in torch_xla's order. Elsewhere processes count as slices, and devices
    are ordered by number.

    Args:
      ici_mesh_shape: the sizes within a slice.
      dcn_mesh_shape: how many slices along each axis; None: there is one slice.
      axis_names: a name for each axis; None: axes are identified by index.

    Raises:
      UsageError: the sizes do not match the slices, or `dcn_mesh_shape` is required.

    >>> import jax
    >>> HybridMesh(ici_mesh_shape=(1, jax.device_count())).mesh_shape == (1, jax.device_count())
    True
    """

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]
    device_attributes: list[dict[str, Any]]

    @stands_for("shoal.plan.placement.place")
    @takes("torch_xla ", ici_mesh_shape=wholes, dcn_mesh_shape=or_none(wholes))
    def __init__(
        self,
        ici_mesh_shape: Sizes,
        dcn_mesh_shape: Sizes | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        self.ici_mesh_shape = tuple(ici_mesh_shape)
        outer = () if dcn_mesh_shape is None else tuple(dcn_mesh_shape)
        self.dcn_mesh_shape = outer or (1,) * len(self.ici_mesh_shape)
        self.device_attributes = device_attributes()  # by number
        ids = self._create_hybrid_device_mesh(self.ici_mesh_shape, self.dcn_mesh_shape)
        super().__init__(ids.ravel(), ids.shape, axis_names)

    def _get_physical_tpu_mesh(self, devices: IntArray) -> IntArray:
        topology = _topology(devices)
        if not isinstance(topology, Torus):
            raise NoMeaningHere(
                "torch_xla _get_physical_tpu_mesh (shoal.plan.topology.from_devices): "
                f"{topology.text} is not a single TPU slice, which alone has coordinates"
            )
        ids = topology.device_ids
        return ids[..., 0] if topology.cores == 1 else ids

    def _create_device_mesh(self, mesh_shape: Sizes, devices: IntArray | None = None) -> IntArray:
        topology = _topology(devices)
        library = "torch_xla" if isinstance(topology, Torus | Slices) else "jax"
        return place(topology, _named_slices(mesh_shape), compatible_with=library).device_ids

    def _create_hybrid_device_mesh(self, ici_mesh_shape: Sizes, dcn_mesh_shape: Sizes) -> IntArray:
        if len(ici_mesh_shape) != len(dcn_mesh_shape):
            raise UsageError(
                f"ici_mesh_shape {ici_mesh_shape} and dcn_mesh_shape {dcn_mesh_shape} must have "
                "as many axes"
            )
        topology = _topology()
        _check_slices(topology, math.prod(dcn_mesh_shape))
        if math.prod(dcn_mesh_shape) == 1:
            return self._create_device_mesh(ici_mesh_shape)
        sizes = [inner * outer for inner, outer in zip(ici_mesh_shape, dcn_mesh_shape, strict=True)]
        library = "torch_xla" if isinstance(topology, Slices) else "jax"
        across = dict(_named_slices(dcn_mesh_shape))
        return place(
            topology, _named_slices(sizes), across=across, compatible_with=library
        ).device_ids


def _check_slices(topology: Topology, requested: int) -> None:
    """Check the number of slices, with torch_xla's messages."""
    count, here = _num_slices(topology), topology.text
    if isinstance(topology, Slices) and count > 1 and requested == 1:
        raise UsageError(
            f"Provide dcn_mesh_shape to create a mesh for multislice: {here} has {count}"
        )
    if count == 1 and requested > 1:
        raise UsageError(
            "Invalid dcn_mesh_shape for single slice mesh: no axis spans slices "
            f"{here}; leave dcn_mesh_shape out"
        )
    if requested not in (1, count):
        raise UsageError(
            f"Number of slices {count} must equal the product of dcn_mesh_shape {requested}"
        )


def _num_slices(topology: Topology) -> int:
    """Return the number of slices; on other platforms, of processes."""
    if isinstance(topology, Torus | Slices):
        return len(topology.slices) if isinstance(topology, Slices) else 1
    return len({device.process_index for device in numbered_devices()})


def _named_slices(sizes: Sizes) -> list[tuple[str, int]]:
    return [(f"axis{index}", size) for index, size in enumerate(sizes)]


def _topology(numbers: IntArray | None = None) -> Topology:
    """Return the topology of the devices with these numbers, or of all."""
    devices = numbered_devices()
    chosen = range(len(devices)) if numbers is None else np.ravel(numbers).tolist()
    return from_devices(_facts(index, devices[index]) for index in chosen)


def _facts(index: int, device: Any) -> dict[str, Any]:
    names = {"coords": "coords", "core_on_chip": "core", "slice_index": "slice",
             "device_kind": "kind"}  # fmt: skip
    known = {name: getattr(device, there, None) for there, name in names.items()}
    facts = {name: value for name, value in known.items() if value is not None}
    facts |= {"process": device.process_index, "platform": device.platform}
    return {"id": index, **facts}
