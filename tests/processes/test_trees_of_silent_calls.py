"""Trees whose leaves are equal and whose nodes are not, given to calls that send nothing."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.errors import DivergenceError
from shoal.testing.cluster import Cluster


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    w: object
    scale: float = dataclasses.field(metadata={"static": True}, default=1.0)


# name → the tree of each of two processes; paths and leaves are equal
TREES = {
    "a static field": lambda x: (Scaled(x, 2.0), Scaled(x, 3.0)),
    "a list and a tuple": lambda x: ([x], (x,)),
    "a dict and an OrderedDict": lambda x: ({"w": x}, collections.OrderedDict(w=x)),
    "None at the end": lambda x: ([x, None], [x]),
    "equal": lambda x: ({"w": [x]}, {"w": [x]}),
}
CALLS = ["put", "create", "the arguments of create", "from_host_local", "relayout"]


def call(how, tree, mesh):
    if how == "put":
        shoal.put(tree, mesh)
    elif how == "create":
        shoal.create(lambda: jax.tree.map(jnp.asarray, tree), layouts=mesh)
    elif how == "the arguments of create":
        shoal.create(lambda t: jax.tree.leaves(t)[0], tree, layouts=mesh)
    elif how == "from_host_local":
        shoal.from_host_local(tree, shoal.Layout(mesh, "x"))
    else:
        placed = shoal.put(jax.tree.leaves(tree)[0], mesh)
        shoal.relayout(jax.tree.map(lambda _: placed, tree), mesh)


def play():
    mesh, odd, said = shoal.make_mesh({"x": -1}), shoal.process_index(), {}
    for how in CALLS:
        for name, trees in TREES.items():
            try:
                call(how, trees(np.ones(4, np.float32))[odd], mesh)
                shoal.barrier("compared here")
            except DivergenceError as error:
                said[how, name] = str(error)
            shoal.barrier("in step")
    return said


@pytest.fixture(scope="module")
def said():
    with Cluster(2, devices=2, start_method="fork") as cluster:
        return cluster.run(play)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("how", CALLS)
def test_trees_of_calls_that_send_nothing_are_compared(how, name, said):
    found = [one.get((how, name), "") for one in said]
    assert [bool(text) for text in found] == [name != "equal"] * 2
    if name == "a static field":
        assert all("(2.0,)" in text and "(3.0,)" in text for text in found)
