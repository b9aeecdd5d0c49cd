"""Meshes of slices over a slower network, in the order of torch_xla's `HybridMesh`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.colour import local
from shoal.compat.torch_xla import mesh as meshes
from shoal.compat.torch_xla.errors import NoMeaningHere, stands_for
from shoal.errors import UsageError
from shoal.plan.hardware.wiring import Slices, Topology, Torus
from shoal.plan.placement import place
from shoal.plan.topology import from_devices

__all__ = ["HybridMesh"]

IntArray = NDArray[np.int64]
Sizes = Sequence[int]


@local
class HybridMesh(meshes.Mesh):
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

    @stands_for("shoal.plan.placement.place")
    def __init__(
        self,
        ici_mesh_shape: Sizes,
        dcn_mesh_shape: Sizes | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        self.ici_mesh_shape = tuple(ici_mesh_shape)
        self.dcn_mesh_shape = tuple(dcn_mesh_shape or (1,) * len(self.ici_mesh_shape))
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
        return place(topology, _named(mesh_shape), compatible_with=library).device_ids

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
        across = dict(_named(dcn_mesh_shape))
        return place(topology, _named(sizes), across=across, compatible_with=library).device_ids


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
    return len({device.process_index for device in meshes.numbered_devices()})


def _named(sizes: Sizes) -> list[tuple[str, int]]:
    return [(f"axis{number}", size) for number, size in enumerate(sizes)]


def _topology(numbers: IntArray | None = None) -> Topology:
    """Return the topology of the devices with these numbers, or of all."""
    devices = meshes.numbered_devices()
    chosen = range(len(devices)) if numbers is None else np.ravel(numbers).tolist()
    return from_devices(_facts(number, devices[number]) for number in chosen)


def _facts(number: int, device: Any) -> dict[str, Any]:
    names = {"coords": "coords", "core_on_chip": "core", "slice_index": "slice",
             "device_kind": "kind"}  # fmt: skip
    known = {name: getattr(device, there, None) for there, name in names.items()}
    facts = {name: value for name, value in known.items() if value is not None}
    facts |= {"process": device.process_index, "platform": device.platform}
    return {"id": number, **facts}
