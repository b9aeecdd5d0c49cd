"""Meshes, specs and XLA's words, as in torch_xla; its worked cases."""

from __future__ import annotations

import math
import pickle
import threading
import types

import jax
import numpy as np
import pytest

import shoal
import shoal.compat.torch_xla as xs
from compat.torch_xla_cases import CASES, ELSEWHERE, mesh_of, of_kind, spec_of
from shoal.compat.torch_xla import mesh as meshes
from shoal.compat.torch_xla.errors import NoMeaningHere, SpmdError, SpmdTypeError
from shoal.errors import UsageError
from shoal.plan.shards import region

KINDS = {
    "op_sharding", "mesh_ctor", "mesh_from_str", "sharding_spec", "hybrid_mesh", "nd_torus",
    "input_sharding", "placements_property", "fsdpv2_partition_spec", "fsdpv2_params",
    "global_tensor_from_cpu_shards", "xla_shard_unpadded", "checkpoint_manager",
}  # fmt: skip


def test_every_kind_of_case_is_answered():
    assert {case["kind"] for case in CASES} == KINDS | ELSEWHERE


def lie_about_the_world(case):
    """Is its error only about how many devices there are?"""
    return "global number of devices" in case["expected"].get("error_message", "")


@of_kind("op_sharding")
def test_op_sharding(case):
    mesh, spec, expected = mesh_of(case), spec_of(case), case["expected"]
    if "error_type" in expected:
        rank = len(case["tensor_shape"])
        kind = {"AssertionError": AssertionError, "ValueError": ValueError, "TypeError": TypeError}
        with pytest.raises(kind[expected["error_type"]]) as caught:
            xs.mark_sharding(np.zeros(case["tensor_shape"], np.float32), mesh, spec)
        assert isinstance(caught.value, UsageError)
        assert len(spec) == rank or "Partition spec length" in str(caught.value)
        return
    words = mesh.get_op_sharding(spec)
    assert words is mesh.get_op_sharding(spec)
    assert (words.text, str(words)) == (expected["op_sharding"],) * 2
    assert words.type == expected["sharding_type"]
    if "requested_type" in expected and () not in spec:  # there an empty tuple is not quite None
        fields = ("tile_assignment", "group_assignment", "replication_groups", "requested_type")
        assert mesh._get_op_sharding_args(spec) == tuple(expected[name] for name in fields)
        assert words.requested_type == expected["requested_type"]
    for device, _, slices in expected.get("shards_device_replica_indices", []):
        held = region(words.layout, case["tensor_shape"], device)
        whole = [[0, size] for size in case["tensor_shape"]]
        assert [[s.start, s.stop] for s in held] == (whole if slices == "..." else slices)


@of_kind("mesh_ctor")
def test_mesh_ctor(case):
    expected = case["expected"]
    if "error_type" in expected and not lie_about_the_world(case):
        with pytest.raises(AssertionError, match="device ids are repeated: 0"):
            mesh_of(case)
        return
    mesh = mesh_of(case)
    if "error_type" in expected:  # fewer devices than there are is no error any more
        assert mesh.get_jax_mesh().devices.shape == tuple(case["mesh_shape"])
        return
    assert str(mesh) == expected["str"]
    assert [list(pair) for pair in mesh.shape().items()] == expected["shape"]
    assert mesh.size() == expected["size"]
    assert mesh.get_logical_mesh().tolist() == expected["logical"]


@of_kind("mesh_from_str")
def test_mesh_from_str(case):
    mesh = xs.Mesh.from_str(case["input"])  # of one device, which is no error any more
    assert (mesh.size(), mesh.axis_names) == (1, None)


@pytest.mark.parametrize(
    "text", ["", "garbage", "{}", "Mesh", "[1]", "(" * 400, "{'device_ids': [0]}"]
)
def test_mesh_from_invalid_text_is_none(text):
    assert xs.Mesh.from_str(text) is None


@pytest.mark.parametrize("name", ["MeshX", "x", "aMesh", "Mesh"])
def test_a_mesh_reads_as_it_was_written(name):
    mesh = xs.Mesh([3, 1, 2, 0], (2, 2), (name, "other"))
    assert xs.Mesh.from_str(str(mesh)) == mesh
    assert xs.Mesh.from_str(f"Mesh{mesh}") == mesh


