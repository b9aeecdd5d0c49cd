"""Forty kinds of nodes: where their classes are defined, what they are called, how registered.

Each kind is a function that makes a *maker* of nodes `(x, y) → node`. Calling it twice defines its
class twice, as running a cell of a notebook twice does.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import jax
from jax import tree_util


class AtTheTop(NamedTuple):
    x: Any
    y: Any


Renamed = namedtuple("CalledOtherwise", "x y")


class Sub(AtTheTop):
    """A subclass of a namedtuple."""


@tree_util.register_dataclass
@dataclasses.dataclass
class DataAtTheTop:
    x: Any
    y: Any
    name: str = dataclasses.field(default="n", metadata={"static": True})


class MyDict(dict):
    pass


class MyList(list):
    pass


class MyTuple(tuple):
    pass


class MyOrdered(OrderedDict):
    pass


def _items(value):
    return tuple(value.values()), tuple(value)


def _items_with_keys(value):
    return [(tree_util.DictKey(key), child) for key, child in value.items()], tuple(value)


for kind in (MyDict, MyOrdered):
    tree_util.register_pytree_with_keys(
        kind,
        _items_with_keys,
        lambda keys, children, kind=kind: kind(zip(keys, children, strict=True)),
    )
for kind in (MyList, MyTuple):
    tree_util.register_pytree_node(
        kind, lambda value: (tuple(value), None), lambda _, children, kind=kind: kind(children)
    )


class ByHand:
    def __init__(self, x, y):
        self.x, self.y = x, y


tree_util.register_pytree_node(
    ByHand, lambda node: ((node.x, node.y), None), lambda _, children: ByHand(*children)
)


def local_namedtuple():
    return namedtuple("State", "x y")


def local_typed_namedtuple():
    class State(NamedTuple):
        x: Any
        y: Any

    return State


def local_renamed():
    return namedtuple("Theirs", "x y")


def same_name_as_one_at_the_top():
    return namedtuple("AtTheTop", "x y")


def local_sub_namedtuple():
    class State(namedtuple("_State", "x y")):
        __slots__ = ()

        def total(self):
            return self.x + self.y

    return State


def local_dataclass(frozen=False):
    @tree_util.register_dataclass
    @dataclasses.dataclass(frozen=frozen)
    class State:
        x: Any
        y: Any

    return State


def local_dataclass_with_static():
    @tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        x: Any
        y: Any
        act: Any = dataclasses.field(default=len, metadata={"static": True})

    return State


def in_the_manner_of_flax():
    """A frozen dataclass, registered with keys, whose functions are static."""

    @dataclasses.dataclass(frozen=True)
    class TrainState:
        x: Any
        y: Any
        apply: Any = max

    tree_util.register_pytree_with_keys(
        TrainState,
        lambda s: (
            [(tree_util.GetAttrKey("x"), s.x), (tree_util.GetAttrKey("y"), s.y)],
            (s.apply,),
        ),
        lambda static, children: TrainState(*children, *static),
    )
    return TrainState


def in_the_manner_of_equinox():
    """Fields are set without calling __init__, which takes other arguments."""

    class Module:
        def __init__(self, key, width):
            raise AssertionError("not called to rebuild one")

    def unflatten(names, children):
        node = object.__new__(Module)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(node, name, child)
        return node

    tree_util.register_pytree_with_keys(
        Module,
        lambda m: ([(tree_util.GetAttrKey(n), v) for n, v in vars(m).items()], tuple(vars(m))),
        unflatten,
    )
    return lambda x, y: unflatten(("x", "y"), (x, y))


def local_by_hand():
    class Pair:
        def __init__(self, x, y):
            self.x, self.y = x, y

    tree_util.register_pytree_node(Pair, lambda p: ((p.x, p.y), ()), lambda _, c: Pair(*c))
    return Pair


def local_by_decorator():
    @tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def tree_flatten(self):
            return (self.x, self.y), "static"

        @classmethod
        def tree_unflatten(cls, static, children):
            return cls(*children)

    return Pair


def local_sub(base):
    kind = type(base.__name__.title(), (base,), {})
    if issubclass(base, dict):
        tree_util.register_pytree_with_keys(
            kind,
            _items_with_keys,
            lambda keys, children: kind(**dict(zip(keys, children, strict=True))),
        )
        return lambda x, y: kind(x=x, y=y)
    tree_util.register_pytree_node(
        kind, lambda value: (tuple(value), None), lambda _, children: kind(children)
    )
    return lambda x, y: kind((x, y))


def local_defaultdict():
    def make(x, y):
        return defaultdict(_factory, x=x, y=y)

    return make


def _factory():
    return 0


def namedtuple_registered_by_hand():
    """Its second field is static."""
    Own = namedtuple("Own", "both note")
    tree_util.register_pytree_node(
        Own, lambda o: (o.both, o.note), lambda note, both: Own(tuple(both), note)
    )
    return lambda x, y: Own((x, y), "note")


def redefined_in_its_module(kind):
    """The module's name is bound to another class by now, as after running a cell again."""

    def define():
        module = types.ModuleType("a_notebook")
        sys.modules["a_notebook"] = module
        classes = []
        for _ in range(2):
            if kind == "namedtuple":
                module.State = namedtuple("State", "x y", module="a_notebook")
            else:
                made = dataclasses.make_dataclass(
                    "State", ["x", "y"], namespace={"__module__": "a_notebook"}
                )
                module.State = tree_util.register_dataclass(made)
            classes.append(module.State)
        return classes[0]

    return define


