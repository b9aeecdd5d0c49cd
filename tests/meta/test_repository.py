"""The repository's own books are in order, and each check of them can fail."""

from __future__ import annotations

import tomllib

import pytest

import shoal
from meta import repository
from meta.documents import pages
from meta.source import ROOT, package_tree, read_tree
from shoal.settings import SETTINGS

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TOWNCRIER = PYPROJECT["project"], PYPROJECT["tool"]["towncrier"]
PINS = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("requirements/*.txt")}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def fragments() -> dict[str, str]:
    """Read the changelog fragments that are there."""
    folder = ROOT / TOWNCRIER["directory"]
    paths = [path for path in folder.iterdir() if path.name not in TOWNCRIER["ignore"]]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_file_says_what_it_must_not():
    problems = repository.forbidden_words(repository.tracked_texts())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", PINS)
def test_pins_are_exact_and_complete(name):
    assert repository.pin_problems(PINS[name]) == []
    assert repository.unpinned(PINS[name], PROJECT, name[len("python") : -len(".txt")]) == []


def test_dependencies_are_those_that_are_imported():
    assert repository.dependency_problems(package_tree(), PROJECT) == []


def test_pythons_are_those_that_are_tested():
    assert repository.python_problems(PROJECT, PINS) == []


def test_the_table_of_python_and_jax_is_what_is_tested():
    assert repository.compatibility_problems(pages()["docs/promises.md"], PINS) == []


def test_pages_speak_of_targets_that_exist():
    assert repository.missing_targets(pages(), MAKEFILE) == []


def test_every_variable_that_is_used_is_listed():
    examples = {**read_tree(ROOT / "examples"), **read_tree(ROOT / "benchmarks")}
    texts = {**package_tree(), **examples, **pages()}
    del texts["settings.py"]  # also names some that do not exist
    assert repository.unlisted_variables(texts, SETTINGS) == []


def test_changelog_fragments_are_well_formed():
    assert repository.fragment_problems(fragments(), TOWNCRIER) == []


def test_the_citation_is_of_this_version():
    """`make release` writes both; between releases, the last one is cited. `make lint` reads it."""
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    (cited,) = [line.removeprefix("version: ") for line in lines if line.startswith("version: ")]
    assert cited == shoal.__version__ or shoal.__version__.endswith(".dev0")
    assert f'abstract: "{PROJECT["description"]}"' in lines
    assert [f"  - {word}" for word in PROJECT["keywords"]] == lines[-len(PROJECT["keywords"]) :]


def test_the_changelog_says_where_the_next_release_goes():
    """Without the line, towncrier writes a release above the page's title."""
    changelog = (ROOT / TOWNCRIER["filename"]).read_text(encoding="utf-8")
    assert changelog.count(TOWNCRIER["start_string"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        "see /wo" "rk/main/x.py",
        "open('/ro" "ot/x')",
        "fixes iss" "ue #2",
        "Iss" "ue 12 says",
        "as DES" "IGN 4 says",
        "pip install --index" "-url x",
        "https://py" "pi.org/simple",
        "# TO" "DO later",
        "Co-auth" "ored-by: x",
    ],
)  # fmt: skip
def test_forbidden_words_are_found(words):
    assert repository.forbidden_words({"a.md": f"fine\n{words}\n"})[0].startswith("a.md:2: ")


def test_ordinary_words_pass():
    text = "gs://bucket/work/x, network/, a tissue 2, github.com/jax-ml/jax/issues/22070, my design"
    assert repository.forbidden_words({"a.md": text}) == []


@pytest.mark.parametrize(
    "line",
    ["jax>=0.10", "jax", "-e .", "jax @ file:///wheels/jax.whl", "jax==0.10.2 # why", "--pre"],
)
def test_a_line_that_is_no_pin_is_found(line):
    assert repository.pin_problems(f"# ok\nnumpy==2.4.6\n{line}\n") == [line]


def test_an_empty_and_an_incomplete_pin_file_are_found():
    project = {"dependencies": ["jax>=0.10", "ml_dtypes"], "optional-dependencies": {"t": ["ruff"]}}
    assert repository.pin_problems("# nothing\n") == ["no pins"]
    assert repository.unpinned("ml-dtypes==1\njax==2", project) == ["ruff"]
    newer = {"dependencies": ["flax>=1; python_version >= '3.12'"], "optional-dependencies": {}}
    assert [repository.unpinned("", newer, python) for python in ("3.11", "3.12")] == [[], ["flax"]]


def test_dependencies_that_disagree_are_found():
    tree = {
        "arrays/a.py": "import jax, xxhash\nimport math\nfrom shoal.errors import E",
        "testing/a.py": "import hypothesis",
    }
    project = {"dependencies": ["jax>=0.10", "Typer"]}
    assert repository.dependency_problems(tree, project) == [
        "arrays/a.py: imports xxhash, not declared",
        "pyproject.toml: typer is imported nowhere",
    ]


def test_pythons_that_disagree_are_found():
    project = {"classifiers": ["Programming Language :: Python :: 3.11", "Typing :: Typed"]}
    assert repository.python_problems(project, ["python3.13.txt"]) == [
        "Python 3.11: claimed, no pins",
        "Python 3.13: pinned, not claimed",
    ]


@pytest.mark.parametrize(
    ("cell", "pin", "problems"),
    [
        ("whole suite", "jax==1.2", []),
        ("whole suite", "jax==1.3", ["Python 3.11 with JAX 1.2: called tested, not pinned",
                                     "Python 3.11 with JAX 1.3: pinned, not called tested"]),
        ("not tested", "jax==1.2", ["Python 3.11 with JAX 1.2: pinned, not called tested"]),
    ],
)  # fmt: skip
def test_a_table_of_python_and_jax_that_is_stale_is_found(cell, pin, problems):
    page = f"A table.\n\n| Python | JAX 1.2 | JAX 2 |\n|---|---|---|\n| 3.11 | {cell} | no |\n"
    pins = {"python3.11.txt": f"jaxlib==9\n{pin}\n"}
    assert repository.compatibility_problems(page, pins) == problems


def test_a_target_that_does_not_exist_is_found():
    texts = {"a.md": "Run `make test` or\nmake no-such\n. Please make haste."}
    assert repository.missing_targets(texts, "test: x\n") == ["a.md: make no-such does not exist"]


def test_a_variable_that_is_not_listed_is_found():
    texts = {"a.py": 'env["SHOAL_OWN"], "SHOAL_*", env["SHOAL_OTHER"], NO_SHOAL_OTHER'}
    assert repository.unlisted_variables(texts, ["SHOAL_OWN"]) == [
        "a.py: SHOAL_OTHER is not in the table of settings.py"
    ]


@pytest.mark.parametrize(
    ("name", "text", "good"),
    [
        ("mesh-text.added.md", "`Mesh.parse` reads what `Mesh.text` writes.\n", True),
        ("mesh.removed.md", "Two.\n\nParagraphs\n", True),
        ("mesh-text.md", "A sentence.\n", False),
        ("mesh_text.added.md", "A sentence.\n", False),
        ("mesh.added", "A sentence.\n", False),
        ("mesh.mended.md", "A sentence.\n", False),
        ("mesh.fixed.md", "\n", False),
    ],
)
def test_a_malformed_fragment_is_found(name, text, good):
    settings = {"issue_pattern": "[a-z-]+", "fragment": {"added": {}, "fixed": {}, "removed": {}}}
    assert (repository.fragment_problems({name: text}, settings) == []) == good