@of_kind("sharding_spec")
def test_sharding_spec(case):
    expected = case["expected"]
    if "error_type" in expected:
        with pytest.raises(ValueError, match="axis 'x' is used 2 times"):
            xs.ShardingSpec(mesh_of(case), spec_of(case))
        return
    spec = xs.ShardingSpec(mesh_of(case), spec_of(case), minibatch=expected["minibatch"])
    assert spec._tile_assignment == expected["tile_assignment"]
    assert spec._group_assignment == expected["group_assignment"]
    assert spec._replication_groups == expected["replication_groups"]
    assert spec._sharding_type == expected["sharding_type"]


def test_a_spec_of_lower_rank_than_the_mesh_replicates():
    spec = xs.ShardingSpec(xs.Mesh(np.arange(8), (4, 2), ("x", "y")), ("x",))
    assert spec._sharding_type is xs.ShardingType.PARTIAL
    assert (
        spec.xla_spec(np.zeros(8)).text == "{devices=[4,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    )
    assert spec.xla_spec(np.zeros((8, 2))) is None


def chips(dims, num_slices):
    """Devices of TPU slices, numbered as in the cases: x fastest, slice after slice."""
    x, y, z = dims
    count = x * y * z
    return [
        types.SimpleNamespace(
            id=number, process_index=number // count, platform="tpu", device_kind="TPU v4",
            coords=(number % x, number // x % y, number % count // (x * y)), core_on_chip=0,
            slice_index=number // count,
        )
        for number in range(count * num_slices)
    ]  # fmt: skip


@of_kind("hybrid_mesh")
def test_hybrid_mesh(case, monkeypatch):
    monkeypatch.setattr(
        meshes, "numbered_devices", lambda: chips(case["slice_dims_xyz"], case["num_slices"])
    )
    mesh = xs.HybridMesh(
        ici_mesh_shape=case["ici_mesh_shape"], dcn_mesh_shape=case["dcn_mesh_shape"]
    )
    assert mesh.get_logical_mesh().tolist() == case["expected"]["logical_mesh"]
    assert list(mesh.mesh_shape) == case["expected"]["mesh_shape"]


@of_kind("nd_torus")
def test_nd_torus(case, monkeypatch):
    shape = case["physical_mesh_shape"][:3]  # the fourth is 1
    devices = [
        types.SimpleNamespace(
            id=number, process_index=0, platform="tpu", device_kind="TPU v4", core_on_chip=0,
            coords=tuple(map(int, np.unravel_index(number, shape))),
        )
        for number in range(math.prod(shape))
    ]  # fmt: skip
    monkeypatch.setattr(meshes, "numbered_devices", lambda: devices)
    mesh = xs.HybridMesh(case["mesh_shape"])
    numbers = np.arange(len(devices))
    assert mesh._get_physical_tpu_mesh(numbers).tolist() == numbers.reshape(shape).tolist()
    assert mesh.get_logical_mesh().tolist() == case["expected"]["logical_mesh"]
    again = mesh._create_device_mesh(case["mesh_shape"], numbers)
    assert again.tolist() == case["expected"]["logical_mesh"]


@pytest.mark.parametrize(
    ("slices", "ici", "dcn", "words"),
    [
        (2, (4,), None, "Provide dcn_mesh_shape to create a mesh for multislice"),
        (1, (4,), (2,), "Invalid dcn_mesh_shape for single slice mesh"),
        (4, (4,), (2,), "Number of slices 4 must equal the product of dcn_mesh_shape 2"),
        (2, (2, 2), (2,), "must have as many axes"),
        (1, (8,), None, "has 8 devices, and .* has 4"),
    ],
)
def test_what_hybrid_meshes_refuse(monkeypatch, slices, ici, dcn, words):
    monkeypatch.setattr(meshes, "numbered_devices", lambda: chips((2, 2, 1), slices))
    with pytest.raises(ValueError, match=words) as caught:
        xs.HybridMesh(ici_mesh_shape=ici, dcn_mesh_shape=dcn)
    assert "torch_xla HybridMesh (shoal." in str(caught.value)


def test_a_hybrid_mesh_off_tpus():
    mesh = xs.HybridMesh(ici_mesh_shape=(4, 2), axis_names=("x", "y"))
    assert [one["name"] for one in mesh.device_attributes] == [f"CPU:{n}" for n in range(8)]
    assert mesh == xs.Mesh(range(8), (4, 2), ("x", "y"))
    with pytest.raises(ValueError, match="Invalid dcn_mesh_shape for single slice mesh"):
        xs.HybridMesh((4, 2), (2, 1))
    with pytest.raises(NotImplementedError, match="not a single TPU slice") as caught:
        mesh._get_physical_tpu_mesh(np.arange(8))
    assert isinstance(caught.value, NoMeaningHere)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (([0, 1], (2, 2)), SpmdError, "2 device ids for 2x2 = 4 positions"),
        (
            ([0, 1], (2,), ("x", "y")),
            SpmdError,
            r"axis names \(2\) must match mesh dimensions \(1\)",
        ),
        (([0, 1], (2, 1), ("x", "x")), SpmdError, "axis 'x' is repeated"),
        (([0, -1], (2,)), SpmdError, "device ids are negative: -1"),
        (([0.5, 1.0], (2,)), SpmdTypeError, "sequence of integers"),
        (([0, 1], (2,), ("",)), SpmdError, "axis name is empty"),
        (([0], ("1",)), SpmdTypeError, "must be a list or tuple of integers"),
    ],
)
def test_meshes_that_are_refused(arguments, kind, words):
    with pytest.raises(kind, match=words) as caught:
        xs.Mesh(*arguments)
    assert isinstance(caught.value, AssertionError)
    assert str(caught.value).startswith("torch_xla Mesh (shoal.Mesh): ")