def nested(inner):
    """A node of one kind in one of another, within builtin ones."""

    def define():
        make, Outer = inner(), local_namedtuple()
        return lambda x, y: {"in": [Outer(make(x, y), (make(y, x), None))], "t": make(x, x)}

    return define


KINDS = {
    "dict": lambda: lambda x, y: {"x": x, "y": y},
    "list": lambda: lambda x, y: [x, y],
    "tuple": lambda: lambda x, y: (x, y),
    "OrderedDict": lambda: lambda x, y: OrderedDict(y=x, x=y),
    "defaultdict": lambda: lambda x, y: defaultdict(int, x=x, y=y),
    "defaultdict with a factory of its own": local_defaultdict,
    "dict with keys of other types": lambda: lambda x, y: {1: x, 2: {(3, "a"): y}},
    "dict in the order of insertion": lambda: lambda x, y: {"y": y, "x": x},
    "None among them": lambda: lambda x, y: [None, x, {"n": None}, y],
    "empty ones among them": lambda: lambda x, y: {"e": {}, "l": [], "t": (), "x": [x, [y, []]]},
    "namedtuple": lambda: AtTheTop,
    "namedtuple, renamed": lambda: Renamed,
    "namedtuple, subclass": lambda: Sub,
    "namedtuple in a function": local_namedtuple,
    "NamedTuple in a function": local_typed_namedtuple,
    "namedtuple in a function, renamed": local_renamed,
    "namedtuple in a function, called like another": same_name_as_one_at_the_top,
    "namedtuple in a function, subclass": local_sub_namedtuple,
    "namedtuple, redefined": redefined_in_its_module("namedtuple"),
    "namedtuple, registered by hand": namedtuple_registered_by_hand,
    "dataclass": lambda: DataAtTheTop,
    "dataclass in a function": local_dataclass,
    "frozen dataclass in a function": lambda: local_dataclass(frozen=True),
    "dataclass with a static function": local_dataclass_with_static,
    "dataclass, redefined": redefined_in_its_module("dataclass"),
    "flax": in_the_manner_of_flax,
    "equinox": in_the_manner_of_equinox,
    "by hand": lambda: ByHand,
    "by hand in a function": local_by_hand,
    "by decorator in a function": local_by_decorator,
    "subclass of dict": lambda: lambda x, y: MyDict(x=x, y=y),
    "subclass of list": lambda: lambda x, y: MyList([x, y]),
    "subclass of tuple": lambda: lambda x, y: MyTuple([x, y]),
    "subclass of OrderedDict": lambda: lambda x, y: MyOrdered(x=x, y=y),
    "subclass of dict in a function": lambda: local_sub(dict),
    "subclass of list in a function": lambda: local_sub(list),
    "subclass of tuple in a function": lambda: local_sub(tuple),
    "subclass of OrderedDict in a function": lambda: local_sub(collections.OrderedDict),
    "subclass of defaultdict in a function": lambda: local_sub(collections.defaultdict),
    "nested namedtuples": nested(local_namedtuple),
    "nested dataclasses": nested(local_dataclass),
    "nested lists": nested(lambda: local_sub(list)),
}


def classes_of(tree):
    """Return the classes of all nodes, outermost first, as JAX sees them."""
    found = []

    def see(node):
        if not tree_util.all_leaves([node]):
            found.append(type(node))
        return False

    jax.tree.flatten(tree, is_leaf=see)
    return found
