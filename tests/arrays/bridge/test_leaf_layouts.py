"""What users give for layouts, leaf by leaf."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shoal.arrays.bridge.leaf_layouts import leaf_layouts
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.match_layouts import match_layouts
from shoal.arrays.placing.put import put
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
ROWS, WHOLE = Layout(MESH, "data", None), Layout(MESH, None, None)


class Params(NamedTuple):
    w: object
    b: object


def paired(tree, layouts):
    """Return path → layout."""
    problems = []
    leaves, _ = leaf_layouts(tree, layouts, problems)
    assert problems == []
    return {leaf.path: leaf.layout for leaf in leaves}


def refused(tree, layouts):
    problems = []
    leaf_layouts(tree, layouts, problems)
    return problems


def test_one_layout_for_all():
    tree = {"a": np.ones((8, 2)), "b": [np.ones((4, 4))], "none": None}
    assert paired(tree, ROWS) == {"['a']": ROWS, "['b'][0]": ROWS}
    assert paired(np.ones((8, 2)), ROWS) == {"the array": ROWS}


def test_a_prefix_tree():
    tree = {"enc": {"w": np.ones((8, 2)), "v": np.ones((8, 2))}, "dec": (np.ones((8, 2)), None)}
    layouts = paired(tree, {"enc": ROWS, "dec": (WHOLE, None)})
    assert layouts == {"['enc']['w']": ROWS, "['enc']['v']": ROWS, "['dec'][0]": WHOLE}


def test_named_tuples_are_containers():
    layouts = paired(Params(np.ones((8, 2)), np.ones((8, 2))), Params(ROWS, WHOLE))
    assert layouts == {".w": ROWS, ".b": WHOLE}


@pytest.mark.parametrize(
    "given",
    [ROWS, sharding_of(ROWS), sharding_of(Layout(MESH, "data")), P("data"), P("data", None),
     "data", ("data",), ("data", None), (("data",),)],
)  # fmt: skip
def test_all_ways_to_say_rows(given):
    with use_mesh(MESH):
        assert paired(np.ones((8, 2)), given) == {"the array": ROWS}


@pytest.mark.parametrize("given", [WHOLE, P(), (), None, (None,)])
def test_all_ways_to_split_nothing(given):
    with use_mesh(MESH):
        assert paired({"a": np.ones((8, 2))}, given) == {"['a']": WHOLE}
        assert paired({"a": np.ones((8, 2))}, {"a": given}) == {"['a']": WHOLE}


def test_several_axes_on_one_dim():
    with use_mesh(MESH):
        layouts = paired(np.ones((8, 2)), (("model", "data"), None))
    assert layouts == {"the array": Layout(MESH, ("model", "data"), None)}


def test_a_function_of_path_and_leaf():
    def choose(path, leaf):
        return ROWS if path == "enc/0" and leaf.shape == (8, 2) else WHOLE

    tree = {"enc": [np.ones((8, 2)), np.ones((8, 2))]}
    assert paired(tree, choose) == {"['enc'][0]": ROWS, "['enc'][1]": WHOLE}
    assert paired(tree, {"enc": choose}) == {"['enc'][0]": ROWS, "['enc'][1]": WHOLE}
    assert "returned 7, which is not a layout" in refused(tree, lambda path, leaf: 7)[0]


def test_ranks_are_strict_for_layouts_and_at_most_for_specs():
    tree = {"w": np.ones((8, 2)), "b": np.ones(8)}
    (problem,) = refused(tree, ROWS)
    assert problem.startswith("['b']: shape (8,) has rank 1, but Layout(data, -")
    assert "has rank 2" in problem
    with use_mesh(MESH):
        (problem,) = refused(tree, P("data", None))
        assert problem == "['b']: P('data', None) has 2 entries for 1 dim"
        (problem,) = refused(tree, (None, "modle"))[1:]
        assert "no axis 'modle' (axes: data, model); did you mean 'model'?" in problem


def test_trees_that_do_not_match():
    tree = {"enc": {"w": np.ones((8, 2)), "bias": np.ones(8)}, "x": np.ones(8)}
    problems = refused(tree, {"enc": {"w": ROWS, "bais": ROWS}, "x": {"y": ROWS}})
    assert len(problems) == 3
    assert problems[0].startswith("['enc']['bais']: a layout, but no leaf; did you mean")
    assert problems[1].startswith("['enc']['bias']: a leaf, but no layout; did you mean")
    assert "['x']: one ndarray" in problems[2]
    assert "but a dict of layouts" in problems[2]


def test_a_list_is_not_a_spec():
    with use_mesh(MESH):
        (problem,) = refused(np.ones((8, 2)), ["data", None])
    assert "but a list of layouts; write one layout (a tuple of axis names, not a list)" in problem


def test_ambiguous_tuple_of_layouts_is_refused():
    tree = (np.ones((8, 2)), np.ones((8, 2)))
    with use_mesh(MESH):
        (problem,) = refused(tree, ("data", None))
        assert "may mean one layout, or one for each of 2 elements" in problem
        assert "write PartitionSpec('data', None) for the first" in problem
        assert "(PartitionSpec('data'), PartitionSpec()) for the other" in problem
        assert paired(tree, P("data", None)) == {"[0]": ROWS, "[1]": ROWS}
        assert paired(tree, (P("data"), P())) == {"[0]": ROWS, "[1]": WHOLE}
        assert paired([*tree], ("data", None)) == {"[0]": ROWS, "[1]": ROWS}


def test_a_tuple_of_dims_that_can_mean_one_thing_is_taken_so():
    pair = (np.ones((8, 2)), np.ones((8, 2)))
    with use_mesh(MESH):
        each = {"[0]": ROWS, "[1]": ROWS}
        assert paired(pair, ("data", "data")) == each  # no one layout has an axis twice
        assert paired({"a": pair}, {"a": ("data", "data")}) == {f"['a']{k}": ROWS for k in each}
        three = (*pair, np.ones((8, 2)))
        assert paired(three, ("data", "data", None)) == {**each, "[2]": WHOLE}
        assert paired(pair, (None, None)) == {"[0]": WHOLE, "[1]": WHOLE}
        assert paired(pair[:1], ("data",)) == {"[0]": ROWS}
        (problem,) = refused(pair[:1], (("data", "model"),))  # both axes on dim 0, or one on each
        assert "write PartitionSpec(('data', 'model'),) for the first" in problem
        assert "(PartitionSpec('data', 'model'),) for the other" in problem
        (problem,) = refused(pair[0], ("data", "data"))
        assert "used 2 times" in problem or "more than once" in problem or "duplicate" in problem


@pytest.mark.parametrize("given", [3, 2.5, np.ones(3), object()])
def test_values_that_are_not_layouts_are_refused(given):
    (problem,) = refused({"w": np.ones((8, 2))}, {"w": given})
    assert problem.startswith("['w']: ")
    assert "is not a layout; pass " in problem


def test_other_memories_are_refused():
    host = sharding_of(ROWS).with_memory_kind("pinned_host")
    (problem,) = refused(np.ones((8, 2)), host)
    assert "memory kind 'pinned_host'" in problem


def test_a_single_device_is_a_mesh_without_axes():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    assert paired(np.ones(3), sharding) == {"the array": Layout(Mesh({}, device_ids=[3]), None)}


def test_missing_devices_are_reported_once_for_all_leaves():
    far = Layout(Mesh({"x": 2}, device_ids=[4, 99]), "x", None)
    (problem,) = refused({"a": np.ones((8, 2)), "b": np.ones((4, 2))}, far)
    assert problem.startswith("['a'], ['b']: Mesh(x=2; ")
    assert "no cpu device has the id 99; JAX has 8: 0..7" in problem


def test_all_offenders_are_in_one_message():
    tree = {"w": np.ones((7, 3), np.float32), "v": "text", "n": np.float32(1)}
    with pytest.raises(UsageError, match="put: 4 problems") as caught:
        put(tree, Layout(MESH, "data", "model"))
    message = str(caught.value)
    assert "['v']: is a str" in message
    assert "['n'], ['v']: shape () has rank 0" in message
    assert "dim 0 of (7, 3) has size 7, which 4 shards (data=4) do not divide; 4 or 8" in message
    assert "dim 1 of (7, 3) has size 3, which 2 shards (model=2) do not divide; 2 or 4" in message


def test_names_are_suggested_only_where_they_are_near_and_free():
    x, whole = np.zeros(8, np.float32), Layout(MESH, None)
    with pytest.raises(UsageError) as caught:
        put({"kernel": x, "a": x, "b": x}, {"kernal": whole, "b": whole, "c": whole})
    assert str(caught.value).splitlines()[1:] == [
        "  - ['c']: a layout, but no leaf",
        "  - ['kernal']: a layout, but no leaf; did you mean 'kernel'?",
        "  - ['a']: a leaf, but no layout",
        "  - ['kernel']: a leaf, but no layout; did you mean 'kernal'?",
    ]


def test_subtrees_without_leaves_need_no_layout():
    x, whole = np.zeros(8, np.float32), Layout(MESH, None)
    assert put({"w": x, "bias": None, "more": {}}, {"w": whole})["bias"] is None


def test_an_array_in_a_message_takes_one_line():
    with pytest.raises(UsageError) as caught:
        put({"w": np.zeros((8, 8), np.float32)}, {"w": ["x", None]})
    assert str(caught.value) == (
        "put: ['w']: one ndarray float32[8, 8] here, but a list of layouts; "
        "write one layout (a tuple of axis names, not a list)"
    )


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda name: WHOLE, r"function <lambda>\(name\)"),
        (lambda: WHOLE, r"function <lambda>\(\)"),
        (lambda a, b, c: WHOLE, r"function <lambda>\(a, b, c\)"),
        (lambda *, name, x: WHOLE, r"function <lambda>\(\*, name, x\)"),
        (len, r"function len\(obj, /\)"),
    ],
)
def test_a_function_of_other_arguments_is_refused_in_words(function, told):
    tree = {"a": np.ones((8, 2)), "b": np.ones((8, 2))}
    (problem,) = refused(tree, function)
    assert re.match(
        rf"\['a'\], \['b'\]: the {told} must take \(name, x\): the leaf's name", problem
    )
    with pytest.raises(UsageError, match=told):
        put(np.ones((8, 2), np.float32), function)
    with pytest.raises(UsageError, match=told):
        match_layouts({"**": function}, tree, mesh=MESH)
