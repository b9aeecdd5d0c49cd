"""What options mean, and which leaves of a checkpoint a target asks for."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from checkpoint import hand_written
from shoal.arrays.bridge.devices import jax_mesh
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.restoring import protocol
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.restoring.target import options_of
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.errors import RestoreMismatchError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
TREE = {
    "params": {"w": np.arange(8.0, dtype=np.float32), "b": np.ones(8, np.float32)},
    "text": np.array(["abc", "1"]),
    "bare": np.ndarray((2, 3), "S0", b""),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("target") / "saved"
    hand_written.write(where, TREE, hand_written.grid(2))
    return where


@pytest.mark.parametrize("only", ["[z-a]", ["w", "params/[9-0]"]])
def test_a_range_that_is_none_is_refused(path, only):
    told = r"only='.*' takes no leaf; the characters in \[ \] are not a valid range"
    with pytest.raises(RestoreMismatchError, match=told):
        restore(path, only=only)


def test_patterns_in_any_order_are_the_same():
    """Each process has another order of the same set of texts."""
    one, other = (
        options_of("restore", {"only": only}, has_target=False)
        for only in (["a/*", "b"], ["b", "a/*"])
    )
    assert one == other


@pytest.mark.parametrize("rename", [{"": "params"}, {"~": "params"}, lambda name: "params"])
def test_single_layout_follows_rename(path, rename):
    back = restore(path, Layout(MESH, "x"), rename=rename, only=["w", "b"])
    assert np.array_equal(back["w"], TREE["params"]["w"])
    assert back.keys() == {"w", "b"}


def test_rename_to_the_root(path):
    back = restore(path, {"all": Layout(MESH, "x")}, rename={"all": ""}, only="all/params/*")
    assert np.array_equal(back["all"]["params"]["b"], TREE["params"]["b"])


def test_only_can_leave_out_a_renamed_leaf(path):
    like = {"params": {"w": np.zeros(8, np.float32)}}
    rename = {"params/w": "params/b"}
    with pytest.raises(
        RestoreMismatchError, match="params/w: is in the checkpoint, not in the target"
    ):
        restore(path, like, rename=rename)
    back = restore(path, like, rename=rename, only="params/w")
    assert np.array_equal(back["params"]["w"], TREE["params"]["b"])


@pytest.mark.parametrize("dtype", [np.float32, "S3", object])
def test_text_is_not_cast(path, dtype):
    with pytest.raises(
        RestoreMismatchError, match=r"text: is <U3 as saved, not .*; no cast exists"
    ):
        restore(path, {"text": np.zeros(2, dtype)}, only="text", dtype="any")


def test_text_of_length_0_comes_back(path):
    back = restore(path, only="bare")["bare"]
    assert (back.dtype, back.shape) == (np.dtype("S0"), (2, 3))


def test_a_mesh_that_a_file_names_takes_no_memory(path, monkeypatch):
    opened = open_checkpoint(LocalStore(path))
    leaves = [replace(one, layout="() @ a=1000000000000") for one in opened.manifest.leaves]
    lying = replace(opened, manifest=replace(opened.manifest, leaves=tuple(leaves)))
    monkeypatch.setattr(protocol, "open_checkpoint", lambda folder: lying)
    with pytest.raises(RestoreMismatchError, match="its mesh has 1000000000000 devices"):
        restore(path, "stored")


def test_a_spec_of_more_dims_than_the_leaf_has(path):
    place = NamedSharding(jax_mesh(MESH), PartitionSpec("x", None, "y"))
    with pytest.raises(RestoreMismatchError, match=r"params/w: P\(.*\) has 3 entries for 1 dim"):
        restore(path, {"params": {"w": place}}, only="params/w")


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P(None, None)])
def test_surplus_dims_of_a_spec_are_refused_though_they_split_nothing(path, spec):
    """JAX refuses such an array in jit, device_put and describe."""
    place = NamedSharding(jax_mesh(MESH), spec)
    told = rf"params/b: {re.escape(str(spec))} has 2 entries for 1 dim\n"
    for target in (place, lambda name, x: place, {"params": {"w": place, "b": place}}):
        with pytest.raises(RestoreMismatchError, match=told):
            restore(path, target, only=["params/w", "params/b"])
