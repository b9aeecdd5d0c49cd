"""`.ci/install` asks pip for the versions that its last argument names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meta.source import ROOT

PYTHON = """#!/bin/sh
case "$*" in
  *"import pip"*) ;;
  *version_info*) echo {minor} ;;
  *) echo "$*" ;;
esac
"""
NEWEST = "-m pip install --quiet --no-compile --upgrade --upgrade-strategy eager --editable .[test]"


def install(venv: Path, minor: str, *versions: str) -> subprocess.CompletedProcess[str]:
    """Run the script with an environment whose Python prints what it is called with."""
    python = venv / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.format(minor=minor))
    python.chmod(0o755)
    return subprocess.run(
        [ROOT / ".ci/install", venv, "no-python", "test", *versions],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("versions", [[], ["pinned"]])
def test_versions_are_pinned_unless_others_are_named(tmp_path, versions):
    done = install(tmp_path, "3.11", *versions)
    pinned = "--constraint requirements/python3.11.txt --editable .[test]"
    assert done.stdout == f"-m pip install --quiet --no-compile {pinned}\n"


def test_a_python_without_pins_gets_the_newest_versions(tmp_path):
    done = install(tmp_path, "3.98")
    assert done.stdout.splitlines() == [
        "no requirements/python3.98.txt: installing the newest versions",
        NEWEST,
    ]


def test_latest_ignores_the_pins(tmp_path):
    assert install(tmp_path, "3.13", "latest").stdout == f"{NEWEST}\n"


def test_nightly_replaces_jax_and_keeps_no_release_of_it(tmp_path):
    first, second, third = install(tmp_path, "3.13", "nightly").stdout.splitlines()
    assert first == NEWEST
    assert second == "-m pip uninstall --quiet --yes jax jaxlib"
    assert third.startswith("-m pip install --no-compile --pre jax jaxlib -i https://")


def test_other_versions_are_refused(tmp_path):
    done = install(tmp_path, "3.13", "newest")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "newest: pinned, latest or nightly?\n"
