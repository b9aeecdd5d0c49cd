"""Targets that say for each leaf where it shall lie: a mesh, and a function of (name, x)."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from checkpoint import hand_written
from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import sharding_of
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import plan_restore, restore
from shoal.checkpoint.saving.save import save
from shoal.errors import RestoreMismatchError, UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.client.in_process import LocalJob

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
TREE = {
    "params": {
        "w": np.arange(32, dtype=np.float32).reshape(8, 4),
        "b": np.ones(4, np.float32),
        "scale": np.zeros((), np.float32),
    },
    "opt": [{"mu": np.ones((2, 3, 4), np.float32)}],
    "epoch": 3,
}
ARRAYS = ("params/w", "params/b", "opt/0/mu")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tree = TREE
    where = tmp_path_factory.mktemp("wanted") / "saved"
    hand_written.write(where, tree, hand_written.grid(2))
    return where


def arrays(back):
    return [one for one in jax.tree.leaves(back) if isinstance(one, jax.Array)]


@pytest.mark.parametrize("mesh", [MESH, jax_mesh(MESH)], ids=["shoal", "jax"])
def test_a_mesh_means_replicated_on_it_whatever_the_rank(path, mesh):
    back = restore(path, mesh)
    assert len(arrays(back)) == 4
    for one in arrays(back):
        assert one.sharding == NamedSharding(jax_mesh(MESH), PartitionSpec())
    assert back["epoch"] == 3
    assert np.array_equal(back["params"]["w"], TREE["params"]["w"])


def test_a_mesh_stands_for_a_subtree_and_for_a_leaf(path):
    split = Layout(MESH, "x", None)
    back = restore(
        path, {"params": {"w": split, "b": MESH, "scale": MESH}, "opt": MESH, "epoch": 0}
    )
    assert back["params"]["w"].sharding == sharding_of(split)
    assert back["params"]["scale"].sharding == sharding_of(Layout(MESH))
    assert back["opt"][0]["mu"].sharding == sharding_of(Layout(MESH))
    assert plan_restore(path, MESH).needed_bytes == sum(one.nbytes for one in arrays(back))


def test_a_mesh_of_devices_that_are_not_here(path):
    with pytest.raises(UsageError, match="device"):
        restore(path, Mesh({"x": 999}, kind="cpu"))


def test_resume_onto_a_mesh(tmp_path):
    one = LocalJob(1).clients[0]
    state = {"w": np.ones((8, 2), np.float32), "b": np.ones(3, np.float32)}
    with Checkpoints(tmp_path, client=one) as ckpts:
        assert ckpts.resume(MESH, state)[1] == 0
        ckpts.save(4, state)
        ckpts.wait()
        back, first = ckpts.resume(MESH, state)
    assert first == 5
    assert back["w"].sharding == sharding_of(Layout(MESH))


# ---- functions


def test_a_function_returns_whatever_stands_for_a_layout(path):
    places: dict[str, Any] = {
        "params/w": NamedSharding(jax_mesh(MESH), PartitionSpec("x")),
        "params/b": MESH,
        "params/scale": None,
        "opt/0/mu": Layout(MESH, "y", None, None),
    }
    back = restore(path, lambda name, x: places[name])
    assert back["params"]["w"].sharding == places["params/w"]
    assert back["params"]["b"].sharding == sharding_of(Layout(MESH))
    assert type(back["params"]["scale"]) is np.ndarray
    assert back["opt"][0]["mu"].sharding == sharding_of(places["opt/0/mu"])


def test_a_function_stands_for_a_subtree(path):
    seen = []

    def rows(name, x):
        seen.append((name, x.shape, x.dtype))
        return Layout(MESH, "y", *[None] * (x.ndim - 1))

    back = restore(path, {"params": MESH, "opt": rows, "epoch": 0})
    assert seen == [("opt/0/mu", (2, 3, 4), np.float32)]
    assert back["opt"][0]["mu"].sharding.spec[0] == "y"


class Net:
    def __init__(self, width):
        self.width = width

    def __call__(self, x):
        return x


def one(name):
    return None


FUNCTIONS = {
    "one argument": (one, r"the function one\(name\)"),
    "a lambda": (lambda: None, r"the function <lambda>\(\)"),
    "three": (lambda a, b, c: None, r"the function <lambda>\(a, b, c\)"),
    "keywords": (lambda *, name, x: None, r"the function <lambda>\(\*, name, x\)"),
    "partial": (functools.partial(lambda a, b, c, d: None, 1), r"the partial\(b, c, d\)"),
    "an object": (Net(3), r"the Net\(x\)"),
    "a class": (Net, r"the class Net\(width\)"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_of_other_arguments_is_refused_in_words(path, case):
    function, told = FUNCTIONS[case]
    inside = {"params": function, "opt": MESH, "epoch": 0}
    for target, kind, where in (
        (function, UsageTypeError, "target: "),
        (inside, RestoreMismatchError, "params: is not in the checkpoint: "),
    ):
        with pytest.raises(kind, match=where + told) as caught:
            restore(path, target)
        text = str(caught.value)
        assert "must take (name, x): the leaf's name, such as 'params/w', and" in text
        assert "jax.ShapeDtypeStruct" in text


def test_arguments_that_have_defaults_or_any_number_are_taken(path):
    for function in (
        lambda *args: None,
        lambda name, x, extra=3: None,
        functools.partial(lambda a, b, c: None, 1),
    ):
        assert type(restore(path, function)["params"]["w"]) is np.ndarray


@pytest.mark.parametrize("wrong", [("x", None), "x", 3, np.ones(3)], ids=str)
def test_invalid_results_of_a_target_function_are_refused(path, wrong):
    with pytest.raises(RestoreMismatchError) as caught:
        restore(path, lambda name, x: wrong, only="params/w")
    text = str(caught.value)
    assert "params/w: the target's function returned" in text
    assert "return a Layout, a sharding, a Mesh, or None for a NumPy array" in text


@pytest.mark.parametrize("function", [one, lambda name, x: None])
def test_a_function_that_only_leaves_out_stays(path, function):
    back = restore(path, {"params": MESH, "apply": function}, only="params/**")
    assert back["apply"] is function
    with pytest.raises(RestoreMismatchError, match="apply: is not in the checkpoint"):
        restore(path, {"params": MESH, "opt": MESH, "epoch": 0, "apply": function})


def test_a_function_of_other_arguments_at_the_place_of_an_array(path):
    with pytest.raises(RestoreMismatchError, match=r"params/w: the function one\(name\) must take"):
        restore(path, {"params": {"w": one}}, only="params/w")


def test_a_layout_of_more_dims_than_a_leaf_is_refused(path):
    with pytest.raises(RestoreMismatchError, match="rank"):
        restore(path, Layout(MESH, None, None))


# ---- leaves that are no targets

NO_TARGETS = {
    "a number": (0, "is 0; pass a layout"),
    "a NumPy scalar": (np.float32(1), r"is np.float32\(1.0\); pass a layout"),
    "a device": (jax.devices()[0], "is a device; pass jax.sharding.SingleDeviceSharding"),
    "a dtype": (np.dtype("float32"), r"is the dtype float32; pass jax.ShapeDtypeStruct\(shape, 'f"),
    "a dtype of NumPy": (np.float32, "is the dtype float32; pass jax.ShapeDtypeStruct"),
    "a dtype of JAX": (jax.numpy.bfloat16, "is the dtype bfloat16; pass jax.ShapeDtypeStruct"),
    "an object": (object(), "is an object; pass a layout"),
    "an ellipsis": (..., "is an ellipsis; pass a layout"),
    "a range": (range(8), "is a range; pass a layout"),
    "bytes": (b"stored", "is b'stored'; pass a layout"),
    "a set": ({1}, "is a set; pass a layout"),
    "a text": ("sharded", "is 'sharded'; pass a layout"),
}


@pytest.mark.parametrize("case", NO_TARGETS)
def test_invalid_targets_of_arrays_raise_restore_mismatch(path, case, tmp_path):
    given, told = NO_TARGETS[case]
    target = {"params": {"w": given, "b": MESH, "scale": MESH}, "opt": [{"mu": given}], "epoch": 0}
    one = LocalJob(1).clients[0]
    with Checkpoints(tmp_path, client=one) as ckpts:
        ckpts.save(1, TREE)
        for call in (
            lambda: restore(path, target),
            lambda: plan_restore(path, target),
            lambda: ckpts.restore(1, target),
            lambda: ckpts.resume(target, TREE),
        ):
            with pytest.raises(RestoreMismatchError) as caught:
                call()
            problems = "\n".join(caught.value.problems)
            for name, shape in (("params/w", r"\(8, 4\)"), ("opt/0/mu", r"\(2, 3, 4\)")):
                where = f"{name}: was saved as an array of shape {shape}, but the target {told}"
                assert re.search(where, problems)
            assert caught.value.wrong_dtype == ("opt/0/mu", "params/w")
        with pytest.raises(RestoreMismatchError, match="params/w: was saved as"):
            Checkpoints(tmp_path / "new", client=one).resume(target, TREE)
    assert restore(path, target, only="params/b")["params"]["w"] is given  # it stays


def test_a_number_is_a_target_for_a_number_and_an_array_of_rank_0(path):
    target = {"params": {"w": MESH, "b": MESH, "scale": 0.0}, "opt": MESH, "epoch": 0}
    back = restore(path, target)
    assert back["epoch"] == 3
    assert type(back["params"]["scale"]) is np.ndarray
    with pytest.raises(
        RestoreMismatchError, match=r"scale: .* of shape \(\), but the target is 'x'"
    ):
        restore(path, {**target, "params": {"w": MESH, "b": MESH, "scale": "x"}})


def test_the_stored_layouts_of_a_subtree_and_of_a_leaf(tmp_path):
    one = LocalJob(1).clients[0]
    w = jax.device_put(TREE["params"]["w"], sharding_of(Layout(MESH, "x", "y")))
    save.on(one, tmp_path / "saved", {"params": {"w": w, "b": w}, "opt": [w], "epoch": 3})
    back = restore(tmp_path / "saved", {"params": "stored", "opt": ["stored"], "epoch": "stored"})
    assert back["epoch"] == 3
    assert [a.sharding for a in arrays(back)] == [w.sharding] * 3
    back = restore(
        tmp_path / "saved", {"params": {"w": "stored", "b": MESH}, "opt": MESH, "epoch": 0}
    )
    assert back["params"]["w"].sharding == w.sharding != back["params"]["b"].sharding


def test_a_text_that_was_saved_may_be_the_word(tmp_path):
    hand_written.write(tmp_path / "saved", {"mode": "stored"}, hand_written.grid(2))
    assert restore(tmp_path / "saved", {"mode": "stored"}) == {"mode": "stored"}
    assert restore(tmp_path / "saved", {"mode": "other"}) == {"mode": "stored"}
