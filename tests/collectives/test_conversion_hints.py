"""Objects that are neither sent nor saved are refused with what to give instead; that works."""

from __future__ import annotations

import argparse
import array
import collections
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import ipaddress
import itertools
import pathlib
import random
import re
import threading
import types
import uuid
import zoneinfo

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.errors import UsageError, UsageTypeError, with_article


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    width: int = 3


class ArrayLike:
    def __array__(self, dtype=None, copy=None):
        return np.arange(3.0)


class Reader:
    """As the iterators of grain."""

    def get_state(self):
        return {"next": 3}

    def __iter__(self):
        return self

    def __next__(self):
        return 3


class Loader:
    """As those of torchdata."""

    def state_dict(self):
        return {"next": 3}


def of_library(library, name, **methods):
    """Return an object of a class that a library would define, or of a subclass of it."""
    base = type(name, (), {"__module__": library, **methods})
    return type(f"My{name}", (base,), {})()


class Tensor:
    """The tensors of torch: an array only once it is detached, and on the host."""

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return np.arange(3.0)


TORCH = of_library("torch", "Tensor", **{k: v for k, v in vars(Tensor).items() if k[0] != "_"})
FRAME = of_library("pandas.core.frame", "DataFrame", columns=("a",))
SERIES = of_library("pandas.core.series", "Series", to_numpy=lambda self: np.arange(3.0))
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
MESH = shoal.Mesh({"x": 1})

CASES = {
    "Generator": (np.random.default_rng(1), "its .bit_generator.state",
                  lambda x: x.bit_generator.state),
    "MT19937": (np.random.Generator(np.random.MT19937(1)), "its .bit_generator.state",
                lambda x: x.bit_generator.state),
    "Philox": (np.random.Philox(1), "its .state", lambda x: x.state),
    "RandomState": (np.random.RandomState(1), "its .get_state(legacy=False)",
                    lambda x: x.get_state(legacy=False)),
    "SeedSequence": (np.random.SeedSequence(1), "its .state", lambda x: x.state),
    "dtype": (np.dtype("float32"), "its .name", lambda x: x.name),
    "Random": (random.Random(1), "its .getstate()", lambda x: x.getstate()),
    "Namespace": (argparse.Namespace(lr=0.1, steps=[3]), "vars(…) of it", vars),
    "SimpleNamespace": (types.SimpleNamespace(lr=0.1), "vars(…) of it", vars),
    "Path": (pathlib.Path("a"), "str(…) of it", str),
    "deque": (collections.deque([1.0, 2.0], 3), "list(…) of it", list),
    "Counter": (collections.Counter("aab"), "dict(…) of it", dict),
    "ChainMap": (collections.ChainMap({"a": 1}), "dict(…) of it", dict),
    "mappingproxy": (types.MappingProxyType({"a": 1}), "dict(…) of it", dict),
    "UserDict": (collections.UserDict(a=1), "dict(…) of it", dict),
    "UserList": (collections.UserList([1]), "list(…) of it", list),
    "UserString": (collections.UserString("a"), "str(…) of it", str),
    "dict_values": ({"a": 1}.values(), "list(…) of it", list),
    "dict_keys": ({"a": 1}.keys(), "list(…) of it", list),
    "dict_items": ({"a": 1}.items(), "list(…) of it", list),
    "range": (range(3), "list(…) of it", list),
    "set": ({2, 1}, "a sorted list of it", sorted),
    "frozenset": (frozenset({2, 1}), "a sorted list of it", sorted),
    "slice": (slice(1, 4, 2), "its .start, .stop and .step", lambda x: [x.start, x.stop, x.step]),
    "bytearray": (bytearray(b"ab"), "bytes(…) of it", bytes),
    "memoryview": (memoryview(b"ab"), "bytes(…) of it", bytes),
    "array": (array.array("i", [1, 2]), "np.asarray(…) of it", np.asarray),
    "c_int_Array_3": ((ctypes.c_int * 3)(1, 2, 3), "np.asarray(…) of it", np.asarray),
    "ArrayLike": (ArrayLike(), "np.asarray(…) of it", np.asarray),
    "MyTensor": (TORCH, "its .detach().cpu().numpy()", lambda x: x.detach().cpu().numpy()),
    "MySeries": (SERIES, "its .to_numpy()", lambda x: x.to_numpy()),
    "MyDataFrame": (FRAME, "the .to_numpy() of each of its columns", None),
    "Ref": (jax.new_ref(jnp.arange(3.0)), "jax.ref.get(…) of it", jax.ref.get),
    "Reader": (Reader(), "its .get_state()", lambda x: x.get_state()),
    "Loader": (Loader(), "its .state_dict()", lambda x: x.state_dict()),
    "generator": ((i for i in range(3)), "list(…) of it, or the number of items read so far", list),
    "map": (map(abs, [1, -2]), "list(…) of it, or the number of items read so far", list),
    "list_iterator": (iter([1]), "list(…) of it, or the number of items read so far", list),
    "count": (itertools.count(3), "the number of items read so far", lambda x: 0),
    "cycle": (itertools.cycle([3]), "the number of items read so far", lambda x: 0),
    "Decimal": (decimal.Decimal("0.1"), "str(…) of it", str),
    "Fraction": (fractions.Fraction(1, 3), "str(…) of it", str),
    "UUID": (uuid.UUID(int=3), "str(…) of it", str),
    "IPv4Address": (ipaddress.ip_address("127.0.0.1"), "str(…) of it", str),
    "ZoneInfo": (zoneinfo.ZoneInfo.no_cache, "functions", None),
    "timezone": (datetime.UTC, "str(…) of it", str),
    "datetime": (datetime.datetime(2020, 1, 2), "its .isoformat()", lambda x: x.isoformat()),
    "timedelta": (datetime.timedelta(1), "its .total_seconds()", lambda x: x.total_seconds()),
    "Pattern": (re.compile("a+"), "its .pattern", lambda x: x.pattern),
    "ValueError": (ValueError("x"), "str(…) of it", str),
    "module": (types, "its .__name__", lambda x: x.__name__),
    "Level": (Level.LOW, "its .name or .value", lambda x: [x.name, x.value]),
    "Config": (Config(), "dataclasses.asdict(…) of it", dataclasses.asdict),
    "Layout": (shoal.Layout(MESH, "x"), "its .text, which Layout.parse reads", lambda x: x.text),
    "Mesh": (MESH, "its .text, which Mesh.parse reads", lambda x: x.text),
}  # fmt: skip
del CASES["ZoneInfo"]
LEFT_OUT = {
    "lock": threading.Lock(),
    "event": threading.Event(),
    "file": io.BytesIO(),
    "system random": random.SystemRandom(),
    "sharding": HERE,
    "jax mesh": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)),
}
CALLS = {
    "save": ("save", shoal.save),
    "pass": ("pass", lambda _, tree: shoal.broadcast(tree)),
}


