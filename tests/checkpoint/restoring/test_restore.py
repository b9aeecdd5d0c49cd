"""What a target may be, what comes back, and what is said if it does not fit."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from checkpoint import hand_written
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.placing.put import put
from shoal.checkpoint.blocks import reader
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.restoring import filling
from shoal.checkpoint.restoring.read_strategy import ReadStrategy, plan_all
from shoal.checkpoint.restoring.restore import plan_restore, restore
from shoal.checkpoint.restoring.target import LeafRequest
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    RestoreMismatchError,
    UsageError,
    UsageTypeError,
)
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
SPLIT = Layout(MESH, "x", None)
WHOLE = Layout(MESH, None, None)
Point = collections.namedtuple("Point", "w b")
TREE = {
    "params": {
        "w": np.arange(32, dtype=np.float32).reshape(8, 4),
        "b": np.arange(4),
    },
    "opt": [{"mu": np.ones((8, 4), np.float32)}, {"mu": np.zeros((8, 4), np.float32)}],
    "point": Point(np.float16(0.5), 10**30),
    "text": "a\ud800b",
    "none": None,
    "raw": b"\0" * 70_000,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("restore") / "saved"
    hand_written.write(where, TREE, hand_written.grid(3, 3))
    return where


def same(one, other):
    if isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.asarray(one).tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


def test_no_target_gives_all_as_it_was_on_the_host(path):
    back = restore(path)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
        assert same(one, other)
        assert type(one) is type(other)


def test_layouts_and_plain_leaves_side_by_side(path):
    like = {**TREE, "params": {"w": SPLIT, "b": np.zeros(4, int)}, "opt": WHOLE}
    back = restore(path, like)
    assert back["params"]["w"].sharding == sharding_of(SPLIT)
    assert back["opt"][1]["mu"].sharding == sharding_of(WHOLE)  # one layout for a subtree
    assert same(back["params"]["w"], TREE["params"]["w"])
    assert back["point"] == TREE["point"]
    assert back["text"] == TREE["text"]


def test_arrays_and_shapes_say_how_they_shall_lie(path):
    device = jax.devices()[3]
    like = {
        "params": {
            "w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding_of(SPLIT)),
            "b": jax.ShapeDtypeStruct((4,), np.int64),
        },
        "opt": [{"mu": jax.device_put(jnp.zeros((8, 4)), device)}, {"mu": np.zeros((8, 4), "f4")}],
    }
    back = restore(path, like, only=["params/**", "opt/**"])
    assert back["params"]["w"].sharding == sharding_of(SPLIT)
    assert type(back["params"]["b"]) is np.ndarray
    assert back["opt"][0]["mu"].devices() == {device}
    assert type(back["opt"][1]["mu"]) is np.ndarray
    assert same(back["opt"][0]["mu"], TREE["opt"][0]["mu"])


def test_a_function_of_names_and_a_spec_on_the_mesh_of_the_block(path):
    asked = {}

    def choose(name, leaf):
        asked[name] = (leaf.shape, leaf.dtype)
        return SPLIT if leaf.shape == (8, 4) else None

    back = restore(path, choose)
    assert asked["params/b"] == ((4,), np.int64)
    assert "text" not in asked
    assert back["params"]["w"].sharding == sharding_of(SPLIT)
    assert type(back["params"]["b"]) is np.ndarray
    with use_mesh(MESH):
        back = restore(path, {"params": {"w": PartitionSpec("y")}}, only="params/w")
    assert back["params"]["w"].sharding.spec == PartitionSpec("y")
    where = SingleDeviceSharding(jax.devices()[2])
    assert restore(path, where, only="opt/0/*")["opt"]["0"]["mu"].devices() == {jax.devices()[2]}


def test_only_leaves_others_as_the_target_has_them(path):
    keep = object()
    back = restore(path, {"params": {"w": SPLIT, "b": keep}}, only="params/w")
    assert back["params"]["b"] is keep
    assert same(back["params"]["w"], TREE["params"]["w"])
    assert restore(path, only="opt/*/mu").keys() == {"opt"}
    with pytest.raises(RestoreMismatchError, match=r"'param/w' takes no leaf; did you mean 'par"):
        restore(path, only="param/w")


def test_renaming_by_prefixes_or_a_function(path):
    layout = {"model": {"weight": SPLIT}, "point": None}
    for rename in (
        {"": "opt", "model/weight": "params/w"},
        lambda name: name.replace("model/weight", "params/w"),
    ):
        back = restore(path, layout, rename=rename, only="model/*")
        assert same(back["model"]["weight"], TREE["params"]["w"])
        assert back["point"] is None
    back = restore(path, {"a": SPLIT}, rename={"a": "opt"}, only="a/**")
    assert same(back["a"][0]["mu"], TREE["opt"][0]["mu"])
    back = restore(path, {"w": SPLIT, "b": 0}, rename={"": "params"}, only=["w"])
    assert same(back["w"], TREE["params"]["w"])


def test_restore_reports_every_mismatch_at_once(path):
    like = {
        **TREE,
        "params": {"ww": SPLIT, "b": Layout(MESH, "x", None)},
        "opt": [
            {"mu": jax.ShapeDtypeStruct((8, 5), np.float32)},
            {"mu": np.zeros((8, 4), np.float16)},
        ],
        "none": np.zeros(3),
    }
    with pytest.raises(RestoreMismatchError) as info:
        restore(path, like)
    error = info.value
    assert (error.missing, error.unexpected) == (("params/ww",), ("params/w",))
    assert (error.wrong_shape, error.wrong_dtype) == (("opt/0/mu",), ("none", "opt/1/mu"))
    told = str(error)
    assert "params/ww: is not in the checkpoint; did you mean 'params/w'?" in told
    assert "opt/0/mu: has shape (8, 4) as saved, not (8, 5)" in told
    assert "opt/1/mu: is float32 as saved, not float16; dtype='any' casts it" in told
    assert "none: was saved as none, which is not an array" in told
    assert "params/b: int64 would become int32" in told
    assert len(error.problems) == 6


def test_dims_that_do_not_divide(path):
    uneven = Layout(Mesh({"x": 3}, kind="cpu"), "x", None)
    for layout in (uneven, sharding_of(uneven)):
        with pytest.raises(RestoreMismatchError, match="params/w: "):
            restore(path, {"params": {"w": layout}}, only="params/w")


@pytest.mark.parametrize(
    ("policy", "dtype", "fits"),
    [
        ("exact", np.float32, True),
        ("exact", np.float64, False),
        ("safe", np.float64, True),
        ("safe", np.float16, False),
        ("safe", ml_dtypes.bfloat16, False),
        ("any", ml_dtypes.bfloat16, True),
        ("any", np.int32, True),
    ],
)
def test_dtypes_are_cast_as_asked(path, policy, dtype, fits):
    like = {"params": {"w": np.zeros((8, 4), dtype)}}
    if fits:
        back = restore(path, like, only="params/w", dtype=policy)["params"]["w"]
        assert same(back, TREE["params"]["w"].astype(dtype))
    else:
        with pytest.raises(RestoreMismatchError, match="params/w: is float32 as saved"):
            restore(path, like, only="params/w", dtype=policy)


def test_a_cast_before_it_is_placed(path):
    like = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=sharding_of(SPLIT))
    back = restore(
        path, {"params": {"w": like}}, only="params/w", dtype="any", max_host_bytes=1 << 18
    )
    assert back["params"]["w"].sharding == sharding_of(SPLIT)
    assert same(back["params"]["w"], TREE["params"]["w"].astype(jnp.bfloat16))


def test_a_cast_takes_no_more_memory_than_it_may(tmp_path, monkeypatch):
    """What is read as stored lies beside the result a part at a time, large leaves or many."""
    rng = np.random.default_rng(0)
    sizes = {"rows": (300, 1000), "row": (1, 1, 300_000), "one": (), "none": (0, 3), "odd": (7, 31)}
    tree = {name: rng.standard_normal(size) for name, size in sizes.items()}
    save(tmp_path / "wide", tree)
    read, held = reader.read_boxes, []

    def counting(checkpoint, wants, **options):
        beside = [want.out.nbytes for want in wants if want.out.dtype == np.float64]
        held.append(sum(beside) + options["most_bytes"])
        return read(checkpoint, wants, **options)

    monkeypatch.setattr(filling, "read_boxes", counting)
    like = {name: np.zeros(value.shape, np.float32) for name, value in tree.items()}
    back = restore(tmp_path / "wide", like, dtype="any", max_host_bytes=1 << 20)
    assert len(held) > 8
    assert max(held) <= 1 << 20
    for name, value in tree.items():
        assert same(back[name], value.astype(np.float32)), name


def test_64_bit_leaves_are_not_narrowed_silently(path):
    with pytest.raises(RestoreMismatchError, match="JAX_ENABLE_X64"):
        restore(path, {"params": {"b": Layout(MESH, "x")}}, only="params/b")
    with jax.enable_x64(True):
        back = restore(path, {"params": {"b": Layout(MESH, "x")}}, only="params/b")
    assert back["params"]["b"].dtype == np.int64


def test_keys_come_back_as_keys(tmp_path):
    keys = jax.random.split(jax.random.key(7), 8)
    mesh = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    tree = {"one": jax.random.key(3, impl="rbg"), "row": jax.device_put(keys, mesh)}
    save(tmp_path / "keys", tree)
    for back in (restore(tmp_path / "keys"), restore(tmp_path / "keys", tree)):
        for name, key in tree.items():
            assert back[name].dtype == key.dtype
            assert (jax.random.key_data(back[name]) == jax.random.key_data(key)).all()
    assert back["row"].sharding.is_equivalent_to(mesh, 1)
    with pytest.raises(
        RestoreMismatchError, match=r"one: is key<rbg> as saved, not key<threefry2x32>"
    ):
        restore(tmp_path / "keys", tree | {"one": jax.random.key(0)})


NARROW = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")


@pytest.mark.parametrize("name", [*NARROW, "S3", "<M8[s]"])
def test_packed_and_odd_dtypes_in_any_layout(name, tmp_path):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    bits = np.random.default_rng(1).integers(0, 256, (8, 6, 4 * dtype.itemsize), np.uint8)
    if dtype.itemsize == 1:
        bits = bits[..., :4] % (4 if name.endswith("2") else 16)
    array = np.ascontiguousarray(bits).view(dtype)
    hand_written.write(tmp_path / "odd", {"a": array}, hand_written.grid(3, 2), processes=2)
    assert same(restore(tmp_path / "odd")["a"], array)
    if name in NARROW:
        back = restore(tmp_path / "odd", Layout(MESH, "x", "y", None))["a"]
        for shard in back.addressable_shards:
            assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes()
    else:
        with pytest.raises(RestoreMismatchError, match="a: has dtype"):
            restore(tmp_path / "odd", Layout(MESH, None, None, None))


def test_values_of_processes_need_as_many_or_a_merge(tmp_path):
    hand_written.write(tmp_path / "own", {"rows": PerProcess([{"at": 3}, {"at": 5}])}, processes=2)
    with pytest.raises(UsageError, match="of each of 2 processes, and there are 1 now"):
        restore(tmp_path / "own")
    back = restore(tmp_path / "own", merge=lambda values: max(one["at"] for one in values))
    assert back == {"rows": PerProcess(5)}
    hand_written.write(tmp_path / "one", {"rows": PerProcess([{"at": 3}])})
    assert restore(tmp_path / "one") == {"rows": PerProcess({"at": 3})}


def test_restore_refuses_paths_without_a_checkpoint_and_invalid_options(tmp_path, path):
    with pytest.raises(NotCommittedError, match="nothing is saved there"):
        restore(tmp_path / "none")
    (tmp_path / "history" / "step_000000000001").mkdir(parents=True)
    with pytest.raises(NotCommittedError, match="a history of 1 step; pass the path of one"):
        restore(tmp_path / "history")
    for wrong, kind in (
        ({"mode": "fast"}, UsageError),
        ({"dtype": "exactly"}, UsageError),
        ({"only": 3}, UsageTypeError),
        ({"rename": {"a": "b"}}, UsageError),
        ({"max_host_bytes": 3}, UsageError),
        ({"merge": 3}, UsageTypeError),
        ({"target": {"a": {"b": jax.jit}}, "rename": 3}, UsageTypeError),
    ):
        with pytest.raises(kind):
            restore(path, **wrong)
    with pytest.raises(UsageTypeError, match="must be a string or a pathlib"):
        restore(3)


def test_donating_a_restored_array_does_not_affect_others(tmp_path):
    array = np.arange(1 << 20, dtype=np.float32)
    save(tmp_path / "large", {"a": array, "b": array})
    layout = Layout(MESH, None)
    back = restore(tmp_path / "large", layout)
    doubled = jax.jit(lambda a: a * 2, donate_argnums=0)(back["a"])
    again = jax.jit(lambda a: a + 1, donate_argnums=0)(doubled)
    assert back["a"].is_deleted()
    assert (np.asarray(again) == array * 2 + 1).all()
    for shard in back["b"].addressable_shards:  # replicas lie in one memory
        assert (np.asarray(shard.data) == array).all()


def test_without_jax_everything_comes_back_to_the_host(path):
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "from shoal.checkpoint.restoring.restore import plan_restore, restore\n"
        f"back = restore({str(path)!r})\n"
        "assert back['params']['w'].sum() == 496, back\n"
        f"print(plan_restore({str(path)!r}, only='opt/**'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 leaves, 256.0 B" in done.stdout or "2 leaves, 256 B" in done.stdout


def test_an_error_while_reading_returns_nothing(path, tmp_path):
    hand_written.write(tmp_path / "bad", {"a": np.zeros(300_000), "b": np.ones(3)})
    (file,) = (tmp_path / "bad").glob("data-*")
    content = bytearray(file.read_bytes())
    content[-1_000_000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as info:
        restore(tmp_path / "bad")
    assert (info.value.file, info.value.leaf) == (file.name, "a")
    assert info.value.offset is not None
    assert info.value.offset <= len(content) - 1_000_000 < info.value.offset + (256 << 10)


def test_the_plan_is_a_table(path):
    plan = plan_restore(path, {"params": {"w": SPLIT}}, only="params/w")
    assert (plan.mode, plan.num_leaves, plan.leaves_bytes) == ("direct", 1, 128)
    (costs,) = plan.processes
    assert (costs.needed_bytes, costs.num_files, costs.num_requests) == (128, 1, 1)
    lines = str(plan).splitlines()
    assert lines[1].split() == ["process", "read", "needed", "files", "requests", "memory"]
    assert len(lines) == 3


def test_the_plan_of_a_merge_counts_the_values_of_all_processes(tmp_path):
    own = PerProcess([{"seen": np.zeros(size)} for size in (1000, 3000)])
    hand_written.write(tmp_path / "own", {"own": own}, processes=2)
    checkpoint = open_checkpoint(LocalStore(tmp_path / "own"))
    sizes = [size for _, size in checkpoint.values_of(0).values()]
    two = plan_all(checkpoint, [LeafRequest(0, None, None)], ReadStrategy({}, ""), None, range(2))
    assert [costs.needed_bytes for costs in two.processes] == sizes
    assert [costs.memory_bytes for costs in two.processes] == sizes
    (alone,) = plan_restore(tmp_path / "own", merge=list).processes
    assert alone.needed_bytes == alone.memory_bytes == sum(sizes)


def test_restored_host_arrays_can_be_put_on_devices(path):
    back = restore(path, only="params/w")["params"]["w"]
    assert back.flags.writeable
    assert same(put(back, SPLIT), TREE["params"]["w"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


def test_registered_nodes_with_and_without_a_target(tmp_path):
    save(tmp_path / "nodes", {"layer": Layer(np.ones((8, 2), np.float32), "one"), "n": 3})
    back = restore(tmp_path / "nodes")
    assert type(back["layer"]) is Layer
    assert back["layer"].name == "one"
    back = restore(tmp_path / "nodes", {"layer": Layer(SPLIT, "other"), "n": 0})
    assert back["layer"].name == "other"
    assert back["layer"].w.sharding == sharding_of(SPLIT)
    assert restore(tmp_path / "nodes", {"layer": SPLIT, "n": 0})["layer"].name == "one"


LITTLE = (
    {},
    [],
    (),
    3,
    {"a": "text"},
    np.zeros((0, 3)),
    np.float32(1),
    {"a": [(), {}, 1], "b": {}},
)


@pytest.mark.parametrize("tree", LITTLE, ids=str)
def test_little_or_nothing(tree, tmp_path):
    hand_written.write(tmp_path / "little", tree)
    back = restore(tmp_path / "little")
    assert type(back) is type(tree)
    assert str(back) == str(tree)
    assert str(plan_restore(tmp_path / "little")).startswith(str(tmp_path))
    back = restore(tmp_path / "little", lambda name, leaf: None)
    assert str(back) == str(tree)
    hand_written.write(tmp_path / "more", [1, {"below": tree}])
    assert str(restore(tmp_path / "more")) == str([1, {"below": tree}])
