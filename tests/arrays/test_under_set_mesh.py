"""Every public function that takes arrays or meshes, inside and outside of `jax.set_mesh`."""

from __future__ import annotations

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shoal
from arrays import ways
from shoal.arrays.bridge.devices import jax_mesh

VALUE = np.arange(32, dtype=np.float32).reshape(8, 4)
KINDS = {"auto": "auto", "explicit": "explicit", "mixed": {"data": "explicit", "model": "auto"}}
# They take a layout or a mesh as a target, in a tree of arrays, or by position.
OTHERWISE = {"describe", "layout_of", "restore", "resume", "plan_restore", "Layout", "Mesh.of"}
# Of processes, of their life, and of objects that hold no array: they have no mesh to differ by.
WITHOUT_ARRAYS = {
    "barrier", "checkpoint_info", "initialize", "is_initialized", "job_status", "live_processes",
    "log", "preempted", "process_count", "process_index", "shutdown", "step",
}  # fmt: skip


def placed(mesh, *spec):
    return shoal.put(VALUE, shoal.Layout(mesh, *spec))


def rows(mesh):
    return placed(mesh, "data", None)


def column(mesh):
    return shoal.Layout(mesh, None, "model")


def whole_mesh(mesh):
    return shoal.make_mesh({"data": 4, "model": 2})


def in_use(mesh):
    with shoal.use_mesh(mesh):
        return shoal.put(VALUE, P("data"))


def a_feed(mesh):
    return [*shoal.feed([VALUE, VALUE + 1], shoal.Layout(mesh, "data", None))]


def per_device(mesh):
    split = shoal.Layout(mesh, "data", None)
    return shoal.manual(lambda x: x + jax.lax.psum(x.sum(), "data"), split, split)(rows(mesh))


def entered(mesh):
    shards = shoal.compat.enter_manual(rows(mesh), shoal.Layout(mesh, "data", None))
    return shoal.compat.leave_manual(shards, shoal.Layout(mesh, "data", None), VALUE.shape)


def packed(mesh):
    split = shoal.Layout(mesh, "data", None)
    shards = [shard for shard in np.split(VALUE, 4) for _ in range(2)]
    return shoal.compat.unpack(shoal.compat.pack(shards, split))


def planned(mesh):
    plan = shoal.plan_relayout(rows(mesh), column(mesh))
    return [plan.peak_bytes, plan.program()(rows(mesh))]


def program(mesh):
    return str(shoal.explain_program(jax.jit(lambda x: x.sum(0)), rows(mesh)))


CASES = {
    "allgather": lambda mesh, _: shoal.allgather(rows(mesh)),
    "assert_same": lambda mesh, _: shoal.assert_same(rows(mesh)),
    "assert_same_program": lambda mesh, _: shoal.assert_same_program(jax.jit(jnp.sin), rows(mesh)),
    "broadcast": lambda mesh, _: shoal.broadcast({"x": VALUE}),
    "check_finite": lambda mesh, _: shoal.check_finite(rows(mesh)),
    "check_replicas": lambda mesh, _: shoal.check_replicas(rows(mesh)),
    "constrain": lambda mesh, _: shoal.constrain(rows(mesh), column(mesh)),
    "create": lambda mesh, _: shoal.create(lambda: jnp.ones((8, 4)), layouts=column(mesh)),
    "describe": lambda mesh, _: str(shoal.describe(rows(mesh))),
    "sync_devices": lambda mesh, _: shoal.sync_devices(mesh),
    "enter_manual": lambda mesh, _: entered(mesh),
    "explain_program": lambda mesh, _: program(mesh),
    "feed": lambda mesh, _: a_feed(mesh),
    "fence": lambda mesh, _: jax.jit(shoal.compat.fence)(rows(mesh)),
    "from_host_local": lambda mesh, _: shoal.from_host_local(VALUE, column(mesh)),
    "jax_mesh": lambda mesh, _: str(shoal.jax_mesh(shoal.layout_of(rows(mesh)).mesh).axis_names),
    "layout_of": lambda mesh, _: str(shoal.layout_of(rows(mesh))),
    "match_layouts": lambda mesh, _: str(
        shoal.match_layouts({"**": P("data")}, {"w": VALUE}, mesh=mesh)
    ),
    "leave_manual": lambda mesh, _: entered(mesh),
    "linear": lambda mesh, _: shoal.compat.linear(rows(mesh), placed(mesh, None, None)),
    "local_rows": lambda mesh, _: str(shoal.local_rows(shoal.Layout(mesh, "data", None), 8)),
    "make_mesh": lambda mesh, _: str(whole_mesh(mesh)),
    "manual": lambda mesh, _: per_device(mesh),
    "pack": lambda mesh, _: packed(mesh),
    "plan_relayout": lambda mesh, _: planned(mesh),
    "plan_restore": lambda mesh, path: str(shoal.plan_restore(path, {"w": column(mesh)})),
    "put": lambda mesh, _: rows(mesh),
    "relayout": lambda mesh, _: shoal.relayout(rows(mesh), column(mesh)),
    "restore": lambda mesh, path: shoal.restore(path, {"w": column(mesh)}),
    "save": lambda mesh, path: shoal.save(f"{path}-{id(mesh)}", {"w": rows(mesh)}),
    "named_sharding": lambda mesh, _: str(shoal.named_sharding(column(mesh))),
    "shard_alike": lambda mesh, _: jax.jit(shoal.shard_alike)(rows(mesh), rows(mesh)),
    "to_host_local": lambda mesh, _: shoal.to_host_local(
        rows(mesh), shoal.Layout(mesh, "data", None)
    ),
    "unpack": lambda mesh, _: packed(mesh),
    "use_mesh": lambda mesh, _: in_use(mesh),
}


def test_every_public_function_is_tried():
    functions = {name for name in shoal.__all__ if not isinstance(getattr(shoal, name), type)}
    functions |= {*shoal.compat.__all__}
    assert functions - WITHOUT_ARRAYS == set(CASES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_equal_with_and_without_set_mesh(name, kind, tmp_path):
    mesh = shoal.Mesh({"data": 4, "model": 2}, axis_types=KINDS[kind])
    shoal.save(tmp_path / "saved", {"w": VALUE})
    results = []
    for context in (contextlib.nullcontext(), jax.set_mesh(jax_mesh(mesh))):
        with context:
            results.append(CASES[name](mesh, str(tmp_path / "saved")))
            if name == "save":
                (path,) = set(tmp_path.iterdir()) - {tmp_path / "saved"}
                results[-1] = shoal.restore(path)
                path.rename(tmp_path.parent / f"{tmp_path.name}-{len(results)}")
    without, within = (jax.tree.leaves(result) for result in results)
    assert len(without) == len(within)
    for one, other in zip(without, within, strict=True):
        if isinstance(one, jax.Array):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(one, other)


def test_every_function_that_takes_a_mesh_or_a_layout_is_tried_in_every_way():
    takers = {
        name
        for module in (shoal, shoal.compat, shoal.compat.multihost_utils)
        for name in module.__all__
        for parameter in _parameters(getattr(module, name))
        if "mesh" in parameter or "layout" in parameter
    }
    assert takers == {name.split()[0] for name in {*ways.LAYOUTS, *ways.MESHES}} - OTHERWISE


def _parameters(function):
    is_function = callable(function) and not isinstance(function, type)
    return inspect.signature(function).parameters if is_function else ()


def test_meshes_and_layouts_are_taken_in_every_way(tmp_path):
    assert ways.play(tmp_path) == []
