"""The API pages have every public name, and every class that a call returns."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import shoal
from meta import documents, public_names
from shoal import types

ENTRY = re.compile(
    r"^\.\. (?:auto(?:function|class|exception|module)|py:type):: ([\w.]+)$", re.MULTILINE
)
PAGES = {p: text for p, text in documents.pages().items() if p.startswith("docs/api/")}
SHOWN = [name for text in PAGES.values() for name in ENTRY.findall(text)]
# `from shoal.plan import cost, topology`, `import shoal.plan.cost`, `shoal.plan.cost.cost`
MODULES = re.compile(
    r"shoal\.((?:plan|runtime|checkpoint|testing)(?:\.[a-z_]+)+|planning|preemption|retention"
    r"|types)"
)
INTERNAL = {"runtime.process.meshes"}  # what a facade calls; a page of `compat` names it


def test_every_public_name_has_an_entry():
    assert set(public_names.documented()) - set(SHOWN) == set()


def test_every_class_that_calls_take_or_return_has_a_public_path_and_an_entry():
    paths = public_names.classes()
    used = public_names.used(public_names.documented())
    private = {kind.__qualname__: name for kind, name in used.items() if kind not in paths}
    assert private == {}, "export it from a door, or keep it out of the annotations"
    needed = {paths[kind] for kind in used} | {f"shoal.types.{name}" for name in types.__all__}
    assert needed - set(SHOWN) == set()


def test_public_paths_lead_to_their_classes():
    for kind, path in public_names.classes().items():
        module, _, name = path.removeprefix("shoal.").rpartition(".")
        found = public_names.module_at(module) if module else shoal
        assert getattr(found, name) is kind


def test_nothing_has_two_entries():
    assert sorted(SHOWN) == sorted(set(SHOWN))


def test_what_pages_import_has_an_entry():
    texts = [t for p, t in documents.pages().items() if _is_for_users(p)]
    named = {name for text in texts for name in MODULES.findall(text)}
    modules = {name.removeprefix("shoal.") for name in SHOWN}
    modules |= {name.rpartition(".")[0] for name in modules}
    assert len(named) > 10
    assert {name for name in named - INTERNAL if name not in modules} == set()


def _is_for_users(page: str) -> bool:
    return page.startswith(("README", "docs/")) and not page.startswith(
        ("docs/architecture", "docs/decisions", "docs/how-it-works")
    )


@pytest.mark.parametrize("name", ["RelayoutPlan", "JobStatus", "Member", "Notice"])
def test_the_classes_that_calls_return_are_found_also_behind_others(name):
    found = public_names.used(public_names.documented())
    assert name in {kind.__name__ for kind in found}


def test_a_class_in_any_annotation_is_found():
    class Part:
        pass

    class Whole:
        part: list[Part]

    def make(whole: Callable[[Whole], None], client: int) -> None: ...

    Part.__module__ = Whole.__module__ = "shoal.fake"
    make.__annotations__["whole"] = Callable[[Whole], None]
    Whole.__annotations__["part"] = list[Part]
    assert public_names.used({"make": make}) == {
        Whole: "make",
        Part: f"shoal.fake.{Whole.__qualname__}",
    }
