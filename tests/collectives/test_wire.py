"""A tree and its bytes: every bit comes back, and no line is read from data."""

import collections
import enum
import functools
import string

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from collectives.trees import DTYPES, bits_of, leaves, trees, unreduced
from shoal.collectives import wire
from shoal.collectives.leaves import ANY, LeafSpec
from shoal.errors import ShoalError, UsageError, UsageTypeError
from shoal.runtime.failures.comparison import shown_line

Pair = collections.namedtuple("Pair", "left right")


def packed(tree):
    spec, values = wire.flatten(tree, "pack")
    buffers, num_bytes = wire.pack_tree(spec, values, "pack")
    data = np.frombuffer(bytearray(b"".join(buffers)), np.uint8)
    assert len(data) == num_bytes
    return spec, data


def round_trip(tree):
    spec, data = packed(tree)
    return wire.unpack_tree(spec, data)


@given(trees())
def test_every_bit_comes_back(tree):
    back = round_trip(tree)
    assert bits_of(back) == bits_of(tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)


@given(leaves())
def test_specification_lines_are_rendered_without_data(leaf):
    (line, *_) = wire.spec_of(leaf).lines
    assert shown_line(line).startswith("the value: ")
    if isinstance(leaf, jax.Array | np.ndarray):
        abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        assert wire.spec_of(abstract).lines == wire.spec_of(leaf).lines


