"""DTensor's functions that make meshes, and its barrier."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from shoal.arguments import shown
from shoal.arrays.make_mesh import described_platform, mesh_of_rings, planned_mesh, virtual_cpus
from shoal.collectives.sync_devices import sync_devices
from shoal.colour import collective, local
from shoal.compat.arguments import number, or_none, row, takes
from shoal.compat.dtensor import config
from shoal.compat.dtensor.layout import check_dtensor_mesh, mesh_owners
from shoal.compat.dtensor.mesh import Mesh, devices_of
from shoal.compat.dtensor.refused import NotPossible, StartError, check_eager, prefix_errors
from shoal.compat.dtensor.text import DeviceSpec, spec_of
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.placement import Rings
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.process import is_initialized
from shoal.runtime.uses_client import client_here

__all__ = [
    "barrier",
    "create_distributed_mesh",
    "create_mesh",
    "create_tpu_mesh",
    "get_device_ids",
    "get_device_locations",
]

_LOG = logging.getLogger("shoal")
_AXES = ("core", "x", "y", "z")

Dims = Mapping[str, int] | Iterable[tuple[str, int]]
Devices = Sequence[DeviceSpec | str] | None


def _pairs(operation: str, dims: Dims) -> list[tuple[str, int]]:
    given = dims.items() if isinstance(dims, Mapping) else dims
    pairs = list(given) if isinstance(given, Iterable) else None
    if pairs is None or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    ):
        raise UsageTypeError(
            f"dtensor.{operation}: mesh_dims={shown(dims)} must be a dict, or pairs (name, size)"
        )
    return pairs


def _specs(
    operation: str, devices: Devices, device_type: str | None, usual: str
) -> list[DeviceSpec]:
    """Return the requested devices of this process; by default all of a type."""
    if devices is None:
        return config.local_devices(usual if device_type is None else device_type)
    specs = [spec_of(device) for device in devices]
    kinds = {spec.device_type for spec in specs} | ({device_type.upper()} if device_type else set())
    if not specs or len(kinds) > 1:
        why = f"Conflicting devices {sorted(map(str, kinds))}" if specs else "devices=[] is empty"
        raise UsageError(f"dtensor.{operation}: {why}; pass devices of one type")
    return specs


def _ids(operation: str, specs: Sequence[DeviceSpec], owner: int) -> list[int]:
    """Return JAX's ids of the devices of a process."""
    kind = (specs[0].device_type or "").lower() if specs else "cpu"
    own = devices_of(kind).get(owner, [])
    missing = [spec.to_string() for spec in specs if (spec.device_index or 0) >= len(own)]
    if missing or not specs:
        raise UsageError(
            f"dtensor.{operation}: process {owner} has {len(own)} {kind} devices, not "
            f"{', '.join(missing[:8]) or 'any to make a mesh of: its devices must be non-empty'}"
            f"{_more(kind, len(own), specs)}"
        )
    return [own[spec.device_index or 0] for spec in specs]


def _more(kind: str, count: int, specs: Sequence[DeviceSpec]) -> str:
    """Return how a process with its one CPU device gets those that are named."""
    wanted = 1 + max((spec.device_index or 0 for spec in specs), default=0)
    if (kind, count) == ("cpu", 1) and wanted > 1:
        return f"\n{virtual_cpus(wanted)}"
    return ""


def _check_type(specs: Sequence[DeviceSpec], use_xla_spmd: bool) -> None:
    if use_xla_spmd and specs and specs[0].device_type != "TPU":
        raise UsageError(
            f"dtensor: use_xla_spmd=True: XLA SPMD is not supported for {specs[0].device_type} "
            "mesh; leave it out: JAX always compiles with XLA's SPMD"
        )


