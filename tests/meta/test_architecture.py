"""The page on the architecture is the tree's own, and each check of that can fail."""

from __future__ import annotations

import pytest

from meta import architecture
from meta.floors import FLOORS, Floor
from meta.source import ROOT, package_tree

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHECKS = (architecture.missing_folders, architecture.unknown_files, architecture.unknown_places)

GOOD_TREE = {
    "__init__.py": "",
    "errors.py": "",
    "plan/__init__.py": "'''Decides. Never imports JAX.'''",
    "plan/mesh.py": "class Mesh:\n    def size(self): ...",
    "plan/orders/__init__.py": "'''Orders.\n\nKnows no mesh.\n'''",
    "plan/orders/jax_order.py": "def order(): ...",
}
GOOD_PAGE = """\
- **`src/shoal/`** The names. `errors` (not `plan`)
- **`plan/`** What is decided.
  `mesh`
- **`plan/orders/`** Orders. `jax_order`

See `plan/mesh.py:Mesh.size`, `plan/mesh.py:Mesh`, `errors.py` and `other`.
"""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_page_and_the_tree_agree(check):
    problems = check(package_tree(), PAGE)
    assert not problems, "\n".join(problems)


def test_every_folder_says_what_it_does_not_know():
    problems = architecture.knowing_folders(package_tree())
    assert not problems, "\n".join(problems)


def test_a_good_page_and_tree_pass_every_check():
    assert [problem for check in CHECKS for problem in check(GOOD_TREE, GOOD_PAGE)] == []
    assert architecture.knowing_folders(GOOD_TREE) == []


BAD = (
    # the tree has more, what the page has instead of what, the check, what it must say
    ({"attic/__init__.py": ""}, ("", ""), architecture.missing_folders,
     "attic/: this directory is not on the page"),
    ({}, ("- **`src/shoal/`**", "-"), architecture.missing_folders,
     "src/shoal/: this directory is not on the page"),
    ({}, ("`mesh`", "`mesh` `wires`"), architecture.unknown_files,
     "plan/wires.py: does not exist"),
    ({}, ("`mesh`", "`mesh` · `mesh`"), architecture.unknown_files, "plan/mesh.py: listed twice"),
    ({}, ("plan/orders/", "attic/"), architecture.unknown_files, "attic/: does not exist"),
    ({}, ("`errors.py`", "`mistakes.py`"), architecture.unknown_places,
     "mistakes.py: does not exist"),
    ({}, ("Mesh.size", "Mesh.shape"), architecture.unknown_places,
     "plan/mesh.py:Mesh.shape: does not exist"),
    ({}, ("mesh.py:Mesh`", "mesh.py:size`"), architecture.unknown_places,
     "plan/mesh.py:size: does not exist"),
)  # fmt: skip


@pytest.mark.parametrize(("more", "change", "check", "words"), BAD, ids=[b[3] for b in BAD])
def test_a_page_that_is_stale_is_found(more, change, check, words):
    page = GOOD_PAGE.replace(*change) if change[0] else GOOD_PAGE
    assert words in check({**GOOD_TREE, **more}, page)


@pytest.mark.parametrize("docstring", ["Draws.", "Knows meshes and layouts.", ""])
def test_a_folder_that_claims_to_know_everything_is_found(docstring):
    tree = {**GOOD_TREE, "draw/__init__.py": f"'''{docstring}'''"}
    assert architecture.knowing_folders(tree) == [
        "draw/__init__.py: its docstring does not say what the directory does not know"
    ]


def test_the_table_of_floors_is_what_is_enforced():
    assert architecture.floor_problems(CONTRIBUTING, FLOORS) == []


TABLE = (
    "| 2 | `plan/` `paths.py` | decides | 0–1 | numpy |\n| 6 | `interop/` | foreign | 0–5 | any |\n"
)
ENFORCED = {
    **dict.fromkeys(["plan", "paths"], Floor(2, 1, frozenset({"numpy"}))),
    "interop": Floor(6, 5, None),
}


def test_a_right_table_passes():
    assert architecture.floor_problems(TABLE, ENFORCED) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((" `paths.py`", ""), "paths: is not in the table"),
        (("`plan/`", "`plan/` `attic/`"), "attic: has no floor"),
        (("| 2 |", "| 3 |"), "plan: the table says Floor(level=3"),
        (("0–1", "0"), "plan: the table says Floor(level=2, may_see=0"),
        (("numpy", "–"), "plan: the table says Floor(level=2, may_see=1, third_party=frozenset())"),
        (("any", "torch"), "interop: the table says Floor(level=6, may_see=5, third_party=froz"),
    ],
)
def test_a_table_that_is_stale_is_found(change, words):
    problems = architecture.floor_problems(TABLE.replace(*change), ENFORCED)
    assert any(problem.startswith(words) for problem in problems), problems