def test_each_bit_pattern_of_small_dtypes():
    small = [t for t in vars(ml_dtypes).values() if isinstance(t, type)]
    small = [np.dtype(t) for t in small if issubclass(t, np.generic)]
    assert len(small) >= 20
    for dtype in [*small, np.dtype("float16"), np.dtype("int8")]:
        count = 256 if dtype.itemsize == 1 else 65536
        words = np.arange(count, dtype=f"u{min(dtype.itemsize, 2)}")
        array = np.resize(words, count * dtype.itemsize // words.itemsize).view(dtype)
        back = round_trip([array, array[3]])
        assert back[0].dtype == back[1].dtype == dtype
        assert back[0].tobytes() == array.tobytes()
        assert type(back[1]) is type(array[3])
        assert np.asarray(back[1]).tobytes() == np.asarray(array[3]).tobytes()


def test_jax_arrays_of_each_dtype():
    known = 0
    with jax.enable_x64(True):
        for dtype in DTYPES:
            words = np.random.default_rng(0).integers(0, 256, 16 * dtype.itemsize, "u1")
            value = words.astype("u1").view(dtype) if dtype.kind != "b" else words > 99
            try:
                array = jax.device_put(value)
            except (TypeError, jax.errors.JaxRuntimeError):
                continue  # one that JAX does not know
            known += 1
            back = round_trip([array])[0]
            assert back.dtype == dtype
            assert back.tobytes() == np.asarray(array).tobytes()
    assert known >= 25


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16", "i8", "u2", "bfloat16"])
def test_other_byte_orders_are_converted(dtype):
    native = np.array([1, 2, -1 if dtype[0] != "u" else 3]).astype(np.dtype(dtype))
    foreign = native.byteswap().view(native.dtype.newbyteorder("S"))
    back = round_trip(foreign)
    assert back.dtype.isnative
    assert back.tobytes() == native.tobytes()
    assert wire.spec_of(foreign).lines == wire.spec_of(native).lines


def test_a_signalling_nan_of_another_byte_order_stays_one():
    native = np.array([0x7FA00001, 0xFF800123], "u4")
    foreign = native.byteswap().view("f4").view(np.dtype("f4").newbyteorder("S"))
    assert round_trip(foreign).view("u4").tolist() == native.tolist()


def test_lines():
    tree = {
        "a": [np.zeros((3, 4), "f4"), 5, "x", None],
        "b": Pair(jnp.zeros((), jnp.bfloat16), jax.random.key(0)),
        "c": (np.float32(1), 1.5, b"", True, 2j, jax.random.split(jax.random.key(0, impl="rbg"))),
    }
    lines = tuple(map(shown_line, wire.spec_of(tree).lines))
    assert lines[:12] == (
        "['a'][0]: float32[3,4]",
        "['a'][1]: int",
        "['a'][2]: str",
        "['a'][3]: None",
        "['b'].left: bfloat16[]",
        "['b'].right: key<threefry2x32>[]",
        "['c'][0]: np.float32",
        "['c'][1]: float",
        "['c'][2]: bytes",
        "['c'][3]: bool",
        "['c'][4]: complex",
        "['c'][5]: key<rbg>[2]",
    )
    assert lines[12] == "no more leaves"
    assert all(line.startswith("tree: ") for line in lines[13:])
    assert "namedtuple[Pair]" in lines[13]


def test_different_tree_nodes_have_different_lines():
    trees = [[1, 2], (1, 2), [[1, 2]], Pair(1, 2), [1, None], [1, ()], {"a": 1}, None, []]
    assert len({wire.spec_of(tree).lines for tree in trees}) == len(trees)


class Box:
    def __init__(self, value, label):
        self.value, self.label = value, label


jax.tree_util.register_pytree_node(
    Box, lambda box: ((box.value,), box.label), lambda label, values: Box(*values, label)
)


def test_addresses_and_the_order_of_sets_are_no_differences():
    def told(label):
        return wire.spec_of(Box(1, label)).lines

    one, other = (functools.partial(lambda: None) for _ in range(2))
    assert repr(one) != repr(other)
    assert told(one) == told(other)
    assert told(Text("{'a', 'b'}")) == told(Text("{'b', 'a'}"))
    assert told(Text("{'a', 'b'}")) != told(Text("{'a', 'c'}"))
    assert told("a") != told("b")
    assert len(told(string.printable * 5)) > 3  # a long text takes several lines


class Text(str):
    __repr__ = str.__str__  # as a set shows itself


def test_static_data_of_several_lines_are_one_line():
    spec = wire.spec_of(Box(1, Text("Config(\n    width=3,\n)")))
    assert "Config( width=3, )" in shown_line(spec.lines[-1])


class Colour(enum.IntEnum):
    RED = 1


def test_unsupported_leaves_are_refused_together_by_path():
    tree = {
        "a": np.array([{}]),
        "b": [object(), np.zeros(2, "V8"), np.array([None])],
        "c": Colour.RED,
        "d": np.longdouble(1),
        "e": np.ma.masked_array([1.0]),
        "f": np.zeros(2, [("x", "f4")]),
        "g": np.void(b"x"),
        "h": {1, 2},
    }
    with pytest.raises(UsageTypeError) as caught:
        wire.spec_of(tree, "broadcast")
    assert str(caught.value).startswith("broadcast: 10 problems\n  - ['a']: has dtype object")
    for words in ("['b'][0]: is an object", "['c']: is a Colour", "['e']: is a masked array"):
        assert words in str(caught.value)


def test_tracers_and_deleted_arrays_are_refused():
    with pytest.raises(UsageTypeError, match="inside jit"):
        jax.jit(lambda x: wire.spec_of([x]))(1.0)
    array = jnp.arange(3)
    array.delete()
    with pytest.raises(UsageError, match="was deleted"):
        wire.spec_of([array])


def test_arrays_whose_values_are_not_reduced_yet_are_refused():
    with pytest.raises(UsageError, match="is unreduced over x: devices hold terms"):
        wire.spec_of([unreduced()])


def test_keys_that_cannot_be_sorted_are_refused():
    with pytest.raises(UsageError, match=r"broadcast: not a pytree: '<' not supported between"):
        wire.spec_of({1: 0, "a": 0}, "broadcast")


def test_concrete_values_are_sent_while_jit_traces():
    tree, back = [jax.random.key(3), jnp.arange(3), np.arange(2), 1], []

    def traced(x):
        back.append(round_trip(tree))
        return x

    jax.jit(traced)(1)
    assert bits_of(back[0]) == bits_of(tree)


def test_an_abstract_shape_has_no_bits():
    spec, values = wire.flatten([jax.ShapeDtypeStruct((2,), "float32")], "x")
    with pytest.raises(UsageError, match=r"x: \[0\]: stands for an array"):
        wire.pack_tree(spec, values, "x")


def test_contiguous_memory_is_not_copied():
    array, whole = np.arange(12.0).reshape(3, 4), jnp.arange(1000.0)
    tree = [array, array.T, whole]
    buffers, _ = wire.pack_tree(*wire.flatten(tree, "x"), "x")
    assert np.shares_memory(np.asarray(buffers[0]), array)
    assert not np.shares_memory(np.asarray(buffers[1]), array)
    assert np.shares_memory(np.asarray(buffers[2]), np.asarray(whole))


def test_arrays_lie_where_they_can_be_used():
    back = round_trip(["x", np.zeros(3, "c16"), b"yz", np.ones(2, "f8")])
    assert all(array.flags.aligned and array.flags.writeable for array in (back[1], back[3]))


def test_data_of_another_tree_is_refused():
    spec, data = packed([np.zeros(3), "abc"])
    for wrong in (data[:-1], np.append(data, np.uint8(0))):
        with pytest.raises(ShoalError, match="a bug"):
            wire.unpack_tree(spec, wrong)


def test_a_leaf_whose_rows_differ():
    leaf = LeafSpec("x", "array", np.dtype("f4"), (ANY, 4))
    assert shown_line(leaf.line) == "x: float32[*,4]"
    assert leaf.is_open
    assert leaf.num_bytes(3) == 48


def test_an_array_over_several_devices_is_read_whole():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    value = np.arange(32.0, dtype="f4").reshape(8, 4)
    for spec in (("x", "y"), ("y",), (), (("x", "y"), None), (None, "x")):
        placed = jax.device_put(value, jax.NamedSharding(mesh, jax.P(*spec)))
        assert round_trip([placed])[0].tobytes() == value.tobytes()
        assert not hasattr(placed, "_npy_value") or placed._npy_value is None
    keys = jax.random.split(jax.random.key(3), 8)
    placed = jax.device_put(keys, jax.NamedSharding(mesh, jax.P("x")))
    assert bits_of(round_trip(placed)) == bits_of(keys)
