"""A run of several tests at a time counts what has ended, and names what has failed at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from meta.source import ROOT
from terminals import read_to_end

CONFTEST = """
import progress

progress.PERIOD_S = 0.0

def pytest_configure(config):
    progress.register(config)
"""
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(10))
def test_number(number):
    assert number != 7, "seven"

@pytest.fixture
def broken():
    raise OSError("no disk")

def test_error(broken):
    pass

def test_crash():
    os._exit(3)
"""


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("import no_such_module")
    return [
        sys.executable, "-m", "pytest", "-n", "2", "-o", "console_output_style=classic",
        "--color=no", "-p", "no:cacheprovider", "--continue-on-collection-errors", str(tmp_path),
    ]  # fmt: skip


@pytest.fixture
def env(child_env):
    return {**child_env, "PYTHONPATH": str(ROOT / "tests")}


def test_lines_say_how_many_have_ended(arguments, env, tmp_path):
    done = subprocess.run(
        arguments, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    printed, _, _ = done.stdout.partition("==== ERRORS")
    failed = re.findall(r"^FAILED (.*)$", printed, re.MULTILINE)
    assert sorted(re.sub(r"'gw\d'.*", "…", line) for line in failed) == [
        "test_none.py - could not be collected",
        "test_some.py::test_crash - worker …",
        "test_some.py::test_error - OSError: no disk",
        "test_some.py::test_number[7] - AssertionError: seven",
    ]
    counts = re.findall(r"^(\d+) of 12 tests, (\d+) failed, \d+ s$", printed, re.MULTILINE)
    assert counts[-1] == ("12", "4")
    summary = r"^=+ 2 failed, 9 passed, 2 errors in [\d.]+s =+$"
    assert re.search(summary, done.stdout, re.MULTILINE)
    assert "FAILED test_some.py::test_number[7]" in done.stdout.partition("short test summary")[2]


def test_on_a_terminal_one_line_is_rewritten(arguments, env, tmp_path):
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        arguments, env={**env, "TERM": "xterm", "COLUMNS": "80"}, cwd=tmp_path,
        stdout=terminal, stderr=terminal, stdin=terminal,
    )  # fmt: skip
    os.close(terminal)
    printed = read_to_end(ours).decode()
    assert process.wait(timeout=100) == 1
    before = printed.partition("==== ERRORS")[0]
    assert re.search(r"\r12 of 12 tests, 4 failed, \d+ s *\r", before)
    assert re.search(r"\rFAILED test_some.py::test_error - OSError: no disk *\r\n", before)
