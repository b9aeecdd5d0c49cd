"""The schedules that costs assume, against programs that XLA compiles for TPUs; needs libtpu."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from shoal.plan.cost import cost
from shoal.plan.placement import place
from shoal.plan.topology import parse

SIZES = {"v5p:4x4x4": {"data": 16, "model": 4}, "v5e:4x4": {"data": 4, "model": 4}}
PROGRAM = """
import itertools, json, sys
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shoal.plan.placement import place
from shoal.plan.topology import from_devices

found = []
for (name, axes), split in itertools.product(json.loads(sys.argv[1]).items(), (True, False)):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    placed = place(from_devices(devices), axes, allow_split_physical_axes=split)
    by_id = {device.id: device for device in devices}
    grid = np.vectorize(by_id.get)(placed.device_ids)
    mesh, spec = Mesh(grid, placed.axis_names), PartitionSpec(*axes)
    array = jax.ShapeDtypeStruct((4096, 4096), "float32", sharding=NamedSharding(mesh, spec))
    for axis in axes:
        left = PartitionSpec(*(other if other != axis else None for other in axes))
        total = jax.shard_map(
            lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=spec, out_specs=left
        )
        text = jax.jit(total).lower(array).compile().as_text()
        coords = [list(device.coords) for device in grid.flat]
        case = {"topology": name, "split": split, "axis": axis}
        found.append({**case, "text": text, "coords": coords})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def programs():
    """The all-reduces over each axis, in XLA's words."""
    libtpu = pytest.importorskip("libtpu")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
           "TPU_LIBRARY_PATH": libtpu.get_library_path()}  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, json.dumps(SIZES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def dims_of_links(program):
    """Return the dims of the links that bind the same all-reduce by our count."""
    topology, axes = parse(program["topology"]), SIZES[program["topology"]]
    mesh = place(topology, axes, allow_split_physical_axes=program["split"])
    estimate = cost(topology, mesh, "all_reduce", program["axis"], 1 << 26)
    return {"xyz".index(dim) for dim in estimate.link.removeprefix("ICI ")}


def replica_groups(text):
    """Read `{{0,1},{2,3}}`, or what newer XLA writes: `mesh['data'=2,'model'=2] {'model'}`."""
    if listed := re.search(r"replica_groups=(\{\{.*?\}\})", text):
        return json.loads(listed[1].translate(str.maketrans("{}", "[]")))
    sizes, axis = re.search(r"replica_groups=mesh\[(.*?)\] \{'(\w+)'\}", text).groups()
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    numbers = np.arange(np.prod([*axes.values()])).reshape(*axes.values())
    return np.moveaxis(numbers, [*axes].index(axis), -1).reshape(-1, axes[axis]).tolist()


def test_replica_groups_lie_on_the_links_that_are_counted(programs):
    for program in programs:
        dims = dims_of_links(program)
        groups = replica_groups(program["text"])
        assert len(groups[0]) == SIZES[program["topology"]][program["axis"]]
        for group in groups:
            columns = list(zip(*(program["coords"][n] for n in group), strict=True))
            assert {d for d, values in enumerate(columns) if len(set(values)) > 1} == dims


def test_xla_goes_through_whole_dims_in_several_orders_at_once(programs):
    """XLA names its strategy: so many colours, and for each the order of the dims."""
    several = 0
    for program in (row for row in programs if not row["split"]):
        dims = dims_of_links(program)
        words = re.search(r'"debug":"(.*?)"', program["text"])[1]
        colours = int(re.search(r"colors:(\d+)", words)[1])
        if len(dims) == 1:  # one ring, both ways round
            assert "1DRingStrategy" in words
            assert colours == 2
            continue
        listed = re.search(r"dim_used:((?:\{[\d ]+\},?)+)", words)[1]
        orders = {tuple(order.split()) for order in re.findall(r"\{([\d ]+)\}", listed)}
        assert len(orders) == colours == len(dims)
        assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(min(orders)))}
        assert len(min(orders)) == len(dims)
        several += 1
    assert several
