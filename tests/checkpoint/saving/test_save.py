"""Saving: what is on disk afterwards, on how many processes and devices whatever."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open

import shoal
from checkpoint.saved_contents import CLEAN, files_of, in_job, kept, messages, same_bits
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.disk import step_folder
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.saving import agreeing
from shoal.checkpoint.saving.request import SaveOptions
from shoal.checkpoint.saving.save import save, save_request, write_tree
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.errors import (
    DivergenceError,
    NotSharedError,
    StepAlreadyCommittedError,
    StorageError,
    StorageFullError,
    UsageError,
    UsageTypeError,
)
from shoal.plan.layout import Layout

Point = namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclass
class Params:
    w: object
    b: object


def on_devices(array, *spec, axes=None):
    mesh = jax.make_mesh(tuple((axes or {"x": 8}).values()), tuple(axes or {"x": 8}))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def grid(*spec):
    values = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    return on_devices(values, *spec, axes={"x": 2, "y": 4}), values


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model"


SPECS = [(), ("x",), (None, "y"), ("x", "y"), (("y", "x"),), (None, ("x", "y"))]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("arena", [None, Arena()])
def test_arrays_of_any_layout(path, spec, arena):
    from shoal.runtime.process import client

    array, values = grid(*spec)
    write_tree(client(), save_request(path), {"w": array}, arena=arena)
    assert same_bits(kept(path)["w"], values)
    assert files_of(path) == CLEAN


def test_shards_of_one_process_are_merged_into_one_entry_of_a_plain_file(path):
    array, values = grid("x", "y")
    save(path, {"layer": {"w": array}})
    (file,) = path.glob("data-*")
    with safe_open(file, "np") as opened:
        assert list(opened.keys()) == ["layer/w"]
        assert same_bits(opened.get_tensor("layer/w"), values)


def test_every_kind_of_leaf(path):
    key = jax.random.key(7)
    tree = {
        "a.b": np.float64(2.5), "a/b": 1, "a": {"b": -0.0}, "": 1 << 200, 1: True, "1": None,
        "ü": "text", "bytes": b"\0\1", "long": "y" * 100_000, "c": 1j,
        "list": [np.arange(3), (np.array(3, "int8"), Point(1, [2]))],
        "ordered": OrderedDict(z=np.zeros((0, 4)), a=np.ones((), bool)),
        "node": Params(jnp.ones(3), "b"), "keys": jax.random.split(key, 3), "key": key,
        "own": PerProcess({"at": [1, np.arange(2)]}),
    }  # fmt: skip
    save(path, tree)
    found = kept(path)
    assert found["a.b"] == 2.5
    assert isinstance(found["a.b"], np.float64)
    assert (found["a~1b"], found["~e"], found["~i1"], found["1"]) == (1, 1 << 200, True, None)
    assert str(found["a/b"]) == "-0.0"
    assert (found["ü"], found["bytes"], found["long"], found["c"]) == (
        "text", b"\0\1", "y" * 100_000, 1j,
    )  # fmt: skip
    assert same_bits(found["list/0"], np.arange(3))
    assert (found["list/1/1/x"], found["list/1/1/y/0"]) == (1, 2)
    assert found["ordered/z"].shape == (0, 4)
    assert same_bits(found["node/w"], np.ones(3, np.float32))
    assert same_bits(found["keys"], jax.random.key_data(jax.random.split(key, 3)))
    assert same_bits(found["key"], jax.random.key_data(key))
    assert found["own"][0]["at"][0] == 1
    kinds = {leaf.name: leaf for leaf in open_checkpoint(LocalStore(path)).manifest.leaves}
    assert (kinds["keys"].impl, kinds["keys"].shape, kinds["keys"].words) == (
        "threefry2x32", (3,), (2,),
    )  # fmt: skip


DTYPES = ["int4", "uint4", "float8_e4m3fn", "bfloat16", "int2", "float4_e2m1fn", "complex64"]


@pytest.mark.parametrize("name", DTYPES)
def test_small_and_unusual_dtypes_on_devices(path, name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.arange(8 * 5).reshape(8, 5).astype(np.float32).astype(dtype)
    save(path, {"split": on_devices(values, "x"), "host": values[:, 1:4]})
    found = kept(path)
    assert same_bits(found["split"], values)
    assert same_bits(found["host"], values[:, 1:4])


def test_arrays_of_numpy_of_any_stride_and_byte_order(path):
    base = np.arange(4000, dtype=np.int32).reshape(40, 100)
    tree = {
        "turned": base.T,
        "cut": base[::3, ::-2],
        "big": base.astype(">i4"),
        "f": np.asfortranarray(base),
    }
    save(path, tree)
    found = kept(path)
    for name, values in tree.items():
        assert np.array_equal(found[name], values), name
        assert found[name].dtype == np.int32


@pytest.mark.parametrize("text", [np.array("ab", "U3"), np.array(b"a", "S3"), np.array("", "U2")])
def test_text_that_does_not_fill_its_room(path, text):
    """Of no dims it was once taken for a scalar, which is shorter."""
    save(path, {"text": text})
    back = kept(path)["text"]
    assert (back.dtype, back.shape, back.tobytes()) == (text.dtype, (), text.tobytes())


def test_a_leaf_alone_and_an_empty_tree(tmp_path):
    save(tmp_path / "leaf", np.arange(3))
    assert same_bits(kept(tmp_path / "leaf")["~"], np.arange(3))
    save(tmp_path / "none", {})
    assert kept(tmp_path / "none") == {}
    assert files_of(tmp_path / "none") == ["COMMIT", "index", "manifest"]


def test_step_user_data_and_metrics_are_stored(path):
    array, _ = grid("x", None)
    metrics = {"loss": 0.5, "bad": float("nan")}
    tree = {"alone": jnp.ones(3), "w": array}
    save(path, tree, step=3, user={"who": ["me"]}, metrics=metrics)
    checkpoint = open_checkpoint(LocalStore(path))
    assert (checkpoint.commit.step, checkpoint.manifest.step) == (3, 3)
    assert checkpoint.manifest.user == {"who": ["me"]}
    assert checkpoint.commit.metrics["loss"] == 0.5
    assert np.isnan(checkpoint.commit.metrics["bad"])
    layout = Layout.parse(checkpoint.manifest.leaves[1].layout)
    assert layout == shoal.layout_of(array)
    assert checkpoint.manifest.mesh == layout.mesh.text
    assert checkpoint.manifest.writer["jax"] == jax.__version__


def test_files_have_the_rights_of_the_umask(path):
    old = os.umask(0o027)
    try:
        save(path, {"w": np.arange(3)})
    finally:
        os.umask(old)
    assert {(path / name).stat().st_mode & 0o777 for name in os.listdir(path)} == {0o640}


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_processes_share_the_writing_of_replicated_data(path, processes):
    large = np.arange(3 << 20, dtype=np.float32).reshape(-1, 1024)

    def work(client):
        tree = {"large": large, "n": 3, "own": PerProcess(client.process), "s": grid("x")[0]}
        tree["on devices"] = on_devices(large, None, "x")
        return save.on(client, path, tree, step=1)

    assert in_job(processes, work) == [None] * processes
    found = kept(path)
    assert same_bits(found["large"], large)
    assert same_bits(found["on devices"], large)
    assert same_bits(found["s"], grid("x")[1])
    assert found["own"] == list(range(processes))
    sizes = [file.bytes for file in open_checkpoint(LocalStore(path)).index.files]
    assert len(sizes) == processes
    assert max(sizes) - min(sizes) < 2 << 20


def test_leaves_that_cannot_be_saved_are_all_named_and_nothing_is_written(path):
    gone = jnp.ones(3)
    gone.delete()
    tree = {
        "ok": 1, "object": np.array([{}]), "gone": gone, "set": {1}, "f": print,
        "masked": np.ma.array([1]), "shape": jax.ShapeDtypeStruct((3,), "float32"),
    }  # fmt: skip
    with pytest.raises(UsageTypeError) as caught:
        save(path, tree)
    problems = "\n".join(caught.value.problems)
    for name in set(tree) - {"ok"}:
        assert f"{name}: " in problems
    assert len(caught.value.problems) == 6
    assert "was deleted" in problems
    assert not path.exists()


def test_a_value_inside_jit_is_named(path):
    with pytest.raises(UsageError, match="w: is a value inside jit"):
        jax.jit(lambda w: save(path, {"w": w}))(1.0)


WRONG = [
    ({"step": -1}, "step=-1"), ({"step": True}, "step=True"), ({"step": 1.5}, "step=1.5"),
    ({"user": {"a": {1}}}, "user"), ({"user": {1: 2}}, "user"),
    ({"metrics": {"a": "b"}}, "metrics"), ({"metrics": {1: 2}}, "metrics"),
    ({"timeout_s": 0}, "timeout_s"), ({"name": ""}, "name"),
    ({"metrics": {"m" * 2000: 1.0}}, "metrics"),
]  # fmt: skip


@pytest.mark.parametrize(("named", "words"), WRONG)
def test_wrong_arguments(path, named, words):
    with pytest.raises(UsageError, match=words):
        save(path, {}, **named)
    assert not path.exists()


def test_a_path_that_is_none():
    with pytest.raises(UsageTypeError, match="path=3"):
        save(3, {})
    for path in ("", "a\0b"):  # the first would be the folder in which the program runs
        with pytest.raises(UsageError, match="is not a path"):
            save(path, {})


def test_nothing_is_overwritten(path):
    save(path, {"w": 1})
    before = {name: (path / name).read_bytes() for name in os.listdir(path)}
    with pytest.raises(StepAlreadyCommittedError) as caught:
        save(path, {"w": 2})
    assert caught.value.path == str(path)
    errors = in_job(3, lambda client: save.on(client, path, {"w": 3}))
    assert {type(error) for error in errors} == {StepAlreadyCommittedError}
    assert {error.attempt for error in errors} == {caught.value.attempt}
    assert "process 0 of 3" in str(errors[2])
    assert before == {name: (path / name).read_bytes() for name in os.listdir(path)}


DIFFERENT = [
    (lambda p: {"w": np.arange(3) + p}, "w: array int64[3]"),
    (lambda p: {"w": np.arange(3 + p)}, "w: array int64"),
    (lambda p: {"w": p}, "w: int "),
    (lambda p: {"w": np.float32(p)}, "w: scalar 0.0"),
    (lambda p: {f"w{p}": 1}, "w0: int"),
    (lambda p: {str(n): 1 for n in range(1 + p)}, "no more leaves"),
    (lambda p: [1] if p else (1,), 'tree: {"kind": "tuple"'),
    (lambda p: {"w": jnp.full(3, p)}, "w: array int32[3] = ["),
    (lambda p: {"w": jnp.full((1024, 1024), p)}, "w: array int32[1024,1024]"),
    (lambda p: {"w": "x" * 70_000 + str(p)}, "w: str uint8[70001]"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "words"), DIFFERENT)
def test_differing_saves_raise_divergence_and_write_nothing(path, tree, words):
    errors = in_job(3, lambda client: save.on(client, path, tree(client.process // 2), name="a"))
    assert {type(error) for error in errors} == {DivergenceError}, messages(errors)
    assert words in str(errors[0])
    shown = list(errors[0].sides)
    assert len(shown) == 2
    assert not path.exists()


@pytest.mark.parametrize("field", [*SaveOptions._fields, "path"])
def test_options_must_be_equal(tmp_path, field):
    def work(client):
        options = {
            "step": client.process,
            "user": {"p": client.process},
            "metrics": {"p": client.process},
        }
        options["overwrite"] = bool(client.process)
        named = {} if field == "path" else {field: options[field]}
        place = client.process if field == "path" else 0
        return save.on(client, tmp_path / str(place), {"w": 1}, name="a", **named)

    errors = in_job(2, work)
    assert {type(error) for error in errors} == {DivergenceError}
    shown = [str(tmp_path / place) for place in "01"] if field == "path" else [f"{field}="]
    assert all(words in str(errors[0]) for words in shown)


def test_equal_values_may_lie_on_other_devices_of_each_process(path):
    values = np.arange(64, dtype=np.float32)

    def work(client):
        kinds = [values, jnp.asarray(values), on_devices(values, "x")]
        return save.on(client, path, {"w": kinds[client.process]})

    assert in_job(3, work) == [None] * 3
    assert same_bits(kept(path)["w"], values)


def test_a_path_that_is_not_shared_is_named(path, monkeypatch):
    see = step_folder.see

    def blind(folder, attempt):
        import threading

        return see(folder, attempt) and threading.current_thread().name != "blind"

    monkeypatch.setattr(step_folder, "see", blind)

    def work(client):
        import threading

        threading.current_thread().name = "blind" if client.process else "sees"
        return save.on(client, path, {"w": np.arange(9)})

    errors = in_job(3, work)
    assert {type(error) for error in errors} == {NotSharedError}
    assert {error.processes for error in errors} == {(1, 2)}
    assert "is not seen by processes 1-2 (" in str(errors[0])
    assert files_of(path) == []


def test_a_path_that_is_a_file(path):
    path.write_text("mine")
    for place in (path, path / "below"):
        errors = in_job(2, lambda client, place=place: save.on(client, place, {"w": 1}))
        assert {type(error) for error in errors} == {StorageError}
        assert {error.errno for error in errors} == {errno.ENOTDIR}
    assert path.read_text() == "mine"


def test_no_permission_or_a_read_only_disk(path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    errors = in_job(2, lambda client: save.on(client, path, {"w": 1}))
    assert {(type(error), error.errno) for error in errors} == {(StorageError, errno.EACCES)}
    assert not path.exists()


def test_too_little_space_is_known_before_anything_is_written(path, monkeypatch):
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda self: 4_300_000)
    big = np.zeros(1 << 20, np.float32)
    errors = in_job(3, lambda client: save.on(client, path, {"w": big}))
    assert {type(error) for error in errors} == {StorageFullError}
    assert {error.free_bytes for error in errors} == {4_300_000}
    assert 4_300_000 < errors[0].needed_bytes < 5_000_000  # of all three, with headers
    assert not path.exists()


def test_there_is_enough_space_if_it_fits(path, monkeypatch):
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda self: 9_000_000)
    assert in_job(
        1, lambda client: save.on(client, path, {"w": np.zeros(2 << 20, np.float32)})
    ) == [None]
    request = save_request(path.parent / "other")
    assert agreeing.store_answer(request, is_lead=True) == {"free": 9_000_000, "replaces": ""}
