"""The API pages have every public name, and every class that a call returns."""

from __future__ import annotations

import re

import pytest

from meta import documents, public_names
from meta.source import ROOT

ENTRY = re.compile(r"^\.\. auto(?:function|class|exception|module):: ([\w.]+)$", re.MULTILINE)
PAGES = {p: text for p, text in documents.pages().items() if p.startswith("docs/api/")}
SHOWN = [name for text in PAGES.values() for name in ENTRY.findall(text)]
# `from shoal.plan import cost, topology`, `import shoal.plan.cost`, `shoal.plan.cost.cost`
MODULES = re.compile(
    r"shoal\.((?:plan|runtime|checkpoint|testing)(?:\.[a-z_]+)+|planning|preemption|retention)"
)
INTERNAL = {"runtime.process.meshes"}  # what a facade calls; a page of `compat` names it


def test_every_public_name_has_an_entry():
    assert set(public_names.documented()) - set(SHOWN) == set()


def test_every_class_that_a_call_returns_has_an_entry():
    assert set(public_names.results(public_names.documented())) - set(SHOWN) == set()


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
    found = public_names.results(public_names.documented())
    assert name in {kind.__name__ for kind in found.values()}
    assert (ROOT / "docs" / "api" / "index.md").exists()