def refused(call, path, value):
    with pytest.raises(UsageTypeError) as caught:
        call(path, {"a": {"b": value}, "w": np.ones(2)})
    return str(caught.value)


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_the_error_says_what_to_give(case, verb, tmp_path):
    value, words, _ = CASES[case]
    message = refused(CALLS[verb][1], tmp_path / "one", value)
    assert f"{verb} {words}" in message
    assert ("a/b: is " if verb == "save" else "['a']['b']: is ") in message


@pytest.mark.parametrize("case", [case for case, (_, _, follow) in CASES.items() if follow])
def test_advised_conversion_can_be_saved_and_broadcast(case, tmp_path):
    value, _, follow = CASES[case]
    plain = follow(value)
    shoal.save(tmp_path / "one", {"a": plain})
    back = [shoal.restore(tmp_path / "one")["a"], shoal.broadcast({"a": plain})["a"]]
    for found in back:
        assert jax.tree.structure(found) == jax.tree.structure(plain)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_generator_goes_on_from_its_state(tmp_path):
    rng, other = np.random.default_rng(3), np.random.default_rng(4)
    rng.random(5)
    shoal.save(tmp_path / "one", {"rng": rng.bit_generator.state})
    other.bit_generator.state = shoal.restore(tmp_path / "one")["rng"]
    assert other.random() == rng.random()
    plain, again = random.Random(3), random.Random(4)
    plain.random()
    again.setstate(shoal.broadcast(plain.getstate()))
    assert again.random() == plain.random()
    legacy, third = np.random.RandomState(3), np.random.RandomState(4)
    third.set_state(shoal.broadcast(legacy.get_state(legacy=False)))
    assert third.rand() == legacy.rand()


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("case", LEFT_OUT)
def test_values_without_a_conversion_are_advised_to_be_left_out(case, verb, tmp_path):
    message = refused(CALLS[verb][1], tmp_path / "one", LEFT_OUT[case])
    assert "; leave it out" in message


@pytest.mark.parametrize("verb", CALLS)
def test_functions_and_those_of_an_optimizer(verb, tmp_path):
    call, done = CALLS[verb][1], {"save": "saved", "pass": "sent"}[verb]
    assert f"functions cannot be {done}; leave it out" in refused(call, tmp_path / "one", abs)
    init = types.FunctionType((lambda: None).__code__, {"__name__": "optax.transforms"})
    message = refused(call, tmp_path / "one", init)
    assert f"functions cannot be {done}; {verb} the state that its init returned" in message


