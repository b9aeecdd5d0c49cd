"""Programs as XLA compiles them for TPUs, kept as files.

python tests/plan/tpu_programs.py      (needs the extra `tpu`; writes the files anew)
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FILES = Path(__file__).parent / "cases" / "tpu_programs"


def chunks(x):
    """Twelve all-to-alls, in a loop within a loop."""

    def one(number, found):
        rows = jax.lax.dynamic_slice_in_dim(x, (number - 2) * 256, 256, 0)
        moved = jax.lax.all_to_all(rows, ("a", "b"), 0, 1, tiled=True)
        return jax.lax.dynamic_update_slice_in_dim(found, moved, (number - 2) * 64, 0)

    def four(_, found):
        return jax.lax.fori_loop(2, 6, one, found) + 1

    return jax.lax.fori_loop(0, 3, four, jax.lax.empty((256, 4 * x.shape[1]), x.dtype))


def scattered_sum(x):
    """A reduce-scatter so large that XLA makes a fusion of it."""
    return jax.lax.psum_scatter(x, ("a", "b"), scatter_dimension=0, tiled=True)


def gather_beside_products(x, w, part):
    """An all-gather that runs while products are computed."""
    whole = jax.lax.all_gather(part, ("b", "c"), axis=0, tiled=True)
    return jax.nn.relu(jax.nn.relu(x @ w) @ w) @ whole


def gathered_and_cut(mesh, x):
    """A layout that XLA knows no better way to than by the whole array."""
    target = NamedSharding(mesh, P(("c", "b", "a"), None))
    return jax.lax.with_sharding_constraint(jax.numpy.sin(x), target) + 1


def cube(name):
    """Return a mesh over the devices of a slice."""
    devices = topologies.get_topology_desc(name, "tpu").devices
    ordered = sorted(devices, key=lambda device: device.id)
    return Mesh(np.array(ordered).reshape(2, 2, 2), ("a", "b", "c"))


def compiled(mesh, fn, *args):
    """Return the text of a program."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in args
    ]
    return jax.jit(fn).lower(*shapes).compile().as_text()


def on_shards(mesh, fn, out, *args):
    """Return the text of a program of what each device does."""
    specs = tuple(spec for *_, spec in args)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return compiled(mesh, mapped, *args)


def programs():
    """Return name → text of each."""
    v5p, v5e, rows = cube("v5p:2x2x2"), cube("v5e:2x4"), P(("a", "b"))
    large, square = ((8192, 8192), "float32", rows), (4096, 4096)
    products = [
        ((8192, 4096), "bfloat16", P("a")),
        (square, "bfloat16", P()),
        (square, "bfloat16", P(("b", "c"))),
    ]

    def gathered(x):
        return gathered_and_cut(v5p, x)

    return {
        "chunks": on_shards(v5p, chunks, P(None, ("a", "b")), ((4096, 512), "float32", rows)),
        "scattered_sum": on_shards(v5p, scattered_sum, rows, large),
        "gather_beside_products": on_shards(v5e, gather_beside_products, P("a"), *products),
        "gathered_and_cut": compiled(v5p, gathered, ((64, 64), "float32", P("c", "b"))),
    }


def kept(text):
    """Return a text without what differs between machines, and what no reader needs."""
    text = re.sub(r', backend_config=\{"flag_configs".*', "", text)
    return re.sub(r'^(\d+ ")/.*/', r"\1", text, flags=re.M)


if __name__ == "__main__":
    import libtpu

    jax.config.update("jax_platforms", "cpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
    FILES.mkdir(exist_ok=True)
    for name, text in programs().items():
        (FILES / f"{name}.txt").write_text(kept(text), encoding="utf-8")
