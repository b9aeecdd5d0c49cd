"""Trees taken apart: what each leaf is, who holds which box, where it is on this host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from checkpoint.saved_contents import same_bits
from collectives.trees import unreduced
from shoal.checkpoint.saving import file_images
from shoal.checkpoint.saving.request import state_lines
from shoal.checkpoint.saving.state import held_of, own_of, read_state
from shoal.checkpoint.tree import flatten
from shoal.checkpoint.tree import nodes as tree_nodes
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.checkpoint.tree.jax_nodes import JaxNodes
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.runtime.failures.comparison import shown_line


def spread(values, *spec, shape=(2, 4)):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))


def test_the_boxes_of_an_array_and_where_they_are():
    (leaf,) = read_state(spread(np.arange(16).reshape(4, 4), "x"), 1).leaves
    assert leaf.shards.origin.tolist() == [[0, 0], [2, 0]]
    assert leaf.shards.extent.tolist() == [[2, 4], [2, 4]]
    assert leaf.shards.holders == ((0,), (0,))
    assert [lies.box.origin for lies in leaf.here] == [(0, 0), (2, 0)]
    found = [words.tolist() for _, words in file_images.words_here(leaf)]
    assert found == np.arange(16).reshape(2, 2, 4).tolist()


def test_local_arrays_count_as_held_by_every_process():
    array = spread(np.arange(16).reshape(4, 4), "x")
    state = read_state({"a": array, "b": np.arange(2)}, 3)
    assert [leaf.shards for leaf in state.leaves] == [None, None]
    assert not state.is_spread
    assert [one.shards.holders for one in held_of(state, 3)] == [((0, 1, 2),)] * 2
    assert [one.shards.extent.tolist() for one in held_of(state, 3)] == [[[4, 4]], [[2]]]


def test_values_are_found_by_device_whatever_the_order_of_shards():
    (leaf,) = read_state(spread(np.arange(16).reshape(4, 4), "x"), 1).leaves
    places = [lies.place for lies in leaf.here]
    mixed = [lies._replace(place=p) for lies, p in zip(leaf.here, places[::-1], strict=True)]
    found = [
        words.tolist() for _, words in file_images.words_here(leaf._replace(here=tuple(mixed)))
    ]
    assert found == np.arange(16).reshape(2, 2, 4).tolist()
    (leaf,) = read_state(jnp.arange(3), 1).leaves
    assert file_images.words_here(leaf)[0][1].tolist() == [0, 1, 2]


def test_keys_have_the_dims_of_their_words():
    keys = jax.random.split(jax.random.key(1), (4, 2))
    whole, split = read_state([keys, spread(keys, "x")], 1).leaves
    assert (whole.record.kind, whole.record.stored_shape) == ("key", (4, 2, 2))
    assert split.shards.extent.tolist() == [[2, 2, 2]] * 2
    words = [words for _, words in file_images.words_here(split)]
    assert same_bits(np.concatenate(words), jax.random.key_data(keys))


def test_layouts_are_recorded_for_arrays_that_have_one():
    leaf, single, host = read_state(
        [spread(jnp.ones((4, 4)), "y"), jnp.ones(3), np.ones(3)], 1
    ).leaves
    assert Layout.parse(leaf.record.layout).dims == ("y", None)
    assert Layout.parse(single.record.layout).dims == (None,)
    assert host.record.layout == ""


def test_devices_in_any_order_and_uneven_meshes():
    devices = np.array(jax.devices())[[5, 2, 7, 0]]
    mesh = Mesh(devices.reshape(2, 2), ("a", "b"))
    values = np.arange(24).reshape(4, 6)
    array = jax.device_put(values, NamedSharding(mesh, P("b", "a")))
    (leaf,) = read_state(array, 1).leaves
    for box, words in file_images.words_here(leaf):
        cut = tuple(slice(a, a + n) for a, n in zip(box.origin, box.extent, strict=True))
        assert words.tolist() == values[cut].tolist()


def test_per_process_values_have_one_box_of_each():
    state = read_state({"own": PerProcess({"a": np.arange(3)}), "w": np.ones(2)}, 4)
    own = own_of(state, 2, 2, 4)
    assert (own[0].record.name, own[0].box.origin) == ("own", (2,))
    assert state.leaves[0].record.shape == ()


def test_a_per_process_value_that_cannot_be_stored_is_named():
    with pytest.raises(UsageError, match="own: "):
        read_state({"own": PerProcess({"bad": object()}), "ok": 1}, 1)


def test_state_lines_describe_each_leaf():
    array = spread(np.arange(16.0).reshape(4, 4), "x")
    tree_ = {"n": 3, "s": "x" * 300, "w": np.arange(2), "d": array, "own": PerProcess(1)}
    state = read_state(tree_, 2)
    lines = dict(
        line.partition(": ")[::2] for line in map(shown_line, state_lines(state, ("step=1",), 2))
    )
    assert list(lines)[-2:] == ["no more leaves", "tree"]
    assert lines["n"] == 'int "3"'
    assert "…" in lines["s"]
    assert lines["w"].startswith("array int64[2] = [0, 1], digest ")
    assert lines["d"].startswith("array float32[4,4]: values ")
    assert lines["own"] == "each process's own"
    assert "step=1" in lines
    assert '"keys": ["d", "n", "own", "s", "w"]' in lines["tree"]
    assert state_lines(state, ("step=1",), 1) == ("step=1",)


def test_a_digest_does_not_depend_on_where_a_value_lies():
    values = np.arange(1 << 19, dtype=np.float32)
    forms = [
        values,
        jnp.asarray(values),
        spread(values, "x"),
        spread(values, ("y", "x")),
        values[:],
    ]
    for small in (False, True):
        cut = [form[:64] if small else form for form in forms]
        lines = {state_lines(read_state([form], 2), (), 2) for form in cut}
        assert len(lines) == 1
        other = [np.where(np.arange(len(cut[0])) == 5, 9, np.asarray(cut[0])).astype(np.float32)]
        assert state_lines(read_state(other, 2), (), 2) not in lines


@jax.tree_util.register_dataclass
@dataclass
class Linear:
    w: object
    b: object


@partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["size"])
@dataclass(frozen=True, slots=True)
class Sized:
    size: int
    w: object


@jax.tree_util.register_pytree_with_keys_class
class Bag:
    """Two children of one name, and static data."""

    def __init__(self, *children, static=None):
        self.children, self.static = children, static

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("child")
        return tuple((key, child) for child in self.children), self.static

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, static=static)


@jax.tree_util.register_static
class Nothing:
    pass


def test_nodes_of_jax_are_taken_apart_and_built_again():
    value = {"l": Linear(1, [2, 3]), "b": Bag(4, 5, static=("s", 1)), "s": Sized(3, 6)}
    leaves, structure = flatten.flatten_tree(value, JaxNodes())
    names = ["/".join(map(str, path)) for path, _ in leaves]
    assert names == ["b/0", "b/1", "l/w", "l/b/0", "l/b/1", "s/w"]
    again = flatten.unflatten_tree(structure, [leaf for _, leaf in leaves], JaxNodes())
    assert (again["l"], again["s"]) == (value["l"], value["s"])
    assert (again["b"].children, again["b"].static) == ((4, 5), ("s", 1))


def test_none_and_arrays_are_leaves():
    leaves, _ = flatten.flatten_tree([None, jnp.ones(2), np.ones(2)], JaxNodes())
    assert len(leaves) == 3


def test_unbuildable_nodes_are_not_built():
    nodes = JaxNodes()
    name = f"{__name__}:Linear"
    assert nodes.build(name, flatten.Level(("w",), (1,), ())) is None  # it has two children
    assert nodes.build("no.such:Class", flatten.Level((), (), None)) is None
    assert nodes.build("builtins:dict", flatten.Level((), (), object())) is None
    assert nodes.build(f"{__name__}:Bag", flatten.Level((), (), tree_nodes.OPAQUE)) is None


HOSTILE = [
    ("Linear", ("w",), (1,), ()), ("Linear", ("w", "b", "c"), (1, 2, 3), ()),
    ("Linear", (), (), ()),
    ("Linear", ("b", "w"), (1, 2), ()), ("Linear", ("w", "b"), (1, 2), ("more",)),
    ("Linear", ("w", "b"), (1, 2), None), ("Linear", ("w", "b"), (1, 2), 5),
    ("Sized", ("w",), (1,), ()), ("Sized", ("w",), (1,), (1, 2)), ("Sized", ("w",), (1,), "xy"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "children", "static"), HOSTILE)
def test_hostile_dataclass_nodes_are_not_built(name, keys, children, static):
    """JAX itself reads beyond the end of children and static data that are too few."""
    assert JaxNodes().build(f"{__name__}:{name}", flatten.Level(keys, children, static)) is None


NATIVE = ["builtins:dict", "builtins:list", "builtins:tuple", "collections:OrderedDict"]


@pytest.mark.parametrize("name", [*NATIVE, "collections:defaultdict", "builtins:NoneType"])
@pytest.mark.parametrize("static", [None, (), ("a",), 3, "x"])
def test_hostile_container_nodes_are_not_built(name, static):
    assert JaxNodes().build(name, flatten.Level(("a",), (1,), static)) is None


@pytest.mark.parametrize("static", [-1, None, 1 << 70])
def test_deque_nodes_are_never_built(static):
    """It is a leaf to JAX, and the length of another could be none."""
    assert JaxNodes().build("collections:deque", flatten.Level(("0",), (1,), static)) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([{}], object), "Python objects"),
        (np.zeros(2, [("a", int)]), "fields"),
        (np.zeros(2, np.longdouble), "depends on the machine"),
        ({1, 2}, "is a set"),
        (range(3), "is a range"),
        (np.ma.array([1]), "masked"),
        (jax.ShapeDtypeStruct((2,), "float32"), "stands for an array"),
        (dict, "is the class dict; save its name"),
    ],
)
def test_values_that_cannot_be_saved_are_refused_by_name(value, words):
    with pytest.raises(UsageError, match=words) as caught:
        read_state({"bad": value, "ok": 1}, 1)
    assert caught.value.problems[0].startswith("bad: ")


def test_types_that_are_wrong_are_errors_of_type():
    with pytest.raises(UsageTypeError):
        read_state([{1}], 1)


def test_strides_of_one_device_are_read_in_place():
    """On CPU the host has what the device has."""
    array = jax.device_put(np.arange(8.0), SingleDeviceSharding(jax.devices()[3]))
    (leaf,) = read_state(array, 1).leaves
    ((_, words),) = file_images.words_here(leaf)
    assert words.ctypes.data == np.asarray(array.addressable_data(0)).ctypes.data


def test_arrays_whose_values_are_not_reduced_yet_are_refused():
    with pytest.raises(UsageError, match="sum: is unreduced over x: devices hold terms"):
        read_state({"sum": unreduced(), "w": np.zeros(2)}, 2)