@local
@takes("dtensor.", devices=or_none(row))
def create_mesh(
    mesh_dims: Dims | None = None, mesh_name: str = "", devices: Devices = None,
    device_type: str | None = None, use_xla_spmd: bool = False,
) -> Mesh:  # fmt: skip
    """Return a mesh over devices of this process: `shoal.make_mesh(devices=[…])`.

    Local.

    Args:
      mesh_dims: name → size, or pairs; one size may be -1. None: one dim "x".
      mesh_name: a label.
      devices: their names or DeviceSpecs, in mesh order; None: all of the type.
      device_type: "CPU", "GPU" or "TPU"; None: that of `devices`, else "CPU".
      use_xla_spmd: for TPUs; stored, without effect.

    >>> create_mesh({"x": 1, "y": -1}, devices=["CPU:3", "CPU:1"]).shape()
    [1, 2]
    """
    dims = {"x": -1} if mesh_dims is None else mesh_dims
    specs = _specs("create_mesh", devices, device_type, "CPU")
    _check_type(specs, use_xla_spmd)
    ids = _ids("create_mesh", specs, config.client_id())
    return _made(
        operation="create_mesh", dims=dims, name=mesh_name, ids=ids, use_xla_spmd=use_xla_spmd
    )


@collective("the mesh's processes")
@collective_scope("create_distributed_mesh", of=client_here)
def create_distributed_mesh(
    mesh_dims: Dims, mesh_name: str = "", local_devices: Devices = None,
    device_type: str | None = None, use_xla_spmd: bool = False,
) -> Mesh:  # fmt: skip
    """Return a mesh over devices of all processes, process after process: `shoal.make_mesh`.

    Collective over the mesh's processes.

    Args:
      mesh_dims: name → size, or pairs; one size may be -1.
      mesh_name: a label.
      local_devices: the names of each process's devices to include, in mesh order, equal on all
        processes; None: all of the type. Not for TPUs, which are ordered by their wiring.
      device_type: "CPU", "GPU" or "TPU"; None: the preferred type.
      use_xla_spmd: for TPUs; stored, without effect.
    """
    operation = "create_distributed_mesh"
    usual = _type_of_job(operation, device_type)
    specs: list[DeviceSpec] = []
    is_tpu = usual == "TPU" == described_platform().upper()
    if not is_tpu:
        specs = _specs(operation, local_devices, device_type, usual)
        is_tpu = bool(specs) and specs[0].device_type == "TPU"
    if is_tpu:
        if local_devices is not None:
            raise UsageError(f"dtensor.{operation}: TPU meshes take no local_devices")
        pairs = _pairs(operation, mesh_dims)
        names, sizes = [name for name, _ in pairs], [size for _, size in pairs]
        return create_tpu_mesh(names, sizes, mesh_name, use_xla_spmd=use_xla_spmd)
    _check_type(specs, use_xla_spmd)
    owners = range(config.num_clients())
    ids = [device_id for owner in owners for device_id in _of(owner, specs, local_devices is None)]
    return _made(operation, mesh_dims, mesh_name, ids, use_xla_spmd)


def _made(operation: str, dims: Dims, name: str, ids: Sequence[int], use_xla_spmd: bool) -> Mesh:
    with prefix_errors(operation):
        mesh = planned_mesh(_pairs(operation, dims), devices=ids, label=name)
    return Mesh.from_shoal(mesh, job=config.job_name(), use_xla_spmd=use_xla_spmd)


def _type_of_job(operation: str, device_type: str | None) -> str:
    """Return the type of devices that a mesh of all processes has by default."""
    if not is_initialized():
        raise StartError(
            f"dtensor.{operation}: Accelerators are uninitialized, please run "
            "dtensor.initialize_accelerator_system() first"
        )
    return config.type_of(
        operation, config.preferred_device_type() if device_type is None else device_type
    )


def _of(owner: int, specs: Sequence[DeviceSpec], is_all: bool) -> list[int]:
    """Return the ids of a process's devices: all, or those with the given indices."""
    if is_all and specs:
        return devices_of(str(specs[0].device_type).lower()).get(owner, [])
    return _ids("create_distributed_mesh", specs, owner)


