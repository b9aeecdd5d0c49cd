"""`.ci/install` asks pip for the versions that its last argument names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from meta.source import ROOT
from meta.test_find_python import place

PYTHON = """
case "$*" in
  *"import sys, pip"*) echo {minor}.7 ;;
  *) echo "$*" >>{log} ;;
esac
"""
NEWEST = (
    "-m pip install --no-compile --progress-bar off --upgrade --upgrade-strategy eager"
    " --editable .[test]"
)


def install(venv: Path, minor: str, *versions: str) -> tuple[list[str], list[str], list[str]]:
    """Run the script with an environment whose Python records what it is called with.

    Returns:
      The lines of the record, of stdout and of stderr.
    """
    log = venv.with_suffix(".log")
    log.touch()
    place(venv / "bin", "python", PYTHON.format(minor=minor, log=log))
    done = run(venv, "no-python", *versions)
    return log.read_text().splitlines(), done.stdout.splitlines(), done.stderr.splitlines()


def run(venv: Path, python: Path | str, *versions: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / ".ci/install", venv, python, "test", *versions],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("versions", [[], ["pinned"]])
def test_versions_are_pinned_unless_others_are_named(tmp_path, versions):
    called, printed, _ = install(tmp_path / "env", "3.11", *versions)
    assert called == [
        "-m pip install --no-compile --progress-bar off"
        " --constraint requirements/python3.11.txt --editable .[test]"
    ]
    first, last = printed
    assert first.startswith(f"installing shoal[test] and what it needs into {tmp_path}/env (Python")
    assert re.fullmatch(r"installed in \d+ s", last)


def test_a_python_without_pins_gets_the_newest_versions(tmp_path):
    called, printed, _ = install(tmp_path / "env", "3.98")
    assert called == [NEWEST]
    assert printed[0] == "no requirements/python3.98.txt: installing the newest versions"


def test_latest_ignores_the_pins(tmp_path):
    assert install(tmp_path / "env", "3.13", "latest")[0] == [NEWEST]


def test_nightly_replaces_jax_and_keeps_no_release_of_it(tmp_path):
    first, second, third = install(tmp_path / "env", "3.13", "nightly")[0]
    assert first == NEWEST
    assert second == "-m pip uninstall --quiet --yes jax jaxlib"
    assert third.startswith("-m pip install --no-compile --pre jax jaxlib -i https://")


def test_other_versions_are_refused(tmp_path):
    called, printed, error = install(tmp_path / "env", "3.13", "newest")
    assert (called, printed) == ([], [])
    assert error == ["newest: pinned, latest or nightly?"]


@pytest.mark.parametrize("script", [None, "exit 1"])
def test_a_foreign_environment_stays_as_it_is(tmp_path, script):
    """Of an older Python, without pip, or moved away from its Python."""
    venv = tmp_path / "env"
    venv.mkdir()
    (venv / "mine").touch()
    if script is not None:
        place(venv / "bin", "python", script)
    done = run(venv, "no-python")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{venv} is no environment of Python 3.11 or newer with pip: ")
    assert (venv / "mine").exists()


def test_a_python_that_will_not_do_makes_nothing(tmp_path):
    done = run(tmp_path / "env", "/bin/false")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "/bin/false is no Python 3.11 or newer that can make environments\n"
    assert not (tmp_path / "env").exists()