def test_a_dataclass_may_be_registered():
    with pytest.raises(UsageTypeError) as caught:
        shoal.broadcast(Config())
    remedy = "decorate it with @jax.tree_util.register_dataclass, or pass dataclasses.asdict(…)"
    assert remedy in str(caught.value)


def test_a_module_of_flax_is_no_dataclass_of_the_program(tmp_path):
    module = type("Module", (), {"__module__": "flax.linen.module"})
    dense = dataclasses.make_dataclass("Dense", ["width"], bases=(module,))(3)
    for verb, (_, call) in CALLS.items():
        message = refused(call, tmp_path / "one", dense)
        assert f"{verb} its variables or nnx.state(…), not the module" in message
        assert "register" not in message


@pytest.mark.parametrize(
    ("value", "follow", "words"),
    [
        (TORCH, lambda x: x.detach().cpu().numpy(), "pass its .detach().cpu().numpy()"),
        (SERIES, lambda x: x.to_numpy(), "pass its .to_numpy()"),
        (range(3), np.asarray, "pass np.asarray(…) of it"),
        (collections.deque([1.0]), np.asarray, "pass np.asarray(…) of it"),
        (array.array("f", [1.0]), np.asarray, "pass np.asarray(…) of it"),
        (ArrayLike(), np.asarray, "pass np.asarray(…) of it"),
        (jax.new_ref(jnp.arange(3.0)), jax.ref.get, "pass jax.ref.get(…) of it"),
        (np.random.default_rng(), None, "pass a numpy array, a scalar or a jax.Array"),
        ("text", None, "pass a numpy array, a scalar or a jax.Array"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_put_names_the_array(value, follow, words):
    place = shoal.Layout(shoal.make_mesh({"x": 1}, devices=[0]))
    with pytest.raises(UsageError) as caught:
        shoal.put({"a": value}, place)
    assert words in str(caught.value)
    if follow:
        array_of_it = follow(value).astype(np.float32)
        np.testing.assert_array_equal(
            shoal.put(array_of_it, shoal.Layout(place.mesh, None)), jnp.asarray(array_of_it)
        )


@pytest.mark.parametrize(
    ("value", "follow"),
    [
        (np.array(["a", "bc"], object), lambda x: x.astype("U")),
        (np.array(["a", "bc"], object), lambda x: x.tolist()),
        (np.array(["a", "bc"], np.dtypes.StringDType()), lambda x: np.array(x.tolist())),
    ],
    ids=["objects as text", "objects as a list", "strings"],
)
def test_arrays_of_objects(value, follow, tmp_path):
    words = ".tolist()) of it" if value.dtype.kind == "T" else ".tolist() of it, or of text .astype"
    for verb in CALLS:
        assert words in refused(CALLS[verb][1], tmp_path / "one", value)
    assert list(shoal.broadcast(follow(value))) == ["a", "bc"]


@pytest.mark.parametrize(
    ("value", "words", "follow"),
    [
        (np.float32(0.5), "its .tolist()", lambda x: x.tolist()),
        (np.arange(3), "its .tolist()", lambda x: x.tolist()),
        (jnp.float32(2), "its .tolist()", lambda x: x.tolist()),
        ((1, 2), "list(…) of it", list),
        ({2, 1}, "a sorted list of it", sorted),
        (b"ab", "its .hex()", lambda x: x.hex()),
        (1j, "its .real and .imag", lambda x: [x.real, x.imag]),
        (pathlib.Path("a"), "str(…) of it", str),
        (argparse.Namespace(lr=0.1), "vars(…) of it", vars),
        (Config(), "dataclasses.asdict(…) of it", dataclasses.asdict),
        (Level.LOW, "its .name or .value", lambda x: x.name),
        (datetime.date(2020, 1, 2), "its .isoformat()", lambda x: x.isoformat()),
        (object(), "None, bool, int, float, str, lists or dicts of these", None),
        (ArrayLike(), "None, bool, int, float, str, lists or dicts of these", None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_user_values_that_are_not_json_are_refused_with_advice(value, words, follow, tmp_path):
    with pytest.raises(UsageError) as caught:
        shoal.save(tmp_path / "one", {"w": 1}, user={"a": value})
    assert f"is {with_article(type(value).__name__)}; pass {words}" in str(caught.value)
    if follow:
        shoal.save(tmp_path / "one", {"w": 1}, user={"a": follow(value)})
        assert shoal.checkpoint_info(tmp_path / "one").user["a"] == follow(value)