@collective("all processes")
@collective_scope("create_tpu_mesh", of=client_here)
def create_tpu_mesh(
    mesh_dim_names: list[str], mesh_shape: list[int], mesh_name: str, ring_dims: int | None = None,
    ring_axes: list[str] | None = None, ring_bounds: list[int] | None = None,
    can_split_host_across_rings: bool = True, build_ring_across_rings: bool = False,
    rotate_ring_across_rings: bool = False, use_xla_spmd: bool = False,
) -> Mesh:  # fmt: skip
    """Return a mesh over all TPU cores in the order of DTensor's rings.

    Collective over all processes.

    `shoal.planning.place(compatible_with="dtensor", rings=…)`; `shoal.make_mesh` finds an order
    that is never worse.

    Args:
      mesh_dim_names, mesh_shape: names and sizes of the dims, major first.
      mesh_name: a label; need not be unique.
      ring_dims: how many dims a ring covers: the first ones, or if negative the last ones; None:
        all but the first.
      ring_axes: the directions in which the slice is walked, fastest first; None: core, x, y, z.
      ring_bounds: the box of a ring along x, y, z, core; None: the whole slice.
      can_split_host_across_rings: may the chips of one host belong to several rings?
      build_ring_across_rings: are the rings themselves ordered as a ring?
      rotate_ring_across_rings: does that ring run along y before x?
      use_xla_spmd: stored, without effect.
    """
    axes = _AXES if ring_axes is None else ring_axes
    rings = Rings(
        ring_dims, axes, ring_bounds,
        can_split_host_across_rings, build_ring_across_rings, rotate_ring_across_rings,
    )  # fmt: skip
    with prefix_errors("create_tpu_mesh"):
        mesh = mesh_of_rings(_named(mesh_dim_names, mesh_shape), rings, label=mesh_name)
    return Mesh.from_shoal(mesh, job=config.job_name(), use_xla_spmd=use_xla_spmd)


def _named(names: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    if len(names) != len(sizes):
        raise UsageError(f"{len(names)} names for {len(sizes)} sizes")
    return list(zip(names, sizes, strict=True))


def _check_tpus(operation: str, mesh: Mesh, client_id: int | None) -> None:
    if check_dtensor_mesh(mesh).device_type() != "TPU":
        raise UsageError(
            f"dtensor.{operation}: The mesh must be a TPU mesh, not {mesh.device_type()}"
        )
    if client_id not in (None, config.client_id()):
        raise NotPossible(
            f"dtensor.{operation}: a DTensor mesh knows only this process's devices; "
            "mesh.shoal_mesh.local(process) has those of any process"
        )


@local
def get_device_ids(mesh: Mesh, client_id: int | None = None) -> list[int]:
    """Return the ids of this process's cores in a TPU mesh.

    Local.
    """
    _check_tpus("get_device_ids", mesh, client_id)
    return mesh.local_device_ids()


@local
def get_device_locations(mesh: Mesh, client_id: int | None = None) -> list[dict[str, int]]:
    """Return dim → index for each of this process's cores in a TPU mesh.

    Local.
    """
    _check_tpus("get_device_locations", mesh, client_id)
    return mesh.local_device_locations()


@collective("the mesh's processes")
@collective_scope("barrier", of=client_here, among=mesh_owners)
@takes("dtensor.", timeout_in_ms=or_none(number))
def barrier(
    mesh: Mesh, barrier_name: str | None = None, timeout_in_ms: float | None = None
) -> None:
    """Wait until all devices of a mesh have finished, on all its processes: `shoal.sync_devices`.

    Collective over the mesh's processes.

    Args:
      mesh: a mesh of existing devices.
      barrier_name: a label for messages, equal on all.
      timeout_in_ms: deadline of the whole call, in milliseconds; None: SHOAL_TIMEOUT_S (600 s).
    """
    check_eager("barrier", "constrain or return the values that must be finished before")
    if not check_dtensor_mesh(mesh).size:
        raise UsageError("dtensor.barrier: a mesh of at most one device has nothing to wait for")
    name = "(barrier)" if barrier_name is None else barrier_name
    limit_s = None if timeout_in_ms is None else timeout_in_ms / 1000
    _LOG.info("entering barrier before op: %s", name)
    with prefix_errors("barrier"):
        sync_devices(mesh.shoal_mesh, name=name, timeout_s=limit_s)
    _LOG.info("finished running barrier across all clients after op: %s", name)
