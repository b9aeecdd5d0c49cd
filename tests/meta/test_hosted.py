"""The files for a code host fit the repository, and each check of them can fail."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from meta import hosted
from meta.repository import claimed_pythons, unlisted_variables
from meta.source import ROOT
from shoal.settings import SETTINGS

CI = ".github/workflows/ci.yml"
WORKFLOWS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / ".github/workflows").iterdir()
}
FORMS = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir()
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")


def test_workflows_call_targets_that_exist():
    assert len(WORKFLOWS) == 3
    assert hosted.command_problems(WORKFLOWS, MAKEFILE) == []


def test_workflows_run_the_pythons_that_are_claimed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert hosted.python_problems(WORKFLOWS, claimed_pythons(project), CI) == []


def test_hooks_run_what_make_lint_runs():
    assert hosted.hook_problems(HOOKS, MAKEFILE) == []


def test_forms_ask_for_commands_that_exist(child_env):
    assert unlisted_variables(FORMS, SETTINGS) == []
    asked = {
        words for text in FORMS.values() for words in re.findall(r"\bshoal [a-z]+ -[^`]*", text)
    }
    assert len(asked) > 3
    for words in sorted(asked):
        _, command, *rest = words.split()
        printed = subprocess.run(
            [sys.executable, "-m", "shoal", command, "--help"],
            env=child_env, capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        for option in [word for word in rest if word.startswith("-")]:
            assert re.search(rf"^  .*{option}\b", printed, re.MULTILINE), words


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("      - run: make test", None),
        ('        run: make "$TARGET"', None),
        ("          - { target: test, minutes: 5 }", None),
        ("      - run: make tests", "ci: make tests does not exist"),
        ("          - { target: tests, minutes: 5 }", "ci: make tests does not exist"),
        ("      - run: pytest", "ci: 'pytest': move it into the Makefile"),
        ("      - run: |", "ci: '|': move it into the Makefile"),
        (
            "      - run: make test || true",
            "ci: 'make test || true': move it into the Makefile",
        ),
    ],
)
def test_a_command_that_developers_do_not_have_is_found(line, problem):
    found = hosted.command_problems({"ci": f"jobs:\n{line}\n"}, "test: x\n")
    assert found == ([problem] if problem else [])


def test_a_python_that_is_not_claimed_or_not_run_is_found():
    workflows = {
        "ci": '{ target: test, python: "3.11" }\n  python-version: ${{ matrix.python }}\n',
        "release": "  python-version: 3.9 # old\n",
    }
    assert hosted.python_problems(workflows, ["3.11", "3.13"], "ci") == [
        "release: Python 3.9 is not claimed",
        "ci: Python 3.13 is missing",
    ]


def test_hooks_and_make_lint_that_differ_are_found():
    makefile = "lint: x ## y\n\t$(VENV)/bin/ruff check\n\t$(VENV)/bin/mypy\n\ntest:\n\tpytest\n"
    hooks = "  entry: .venv/bin/ruff check --force-exclude\n  entry: .venv/bin/zizmor\n"
    assert hosted.hook_problems(hooks, makefile) == [
        "make lint: 'mypy' is in no hook",
        "hook 'zizmor' is not in make lint",
    ]
