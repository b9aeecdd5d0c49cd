"""Planning at 8 to 1,048,576 devices, beside JAX where it can do the same work.

JAX plans without devices up to the HLO text (`AbstractMesh`); for the regions of devices it needs
devices, so that those rows have it at 8 devices only. JAX remembers every mesh and sharding it has
seen: rows that say "first time" give both sides axis names that are new in every round.

    make bench    or    python benchmarks/planning.py
"""

from __future__ import annotations

import itertools
import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rows import compare

from shoal.plan.hlo import hlo_text
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.patterns import Selection
from shoal.plan.shards import owners, region

COUNTS = (8, 4096, 65536, 1048576)


def grid_of(devices: int) -> dict[str, int]:
    """Two axes whose product is `devices`, near a square."""
    model = 1 << (int(math.log2(devices)) // 2)
    return {"data": devices // model, "model": model}


def plan(devices: int) -> None:
    axes, case = grid_of(devices), {"devices": devices}
    shape = (4 * axes["data"], 4 * axes["model"])
    mesh = Mesh(axes)
    layout = Layout(mesh, "model", "data")
    compare("mesh", case, {"shoal": lambda: Mesh(axes), "jax": lambda: jax_mesh(axes)})
    ids = np.random.RandomState(0).permutation(devices)
    compare("mesh of reordered ids", case, {"shoal": lambda: Mesh(axes, device_ids=ids)})
    compare("layout", case, {"shoal": lambda: Layout(mesh, "model", "data")})
    compare("HLO text, version 1", case, {"shoal": lambda: hlo_text(layout, 1)})
    whole_plans(case, axes, shape)
    regions(case, layout, shape)
    spread = Mesh(axes, processes=np.arange(devices) // 8)
    split, kept = Layout(spread, "model", "data"), Layout(spread, "model", None)
    compare("owners of all, 8 devices a process", case, {"shoal": lambda: owners(split, shape)})
    compare("the same with replicas", case, {"shoal": lambda: owners(kept, shape)})


def jax_mesh(axes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def shoal_text(axes: dict[str, int]) -> str:
    data, model = axes
    return hlo_text(Layout(Mesh(axes), model, data), version=2)


def jax_text(axes: dict[str, int]) -> str:
    data, model = axes
    placed = NamedSharding(jax_mesh(axes), PartitionSpec(model, data))
    return str(placed._to_xla_hlo_sharding(2))


def whole_plans(case: dict[str, int], axes: dict[str, int], shape: tuple[int, ...]) -> None:
    """From nothing to the HLO text, with new names in every round and with the same again."""
    numbers = itertools.count()

    def fresh() -> dict[str, int]:
        number = next(numbers)
        return {f"{name}{number}": size for name, size in axes.items()}

    what = "mesh, layout and HLO text version 2"
    first = {"shoal": lambda: shoal_text(fresh()), "jax": lambda: jax_text(fresh())}
    compare(f"{what}, first time", case, first)
    compare(
        f"{what}, again", case, {"shoal": lambda: shoal_text(axes), "jax": lambda: jax_text(axes)}
    )
    last = case["devices"] - 1
    compare(f"{what} and one region", case, {"shoal": lambda: everything(axes, shape, last)})


def everything(axes: dict[str, int], shape: tuple[int, ...], device_id: int) -> tuple[object, ...]:
    layout = Layout(Mesh(axes), "model", "data")
    return hlo_text(layout, 2), region(layout, shape, device_id)


def regions(case: dict[str, int], layout: Layout, shape: tuple[int, ...]) -> None:
    """The region of one device, and of all."""
    last, devices = layout.mesh.size - 1, case["devices"]
    one = {"shoal": lambda: region(layout, shape, last)}
    every = {"shoal": lambda: owners(layout, shape)}
    if devices == len(jax.devices()):
        grid = np.array(jax.devices()).reshape(layout.mesh.shape)
        mesh = jax.sharding.Mesh(grid, layout.mesh.axis_names)
        spec = PartitionSpec("model", "data")
        device = jax.devices()[last]
        one["jax"] = lambda: NamedSharding(mesh, spec).devices_indices_map(shape)[device]
        every["jax"] = lambda: NamedSharding(mesh, spec).devices_indices_map(shape)
    compare("region of one device", case, one)
    compare("owners of all", case, every)


def names_of_leaves(count: int) -> None:
    """As many names as leaves, as `only=` of a restore gives them, and a pattern of many stars."""
    leaves = [f"model/block[{number}]/w*" for number in range(count)]
    case = {"leaves": count, "names": count}
    compare("names of leaves", case, {"shoal": lambda: Selection(leaves, leaves).idle()})
    case = {"leaves": count, "stars": 9}
    compare(
        "leaves that a pattern takes",
        case,
        {"shoal": lambda: Selection(["**/" + "*e" * 9], leaves)},
    )


if __name__ == "__main__":
    names_of_leaves(10_000)
    for count in COUNTS:
        plan(count)
