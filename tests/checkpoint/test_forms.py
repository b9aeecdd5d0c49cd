"""What comes back without a target: the tree, nested dicts, or names → values."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.checkpoint.tree.flatten import flatten_tree, unflatten_tree
from shoal.checkpoint.tree.names import component
from shoal.checkpoint.tree.nodes import as_dicts
from shoal.errors import UsageError
from shoal.plan.mesh import Mesh

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    step: Any


TREE = State({"a.b": {"w": np.ones(2, "f4")}, 3: [np.zeros(3, "f4"), (Point(1, None), "t")]}, 7)
NAMES = ["params/a.b/w", "params/~i3/0", "params/~i3/1/0/x", "params/~i3/1/0/y", "params/~i3/1/1"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("forms") / "saved"
    shoal.save(where, TREE)
    return where


def test_names_and_their_values(path):
    back = shoal.restore(path, form="flat")
    assert sorted(back) == sorted([*NAMES, "step"])
    assert back["params/~i3/1/0/x"] == 1
    assert back["step"] == 7
    assert back["params/a.b/w"].tolist() == [1, 1]
    assert list(shoal.restore(path, only="params/**/w", form="flat")) == ["params/a.b/w"]


def test_nested_dicts(path):
    back = shoal.restore(path, form="dicts")
    assert set(map(type, nodes(back))) == {dict}
    assert back["step"] == 7
    assert back["params"][3]["1"] == {"0": {"x": 1, "y": None}, "1": "t"}
    only = shoal.restore(path, only="params/~i3/1/**", form="dicts")
    assert only == {"params": {3: {"1": {"0": {"x": 1, "y": None}, "1": "t"}}}}


def nodes(tree):
    if not isinstance(tree, dict | list | tuple | State):
        return []
    inner = tree.values() if isinstance(tree, dict) else ()
    return [tree, *(one for child in inner for one in nodes(child))]


def test_a_tree_as_always(path):
    assert isinstance(shoal.restore(path), State)
    assert isinstance(shoal.restore(path, form="tree"), State)


@pytest.mark.parametrize(
    "target", [MESH, lambda name, x: MESH, "stored"], ids=["mesh", "function", "stored"]
)
def test_single_target_for_all_leaves_takes_any_form(path, target):
    back = shoal.restore(path, target, form="flat")
    assert sorted(back) == sorted([*NAMES, "step"])
    assert isinstance(back["params/a.b/w"], jax.Array) == (target != "stored")
    assert shoal.restore(path, target, form="dicts")["params"][3]["1"]["0"]["x"] == 1


def test_form_dicts_needs_neither_jax_nor_the_saved_classes(path):
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "import shoal\n"
        f"back = shoal.restore({str(path)!r}, form='dicts')\n"
        "assert back['params']['a.b']['w'].tolist() == [1, 1] and back['step'] == 7\n"
        f"assert type(shoal.restore({str(path)!r})).__name__ == 'UnknownNode'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["dicts", "flat"])
def test_a_target_that_is_a_tree_has_its_own_form(path, form):
    for target in (TREE, {"params": MESH, "step": 0}, np.ones(3)):
        with pytest.raises(
            UsageError, match=f"restore: form='{form}' is for .* this target determines"
        ):
            shoal.restore(path, target, form=form)


def test_a_form_that_there_is_not(path):
    with pytest.raises(UsageError, match="form='flatt' is not one of 'tree', 'dicts', 'flat'; did"):
        shoal.restore(path, form="flatt")


def test_little_or_nothing(tmp_path):
    for number, (tree, names, dicts) in enumerate(
        [(5, {"~": 5}, 5), ({}, {}, {}), ([], {}, {}), ([1, {}], {"0": 1}, {"0": 1, "1": {}})]
    ):
        shoal.save(tmp_path / str(number), tree)
        assert shoal.restore(tmp_path / str(number), form="flat") == names
        assert shoal.restore(tmp_path / str(number), form="dicts") == dicts


def test_a_history_restores_in_any_form(tmp_path):
    with shoal.Checkpoints(tmp_path) as ckpts:
        ckpts.save(3, TREE)
        ckpts.wait()
        assert ckpts.restore(form="flat")["step"] == 7


TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 2), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.sampled_from("ab"), inner).map(collections.OrderedDict)
    ),
    max_leaves=8,
)


@given(TREES)
def test_every_leaf_of_the_dicts_is_where_its_name_says(tree):
    leaves, structure = flatten_tree(tree)
    found = unflatten_tree(as_dicts(structure), [value for _, value in leaves])

    def walk(value, name):
        if type(value) is dict:
            for key, child in value.items():
                yield from walk(child, [*name, component(key)])
        else:
            yield "/".join(name), value

    wanted = {"/".join(map(component, path)): value for path, value in leaves}
    assert dict(walk(found, [])) == wanted
