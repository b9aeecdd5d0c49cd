"""What every tracked file may say, what is declared, pinned and announced."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.requirements import Requirement

from meta.floors import imports
from meta.source import PACKAGE, ROOT, Tree

# Assembled from pieces, so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.-])/(?:wo" r"rk|ro" r"ot)/",
    "a tracker's number; cite by address": r"\b[Ii]ss" r"ues? #?\d+\b",
    "a plan that is not here": r"\bDES" r"IGN\b|\bcontrol_pl" r"ane\b|\.\./sha" r"red/",
    "where packages come from": r"python" r"hosted|py" r"pi\.org|--(?:extra-)?index" r"-url",
    "a note to self": r"\b(?:TO" r"DO|FIX" r"ME)\b",
    "who wrote it": r"(?i)co-auth" r"ored-by",
}  # fmt: skip

WITH_EXTRAS = (
    "checkpoint/bucket/transport.py",
    "checkpoint/bucket/credentials.py",
    "testing/",
    "interop/",
)  # imported by name, by those who installed the extra
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")


def tracked_texts() -> dict[str, str]:
    """Read every text file that git tracks."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    texts = {}
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content:
            texts[name] = content.decode("utf-8")
    return texts


def forbidden_words(texts: Mapping[str, str]) -> list[str]:
    """Find what no file of the repository may say."""
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r} is {what}"
        for what, pattern in FORBIDDEN.items()
        for path, text in texts.items()
        for match in re.finditer(pattern, text)
    ]


def pin_problems(text: str) -> list[str]:
    """Find lines of a constraints file that are no exact pin of a released version."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if not PIN.fullmatch(line)] if lines else ["no pins"]


def unpinned(pins: str, project: Mapping[str, Any], python: str = "3.13") -> list[str]:
    """Find declared dependencies that the constraints file of a Python forgets."""
    pinned = {_normal(line.split("==")[0]) for line in pins.splitlines()}
    declared = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        declared += extra
    here = {"python_version": python}
    declared = [
        need
        for need in declared
        if (marker := Requirement(need).marker) is None or marker.evaluate(here)
    ]
    return sorted({_distribution(need) for need in declared} - pinned)


def dependency_problems(tree: Tree, project: Mapping[str, Any]) -> list[str]:
    """Compare what the library imports with what it says it needs, both ways."""
    declared = {_distribution(need).replace("-", "_") for need in project["dependencies"]}
    foreign = {
        target.split(".")[0].lower(): path
        for path in tree
        if not path.startswith(WITH_EXTRAS)
        for target, _, _ in imports(path, tree)
    }
    known = {*sys.stdlib_module_names, PACKAGE, "jaxlib"}  # jax brings its own jaxlib
    used = {name: path for name, path in foreign.items() if name not in known}
    return [
        *(f"{used[name]}: imports {name}, not declared" for name in sorted(set(used) - declared)),
        *(f"pyproject.toml: {name} is imported nowhere" for name in sorted(declared - set(used))),
    ]


def claimed_pythons(project: Mapping[str, Any]) -> list[str]:
    """Return the Pythons of the classifiers: `["3.11", "3.13"]`."""
    claim = "Programming Language :: Python :: "
    versions = [c.removeprefix(claim) for c in project["classifiers"] if c.startswith(claim)]
    return [version for version in versions if version.startswith("3.")]


def python_problems(project: Mapping[str, Any], pin_files: Iterable[str]) -> list[str]:
    """Compare the Pythons that the package claims with those that it is tested on."""
    claimed = {*claimed_pythons(project)}
    pinned = {name.removeprefix("python").removesuffix(".txt") for name in pin_files}
    return [
        *(f"Python {version}: claimed, no pins" for version in sorted(claimed - pinned)),
        *(f"Python {version}: pinned, not claimed" for version in sorted(pinned - claimed)),
    ]


def compatibility_problems(page: str, pins: Mapping[str, str]) -> list[str]:
    """Compare the pairs of Python and JAX that a page calls tested with those that are pinned.

    Args:
      page: with one table, of a row for each Python and a column for each JAX.
      pins: the constraints files, by name; their Pythons are those of `python_problems`.
    """
    lines = re.findall(r"^\| (Python|\d\.\d+.*?) \|(.*)\|$", page, re.MULTILINE)
    (_, head), *rows = [(first, [*map(str.strip, rest.split("|"))]) for first, rest in lines]
    tested = {
        f"Python {python} with {jax}"
        for python, cells in rows
        for jax, cell in zip(head, cells, strict=True)
        if cell == "whole suite"
    }
    pinned = {
        f"Python {name.removeprefix('python').removesuffix('.txt')} with JAX {version}"
        for name, text in pins.items()
        for version in re.findall(r"^jax==(.+)$", text, re.MULTILINE)
    }
    return [
        *(f"{pair}: called tested, not pinned" for pair in sorted(tested - pinned)),
        *(f"{pair}: pinned, not called tested" for pair in sorted(pinned - tested)),
    ]


def missing_targets(texts: Mapping[str, str], makefile: str) -> list[str]:
    """Find `make target` that a page speaks of and the Makefile does not have."""
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    return [
        f"{page}: make {target} does not exist"
        for page, text in texts.items()
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
        if target not in targets
    ]


def unlisted_variables(texts: Mapping[str, str], listed: Iterable[str]) -> list[str]:
    """Find variables that are used and not listed: `initialize` would warn about them."""
    known = {*listed}
    return [
        f"{path}: {name} is not in the table of settings.py"
        for path, text in texts.items()
        for name in sorted({*re.findall(r"\bSHOAL_[A-Z0-9_]*[A-Z0-9]\b", text)} - known)
    ]


def fragment_problems(fragments: Mapping[str, str], towncrier: Mapping[str, Any]) -> list[str]:
    """Find changelog fragments that towncrier would refuse, or show as an empty section."""
    kinds = "|".join(towncrier["fragment"])
    form = re.compile(rf"({towncrier['issue_pattern']})\.({kinds})\.md")
    return [
        *(f"{name}: call it <slug>.({kinds}).md" for name in fragments if not form.fullmatch(name)),
        *(f"{name}: is empty" for name, text in fragments.items() if not text.strip()),
    ]


def _distribution(need: str) -> str:
    return _normal(re.match(r"[\w.-]+", need)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
