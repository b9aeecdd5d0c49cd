"""The marker runs a test's body in processes; its failures are the test's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import shoal
from testing import functions


@pytest.mark.processes(3, devices=2, start_method="fork")
def test_the_body_runs_in_three_processes():
    assert shoal.process_count() == 3
    assert functions.global_sum() == (15.0, 6)
    shoal.barrier("here")


@pytest.mark.processes(2, start_method="fork")
@pytest.mark.parametrize("name", ["one", "two"])
def test_parameters_and_paths_travel(name, tmp_path):
    assert name in ("one", "two")
    (tmp_path / str(shoal.process_index())).write_text(name)
    shoal.barrier("written")
    assert [path.read_text() for path in tmp_path.iterdir()] == [name] * 2


class TestInAClass:
    @pytest.mark.processes(1)
    def test_a_method(self):
        assert type(self).__name__ == "TestInAClass"


@pytest.mark.cuts
@pytest.mark.processes(2, network=True, start_method="fork")
def test_across_hosts():
    assert functions.host() == f"10.201.0.{shoal.process_index() + 1}"


INNER = """
import os, pytest, shoal

@pytest.mark.processes(2, start_method="fork")
def test_fails():
    if shoal.process_index() == 1:
        assert 1 + 1 == 3
    shoal.barrier("never")

@pytest.mark.processes(2, start_method="fork")
def test_skips():
    pytest.skip("not today")

@pytest.mark.processes(2, initialize=False)
def test_is_wrong():
    pass

@pytest.mark.processes(2)
def test_has_a_fixture_that_cannot_travel(monkeypatch):
    pass

class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("it has no words")

@pytest.mark.processes(1, start_method="fork")
def test_raises_what_cannot_be_shown():
    raise UnspeakableError(lambda: 0)

@pytest.mark.processes(1)
def test_passes(default="not a fixture"):
    assert os.environ["SHOAL_PROCESS_ID"] == "0"
    print("not shown")
"""


def test_failures_are_reported_with_their_traceback(child_env, tmp_path):
    inner = tmp_path / "inner"  # not the current directory, which pytest itself imports from
    inner.mkdir()
    (inner / "test_inner.py").write_text(INNER)
    (inner / "selectors.py").write_text("raise RuntimeError('a namesake')")
    command = [sys.executable, "-m", "pytest", "-p", "shoal.testing.pytest_plugin", "-rs"]
    done = subprocess.run(
        [*command, "--strict-markers", "-p", "no:cacheprovider", str(inner)],
        cwd=tmp_path,
        env=child_env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "4 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    assert "During handling of the above" not in done.stdout, done.stdout
    for words in (
        "process 1 of 2 failed; so did [0] after it",
        "    assert 1 + 1 == 3",
        "Skipped: not today",
        "@pytest.mark.processes(2, initialize=False)",
        "is a MonkeyPatch, which cannot be sent",
        "UnspeakableError: <exception str() failed>",
    ):
        assert words in done.stdout, words


def test_under_ci_a_cut_is_never_skipped(child_env, tmp_path):
    code = """
        import shoal.testing.pytest_plugin as plugin
        plugin.why_no_cuts = lambda: "there is no network here"
        import pytest
        @pytest.mark.cuts
        def test_cut():
            pass
        """
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "shoal.testing.pytest_plugin"]
    for variables, told in (({}, "1 skipped"), ({"CI": "1"}, "CI must run this test")):
        if variables and os.geteuid() != 0:
            told = "1 skipped"
        env = {name: value for name, value in child_env.items() if name != "CI"} | variables
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", str(tmp_path)],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert told in done.stdout, done.stdout
