"""Which names patterns take together, and what is suggested instead of one that takes none."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan import patterns
from shoal.plan.patterns import Selection, escaped, matches, near, taken

COMPONENTS = st.sampled_from(["a", "ab", "w", "w0", "w1", "w[01]", "*", "b?", "!a", "[!a]"])
NAMES = st.lists(COMPONENTS, min_size=1, max_size=3).map("/".join)
GLOBS = st.lists(st.one_of(COMPONENTS, st.sampled_from(["**", "w*", "?"])), min_size=1, max_size=3)
PATTERNS = st.one_of(NAMES, GLOBS.map("/".join)).flatmap(lambda p: st.sampled_from([p, f"!{p}"]))


def by_components(pattern: list[str], name: list[str]) -> bool:
    """Match as the documentation says, one component after the other."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(by_components(pattern[1:], name[n:]) for n in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and by_components(
        pattern[1:], name[1:]
    )  # fmt: skip


def by_hand(pattern: str, names: set[str]) -> set[str]:
    if pattern in names:
        return {pattern}
    return {name for name in names if by_components(pattern.split("/"), name.split("/"))}


@given(st.sets(NAMES, max_size=8), st.lists(PATTERNS, min_size=1, max_size=4, unique=True))
def test_patterns_take_what_they_say(names, patterns):
    out = [p for p in patterns if p.startswith("!") and p not in names]
    into = [p for p in patterns if p not in out]
    left_out = set().union(*(by_hand(p[1:], names) for p in out))
    wanted = set().union(*(by_hand(p, names) for p in into)) if into else names
    selection = Selection(patterns, names)
    assert selection.names == wanted - left_out
    idle = {p for p in out if not by_hand(p[1:], names)}
    idle |= {p for p in into if not by_hand(p, names) - left_out}
    lines = selection.idle()
    assert len(lines) == len(idle)
    assert {p for p in patterns if any(line.startswith(repr(p)) for line in lines)} >= idle


@given(NAMES, NAMES)
def test_an_escaped_name_matches_itself_alone(name, other):
    assert matches(escaped(name), other) == (name == other)


@given(
    st.text("ab*?/", max_size=12).map(lambda text: re.sub(r"\*\*+", "**", text)),
    st.text("ab/", max_size=10),
)
def test_stars_in_any_place_match_as_by_components(pattern, name):
    assert matches(pattern, name) == by_components(pattern.split("/"), name.split("/"))


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (f"{'*' * 30}x", "a" * 4000),
        (f"{'*a' * 30}*x", "a" * 400),
        (f"{'**/*a*/' * 30}x", "a/" * 400 + "a"),
        (f"{'**/' * 30}x", "a/" * 4000 + "a"),
    ],
)
def test_no_pattern_takes_time_exponential_in_its_stars(pattern, name):
    assert not matches(pattern, name)  # with backtracking, longer than any test may take


@pytest.mark.parametrize("pattern", ["a[!b]c", "a[+-9]c"])
def test_no_set_of_characters_matches_the_end_of_a_component(pattern):
    assert not matches(pattern, "a/c")


def test_names_are_not_compiled_as_patterns(monkeypatch):
    names = [f"layers[{number}]/w*" for number in range(400)]
    monkeypatch.setattr(patterns, "_compiled", lambda text: pytest.fail(f"{text} was compiled"))
    assert Selection(names, names).names == {*names}
    assert Selection([f"layer/{number}" for number in range(400)], names).names == frozenset()


def test_no_patterns_take_nothing():
    assert Selection([], ["a"]).names == frozenset()
    assert Selection([], ["a"]).idle() == []


NET = ["params/w", "params/b", "step", "opt/0/mu/w", "w[0]"]


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("params", "; did you mean 'params/**'? 'params' is a directory of 2 leaves"),
        ("params/", "; did you mean 'params/**'? 'params' is a directory of 2 leaves"),
        ("parms", "; did you mean 'params/**'? 'params' is a directory of 2 leaves"),
        ("opt/0", "; did you mean 'opt/0/**'? 'opt/0' is a directory of 1 leaf"),
        ("parms/w", "; did you mean 'params/w'?"),
        ("parms/**", "; did you mean 'params/**'?"),
        ("opt/*/mv/w", "; did you mean 'opt/*/mu/w'?"),
        ("opt/*", "; did you mean 'opt/**'?"),
        ("mu/w", "; did you mean '**/mu/w'?"),
        ("['params']['w']", "; did you mean 'params/w'?"),
        (".params.w", "; did you mean 'params/w'?"),
        ("stp", "; did you mean 'step'?"),
        ("w[z-a]", "; the characters in [ ] are not a valid range"),
        ("(params|opt)/.*", "; patterns are not regular expressions: "),
        ("qqq", "; leaves have names such as 'params/w'"),
    ],
)
def test_unmatched_pattern_suggests_similar_leaves(pattern, told):
    assert not taken(pattern, NET)
    assert near(pattern, NET).startswith(told)


def test_a_folder_with_the_characters_of_patterns_is_suggested_so_that_it_works():
    told = near("layers[0]", ["layers[0]/w"])
    assert "did you mean 'layers[[]0]/**'? 'layers[0]' is a directory" in told
    assert taken("layers[[]0]/**", ["layers[0]/w"]) == {"layers[0]/w"}


def test_nothing_is_suggested_where_there_is_nothing():
    assert near("a", []) == ""
