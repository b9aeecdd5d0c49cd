"""One table of rules → a layout for every leaf of a tree."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shoal
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.match_layouts import match_layouts
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.patterns import matches

MESH = Mesh({"data": 4, "model": 2})


class Adam(NamedTuple):
    count: object
    mu: object
    nu: object


class Empty(NamedTuple):
    """A state without leaves, as optimizers chain them."""


def init(key):
    kernels = jax.random.split(key, 2)
    params = {
        "layers": [
            {"kernel": jax.random.normal(k, (8, 16)), "bias": jnp.zeros(16)} for k in kernels
        ],
        "embed": jnp.zeros((12, 8)),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "opt": (Adam(jnp.zeros((), jnp.int32), zeros, zeros), Empty())}


SHAPES = jax.eval_shape(init, jax.random.key(0))
TABLE = {"**/kernel": ("data", "model"), "**/bias": "model", "**/embed": (None, "data")}


def test_one_table_serves_parameters_and_the_state_of_the_optimizer():
    matched = match_layouts(TABLE, SHAPES, mesh=MESH)
    assert jax.tree.structure(matched) == jax.tree.structure(SHAPES)
    for params in (matched["params"], matched["opt"][0].mu, matched["opt"][0].nu):
        assert params["layers"][1] == {
            "kernel": Layout(MESH, "data", "model"),
            "bias": Layout(MESH, "model"),
        }
        assert params["embed"] == Layout(MESH, None, "data")
    assert matched["opt"][0].count == Layout(MESH)


def test_the_result_goes_wherever_layouts_are_taken(tmp_path):
    matched = match_layouts(TABLE, SHAPES, mesh=MESH)
    state = shoal.create(init, jax.random.key(0), layouts=matched)
    targets = jax.tree.map(sharding_of, matched)
    whole = match_layouts({"**": ()}, SHAPES, mesh=MESH)
    moved = [
        shoal.put(jax.tree.map(np.asarray, state), matched),
        shoal.relayout(shoal.relayout(state, whole), matched),
        jax.jit(lambda x: x, out_shardings=targets)(state),
    ]
    shoal.save(tmp_path / "state", state)
    moved.append(shoal.restore(tmp_path / "state", matched))
    for tree in moved:
        assert jax.tree.map(layout_of, tree) == matched
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, tree, state)))


def test_the_first_rule_that_matches_decides():
    rules = [("params/layers/1/kernel", ()), ("**/kernel", ("data",)), ("**", ())]
    matched = match_layouts(rules, SHAPES, mesh=MESH)
    kernels = [layer["kernel"].dims for layer in matched["params"]["layers"]]
    assert kernels == [("data",), ()]
    assert matched["params"]["embed"].is_replicated


def test_layouts_are_given_in_every_form():
    other = Mesh({"x": 8})
    shapes = {name: jax.ShapeDtypeStruct((8, 4), np.float32) for name in "abcdef"}
    rules = {
        "a": Layout(other, "x", None),
        "b": sharding_of(Layout(other, "x", None)),
        "c": P(("data", "model")),
        "d": "data",
        "e": lambda path, leaf: (None, "data") if (path, leaf.shape) == ("e", (8, 4)) else None,
        "f": None,
    }
    with use_mesh(MESH):
        matched = match_layouts(rules, shapes)
    assert matched == {
        "a": Layout(other, "x", None),
        "b": Layout(other, "x", None),
        "c": Layout(MESH, ("data", "model")),
        "d": Layout(MESH, "data"),
        "e": Layout(MESH, None, "data"),
        "f": Layout(MESH),
    }
    jaxs = sharding_of(Layout(MESH)).mesh
    assert match_layouts({"**": ()}, shapes, mesh=jaxs)["a"] == Layout(MESH)


def test_leaves_without_dims_need_no_rule_and_lie_on_the_mesh_of_theirs():
    other = Mesh({"x": 8})
    shapes = {"a": {"w": jnp.ones((8, 2)), "n": 0}, "b": {"w": jnp.ones((8, 2)), "n": jnp.int32(0)}}
    rules = {"a/**": Layout(other, "x", None), "b/w": ("data", None)}
    matched = match_layouts(rules, shapes, mesh=MESH)
    assert (matched["a"]["n"], matched["b"]["n"]) == (Layout(other), Layout(MESH))
    assert match_layouts({"**": ("data", "model")}, {"n": 0}, mesh=MESH) == {"n": Layout(MESH)}


def test_the_mesh_of_the_layouts_is_that_of_the_names_if_there_is_one():
    shapes = {"a": jnp.ones((8, 2)), "b": jnp.ones(8)}
    rules = {"a": Layout(MESH, "data", None), "b": "data"}
    assert match_layouts(rules, shapes)["b"] == Layout(MESH, "data")
    with pytest.raises(UsageError, match="rules without a mesh need one: pass mesh="):
        match_layouts({"**": ()}, shapes)
    with pytest.raises(UsageTypeError, match="'data' must be a "):
        match_layouts(rules, shapes, mesh="data")


def test_a_single_leaf_is_matched_by_two_stars():
    assert match_layouts({"**": "data"}, jnp.ones(8), mesh=MESH) == Layout(MESH, "data")


def test_match_layouts_reports_every_problem_at_once():
    tree = {
        "dense": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(5)},
        "embed": [jnp.ones((7, 3)), jnp.ones(3)],
        "name": "x",
        "shape": (3, 4),
    }
    rules = {
        "**/kernal": (),
        "**/kernel": ("data", "modl"),
        "kernel": (),
        r".*bias": (),
        "**/bias": "data",
        "dense/*": (),
    }
    with pytest.raises(UsageError) as caught:
        match_layouts(rules, tree, mesh=MESH)
    said = caught.value.problems
    assert len(said) == 9
    text = "\n".join(said)
    for words in (
        "dense/kernel: Layout('data', 'modl') on",
        "did you mean 'model'?",
        "embed/0, embed/1: no rule matches; '**': () at the end replicates all other leaves",
        "name: a str has no shape",
        "shape: (3, 4) are numbers, not a shape: pass jax.ShapeDtypeStruct((3, 4), dtype)",
        "dense/bias: dim 0 of (5,) has size 5, which 4 shards (data=4) do not divide; 4 or 8",
        "rule '**/kernal': matches nothing; did you mean '**/kernel'?",
        "rule 'kernel': matches nothing; did you mean '**/kernel'?",
        "rule '.*bias': matches nothing; patterns are not regular expressions",
        "rule 'dense/*': earlier rules already match every leaf that it matches ('**/bias' "
        "takes 'dense/bias')",
    ):
        assert words in text, words


def test_many_leaves_with_one_fault_are_named_in_one_line():
    tree = {f"w{n:02}": jnp.ones((8, 2)) for n in range(30)}
    with pytest.raises(UsageError, match=r"w00, .*, w07 and 22 more: no rule matches"):
        match_layouts({}, tree, mesh=MESH)


def test_rules_may_decide_nothing_where_a_table_serves_several_trees():
    params = SHAPES["params"]
    with pytest.raises(UsageError, match="rule 'opt/\\*\\*': matches nothing"):
        match_layouts({**TABLE, "opt/**": ()}, params, mesh=MESH)
    matched = match_layouts({**TABLE, "opt/**": ()}, params, mesh=MESH, all_rules=False)
    assert matched == match_layouts(TABLE, SHAPES, mesh=MESH)["params"]
    with pytest.raises(UsageTypeError, match="all_rules=1 must be"):
        match_layouts(TABLE, params, mesh=MESH, all_rules=1)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("**/w", "must map patterns to layouts"),
        ({3: ()}, "3 is not a pattern such as"),
        ({"": ()}, "'' is not a pattern"),
        ([("w",)], "must be a pair of a pattern and a layout"),
        ({"[z-a]": ()}, "the characters in \\[ \\] are not a valid range"),
        ({"w": ["data", None]}, "\\['data', None\\] is not a layout; pass a tuple"),
        ({"w": {"b": ()}}, "is not a layout"),
    ],
)
def test_rules_that_are_none(rules, words):
    with pytest.raises(UsageError, match=words):
        match_layouts(rules, {"w": jnp.ones((8, 4))}, mesh=MESH)


@pytest.mark.parametrize("given", [P("data", None, None), ("data", None, None),
                                   Layout.replicated(MESH, 3), lambda path, leaf: 3])  # fmt: skip
def test_layouts_that_do_not_fit_a_leaf(given):
    with pytest.raises(UsageError, match=r"match_layouts: a/w: "):
        match_layouts({"a/w": given}, {"a": {"w": jnp.ones((8, 4))}}, mesh=MESH)


def test_pending_sums_are_no_layout_of_a_parameter():
    explicit = Mesh({"x": 8}, axis_types="explicit")
    pending = Layout(explicit, None, partial={"x": "sum"})
    with pytest.raises(UsageError, match="values are never partial: leave it out"):
        match_layouts({"w": pending}, {"w": jnp.ones(8)})


WORDS = st.sampled_from(["a", "b", "w"])
PATHS = st.lists(WORDS, min_size=1, max_size=3)
RULES = st.lists(st.lists(WORDS | st.sampled_from(["*", "**"]), min_size=1, max_size=3), max_size=5)


def by_hand(pattern, path):
    """Match component by component."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(by_hand(pattern[1:], path[n:]) for n in range(len(path) + 1))
    return bool(path) and pattern[0] in ("*", path[0]) and by_hand(pattern[1:], path[1:])


