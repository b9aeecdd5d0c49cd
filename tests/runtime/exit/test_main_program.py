"""What is read of how a program ended, in an exit handler of a real interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading
from shoal.runtime.exit.main_program import MainProgram

program = MainProgram()
assert program.is_running() and not program.has_returned() and program.uncaught() is None

def at_exit():
    error = program.uncaught()
    print(program.is_running(), program.has_returned(), type(error).__name__, program.place)

atexit.register(at_exit)
sys.excepthook = lambda *what: None
def fail():
    raise ValueError("no data")
"""
BAD_HOOK = "sys.excepthook = lambda *what: 1 / 0\n"
ENDS = {
    "returns": ("fail", "True NoneType"),
    "raises": ("fail()", "False ValueError"),
    "raises again": ("try:\n fail()\nexcept ValueError:\n raise", "False ValueError"),
    "raises through finally": ("try:\n fail()\nfinally:\n print(end='')", "False ValueError"),
    "hook raises": (f"{BAD_HOOK}fail()", "False ValueError"),
    "no hook": ("del sys.excepthook\nfail()", "False ValueError"),
    "system exit": ("raise SystemExit(3)", "False NoneType"),
    "sys.exit": ("sys.exit('words')", "False NoneType"),
    "caught": ("try:\n sys.exit(3)\nexcept SystemExit:\n pass", "True NoneType"),
    "shown and caught": (
        "try:\n fail()\nexcept ValueError as e:\n sys.last_value = e\n"
        " sys.last_traceback = e.__traceback__\nassert program.uncaught() is None",
        "True",
    ),
    "in a thread": (
        "made = threading.Thread(target=lambda: globals().update(program=MainProgram()))\n"
        "made.start(); made.join()\nfail()",
        "False ValueError",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_exit_handler_knows_how_the_program_ended(end, tmp_path, child_env):
    script, expected = ENDS[end]
    (tmp_path / "train.py").write_text(SCRIPT + script + "\n")
    ways = [["train.py"], ["-m", "train"]] if end in ("raises", "system exit") else [["train.py"]]
    for way in ways:
        ended = subprocess.run(
            [sys.executable, *way], env=child_env, cwd=tmp_path, capture_output=True, text=True
        )
        assert ended.stdout.startswith(f"False {expected} "), ended
        assert " train.py:" in ended.stdout, ended
