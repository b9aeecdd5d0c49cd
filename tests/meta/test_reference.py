"""The reference page is current and whole, and reads what docstrings say."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

import shoal
from meta import documents, reference
from meta import reference_entries as entries
from meta.source import ROOT
from shoal.colour import collective
from shoal.settings import SETTINGS

PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
# `from shoal.plan import cost, topology`, `import shoal.plan.cost`, `shoal.plan.cost.cost`
MODULES = re.compile(
    r"shoal\.((?:plan|runtime|checkpoint|testing)(?:\.[a-z_]+)+|planning|preemption|retention)"
)
FROM = re.compile(r"from shoal\.(\w+) import ([\w, ]+)")
INTERNAL = {"runtime.process.meshes"}  # what a facade calls; a page of `compat` names it


def test_the_page_is_current():
    assert reference.page() == PAGE, "docs/reference.md is stale: make reference"


@pytest.mark.parametrize("name", sorted(shoal.__all__))
def test_every_exported_name_has_its_signature(name):
    target = getattr(shoal, name)
    if isinstance(target, type) and issubclass(target, BaseException):
        assert f"| `{name}` | {getattr(target, 'exit_code', '–')} | " in PAGE
    elif callable(target):
        assert f"### `shoal.{name}`\n\n```\n{entries.signature(name, target)}\n```\n" in PAGE
    else:
        assert name == "__version__"


def test_every_module_that_a_page_imports_is_in_the_reference():
    texts = {page: text for page, text in documents.pages().items() if _is_for_users(page)}
    named = {name for text in texts.values() for name in MODULES.findall(text)}
    named |= {
        f"{folder}.{name.strip()}"
        for text in texts.values()
        for folder, names in FROM.findall(text)
        for name in names.split(",")
        if folder in ("plan", "runtime", "checkpoint", "testing", *reference.DOORS)
    }
    sections = set(re.findall(r"^## `shoal\.([\w.]+)`$", PAGE, re.MULTILINE))
    assert len(named) > 10
    lacking = {name for name in named - INTERNAL if not sections & {name, name.rpartition(".")[0]}}
    assert lacking == set()


def _is_for_users(page: str) -> bool:
    return page == "README.md" or (
        page.startswith("docs/")
        and not page.startswith(
            ("docs/architecture", "docs/decisions", "docs/how-it-works", "docs/reference")
        )
    )


def test_the_page_has_arguments_errors_members_and_variables():
    assert "- `name`: the name of the synchronization point, equal on all processes;" in PAGE
    assert "- `DivergenceError`: on all that arrived: others arrived at another point" in PAGE
    assert "| `coords(device_id: int) -> tuple[int, ...]` | Return the index of a device" in PAGE
    assert "| `step_s: float \\| None` | median time of its last steps, seconds |" in PAGE
    assert "| `DivergenceError` | 70 | `sides` `difference` | Processes have made different" in PAGE
    assert "| `barrier.before_arrive` | in barrier, before anything is sent |" in PAGE
    assert all(f"| `{name}` | " in PAGE for name in SETTINGS)


def test_links_within_the_page_lead_to_its_headings():
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL), re.M)
    anchors = set(reference._anchors(headings))
    links = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert len(links) > 50
    assert set(links) - anchors == set()


class Row(NamedTuple):
    """A row."""

    name: str  # what it is called
    size: int = 3


@dataclass(frozen=True)
class Box:
    """A box."""

    sides: tuple[int, ...]  # a | b

    @property
    def volume(self) -> int:
        """How much it holds."""
        return 0

    @classmethod
    def of(cls, *sides: int, unit: str = "m") -> Box:
        """Make one.

        Local.
        """
        return cls(sides)

    def _hidden(self) -> None: ...


class Kind(enum.Enum):
    """A kind."""

    ROUND = 1


@collective("the *mesh*")
def act(a: int, /, b: str = "x", *, c: Sequence[int] | None = None) -> Row:
    """Act on `a*b*c` and d*e.

    Collective over the *mesh*.

    More.

    Args:
      a, b: the first two,
        on two lines.
      c: the third: if any.

    Returns:
      a row: see
      above.

    Raises:
      UsageError: always.
      Else what it meets with.

    >>> act(1)
    """


@contextlib.contextmanager
def within() -> Iterator[Row]:
    """Be within."""
    yield Row("")


def long(
    first_of_them_all: Sequence[int], second_of_all: Sequence[int], *rest: Sequence[int], d: int
):
    """Have many parameters."""


def test_an_entry_shows_all_parts():
    assert entries.entry("act", act, heading="shoal.act") == (
        "### `shoal.act`\n\n"
        '```\nact(a: int, /, b: str = "x", *, c: Sequence[int] | None = None) -> Row\n```\n\n'
        "*Collective over the \\*mesh\\*.*\n\n"
        "Act on `a*b*c` and d\\*e.\n\n"
        "**Args**\n\n- `a`, `b`: the first two, on two lines.\n- `c`: the third: if any.\n\n"
        "**Returns** a row: see above.\n\n"
        "**Raises**\n\n- `UsageError`: always.\n- Else what it meets with.\n"
    )


def test_signatures():
    assert entries.signature("within", within) == "within() -> AbstractContextManager[Row]"
    assert entries.signature("Row", Row) == "Row(name: str, size: int = 3)"
    assert entries.signature("of", Box.of.__func__, bound=True) == (
        'of(*sides: int, unit: str = "m") -> Box'
    )
    assert entries.signature("long", long) == (
        "long(\n    first_of_them_all: Sequence[int],\n    second_of_all: Sequence[int],\n"
        "    *rest: Sequence[int],\n    d: int,\n)"
    )


def test_members(monkeypatch):
    monkeypatch.setattr(entries, "PACKAGE", __name__.split(".")[0])  # else their base is not ours
    shown = {kind: [member[:2] for member in entries.members(kind)] for kind in (Row, Box, Kind)}
    assert shown[Row] == [("name: str", "what it is called"), ("size: int", "")]
    assert shown[Box] == [
        ("sides: tuple[int, ...]", "a \\| b"),
        ("volume: int", "How much it holds."),
        ('of(*sides: int, unit: str = "m") -> Box', "Make one."),
    ]
    assert shown[Kind] == [("ROUND", "1")]


def test_the_classes_that_calls_return_are_found_also_behind_others():
    modules = {"shoal": {"plan_relayout": shoal.plan_relayout, "job_status": shoal.job_status}}
    found = {kind.__name__: names for kind, names in reference.results(modules).items()}
    assert found["RelayoutPlan"] == ["plan_relayout"]
    assert found["JobStatus"] == ["job_status"]
    assert found["Member"] == ["JobStatus", "JobStatus"]
