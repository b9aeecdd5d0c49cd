"""Documents as programs: the code blocks of Markdown pages and the examples of docstrings."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from forked_scripts import run_forked
from meta.source import ROOT, Tree, module_name, nodes, parse

Done = subprocess.CompletedProcess[str]

README_LINES = 120
LIMIT_S = 600.0  # of one example, where other work takes the cores
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Examples that start or end a job get a process of their own.
JOINS = re.compile(r">>> .*\b(initialize|shutdown)\(")

DOCTESTS = """
import doctest, importlib, sys
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=flags)
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    # a module of examples that lose their tests (a wrapper without __doc__) must not pass unseen
    found = [test for test in finder.find(module, name) if test.examples]
    if not found:
        sys.exit(f"{name}: its examples are not found")
    for test in found:
        runner.run(test)
sys.exit(1 if runner.summarize(verbose=False).failed else 0)
"""

# In a fork whose folder is that of this file.
BLOCK = """
import os, runpy, sys, warnings

warnings.simplefilter("error")
os.chdir(sys.path[0])
sys.argv[:] = [os.path.abspath("block.py")]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Block(NamedTuple):
    """One code block of a page."""

    page: str
    line: int  # of its first line of code
    language: str
    code: str


def pages() -> dict[str, str]:
    """Read the pages whose code must run: the README, CONTRIBUTING and docs/."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in sorted(paths)}


def blocks(page: str, text: str, language: str = "python") -> Iterator[Block]:
    """Yield the code blocks of a page in one language."""
    for match in FENCE.finditer(text):
        if match[1] == language:
            line = text.count("\n", 0, match.start()) + 2
            yield Block(page, line, language, match[2])


def run_blocks(blocks: Sequence[Block], env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Run blocks, each alone, as by a reader who pastes it, on 8 virtual devices.

    Returns:
      What each block said that failed.
    """
    failed = {}
    for number, block in enumerate(blocks):
        place = folder / str(number)
        place.mkdir()
        program = "\n" * (block.line - 1) + block.code  # so that tracebacks name the page's lines
        (place / "block.py").write_text(program, encoding="utf-8")
        done = run_forked(BLOCK, {**env, "JAX_NUM_CPU_DEVICES": "8"}, place, timeout_s=LIMIT_S)
        if done.returncode != 0:
            failed[f"{block.page}:{block.line}"] = done.stdout + done.stderr
    return failed


def run_doctests(names: list[str], env: Mapping[str, str]) -> Done:
    """Run the examples of modules, all in one process."""
    return run(["-c", DOCTESTS, *names], env, ROOT)


def run(arguments: list[str], env: Mapping[str, str], folder: Path) -> Done:
    """Run Python on 8 virtual devices, warnings being errors, and keep what it says."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**env, "JAX_NUM_CPU_DEVICES": "8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def modules_with_examples(tree: Tree) -> tuple[list[str], list[str]]:
    """Return the modules whose docstrings have examples: those that share a process, and others."""
    shared, alone = [], []
    for path, text in tree.items():
        if ">>> " not in text:
            continue
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = [ast.get_docstring(n) or "" for n in nodes(parse(text)) if isinstance(n, owners)]
        if any(">>> " in doc for doc in docs):
            (alone if any(map(JOINS.search, docs)) else shared).append(module_name(path))
    return shared, alone


def long_readme(text: str) -> list[str]:
    """Check that the README is one that people read to its end."""
    lines = len(text.splitlines())
    return [f"README.md: {lines} lines, at most {README_LINES}"] if lines > README_LINES else []


def broken_links(texts: Mapping[str, str], root: Path) -> list[str]:
    """Find relative links to files that do not exist."""
    problems = []
    for page, text in texts.items():
        for match in re.finditer(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", FENCE.sub("", text)):
            target = match[1]
            if "://" not in target and not (root / page).parent.joinpath(target).exists():
                problems.append(f"{page}: links to {target}, which does not exist")
    return problems


def links_named_by_files(texts: Mapping[str, str]) -> list[str]:
    """Find links of the site whose text is the name of a page's file, not where they lead."""
    return [
        f"{page}: the text of a link is {name}"
        for page, text in texts.items()
        if page.startswith("docs/")
        for name in re.findall(r"\[`?([\w./-]+\.md)`?\]\(", FENCE.sub("", text))
    ]


def unknown_names(texts: Mapping[str, str], module: ModuleType) -> list[str]:
    """Find `package.name` that a page speaks of and a module does not have."""
    spoken = re.compile(rf"(?<![\w./-]){module.__name__}\.([A-Za-z]\w*)\b(?!\.(?:py|md)\b)")
    return [
        f"{page}: {module.__name__}.{name} does not exist"
        for page, text in texts.items()
        for name in sorted(set(spoken.findall(text)))
        if not hasattr(module, name)
        and importlib.util.find_spec(f"{module.__name__}.{name}") is None
    ]
