"""Names of leaves: no two for one path, no two paths with one name, whatever the keys."""

import json
import struct
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.checkpoint.tree import names
from shoal.errors import UsageError, UsageTypeError

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=6) | st.sampled_from(
    [
        "",
        "~",
        "/",
        "#",
        "~0",
        "~e",
        "a.b",
        "a/b",
        "__metadata__",
        "\0",
        "..",
        "~T~.",
        "~,",
        "\ud800",
    ]
)
PLAIN_KEYS = (
    ANY_TEXT | st.integers() | st.booleans() | st.floats() | st.binary(max_size=4) | st.none()
)
KEYS = st.recursive(PLAIN_KEYS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


def same(left, right):
    """Are keys the same, 1 and True apart, NaNs by their bits?"""
    if type(left) is not type(right):
        return False
    if type(left) is float:
        return struct.pack(">d", left) == struct.pack(">d", right)
    if type(left) is tuple:
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(st.lists(KEYS, max_size=4).map(tuple))
@example(("\ud800\udc00",))
@example(("~T~.", ("", "~,", ("~.",))))
@example((10**5000, -(10**5000), -(1 << 63), 1 << 63))
def test_every_path_comes_back(path):
    name = names.name_of(path)
    assert same(names.path_of(name), path)
    assert json.loads(json.dumps(name, ensure_ascii=False).encode()) == name  # it is real text
    assert name != "__metadata__"
    assert "#" not in name
    assert name.splitlines() == [name]  # and it disturbs nobody's terminal
    assert not any(unicodedata.category(one) == "Cc" for one in name)


@given(st.lists(KEYS, max_size=3).map(tuple), st.lists(KEYS, max_size=3).map(tuple))
def test_other_paths_have_other_names(left, right):
    assert (names.name_of(left) == names.name_of(right)) == same(left, right)


NAMES = (
    ((), "~"), (("",), "~e"), (("params", "0", "w"), "params/0/w"), (("a.b",), "a.b"),
    (("a/b",), "a~1b"), (("a", "b"), "a/b"), (("a#b~",), "a~2b~0"), (("__metadata__",), "~m"),
    ((1,), "~i1"), (("1",), "1"), ((True,), "~t"), ((1.0,), "~d1.0"), ((None,), "~n"),
    ((b"\0\xff",), "~b00ff"), (((1, "a"),), "~T~i1~,a~."), (((),), "~T~."),
    (("\ud800",), "~ud800"), (("a\n\x1b[31m",), "a~u000a~u001b[31m"),
    (("\0\u2028",), "~u0000~u2028"),
    (("größe",), "größe"), ((float("inf"), -0.0), "~dinf/~d-0.0"),
)  # fmt: skip


@pytest.mark.parametrize(("path", "name"), NAMES, ids=repr)
def test_name_of_joins_and_escapes_keys(path, name):
    assert names.name_of(path) == name


@pytest.mark.parametrize("key", [1 + 2j, frozenset(), range(3), object, [1]])
def test_other_keys_are_refused(key):
    with pytest.raises(UsageTypeError, match=f"has a key of type {type(key).__name__}"):
        names.component(key)


class Text(str):
    __slots__ = ()


def test_a_subclass_would_come_back_as_another_type():
    with pytest.raises(UsageTypeError, match="has a key of type Text"):
        names.component(Text("a"))


def test_tuples_without_end_are_refused():
    key = ()
    for _ in range(50):
        key = (key,)
    with pytest.raises(UsageError, match="tuples in tuples"):
        names.component(key)
    with pytest.raises(UsageError, match="not part of a name"):
        names.key_of("~T" * 5000 + "~." * 5000)


@pytest.mark.parametrize(
    "text",
    ["", "~", "a~", "~3", "#", "a#", "a/b", "~i", "~i01", "~i+1", "~i1_0", "~i 1", "~x5", "~d1",
     "~dnan", "~d1e3", "~b0", "~bFF", "~q7ff", "~q0000000000000000", "~T", "~T~i1", "~Ta~,", "~ue",
     "~u0041", "~u00e9", "~u001", "~u001B", "a\nb", "\x7f",
     "~uD800", "\ud800", "__metadata__", "~z", "~ta", "~T~,~.", "~i" + "9" * 5000],
)  # fmt: skip
def test_key_of_refuses_invalid_name_components(text):
    with pytest.raises(UsageError, match="not part of a name"):
        names.key_of(text)


ORIGINS = st.none() | st.integers(0, 99) | st.lists(st.integers(0, 99), min_size=1).map(tuple)
ENTRIES = st.tuples(st.lists(KEYS, max_size=3).map(tuple), ORIGINS)


@given(ENTRIES, ENTRIES)
def test_entries_of_other_boxes_or_processes_have_other_names(one, other):
    def entry(path, of):
        name = names.name_of(path)
        return names.entry_of_process(name, of) if isinstance(of, int) else names.entry(name, of)

    assert (entry(*one) == entry(*other)) == (one == other)
