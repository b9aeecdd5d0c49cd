"""What the documents show runs as shown, and each check of it can fail."""

from __future__ import annotations

import json

import pytest

import shoal
from checkpoint.bucket import servers
from meta import documents
from meta.source import ROOT, package_tree

PAGES = documents.pages()
BLOCKS = [block for page, text in PAGES.items() for block in documents.blocks(page, text)]
OF_BUCKETS = [block for block in BLOCKS if block.page == "docs/buckets.md"]
BLOCKS = [block for block in BLOCKS if block not in OF_BUCKETS]
SHARED, ALONE = documents.modules_with_examples(package_tree())
PATIENT = pytest.mark.timeout(2 * documents.LIMIT_S)  # beside other work, a page takes minutes
EXAMPLES = {"together": SHARED, **{name: [name] for name in ALONE}}


def test_pages_have_code():
    assert len(BLOCKS) > 10


@PATIENT
@pytest.mark.parametrize("part", range(0, len(BLOCKS), 9))
def test_the_code_of_all_pages_runs(part, child_env, tmp_path):
    assert documents.run_blocks(BLOCKS[part : part + 9], child_env, tmp_path) == {}


@PATIENT
def test_the_code_of_the_page_of_buckets_runs_on_a_server(child_env, tmp_path):
    assert OF_BUCKETS
    with servers.moto() as address:
        servers.make_bucket(address, "models")
        env = {**child_env, **servers.variables(address)}
        assert documents.run_blocks(OF_BUCKETS, env, tmp_path) == {}


@PATIENT
@pytest.mark.parametrize("names", EXAMPLES.values(), ids=EXAMPLES)
def test_the_examples_of_docstrings_run(names, child_env):
    assert names, "no docstring has an example"
    done = documents.run_doctests(names, child_env)
    assert done.returncode == 0, done.stdout


def test_the_readme_is_short():
    assert documents.long_readme(PAGES["README.md"]) == []


def test_links_lead_somewhere():
    assert documents.broken_links(PAGES, ROOT) == []


def test_links_say_where_they_lead():
    assert documents.links_named_by_files(PAGES) == []


def test_pages_speak_only_of_what_exists():
    assert documents.unknown_names(PAGES, shoal) == []


def test_a_name_that_does_not_exist_is_found():
    page = {"a.md": "`json.loads`, `json.tool`, json.txt/x src/json.py `json.speak(x)`"}
    page["a.md"] += " json.\n"
    assert documents.unknown_names(page, json) == [
        "a.md: json.speak does not exist",
        "a.md: json.txt does not exist",
    ]


def test_blocks_are_found_with_their_lines():
    text = "# A\n\n```python\nx = 1\n```\n\n```console\n$ ls\n```\n```python\ny = 2\nz = 3\n```\n"
    found = list(documents.blocks("a.md", text))
    assert [(block.line, block.code) for block in found] == [(4, "x = 1\n"), (11, "y = 2\nz = 3\n")]


def test_a_block_that_fails_is_found(child_env, tmp_path):
    codes = {
        7: "import os\nprint(os.environ['NO_SUCH'])\n",
        1: "import os\nassert [v for v in os.environ if v.startswith('JAX_NUM')] == %r\n"
        % ["JAX_NUM_CPU_DEVICES"],  # eight devices, and none of the suite's strictness
        2: "import warnings\nwarnings.warn('old')\n",
        3: "import os\nos._exit(3)\n",
        4: "assert __name__ == '__main__' and __file__.endswith('block.py')\n",
    }
    blocks = [documents.Block("a.md", line, "python", code) for line, code in codes.items()]
    failed = documents.run_blocks(blocks, child_env, tmp_path)
    assert [*failed] == ["a.md:7", "a.md:2", "a.md:3"]
    assert "line 8" in failed["a.md:7"]


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (">>> 1 + 1\n    3", "Expected:\n    3\nGot:\n    2"),
        (">>> import warnings\n    >>> warnings.warn('old')", "UserWarning: old"),
        ("nothing", "its examples are not found"),
    ],
)
def test_an_example_that_fails_is_found(example, words, child_env, tmp_path):
    (tmp_path / "culprit.py").write_text(f"def f():\n    '''Do.\n\n    {example}\n    '''\n")
    done = documents.run_doctests(["culprit"], {**child_env, "PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0
    assert words in done.stdout


def test_examples_that_join_a_job_run_alone():
    tree = {
        "a.py": "'''>>> 1'''",
        "b.py": "def f():\n    '''>>> shoal.initialize(virtual_devices=8)'''",
        "c.py": "x = '>>> 1'",
    }
    assert documents.modules_with_examples(tree) == (["shoal.a"], ["shoal.b"])


def test_a_long_readme_and_a_dead_link_are_found(tmp_path):
    assert documents.long_readme("a\n" * 121) == ["README.md: 121 lines, at most 120"]
    page = {"a.md": "[b](b.md) [c](docs/c.md#d) [e](https://example.org) `[f](x)`\n"}
    (tmp_path / "b.md").write_text("")
    assert documents.broken_links(page, tmp_path) == [
        "a.md: links to docs/c.md, which does not exist",
        "a.md: links to x, which does not exist",
    ]


def test_a_link_that_is_called_as_its_file_is_found():
    text = "[GPUs](gpu.md) [gpu.md](gpu.md) [`a/b.md`](b.md)\n```md\n[c.md](c.md)\n```\n"
    assert documents.links_named_by_files({"docs/a.md": text, "NOTES.md": text}) == [
        "docs/a.md: the text of a link is gpu.md",
        "docs/a.md: the text of a link is a/b.md",
    ]
