"""Hops along the axes of a mesh, against a count by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.mesh import Mesh
from shoal.plan.placement import hops_of, place
from shoal.plan.topology import parse

SHAPES = ["v5e:2x4", "v5p:4x4x4", "v5e:4x4 x 2 slices", "torus:3x5 wrap=y", "v3:2x2",
          "v5e:2x2 + v5e:2x4", "torus:7", "tpu7x:2x2x1 x 3 slices"]  # fmt: skip


def counted(topology, mesh):
    """Walk round every ring, link by link."""
    tori = list(topology.parts()) if hasattr(topology, "slices") else [topology]
    where = {
        int(one): (number, at)
        for number, torus in enumerate(tori)
        for at, one in np.ndenumerate(torus.device_ids)
    }
    hops = {}
    for axis, name in enumerate(mesh.axis_names):
        longest, total, most = 0, 0, 0
        for ring in np.moveaxis(mesh.device_ids, axis, -1).reshape(-1, mesh.shape[axis]):
            cells = [where[int(one)] for one in ring]
            most = max(most, len({number for number, _ in cells}))
            links_of_ring = 0
            for (part, here), (other, there) in zip(cells, cells[1:] + cells[:1], strict=True):
                if part != other:
                    continue
                links = 0
                wires = zip(tori[part].shape, tori[part].wrap, strict=True)
                for a, b, (size, wrap) in zip(here[:-1], there[:-1], wires, strict=True):
                    links += min(abs(a - b), size - abs(a - b)) if wrap else abs(a - b)
                longest = max(longest, links)
                links_of_ring += links
            total = max(total, links_of_ring)
        hops[name] = (longest, total, most)
    return hops


@pytest.mark.parametrize("text", SHAPES)
@given(st.data())
def test_hops_equal_a_direct_count(text, data):
    topology = parse(text)
    ids = data.draw(st.permutations(topology.device_ids.ravel().tolist()))
    count = topology.num_devices
    rows = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    mesh = Mesh({"a": rows, "b": count // rows}, device_ids=ids)
    assert hops_of(topology, mesh) == counted(topology, mesh)


@pytest.mark.parametrize("text", SHAPES)
def test_a_placed_mesh_and_part_of_it(text):
    topology = parse(text)
    for axes in ({"a": topology.num_devices}, {"a": 1, "b": topology.num_devices}):
        try:
            mesh = place(topology, axes)
        except ValueError:
            continue  # slices that differ
        assert hops_of(topology, mesh) == counted(topology, mesh)
    part = Mesh(
        {"a": 2}, device_ids=list(itertools.islice(topology.device_ids.ravel().tolist(), 2))
    )
    assert hops_of(topology, part) == counted(topology, part)


def test_hosts_have_no_links():
    hosts = parse("gpu:2 hosts x 4")
    assert hops_of(hosts, place(hosts, {"a": 8})) == {}
