"""The host and slice of each device of a move."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.plan.hardware.hosts import Hosts
from shoal.plan.hardware.wiring import Slices, Topology, check_topology
from shoal.plan.mesh import Mesh

IntArray = NDArray[np.int64]


class Places(NamedTuple):
    """All devices of a move, by ascending id [devices]."""

    devices: IntArray
    hosts: IntArray  # the process that owns each
    slices: IntArray  # the slice of each, or the switch of its host; 0 if unknown

    def at(self, device_ids: IntArray) -> IntArray:
        """Return the places of these ids in `devices`, in the shape of `device_ids`."""
        return np.searchsorted(self.devices, device_ids)


def places(operation: str, source: Mesh, target: Mesh, topology: Topology | None) -> Places:
    """Return where the devices of both meshes are.

    Args:
      operation: the function that the caller called.
      topology: says the host and the slice of each device. None: a host for each process of the
        meshes, and one slice.

    Raises:
      UsageError: the topology lacks devices of the meshes; or without a topology, the meshes give
        different processes for a device.
    """
    devices: IntArray = np.union1d(source.device_ids, target.device_ids)
    if topology is None:
        return Places(devices, _owners(operation, source, target), np.zeros(len(devices), np.int64))
    check_topology(operation, topology)
    known = topology.device_ids.ravel()
    strange = np.setdiff1d(devices, known)
    if strange.size:
        raise UsageError(
            f"{operation}: the meshes have devices that {topology.text} lacks: {_listed(strange)}; "
            f"its ids are {known.min()} to {known.max()}"
        )
    order = np.argsort(known)
    cells = order[np.searchsorted(known[order], devices)]
    return Places(devices, topology.processes.ravel()[cells], _slices(topology)[cells])


def _owners(operation: str, source: Mesh, target: Mesh) -> IntArray:
    """Return the process of each device, on which both meshes must agree."""
    ids = np.concatenate([source.device_ids.ravel(), target.device_ids.ravel()])
    owners = np.concatenate([source.processes.ravel(), target.processes.ravel()])
    order = np.argsort(ids, kind="stable")
    ids, owners = ids[order], owners[order]
    twice = ids[1:] == ids[:-1]
    strange = ids[1:][twice & (owners[1:] != owners[:-1])]
    if strange.size:
        raise UsageError(
            f"{operation}: source and target give different processes for the same devices: "
            f"{_listed(strange)}; a device has one process"
        )
    is_first = np.concatenate([[True], ~twice])
    return np.asarray(owners[is_first])


def _slices(topology: Topology) -> IntArray:
    """Return the slice of each cell; of hosts behind switches, the switch."""
    if isinstance(topology, Slices):
        return np.repeat(np.arange(len(topology.slices)), [s.num_devices for s in topology.slices])
    group = topology.num_devices
    if isinstance(topology, Hosts) and topology.switch:
        group = topology.switch * topology.grid[-1]
    return np.arange(topology.num_devices) // max(group, 1)


def _listed(ids: IntArray) -> str:
    return ", ".join(map(str, ids[:8].tolist())) + (", …" if ids.size > 8 else "")
