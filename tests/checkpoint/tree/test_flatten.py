"""Trees: every kind of node comes back, in order, by name; others go through a registry."""

import sys
from collections import OrderedDict, defaultdict, namedtuple
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.tree import flatten, nodes
from shoal.checkpoint.tree.names import name_of
from shoal.errors import CorruptCheckpointError, UsageError, UsageTypeError

Point = namedtuple("Point", ["x", "y"])


class Typed(NamedTuple):
    a: int
    b: object = None


KEYS = st.text(max_size=3) | st.integers(-3, 3) | st.none() | st.binary(max_size=2)
LEAVES = st.integers() | st.text(max_size=3) | st.none() | st.just(2.5)


def branches(inner):
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(list, d))
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
        | st.tuples(inner, inner).map(lambda pair: Typed(*pair))
    )


TREES = st.recursive(LEAVES, branches, max_leaves=12)


def types_of(value):
    if isinstance(value, dict):
        inner = [types_of(one) for one in value.values()]
    elif isinstance(value, list | tuple):
        inner = [types_of(one) for one in value]
    else:
        return type(value)
    return type(value), inner


@pytest.fixture(autouse=True)
def _find_me():
    """This file is imported under no name of its own; classes are found by their module."""
    module = sys.modules.get(__name__)
    sys.modules[__name__] = module or type(sys)(__name__)
    vars(sys.modules[__name__]).update(Point=Point, Typed=Typed)


@given(TREES)
def test_trees_come_back(value):
    leaves, structure = flatten.flatten_tree(value)
    again, count = nodes.decode_structure(nodes.encode_structure(structure), "m")
    assert again == structure
    assert count == nodes.num_leaves(structure) == len(leaves)
    built = flatten.unflatten_tree(again, [leaf for _, leaf in leaves])
    assert built == value
    assert repr(types_of(built)) == repr(
        types_of(flatten.unflatten_tree(structure, [x for _, x in leaves]))
    )
    assert nodes.names_of(structure) == [name_of(path) for path, _ in leaves]
    assert len(set(nodes.names_of(structure))) == len(leaves)


def test_the_order_of_a_dict_is_not_kept_and_that_of_an_ordered_dict_is():
    one, two = {"b": 1, "a": 2, 3: 3}, {3: 3, "a": 2, "b": 1}
    assert flatten.flatten_tree(one) == flatten.flatten_tree(two)
    assert nodes.names_of(flatten.flatten_tree(one)[1]) == ["a", "b", "~i3"]
    ordered = OrderedDict([("b", 1), ("a", 2)])
    leaves, structure = flatten.flatten_tree(ordered)
    assert leaves == [(("b",), 1), (("a",), 2)]
    assert list(flatten.unflatten_tree(structure, [1, 2])) == ["b", "a"]


def test_all_bad_keys_are_named_at_once():
    bad = {"a": {1j: 0, frozenset(): 1}, "b": [{(): 1, object: 2}]}
    with pytest.raises(UsageTypeError) as error:
        flatten.flatten_tree(bad, operation="save")
    text = str(error.value)
    assert text.startswith("save: 3 problems")
    assert "a: has a key of type complex" in text
    assert "b/0: has a key of type type" in text


def test_two_nans_are_one_key():
    with pytest.raises(UsageError, match="has the key nan twice"):
        flatten.flatten_tree({float("nan"): 1, float("nan"): 2})


def test_trees_without_end_are_refused():
    within: list[object] = []
    within += [within, within, {"a": within}]
    with pytest.raises(UsageError, match="contains itself"):
        flatten.flatten_tree({"loop": within})
    deep: object = 1
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(UsageError, match="nested deeper than 100"):
        flatten.flatten_tree(deep)
    shared = [1, 2]
    assert len(flatten.flatten_tree([shared, shared])[0]) == 4


def test_files_nest_no_deeper_than_trees():
    deep: object = 0
    for _ in range(100):
        deep = {"kind": "list", "children": [deep]}
    assert nodes.decode_structure(deep, "m")[1] == 1
    with pytest.raises(CorruptCheckpointError, match="nested deeper than 100"):
        nodes.decode_structure({"kind": "list", "children": [deep]}, "m")


def test_values_that_are_not_nodes_are_leaves():
    array = np.arange(3)
    assert flatten.flatten_tree(array)[0][0][1] is array
    assert flatten.flatten_tree(None) == ([((), None)], 0)
    assert nodes.names_of(0) == ["~"]
    stops = flatten.flatten_tree([(1, 2), [3]], is_leaf=lambda value: isinstance(value, tuple))[0]
    assert stops == [(("0",), (1, 2)), (("1", "0"), 3)]
    assert flatten.flatten_tree([], is_leaf=lambda value: True) == ([((), [])], 0)


class Box:
    def __init__(self, w, b, config):
        self.w, self.b, self.config = w, b, config


class Boxes:
    """A registry that knows Box."""

    def __init__(self, may_build=True):
        self.may_build = may_build

    def flatten(self, value):
        return (
            flatten.Level(("w", "b"), (value.w, value.b), value.config)
            if isinstance(value, Box)
            else None
        )

    def build(self, type_name, level):
        if not self.may_build or not type_name.endswith(":Box") or level.static is nodes.OPAQUE:
            return None
        assert level.keys == ("w", "b")
        return Box(*level.children, level.static)


CONFIGS = (None, {"units": (3, 4), 1: [b"x", 2.5, -0.0, 10**400, "\ud800"]}, np.float32(2))


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_registered_nodes_come_back(config):
    leaves, structure = flatten.flatten_tree({"box": Box(1, [2], config)}, Boxes())
    assert nodes.names_of(structure) == ["box/w", "box/b/0"]
    again, _ = nodes.decode_structure(nodes.encode_structure(structure), "m")
    built = flatten.unflatten_tree(again, [leaf for _, leaf in leaves], Boxes())["box"]
    assert (built.w, built.b) == (1, [2])
    assert repr(built.config) == repr(config)
    assert type(built.config) is type(config)