@given(PATHS, PATHS, RULES)
def test_rules_decide_as_by_hand(one, other, rules):
    tree: dict = {}
    for path in (one, other):
        node = tree
        for part in path:
            node = node.setdefault(f"{part}", {})
        node["leaf"] = jax.ShapeDtypeStruct((8,), np.float32)
    choices = [None, "data", "model", ("data", "model"), ("model", "data")]
    table = [("/".join([*rule, "leaf"]), (choices[n],)) for n, rule in enumerate(rules)]
    matched = match_layouts([*table, ("**", "data")], tree, mesh=MESH, all_rules=False)
    for path, layout in jax.tree_util.tree_flatten_with_path(matched)[0]:
        parts = [key.key for key in path]
        first = next(
            (n for n, rule in enumerate(rules) if by_hand([*rule, "leaf"], parts)), len(rules)
        )
        wanted = (choices[first],) if first < len(rules) else ("data",)
        assert layout == Layout(MESH, *wanted)
    name = "/".join(one)
    assert all(matches("/".join(r), name) == by_hand(r, one) for r in rules)


def test_a_function_that_ends_without_a_word_decides_nothing():
    shapes = {"w": jax.ShapeDtypeStruct((8, 4), np.float32)}
    with pytest.raises(UsageError, match=r"w: the function .*<lambda> returned None; \(\) splits"):
        match_layouts({"**": lambda path, leaf: None}, shapes, mesh=MESH)
    assert match_layouts({"**": lambda path, leaf: ()}, shapes, mesh=MESH)["w"].is_replicated


def test_a_rule_in_other_names_is_shown_how_leaves_are_called():
    shapes = {"a": [jax.ShapeDtypeStruct((8, 4), np.float32)]}
    with pytest.raises(UsageError, match=r"matches nothing; did you mean 'a/0'\?"):
        match_layouts({"['a'][0]": (), "**": ()}, shapes, mesh=MESH)


def test_the_path_of_a_leaf_is_a_rule_for_it_alone():
    shapes = {name: jax.ShapeDtypeStruct((8, 4), np.float32) for name in ("w[0]", "w0", "w[z-a]")}
    matched = match_layouts({"w[0]": "data", "w[z-a]": "model", "**": ()}, shapes, mesh=MESH)
    assert [matched[name].dims for name in shapes] == [("data",), (), ("model",)]
    with pytest.raises(UsageError, match=r"rule 'v\[z-a\]': .* are not a valid range"):
        match_layouts({"v[z-a]": "data", "**": ()}, shapes, mesh=MESH, all_rules=False)
    with pytest.raises(UsageError, match=r"rule 'dense': .*; did you mean 'dense/\*\*'\?"):
        match_layouts({"dense": (), "**": ()}, {"dense": shapes}, mesh=MESH)