def test_a_mesh_is_a_value():
    mesh = xs.Mesh(np.arange(8).reshape(4, 2), (2, 4), ("x", "y"))
    assert mesh == xs.Mesh(list(range(8)), [2, 4], ["x", "y"])
    assert hash(mesh) == hash(pickle.loads(pickle.dumps(mesh)))
    assert mesh != xs.Mesh(range(8), (2, 4))
    assert mesh.get_axis_name_idx("y") == 1
    assert mesh.get_axis_name_idx("z") is None
    assert xs.Mesh(range(8), (2, 4)).get_axis_name_idx("axis0") is None
    assert mesh.get_op_sharding((0, "y")) is mesh.get_op_sharding(("x", np.int64(1)))


def test_a_mesh_needs_its_devices_when_arrays_are_placed():
    mesh = xs.Mesh([6, 7, 8, 9], (4,), ("x",))
    assert str(mesh.get_op_sharding(("x",))) == "{devices=[4]6,7,8,9}"
    for call in (
        mesh.get_jax_mesh,
        lambda: xs.mark_sharding(np.zeros(4, np.float32), mesh, ("x",)),
    ):
        with pytest.raises(SpmdError, match=r"no device \[8, 9\]; JAX has 8 devices"):
            call()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (("x", 2), "index 2 is out of bounds"),
        (("x", -1), "index -1 is out of bounds"),
        ((True, None), "True must be"),
        ((("x", None), None), "None must be an axis name or index"),
        (("xx", None), "no axis 'xx'.*did you mean 'x'"),
        ("x", "must be a tuple"),
        (None, "must be a tuple"),
    ],
)
def test_specs_that_are_refused(spec, words):
    mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
    for call in (mesh.get_op_sharding, mesh._get_op_sharding_args):
        with pytest.raises(UsageError, match=words) as caught:
            call(spec)
        assert isinstance(caught.value, AssertionError)


def test_the_global_mesh_is_that_of_all_threads_until_shutdown():
    mesh = xs.get_1d_mesh("x")
    assert (mesh.mesh_shape, mesh.axis_names) == ((jax.device_count(),), ("x",))
    assert xs.get_1d_mesh().axis_names is None
    assert xs.get_global_mesh() is None
    with pytest.raises(AssertionError, match="set_global_mesh"):
        xs.set_global_mesh("mesh")
    with pytest.raises(ValueError, match="no global mesh is set"):
        xs.enable_manual_sharding(np.zeros(8, np.float32), ("x",))
    xs.set_global_mesh(mesh)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(xs.get_global_mesh()))
    thread.start()
    thread.join()
    assert seen == [mesh]
    shoal.shutdown()
    assert xs.get_global_mesh() is None
