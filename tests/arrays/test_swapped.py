"""Arguments the wrong way round, and trees that JAX cannot flatten, are refused in words."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

import shoal

VALUE = np.ones((8, 4), np.float32)


@pytest.fixture
def rows():
    return NamedSharding(shoal.make_mesh({"data": 8}), P("data"))


@pytest.mark.parametrize("verb", ["put", "from_host_local", "to_host_local", "relayout",
                                  "constrain"])  # fmt: skip
@pytest.mark.parametrize("in_tree", [False, True])
def test_layouts_before_values(verb, in_tree, rows):
    for layout in (rows, rows.spec, rows.mesh, shoal.Layout(rows.mesh, "data")):
        given = [{"w": layout}, {"w": VALUE}] if in_tree else [layout, VALUE]
        with pytest.raises(shoal.UsageError, match=f"{verb}: (.|\n)*the values come first"):
            getattr(shoal, verb)(*given)


def test_a_layout_before_a_function_and_a_source(rows):
    with pytest.raises(shoal.UsageError, match="must be a function, not NamedSharding") as caught:
        shoal.create(rows, lambda: jnp.ones(8))
    assert "\n" not in str(caught.value)
    with pytest.raises(shoal.UsageError, match=r"feed: ndarray float32\[8, 4\] is not a layout"):
        shoal.feed(rows, VALUE)


def test_a_tree_before_its_path(tmp_path, rows):
    tree = {"w": shoal.put(VALUE, rows)}
    with pytest.raises(shoal.UsageError, match=r"pathlib.Path; write save\(path, tree\)") as caught:
        shoal.save(tree, tmp_path / "x")
    assert "\n" not in str(caught.value)
    with pytest.raises(shoal.UsageError, match=r"write restore\(path, target\)"):
        shoal.restore({"w": rows}, tmp_path / "x")


def test_shapes_before_rules_and_a_spec_without_a_mesh(rows):
    with pytest.raises(shoal.UsageError, match=r"rule 'w': array.* is not a layout") as caught:
        shoal.match_layouts({"w": VALUE}, {"**": P()}, mesh=rows.mesh)
    assert "\n" not in str(caught.value)
    with pytest.raises(shoal.UsageError, match=r"write shoal.Layout\(mesh, P\('data',\)\)"):
        shoal.layout_of(rows.spec)


@pytest.mark.parametrize("verb", [
    lambda tree, rows: shoal.put(tree, rows),
    lambda tree, rows: shoal.from_host_local(tree, rows),
    lambda tree, rows: shoal.allgather(tree),
])  # fmt: skip
def test_keys_of_several_types(verb, rows):
    with pytest.raises(shoal.UsageError, match="give all keys of a dict one type"):
        verb({1: VALUE, "a": VALUE}, rows)
