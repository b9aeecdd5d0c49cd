"""Meshes in which the devices of each process are a box."""

from __future__ import annotations

import numpy as np
import pytest

from plan.jax_cases import shapes_of
from shoal.errors import UsageError
from shoal.plan.placement import place
from shoal.plan.topology import Torus, from_devices, parse


def named(sizes):
    return [(f"a{number}", size) for number, size in enumerate(sizes)]


def in_boxes(mesh):
    """Whether each process owns all devices between its first and last along each axis."""
    for process in np.unique(mesh.processes):
        own = np.argwhere(mesh.processes == process)
        if np.prod(own.max(axis=0) - own.min(axis=0) + 1) != len(own):
            return False
    return True


@pytest.mark.parametrize(
    "text",
    ["v5e:4x4", "v5e:2x4", "v5p:4x4x4", "v4:2x2x4", "torus:6x4 host=3x2", "torus:2x2 cores=2",
     "v5e:4x4 x 2 slices", "gpu:3 hosts x 4", "cpu:4 hosts x 2 switch=2",
     "flat:6", "torus:4x4x2 host=2x2x1 wrap=xz"],
)  # fmt: skip
def test_every_host_is_a_box_of_every_mesh(text):
    topology = parse(text)
    for sizes in shapes_of(topology.num_devices):
        mesh = place(topology, named(sizes), contiguous_submeshes=True)
        assert mesh.shape == tuple(sizes)
        assert sorted(mesh.device_ids.ravel().tolist()) == sorted(topology.device_ids.ravel())
        assert in_boxes(mesh), sizes


def test_contiguous_submeshes_must_be_requested():
    """Without it the ring is the better one, and splits hosts."""
    slice_ = parse("v5e:4x4")
    assert not in_boxes(place(slice_, {"x": 16}))
    assert in_boxes(place(slice_, {"x": 16}, contiguous_submeshes=True))


def test_live_devices_at_an_offset():
    torus = Torus((4, 4), "v5e", origin=(4, 8))
    assert in_boxes(place(torus, {"a": 2, "b": 8}, contiguous_submeshes=True))


def test_processes_that_fill_no_boxes_of_one_shape():
    processes = [0, 0, 0, 1]
    devices = [
        {"id": n, "process": p, "coords": (n, 0, 0), "core": 0, "slice": None, "kind": "TPU v5p"}
        for n, p in enumerate(processes)
    ]
    with pytest.raises(UsageError, match="several shapes"):
        place(from_devices(devices), {"x": 4}, contiguous_submeshes=True)
    hosts = parse("gpu:2 hosts x 2").numbered(processes=[[0, 0], [0, 1]])
    with pytest.raises(UsageError, match="differ"):
        place(hosts, {"x": 4}, contiguous_submeshes=True)


def test_slices_that_differ():
    pair = parse("v5e:2x2 + v5e:4x4")
    mesh = place(pair, {"a": 5, "b": 4}, contiguous_submeshes=True)
    assert in_boxes(mesh)
