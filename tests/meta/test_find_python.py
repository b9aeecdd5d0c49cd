"""`.ci/find-python` trusts no name: it asks each candidate what it is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meta.source import ROOT


def place(folder: Path, name: str, script: str) -> Path:
    """Put a program called `name` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def find(which: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the finder where `home`/bin is all of PATH, its version managers below `home`."""
    (home / "bin").mkdir(exist_ok=True)
    (home / "bin" / "bash").symlink_to(shutil.which("bash"))
    outside = {
        "PATH": str(home / "bin"),
        "HOME": str(home),
        "PYENV_ROOT": str(home / "pyenv"),
    }
    return subprocess.run(
        [str(ROOT / ".ci" / "find-python"), which],
        env={**outside, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_shim_that_does_not_run_is_passed_over(tmp_path):
    place(tmp_path / "bin", "python3.98", "echo 'command not found' >&2; exit 127")
    place(tmp_path / "pyenv/versions/3.97.0/bin", "python3", "echo 3 97 0 /the/real/one")
    assert find("newest", tmp_path).stdout == "/the/real/one\n"


def test_the_newest_of_several_is_found(tmp_path):
    for minor, micro in ((96, 3), (97, 10), (97, 9)):
        folder = tmp_path / f"pyenv/versions/3.{minor}.{micro}/bin"
        place(folder, "python3", f"echo 3 {minor} {micro} /python/{minor}.{micro}")
    assert find("newest", tmp_path).stdout == "/python/97.10\n"


def test_the_default_is_3_11_where_there_is_one(tmp_path):
    place(tmp_path / "bin", "python3.97", "echo 3 97 0 /the/newest")
    place(tmp_path / "bin", "python3.11", "echo 3 11 9 /a path/of 3.11")
    assert find("default", tmp_path).stdout == "/a path/of 3.11\n"


def test_python_chosen_in_place_of_3_11_is_printed(tmp_path):
    place(tmp_path / "bin", "python3.97", "echo 3 97 0 /a path/of 3.97")
    done = find("default", tmp_path)
    assert done.stdout == "/a path/of 3.97\n"
    assert done.stderr == "no Python 3.11 found: taking /a path/of 3.97\n"


def test_missing_python_prints_what_to_do(tmp_path):
    place(tmp_path / "bin", "python3", "exit 1")  # an old one
    done = find("default", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "no Python 3.11 or newer found; if there is one, add PYTHON=/its/path to the command\n"
    )


def test_a_python_that_cannot_make_environments_is_named(tmp_path):
    """As Debian's, whose part that makes environments is another package."""
    hidden = "import sys; sys.modules['ensurepip'] = None"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    place(tmp_path / "bin", "python3", f'PYTHONPATH={tmp_path} exec "{sys.executable}" "$@"')
    done = find("default", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    version = f"python3.{sys.version_info.minor}"
    assert re.fullmatch(
        rf'Python [\d.]+ \(.*\) cannot make .* "sudo apt install {version}-venv" .*\n', done.stderr
    )


@pytest.mark.parametrize("which", [["default", "PYTHON"], ["newest", "NEWEST_PYTHON"]])
def test_your_own_choice_wins(which, tmp_path):
    assert find(which[0], tmp_path, **{which[1]: "/mine"}).stdout == "/mine\n"


@pytest.mark.parametrize("which", ["", "oldest"])
def test_a_question_it_does_not_know_is_a_usage_error(which, tmp_path):
    done = find(which, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage" in done.stderr
