"""Groups of processes in a message: the smallest first, few of many, each with its source line."""

from __future__ import annotations

import importlib.util
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.failures.comparison import (
    Kind,
    ShownSide,
    compare_lines,
    divergence_error,
    headline,
    needs,
    shown_line,
)
from shoal.runtime.failures.facts import CallPlace, Difference, of_json, to_json
from shoal.runtime.rules.spec_lines import END, SpecLine
from shoal.runtime.system.callsite import callsite, source_at

ENDED = "(nothing: it ends before)"


def rows(error):
    """Return the lines after the heading."""
    return str(error).splitlines()[1:]


def test_the_smallest_group_is_first_and_of_equal_ones_that_of_the_lowest_process():
    sides = [
        ShownSide([4, 5], "b"),
        ShownSide([0, 1], "a"),
        ShownSide([2, 3, 6], "c"),
        ShownSide([7], "d"),
    ]
    error = divergence_error("they differ", sides, advice="Make them equal.")
    assert rows(error) == [
        "  process 7: d",
        "  processes 0-1: a",
        "  processes 4-5: b",
        "  processes 2-3, 6: c",
        "Make them equal.",
    ]
    assert error.sides == {"d": (7,), "a": (0, 1), "b": (4, 5), "c": (2, 3, 6)}


def test_of_many_groups_the_ends_are_shown_and_the_attributes_hold_all():
    sides = [ShownSide(range(10 * n, 10 * n + n), f"{n}") for n in range(1, 18)]
    error = divergence_error("they differ", sides)
    assert [row.split(": ")[-1] for row in rows(error)] == [
        "1", "2", "  … 13 more groups, 117 processes", "16", "17",
    ]  # fmt: skip
    assert len(error.sides) == len(error.difference.sides) == 17


def test_groups_of_which_only_the_number_is_known_are_counted_with_those_left_out():
    known = [ShownSide([n], f"{n}") for n in range(8)]
    error = divergence_error(
        "they differ", [*known, ShownSide([8, 9, 10], "3 more versions", groups=3)]
    )
    assert rows(error)[2] == "  … 7 more groups, 7 processes"
    assert [row[:12] for row in rows(error)[3:]] == ["  process 6:", "  process 7:"]
    assert error.sides["3 more versions"] == (8, 9, 10)


def test_scattered_processes_are_shown_by_their_first_range():
    error = divergence_error(
        "they differ", [ShownSide(range(0, 40, 2), "even"), ShownSide(range(1, 40, 2), "odd")]
    )
    assert rows(error) == [
        "  20 processes (0 and others): even",
        "  20 processes (1 and others): odd",
    ]


def test_a_call_that_all_make_is_shown_once_with_its_source_line():
    site = callsite()
    sides = [ShownSide([n], f"['w']: int32[{n}]", "broadcast", "w", site) for n in range(2)]
    error = divergence_error("they differ", sides, kind=Kind("shape", "['w']"))
    assert rows(error) == [
        f"  broadcast 'w' at {site}   site = callsite()",
        "    process 0: ['w']: int32[0]",
        "    process 1: ['w']: int32[1]",
    ]
    assert error.sides == {"['w']: int32[0]": (0,), "['w']: int32[1]": (1,)}
    difference = error.difference
    assert (difference.what, difference.call, difference.name, difference.path) == (
        "shape", "broadcast", "w", "['w']",
    )  # fmt: skip
    file, line = site.split(" ")[0].rsplit(":", 1)
    place = CallPlace(
        call="broadcast", name="w", file=file, line=int(line), source="site = callsite()"
    )
    assert [side.place for side in difference.sides] == [place, place]
    assert [side.said for side in difference.sides] == ["int32[0]", "int32[1]"], "the path is apart"
    assert of_json(Difference, to_json(difference)) == difference
    assert pickle.loads(pickle.dumps(error)).difference == difference


def test_different_calls_have_a_line_each_of_at_most_48_columns():
    short, long = callsite(), callsite() or "a text that makes this line longer than 48 columns"
    sides = [
        ShownSide([0], call="allgather", site=short),
        ShownSide([1], call="barrier", name="x", site=long),
    ]
    error = divergence_error("they differ", sides, kind=Kind("call"))
    first, second = (row.partition("   ") for row in (row.strip() for row in rows(error)))
    assert first[0] == f"process 0: allgather at {short}"
    assert second[0] == f"process 1: barrier 'x' at {long}"
    assert len(first[2]) <= 48
    assert first[2] == second[2]
    assert first[2].startswith("short, long = callsite()")
    assert "…" in first[2]


def test_a_line_of_a_file_that_is_not_loaded_here_is_not_shown():
    assert source_at("nowhere/train.py:3 (main)") == source_at("") == source_at("a place") == ""
    assert source_at(callsite().replace("test_comparison.py", "comparison.py")) == ""
    assert source_at(f"{callsite().partition(':')[0]}:999999 (main)") == ""


def test_the_search_for_a_line_loads_no_module(tmp_path, monkeypatch):
    (tmp_path / "lazy_one.py").write_text("raise AssertionError")
    spec = importlib.util.spec_from_file_location("lazy_one", tmp_path / "lazy_one.py")
    loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "lazy_one", module)
    monkeypatch.setitem(sys.modules, "no_module", object())
    assert source_at("lazy_one.py:1 (f)") == "raise AssertionError"


def test_groups_that_said_the_same_are_one_side():
    error = divergence_error("they differ", [ShownSide([0], "1"), ShownSide([1], "1")])
    assert error.sides == {"1": (0, 1)}