@pytest.mark.parametrize(("config", "may_build"), [(object(), True), (lambda: 1, True), (3, False)])
def test_unbuildable_class_comes_back_as_an_unknown_node(config, may_build):
    leaves, structure = flatten.flatten_tree(Box(1, 2, config), Boxes())
    again, _ = nodes.decode_structure(nodes.encode_structure(structure), "m")
    node = flatten.unflatten_tree(again, [leaf for _, leaf in leaves], Boxes(may_build))
    assert type(node) is flatten.UnknownNode
    assert (node.type.rpartition(":")[2], node.keys, node.children) == ("Box", ("w", "b"), (1, 2))
    assert node.static == (3 if config == 3 else nodes.OPAQUE)
    assert nodes.encode_structure(flatten.flatten_tree(node)[1]) == nodes.encode_structure(
        structure
    )  # and is saved as it was


def test_a_namedtuple_whose_class_is_gone_or_other_comes_back_as_a_node():
    _, structure = flatten.flatten_tree(Point(1, 2))
    for name in ("gone:Point", f"{__name__}:Gone", f"{__name__}:Typed", "os:system", "sys:modules"):
        strange = nodes.Branch("namedtuple", ("x", "y"), (0, 1), name)
        node = flatten.unflatten_tree(strange, [1, 2])
        assert node == flatten.UnknownNode(name, ("x", "y"), (1, 2))
    node = flatten.UnknownNode(structure.type, ("x", "y"), (1, 2))
    assert type(flatten.unflatten_tree(*reversed(([1, 2], flatten.flatten_tree(node)[1])))) is Point


def test_unflattening_imports_no_modules():
    assert "this" not in sys.modules
    flatten.unflatten_tree(nodes.Branch("namedtuple", ("d",), (0,), "this:d"), [1])
    assert "this" not in sys.modules


def test_an_unknown_factory_is_not_called():
    value = defaultdict(lambda: 5, {"a": 1})
    _, structure = flatten.flatten_tree(value)
    again, _ = nodes.decode_structure(nodes.encode_structure(structure), "m")
    node = flatten.unflatten_tree(again, [1])
    assert node == flatten.UnknownNode("collections:defaultdict", ("a",), (1,), nodes.OPAQUE)


@given(TREES, st.data())
def test_pruned_leaves_keep_their_names(value, data):
    leaves, structure = flatten.flatten_tree(value)
    wanted = data.draw(st.sets(st.sampled_from(range(len(leaves))))) if leaves else set()
    pruned = nodes.prune(structure, wanted)
    names = nodes.names_of(structure)
    assert nodes.names_of(pruned) == [names[number] for number in sorted(wanted)]
    flatten.unflatten_tree(pruned, sorted(wanted))  # it can be built
    if len(wanted) == len(leaves) and leaves and not has_empty(structure):
        assert pruned == structure


def has_empty(structure):
    if isinstance(structure, int):
        return False
    return not structure.children or any(map(has_empty, structure.children))


def test_pruned_list_becomes_a_dict_of_the_remaining_children():
    _, structure = flatten.flatten_tree({"a": [1, {"x": 2}, 3], "b": 4, "p": Point(5, 6)})
    pruned = nodes.prune(structure, [1, 2, 5])
    assert flatten.unflatten_tree(pruned, "uvw") == {
        "a": {"1": {"x": "u"}, "2": "v"},
        "p": {"y": "w"},
    }
    assert flatten.unflatten_tree(nodes.prune(structure, []), []) == {}


@pytest.mark.parametrize(
    "found",
    [None, "x", 1, True, 0.0, [], {}, {"kind": "dict"}, {"kind": "set", "children": []},
     {"kind": ["dict"], "keys": [], "children": []},
     {"kind": "list", "children": [1]}, {"kind": "list", "children": [0, 0]},
     {"kind": "list", "children": {"0": 0}}, {"kind": "list", "children": [0], "keys": ["0"]},
     {"kind": "dict", "keys": ["a"], "children": []},
     {"kind": "dict", "keys": ["a", "a"], "children": [0, 1]},
     {"kind": "dict", "keys": ["b", "a"], "children": [0, 1]},
     {"kind": "dict", "keys": ["a/b"], "children": [0]},
     {"kind": "dict", "keys": [1], "children": [0]},
     {"kind": "dict", "keys": [["a"]], "children": [0]},
     {"kind": "node", "keys": [], "children": []},
     {"kind": "node", "type": 3, "keys": [], "children": []},
     {"kind": "node", "type": "a:b", "keys": [], "children": [], "opaque": False},
     {"kind": "node", "type": "a:b", "keys": [], "children": [], "opaque": True, "static": 1},
     {"kind": "node", "type": "a:b", "keys": [], "children": [], "static": 1},
     {"kind": "node", "type": "a:b", "keys": [], "children": [], "static": {"dict": [[[], 1]]}},
     {"kind": "namedtuple", "type": "a:b", "keys": [], "children": [], "static": "x"},
     {"kind": "defaultdict", "keys": [], "children": []},
     {"kind": "defaultdict", "keys": [], "children": [], "static": "os.system"}],
    ids=repr,
)  # fmt: skip
def test_malformed_tree_structure_raises_corrupt_checkpoint(found):
    with pytest.raises(CorruptCheckpointError, match=r"^m has an invalid tree") as error:
        nodes.decode_structure(found, "m")
    assert error.value.file == "m"
