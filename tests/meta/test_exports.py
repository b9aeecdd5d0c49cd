"""The door and the colours agree, and each check of it can fail."""

from __future__ import annotations

import types

import pytest

import shoal
from meta import exports, public_names
from meta.source import package_tree
from shoal import colour

DOOR = package_tree()["__init__.py"]


def test_dunder_all_lists_the_imports():
    assert exports.door_problems(DOOR) == []


def test_lazy_names_are_those_that_type_checkers_see():
    assert exports.lazy_problems(shoal, exports.declared(DOOR)) == []


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        shoal.no_such_name  # noqa: B018


def test_every_public_function_states_which_processes_must_call_it():
    for module, names in public_names.public_modules():
        problems = exports.surface_problems(names)
        assert not problems, "\n".join([module, *problems])


def test_decorators_and_docstrings_agree():
    problems = exports.colour_problems(package_tree())
    assert not problems, "\n".join(problems)


TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("__all__ = ['put']", "put: in __all__, imported nowhere"),
        (TYPED + "from shoal.a import put as put\n__all__ = []", "put: imported, not in __all__"),
        ("from shoal.a import Mesh as Mesh\n", "Mesh: imported, not in __all__"),
        ("from shoal.a import x\n__all__ = ['x', 'x']", "x: listed twice in __all__"),
    ],
)
def test_dunder_all_that_differs_from_the_imports_is_found(door, words):
    assert words in exports.door_problems(door)


def test_dunder_all_that_matches_the_imports_passes():
    door = TYPED + "from shoal.a import put as put\n__all__: list[str] = ['put', '__version__']"
    assert exports.door_problems(door) == []


def test_lazy_names_that_disagree_are_found():
    fake = types.ModuleType("fake")
    fake.colour_of, fake.local = colour.colour_of, colour.traced
    source = dict.fromkeys(["colour_of", "local", "collective"], "shoal.colour")
    assert exports.lazy_problems(fake, source) == [
        "local: not the one of shoal.colour",
        "collective: fake does not pass it",
    ]


@colour.collective()
def _right():
    """Meet.

    Collective over all processes.
    """


@colour.local
def _wrong():
    """Meet.

    Collective over all processes.
    """


@colour.traced
def _twice():
    """Meet.

    Traced.
    Local.
    """


@colour.traced
def _longer():
    """Meet.

    Traced. Like everything here.
    """


def _none():
    """Meet.

    Local.
    """


def test_a_surface_that_disagrees_is_found():
    fakes = {"right": _right, "E": ValueError, "number": 3}
    assert exports.surface_problems(fakes) == []
    for wrong in (_wrong, _twice, _longer, _none):
        assert len(exports.surface_problems({"f": wrong})) == 1


@pytest.mark.parametrize(
    ("mark", "line", "good"),
    [
        ("@local", "Local.", True),
        ("@collective('a mesh')", "Collective over a mesh.", True),
        ("@logically_collective('layout')", "Logically collective: layout must be equal.", True),
        ("@colour.traced", "Traced.", True),
        ("@functools.cache", "Locally cached.", True),
        ("@local", "Traced.", False),
        ("@local", "", False),
        ("", "Local.", False),
        ("@collective", "Collective over all processes.", False),
        ("@logically_collective('a')", "Logically collective: b must be equal.", False),
    ],
)  # fmt: skip
def test_colours_in_source(mark, line, good):
    tree = {"a.py": f"{mark}\ndef f():\n    '''Do.\n\n    {line}\n    '''"}
    assert (exports.colour_problems(tree) == []) == good
