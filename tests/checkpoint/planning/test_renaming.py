"""Which `rename=` would find subtrees that bear another name: against trying them all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shoal
from shoal.checkpoint.planning.renaming import renames, subtrees
from shoal.checkpoint.restoring.target import TargetOptions
from shoal.errors import RestoreMismatchError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
PARTS = st.lists(st.sampled_from(["a", "b", "c", "w"]), min_size=1, max_size=4)


def leaves_only(names):
    """Leave out names that are prefixes of others: they cannot be leaves."""
    return {n for n in names if not any(one.startswith(f"{n}/") for one in names)}


NAMES = st.lists(PARTS.map("/".join), max_size=8).map(lambda n: sorted(leaves_only(set(n))))


def parts_of(target, saved):
    """Return what is missing, unexpected, and found."""
    return set(target) - set(saved), set(saved) - set(target), set(target) & set(saved)


def finds(target, saved, mapping):
    """Return how many leaves a rename finds that were missing; None: it loses one, or doubles."""
    _, _, found = parts_of(target, saved)
    names = [TargetOptions(rename=mapping).stored_name(name) for name in target]
    if any(name not in names for name in found) or any(
        new != old for old, new in zip(target, names, strict=True) if old in found
    ):
        return None
    there = [name for name in names if name in set(saved)]
    return None if len(there) > len(set(there)) else len(there) - len(found)


def any_shape(names):
    return dict.fromkeys(sorted(names))


@given(NAMES, NAMES)
def test_proposed_renames_find_leaves_and_lose_none(target, saved):
    missing, unexpected, found = parts_of(target, saved)
    mapping = renames(any_shape(missing), any_shape(unexpected), found)
    count = finds(target, saved, mapping)
    assert count is not None
    assert (count > 0) == bool(mapping)
    for prefix in mapping:  # each of them is of use
        less = {one: other for one, other in mapping.items() if one != prefix}
        assert (finds(target, saved, less) or 0) < count


@given(NAMES, NAMES)
@example(["a/a"], ["a", "b/a"])  # either may be it
def test_if_one_prefix_finds_all_so_does_it(target, saved):
    """Brute force: all prefixes of what is missing and of what is there; names, which compete."""
    missing, unexpected, found = parts_of(target, saved)
    if not missing:
        return

    def prefixes(names, whole):
        paths = [name.split("/") for name in names]
        return {"/".join(path[:end]) for path in paths for end in range(len(path) + whole)}

    def moved(name, one, other):
        return "/".join(part for part in (other, name.removeprefix(one).strip("/")) if part)

    def places(whole):
        """Return where all that is missing may be."""
        pairs = itertools.product(prefixes(missing, whole), prefixes(unexpected, whole))
        return {
            tuple(moved(name, one, other) for name in sorted(missing))
            for one, other in pairs
            if finds(target, saved, {one: other}) == len(missing)
        }

    if places(whole=0) and len(places(whole=1)) == 1:
        mapping = renames(any_shape(missing), any_shape(unexpected), found)
        assert finds(target, saved, mapping) == len(missing)


@given(NAMES, PARTS.map("/".join), st.data())
def test_a_subtree_that_was_renamed(saved, fresh, data):
    """Its new name was nowhere before: one rename finds all of it."""
    inner = {"/".join(n.split("/")[:e]) for n in saved for e in range(1, n.count("/") + 1)}
    if not inner:
        return
    prefix = data.draw(st.sampled_from(sorted(inner)))
    fresh = f"new_{fresh}"
    target = [
        fresh + name[len(prefix) :] if name.startswith(f"{prefix}/") else name for name in saved
    ]
    missing, unexpected, found = parts_of(target, saved)
    mapping = renames(any_shape(missing), any_shape(unexpected), found)
    assert finds(target, saved, mapping) == len(missing)
    assert len(mapping) == 1


@given(NAMES, NAMES)
def test_subtrees_of_which_nothing_is_wanted(target, saved):
    _, unexpected, _ = parts_of(target, saved)
    tops = subtrees(unexpected, saved)
    brute = []
    for name in sorted(
        {"/".join(n.split("/")[:e]) for n in saved for e in range(1, n.count("/") + 1)}
    ):
        below = [one for one in saved if one.startswith(f"{name}/")]
        if set(below) <= unexpected and not any(name.startswith(f"{one}/") for one in brute):
            brute.append(name)
    assert tops == sorted(brute)


def test_equal_names_are_distinguished_by_shape():
    saved = {"a/w": (2,), "b/w": (3,)}
    assert renames({"x/w": (3,)}, saved, []) == {"x": "b"}
    assert renames({"x/w": (4,)}, saved, []) == {}


def test_thousands_of_leaves_take_no_time():
    """Names that all end alike are not all compared: the work has a bound."""
    layers = [f"{n}/{part}/{leaf}" for n in range(1000) for part in "qkvo" for leaf in "wb"]
    missing = any_shape([*(f"enc/layer{one}" for one in layers), "enc/new"])
    saved = any_shape(f"encoder/layer{one}" for one in layers)
    assert renames(missing, saved, ["step"]) == {"enc": "encoder"}
    other = any_shape(f"encoder/block{one}" for one in layers)
    assert renames(missing, other, ["step"]) == {}, "no few prefixes say it"


# ---- as a user meets it


def tree(name, layers=30):
    rows = [{"w": np.ones((2, 2)), "b": np.zeros(2)} for _ in range(layers)]
    return {"params": {name: rows, "head": np.ones(3)}, "step": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("renaming") / "saved"
    shoal.save(where, tree("encoder"))
    return where


def told(path, target, **options):
    with pytest.raises(RestoreMismatchError) as caught:
        shoal.restore(path, target, **options)
    return caught.value


def test_a_renamed_subtree_is_one_line_and_the_rename(path):
    target = tree("enc")
    error = told(path, target)
    assert len(error.missing) == len(error.unexpected) == 60
    assert str(error).splitlines()[0] == (
        "restore: the target does not match the checkpoint: params/enc: 60 leaves below it are "
        "not in the checkpoint, which has such leaves below params/encoder, as "
        "params/encoder/0/b (float64[2]): rename={'params/enc': 'params/encoder'} takes those"
    )
    assert len(str(error)) < 300
    back = shoal.restore(path, target, rename={"params/enc": "params/encoder"})
    assert back["params"]["enc"][29]["w"].tolist() == [[1, 1], [1, 1]]


def test_several_renames_are_proposed_beside_other_problems(tmp_path):
    saved = {"a": {"x": 1, "y": 2}, "b": {"z": 3, "u": 4}, "gone": 5}
    shoal.save(tmp_path / "one", saved)
    error = told(tmp_path / "one", {"aa": saved["a"], "bb": saved["b"], "new": 6})
    assert "aa: 2 leaves below it are not in the checkpoint" in str(error)
    assert "all of these: rename={'aa': 'a', 'bb': 'b'}" in str(error)
    assert "new: is not in the checkpoint" in str(error)
    assert "gone: is in the checkpoint, not in the target; only='!gone' leaves it out" in str(error)
    assert "\nonly='!new' keeps what the target has there" in str(error)
    assert error.missing == ("aa/x", "aa/y", "bb/u", "bb/z", "new")


def test_a_tree_that_lies_deeper_or_higher(path, tmp_path):
    error = told(path, {"model": tree("encoder")})
    assert "rename={'model': ''} takes those" in str(error)
    shoal.restore(path, {"model": tree("encoder")}, rename={"model": ""})
    shoal.save(tmp_path / "deep", {"model": tree("encoder")})
    error = told(tmp_path / "deep", tree("encoder"))
    assert "the tree: 62 leaves are not in the checkpoint" in str(error)
    assert "rename={'': 'model'} takes those" in str(error)
    shoal.restore(tmp_path / "deep", tree("encoder"), rename={"": "model"})


def test_a_layout_for_a_subtree_of_another_name(path):
    layout = {"params": {"enc": Layout(MESH, None), "head": 0}, "step": 0}
    assert "rename={'params/enc': 'params/encoder'} takes those" in str(told(path, layout))
    layout = {"params": {"enc": Layout(MESH, None), "dec": Layout(MESH, None)}, "step": 0}
    error = told(path, layout)
    assert "params/enc: is not in the checkpoint; did you mean 'params/encoder'?" in str(error)


def test_beside_a_rename_of_the_users_own(path):
    target = {"model": tree("enc")["params"], "step": 1}
    error = told(path, target, rename={"model": "params"})
    mapping = {"model": "params", "model/enc": "params/encoder"}
    assert f"rename={mapping} takes those" in str(error)
    shoal.restore(path, target, rename=mapping)
    error = told(path, target, rename=lambda name: name.replace("model", "params"))
    assert "rename=" not in str(error)


@pytest.mark.parametrize("name", ["w", "the leaves of it"])
def test_renaming_of_a_single_leaf_is_shown_as_one(tmp_path, name):
    shoal.save(tmp_path / "one", {"a": {name: np.ones(2), "b": 1}})
    error = told(tmp_path / "one", {"a": {"b": 1}, "c": {name: np.ones(2)}})
    assert (
        f"c/{name}: is not in the checkpoint, which has a/{name} (float64[2]): "
        "rename={'c': 'a'} takes that" in str(error)
    )


PARAMETERS = {"dense/w": (8, 4), "dense/b": (4,), "out/w": (4, 2), "out/b": (2,)}


def below(prefix, names=PARAMETERS):
    return {f"{prefix}/{name}": shape for name, shape in names.items()}


def nested(shapes):
    """Return a tree of dicts with such leaves."""
    tree = {}
    for name, shape in shapes.items():
        *parents, last = name.split("/")
        node = tree
        for one in parents:
            node = node.setdefault(one, {})
        node[last] = np.zeros(shape)
    return tree


ADAM = below("opt/0/mu") | below("opt/0/nu") | {"opt/0/count": ()}
SGD = below("opt/0/trace")
OUT = {name: shape for name, shape in PARAMETERS.items() if name.startswith("out")}
DENSE = {name: shape for name, shape in PARAMETERS.items() if name not in OUT}
BOTH = below("s/0/trace", DENSE) | below("a/0/mu", OUT) | below("a/0/nu", OUT) | {"a/0/count": ()}


@pytest.mark.parametrize(
    ("target", "saved", "mapping"),
    [
        (SGD, ADAM, {}),  # is the trace the first moment, or the second?
        (ADAM, SGD, {}),  # and which of them is the trace?
        (BOTH, ADAM, {"a": "opt"}),
        (ADAM, {f"chain/{name}": shape for name, shape in ADAM.items()}, {"opt": "chain/opt"}),
        (below("a"), below("b") | below("c"), {}),
        (below("a") | below("d"), below("b"), {}),
        (below("a"), below("b") | {"c/dense/w": (8, 4)}, {"a": "b"}),
        ({"a/w": (3,)}, {"b/w": (3,), "c/w": (4,)}, {"a": "b"}),
        ({"a/w": (3,)}, {"b/w": (3,), "c/w": (3,)}, {}),
    ],
)
def test_ambiguous_renames_are_not_proposed(target, saved, mapping, tmp_path):
    assert renames(target, saved, ["step"]) == mapping
    shoal.save(tmp_path / "c", nested(saved))
    with pytest.raises(RestoreMismatchError) as caught:
        shoal.restore(tmp_path / "c", nested(target))
    assert ("rename=" in str(caught.value)) == bool(mapping)
    assert "did you mean" not in str(caught.value)
