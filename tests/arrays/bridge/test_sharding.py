"""The bridge to JAX, both ways."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from arrays.device_grids import grids, placements
from shoal.arrays.bridge import devices as bridge
from shoal.arrays.bridge.devices import jax_mesh, twins, twins_needed
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.named_sharding import named_sharding
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region, replica_index
from shoal.testing.strategies import layouts


@given(grids())
def test_a_mesh_comes_back_from_jax(mesh):
    there = jax_mesh(mesh)
    assert there.axis_names == mesh.axis_names
    assert [device.id for device in there.devices.flat] == mesh.device_ids.ravel().tolist()
    assert Mesh.of(there) == mesh
    assert jax_mesh(Mesh.of(there)) is there


@given(grids(axis_types="explicit").flatmap(lambda mesh: layouts(mesh, max_rank=3, partial=True)))
def test_a_layout_with_pending_sums_comes_back(layout):
    if any(reduction != "sum" for reduction in layout.partial.values()):
        with pytest.raises(UsageError, match="pending reductions other than sums"):
            sharding_of(layout)
        return
    there = sharding_of(layout)
    assert set(there.spec.unreduced) == set(layout.partial)
    assert layout_of(there) == layout


@given(placements())
def test_a_layout_comes_back_and_means_the_same_regions(placement):
    layout, shape = placement
    there = sharding_of(layout)
    assert layout_of(there) == layout
    assert layout_of(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=there)) == layout
    for device, index in there.devices_indices_map(shape).items():
        box = tuple(
            slice(*piece.indices(size)[:2]) for piece, size in zip(index, shape, strict=True)
        )
        assert region(layout, shape, device.id) == box


def test_replicas_are_numbered_as_in_jax():
    layout = Layout(Mesh({"x": 2, "y": 4}, device_ids=[7, 2, 5, 0, 1, 6, 3, 4]), "y")
    array = jax.device_put(np.zeros(8, np.float32), sharding_of(layout))
    for shard in array.addressable_shards:
        assert replica_index(layout, (8,), shard.device.id) == shard.replica_id


def test_the_layout_of_an_array_has_its_rank():
    mesh = Mesh({"x": 8})
    array = jax.device_put(
        np.zeros((8, 2, 3), np.float32), NamedSharding(jax_mesh(mesh), PartitionSpec("x"))
    )
    assert layout_of(array) == Layout(mesh, "x", None, None)


def test_the_layout_of_a_result_of_jit():
    layout = Layout(Mesh({"x": 4, "y": 2}), "x", "y")
    array = jax.device_put(np.zeros((8, 2), np.float32), sharding_of(layout))
    assert layout_of(jax.jit(lambda x: x + 1)(array)) == layout


def test_layout_of_an_array_on_one_device_has_a_mesh_without_axes():
    layout = layout_of(jax.device_put(np.zeros((2, 3), np.float32), jax.devices()[5]))
    assert layout == Layout(Mesh({}, device_ids=[5]), None, None)
    assert layout_of(jax.device_put(np.zeros((2, 3)), sharding_of(layout))) == layout


def test_a_named_sharding_is_a_sharding():
    given = NamedSharding(jax_mesh(Mesh({"x": 8})), PartitionSpec("x"))
    assert named_sharding(given) is given


def test_equal_layouts_give_one_object():
    assert sharding_of(Layout(Mesh({"x": 8}), "x")) is sharding_of(Layout(Mesh({"x": 8}), ("x",)))


def test_all_missing_devices_are_named():
    with pytest.raises(UsageError, match=r"id 9,11\.\.12; JAX has 8: 0\.\.7"):
        jax_mesh(Mesh({"x": 4}, device_ids=[3, 12, 9, 11]))


def test_devices_of_other_processes_are_named():
    with pytest.raises(UsageError, match=r"1 \(process 0\), 3 \(process 0\); make_mesh"):
        jax_mesh(Mesh({"x": 4}, processes=[0, 1, 0, 2]))


@pytest.mark.parametrize("name", ["größe", "a\nb", "a\\b", 'a"b', "a'b"])
def test_names_that_would_abort_the_compiler(name):
    with pytest.raises(UsageError, match="must be printable ASCII without quotes"):
        sharding_of(Layout(Mesh({name: 8}), name))


def test_unavailable_platform_raises_usage_error():
    with pytest.raises(UsageError, match="JAX has no tpu devices here; its default is cpu"):
        sharding_of(Layout(Mesh({"x": 8}, kind="tpu"), "x"))


def test_pending_sums_need_explicit_axes():
    with pytest.raises(UsageError, match="axis_types='explicit'"):
        sharding_of(Layout(Mesh({"x": 8}), partial={"x": "sum"}))


def test_twins_pair_each_process_by_ascending_id():
    accelerators = {0: 0, 3: 0, 4: 1, 5: 1}
    cpus = {0: 0, 1: 0, 2048: 1, 2049: 1}
    assert twins(accelerators, accelerators, cpus) == {0: 0, 3: 1, 4: 2048, 5: 2049}
    assert twins({5: 1}, accelerators, cpus) == {5: 2049}  # the same twin in any mesh
    assert twins({5: 1}, accelerators, {0: 0, 2048: 1}) == {}  # too few CPU devices
    assert twins({5: 0}, accelerators, cpus) == {}  # not the owner


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_as_many_cpu_devices_as_needed_make_twins_and_one_fewer_does_not(owners, data):
    accelerators = dict(enumerate(owners))
    chosen = data.draw(st.sets(st.sampled_from(sorted(accelerators)), min_size=1))
    devices = {one: accelerators[one] for one in chosen}
    count = twins_needed(devices, accelerators)

    def paired(each):
        cpus = {2048 * p + n: p for p in range(4) for n in range(each)}
        return set(twins(devices, accelerators, cpus)) == chosen

    assert paired(count)
    assert not paired(count - 1)


def test_a_host_mesh_without_its_cpu_devices_says_what_to_write(monkeypatch):
    gpus = [SimpleNamespace(id=n, process_index=0, platform="gpu") for n in range(100, 104)]
    cpus = jax.devices()[:2]
    monkeypatch.setattr(
        bridge,
        "jax",
        SimpleNamespace(
            devices=lambda kind=None: cpus if kind == "cpu" else gpus,
            default_backend=lambda: "gpu",
            sharding=jax.sharding,
            Device=jax.Device,
        ),
    )
    mesh = Mesh({"x": 4}, device_ids=[device.id for device in gpus], kind="gpu", label="twins")
    there = jax_mesh(mesh.submesh(x=slice(2)).host_mesh())
    assert [device.id for device in there.devices.flat] == [0, 1]
    assert jax_mesh(mesh.host_mesh(per="process")).devices.tolist() == [cpus[0]]
    with pytest.raises(
        UsageError,
        match=r"too few CPU devices .*: process 0 has 2; write initialize\(host_devices=4\)",
    ):
        jax_mesh(mesh.host_mesh())


def test_manual_and_abstract_meshes_are_refused():
    devices = np.array(jax.devices()).reshape(4, 2)
    with pytest.raises(UsageError, match="axes 'y' are Manual"):
        Mesh.of(jax.sharding.Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto, AxisType.Manual)))
    with pytest.raises(UsageError, match="no devices"):
        Mesh.of(AbstractMesh((8,), ("x",)))


@pytest.mark.parametrize("value", [np.ones(3), 3, None, "x"])
def test_host_values_have_no_layout(value):
    with pytest.raises(UsageTypeError, match="has no layout: put it on a mesh"):
        layout_of(value)


def test_layout_of_refuses_values_without_a_layout():
    with pytest.raises(UsageError, match="names no sharding"):
        layout_of(jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(UsageError, match="inside jit"):
        jax.jit(lambda x: (layout_of(x), x)[1])(jnp.ones(3))
    with pytest.raises(UsageError, match=r"layout_of: float32\[99,99\] is a value inside jit"):
        jax.grad(lambda x: (layout_of(x), x.sum())[1])(jnp.ones((99, 99)))
    with pytest.raises(UsageError, match="leaves dims to the compiler"):
        layout_of(
            NamedSharding(jax_mesh(Mesh({"x": 8})), PartitionSpec(PartitionSpec.UNCONSTRAINED))
        )
    assert isinstance(jnp.ones(3).sharding, SingleDeviceSharding)
