"""`log` prints whole lines on process 0, with the step, also before a job is joined."""

from __future__ import annotations

import io
import sys

import pytest

from forked_scripts import run_forked
from shoal.runtime import process
from shoal.runtime.log import log
from shoal.runtime.step import step


@pytest.fixture(autouse=True)
def before_any_job(monkeypatch):
    """Whatever ran before in this process."""
    for name in ("alone", "joined", "left"):
        monkeypatch.setattr(process._RECORD, name, None)


class Pieces(io.StringIO):
    """A stream that keeps what each write was given."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces += [text] if text else []
        return len(text)


def test_a_line_is_one_write_with_the_step(monkeypatch):
    out = Pieces()
    monkeypatch.setattr(sys, "stdout", out)
    log("begin")
    with step(4):
        log("loss", 0.5, None)
        with step(7):
            log()
        log("evaluated\nin two lines")
    log("end")
    assert out.pieces == [
        "begin\n", "step 4: loss 0.5 None\n", "step 7: \n", "step 4: evaluated\nin two lines\n",
        "end\n",
    ]  # fmt: skip


@pytest.mark.parametrize(("quiet", "lines"), [("1", ""), ("0", "said\n")])
def test_the_variable_turns_it_off(monkeypatch, capsys, quiet, lines):
    monkeypatch.setenv("SHOAL_QUIET", quiet)
    log("said")
    assert capsys.readouterr().out == lines


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "said\n"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ""),
        ({"SHOAL_PROCESS_ID": "3", "SHOAL_NUM_PROCESSES": "4"}, ""),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "said\n"),  # `initialize` refuses it
    ],
)
def test_before_a_job_is_joined_the_launcher_gives_the_index(monkeypatch, capsys, env, lines):
    monkeypatch.setattr(process._RECORD, "alone", None)  # as in a process that has just begun
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    log("said")
    assert capsys.readouterr().out == lines


def test_without_a_standard_output_nothing_happens(child_env, tmp_path):
    script = """
    import sys
    from shoal.runtime.log import log
    sys.stdout = None
    log("nowhere")
    """
    done = run_forked(script, child_env, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