def one(path, dtype, shape="", layout="", **given):
    return SpecLine(path=path, dtype=dtype, shape=shape, layout=layout, **given).packed


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        (
            [one("the value", "float64", "[8]"), one("the value", "float64", "[4]")],
            Kind("shape"),
            ["float64[8]", "float64[4]"],
        ),
        (
            [one("['x']", "f4", "[4,2]"), one("['x']", "f8", "[4,2]")],
            Kind("dtype", "['x']"),
            None,
        ),
        ([one("['x']", "f4", "[4]"), one("['x']", "f8", "[2]")], Kind("shape", "['x']"), None),
        ([one("['n']", "int"), one("['n']", "str")], Kind("dtype", "['n']"), None),
        ([one("['n']", "int"), one("['n']", "f4", "[]")], Kind("dtype", "['n']"), None),
        ([one("['a']", "int"), one("['b']", "int")], Kind("tree"), None),
        ([one("['a']", "int"), ENDED], Kind("tree"), None),
        ([END, one("[2]", "int")], Kind("tree"), ["no more leaves", "[2]: int"]),
        (
            [SpecLine("tree", value=text).packed for text in ("(*)", "[*]")],
            Kind("tree"),
            ["tree: (*)", "tree: [*]"],
        ),
        ([SpecLine("mesh", value=f"data={n}").packed for n in (2, 4)], Kind("layout"), None),
        (
            [one("['w']", "f4", "[8]", dims) for dims in ("(x)", "(-)")],
            Kind("layout", "['w']"),
            ["['w']: f4[8] as (x)", "['w']: f4[8] as (-)"],
        ),
        (
            [one("the array", "f4", "[8]", "(x)", digest=it) for it in ("ab", "cd")],
            Kind("value"),
            ["f4[8] as (x): values ab", "f4[8] as (x): values cd"],
        ),
        (
            [one("['w']", "f4", f"[{n}]", "(x)", digest=f"ab{n}") for n in (8, 6)],
            Kind("shape", "['w']"),
            ["['w']: f4[8] as (x)", "['w']: f4[6] as (x)"],
        ),
        (
            [one("['r']", "f4", "[]", "()", value=it) for it in ("0.1", "0.2")],
            Kind("value", "['r']"),
            ["['r']: f4[] as () = 0.1", "['r']: f4[] as () = 0.2"],
        ),
        (
            [
                one("['r']", "f4", "[]", "()", value="0.1"),
                one("['r']", "f4", "[2]", "(-)", value="[0.1, 0.2]"),
            ],
            Kind("shape", "['r']"),
            ["['r']: f4[] as ()", "['r']: f4[2] as (-)"],
        ),
        (
            [one("n", "int", value='"1"'), one("n", "int", value='"2"')],
            Kind("value", "n"),
            ['n: int "1"', 'n: int "2"'],
        ),
        (
            [one("x", "f4", "[1]", value="[nan]", digest=it) for it in ("ab", "cd")],
            Kind("value", "x"),
            ["x: f4[1] = [nan], digest ab", "x: f4[1] = [nan], digest cd"],
        ),
        (["source=0", "source=1"], Kind("value"), None),
        (["step=4", "step=5"], Kind("step"), None),
        (["source=0", "is_source"], Kind("value"), None),
        (["check_values=True", "check_values=False"], Kind("value"), None),
        (["axes x=2", "axes none"], Kind("value"), None),
    ],
)
def test_kind_of_difference_follows_from_two_lines(lines, kind, said):
    actual, rows = compare_lines(lines, ENDED)
    assert actual == kind
    assert [*map(shown_line, rows)] == (said or [*map(shown_line, lines)])


@given(st.builds(SpecLine, st.sampled_from(["leaf", "tree", "mesh"]), *[st.text()] * 7))
def test_a_line_is_sent_and_read_back(one):
    clean = SpecLine(*(field.replace("\x01", "") for field in one))
    assert SpecLine.of(clean.packed) == clean
    cut = clean.packed[: len(clean.packed) // 2]
    assert "\x01" not in shown_line(clean.packed) + shown_line(cut)


@pytest.mark.parametrize(
    ("kind", "call", "name", "words", "need"),
    [
        (
            "call",
            "",
            "",
            "processes made different calls",
            "All processes of a group must make the same coll",
        ),
        ("name", "barrier", "", "processes gave a barrier different names", "A barrier needs the"),
        (
            "name",
            "allgather",
            "",
            "processes gave an allgather different names",
            "allgather needs th",
        ),
        ("shape", "broadcast", "", "processes gave broadcast different shapes", "broadcast needs"),
        ("dtype", "broadcast", "", "processes gave broadcast different dtypes", "broadcast needs"),
        ("tree", "save", "", "processes gave save different trees", "save needs the same tree"),
        ("value", "put", "", "processes gave put different values", "put needs equal values"),
        (
            "shape",
            "from_host_local",
            "",
            "processes gave from_host_local different shapes",
            "from_host_local needs parts of the same shape on every process: leave out the rows",
        ),
        ("step", "save", "", "processes gave save different steps", "save needs the same step on"),
        ("step", "restore", "", "processes gave restore different steps", "restore needs the"),
        ("group", "barrier", "pair", "processes gave barrier 'pair' different groups", "Every pro"),
        ("program", "assert_same_program", "", "processes compiled different programs", "Numbers"),
        ("layout", "pack", "", "processes gave pack different layouts", "pack needs the same tree"),
        ("layout", "save", "", "processes gave save different layouts", "save needs the same layo"),
    ],
)
def test_every_kind_has_words_and_says_what_must_be_equal(kind, call, name, words, need):
    assert headline(Kind(kind), call, name) == words
    assert needs(call, kind).startswith(need)
