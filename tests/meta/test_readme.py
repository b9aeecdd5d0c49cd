"""README's two commands do what it says, and are those that CI runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from meta.documents import FENCE, pages
from meta.source import ROOT

BLOCKS = [code for _, code in FENCE.findall(pages()["README.md"])]
COMMANDS = [line.partition("#")[0].split() for line in BLOCKS[0].splitlines()]
SHOWN = [block.splitlines() for block in BLOCKS[1:3]]  # the last lines of each
SUMMARY = re.compile(r"=+ \d+ passed(, \d+ \w+)* in [\d.]+s( \([\d:]+\))? =+")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def run(command: list[str], env: dict[str, str]) -> list[str]:
    """Run `make TARGET` with the environment of this run, as it is; return what it prints."""
    venv = os.path.relpath(sys.prefix, ROOT)
    installed = [f"--old-file={venv}/{mark}" for mark in (".demo", ".installed")]
    outside = {name: value for name, value in env.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        [*command, f"VENV={venv}", *installed],
        cwd=ROOT, env=outside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_two_commands_come_first_and_ci_runs_them():
    assert COMMANDS == [["make", "demo"], ["make", "test"]]
    steps = re.findall(r"^ *step (\S+)", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.M)
    assert {target for _, target in COMMANDS} <= {*steps}


@needs_make
@pytest.mark.faults
@pytest.mark.timeout(300)  # half a minute on two cores that do nothing else
def test_the_demo_ends_as_shown(child_env):
    def without_digits(lines):
        return [re.sub(r"\d+", "0", line) for line in lines]

    printed = run(COMMANDS[0], child_env)
    assert without_digits(printed[-len(SHOWN[0]) :]) == without_digits(SHOWN[0])


@needs_make
def test_the_tests_end_as_shown(child_env):
    one_file = {"PYTEST_ADDOPTS": "tests/meta/test_hostile_defaults.py"}
    last = run(COMMANDS[1], {**child_env, **one_file})[-1]
    assert [bool(SUMMARY.fullmatch(line)) for line in (*SHOWN[1], last)] == [True, True]


def test_the_front_page_of_the_site_has_the_same_program():
    """Its picture is the report of this program: docs/failed.json."""
    (program,) = [code for code in BLOCKS if code.startswith("# train.py")]
    assert program in [code for _, code in FENCE.findall(pages()["docs/index.md"])]
    recorded = json.loads((ROOT / "docs/failed.json").read_text(encoding="utf-8"))
    line = recorded["others"][0]["place"]["line"]
    assert recorded["others"][0]["place"]["source"] == program.splitlines()[line - 1].strip()
