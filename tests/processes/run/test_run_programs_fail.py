"""Programs that fail before, or beside, their first line: as `shoal run` reports them."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPT = "raise KeyboardInterrupt\n"
JOIN = "import shoal\nshoal.initialize(virtual_devices=1)\n"
HOOK = "import sys\nsys.excepthook = lambda *raised: print(raised[0].__name__, flush=True)\n"
INTERRUPTS = {
    "script.py": INTERRUPT,
    "joined.py": JOIN + INTERRUPT,
    "without_hooks.py": JOIN.replace("=1", "=1, hooks=False") + INTERRUPT,
    "hooked.py": HOOK + INTERRUPT,
    "joined_and_hooked.py": JOIN + HOOK + INTERRUPT,
    "sigint.py": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
    "asynchronous.py": "import asyncio\nasync def f(): raise KeyboardInterrupt\nasyncio.run(f())\n",
    "folder/__main__.py": INTERRUPT,
}


def run(launch, *words, python=(sys.executable,)):
    """Run a command line of `shoal run` in the folder of a launch."""
    launch.popen = subprocess.Popen(
        [*python, "-m", "shoal", "run", *words],
        cwd=launch.folder, env=launch.env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return launch.finish()


def write(launch, files):
    for name, text in files.items():
        path = launch.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("number", ["1", "2"])
@pytest.mark.parametrize("program", [*INTERRUPTS, "-m script"])
def test_a_keyboard_interrupt_is_130(launch, program, number):
    write(launch, INTERRUPTS)
    finished = run(launch, "-n", number, *program.removesuffix("/__main__.py").split())
    assert finished.code == 130, finished.err
    assert "raised KeyboardInterrupt" in finished.verdict
    assert "Then " not in finished.err, "the process itself ended so"


@pytest.mark.parametrize("program", ["script.py", "joined.py", "hooked.py", "joined_and_hooked.py"])
def test_a_keyboard_interrupt_is_130_without_a_launcher(launch, program):
    write(launch, INTERRUPTS)
    shell = ["sh", "-c", f'"{sys.executable}" {program}; echo $?']
    done = subprocess.run(
        shell, cwd=launch.folder, env=launch.env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("130\n"), done


def test_a_module_that_is_not_there_is_refused_before_any_process_starts(launch):
    write(launch, {"pkg/__init__.py": "print('ran')", "pkg/train.py": ""})
    finished = run(launch, "-n", "2", "--max-restarts", "3", "-m", "pkg.trian")
    words = "shoal: run: there is no module 'pkg.trian'; did you mean 'pkg.train'?\n"
    assert finished == (2, "", words)


def test_a_module_that_only_its_package_could_find_is_refused_once(launch):
    write(launch, {"pkg/__init__.py": "__path__ = []"})
    finished = run(launch, "-n", "2", "--max-restarts", "3", "-m", "pkg.trian")
    assert finished.code == 2
    assert finished.err.count("No module named pkg.trian") == 2  # of each process
    assert "attempt 1" not in finished.err
    assert "runpy" not in finished.err


def test_the_exit_of_an_installed_module_is_shown_without_what_started_it(launch):
    finished = run(launch, "-m", "json.tool")  # no input
    assert finished.code == 1
    assert "json/tool.py" in finished.err
    assert "runpy" not in finished.err


@pytest.mark.parametrize("program", ["-m pk.sub.train", "starts.py", "-m starts"])
def test_a_syntax_error_is_shown_with_its_path(launch, program):
    files = {"pk/__init__.py": "", "pk/sub/__init__.py": "x = 1\ndef f(:\n", "pk/sub/train.py": ""}
    write(launch, files | {"starts.py": "import pk.sub\n"})
    finished = run(launch, "-n", "2", *program.split())
    assert finished.code == 1
    assert '  File "pk/sub/__init__.py", line 2, in <module>\n    def f(:\n' in finished.err


# A file beside the script has the name of a module of Python; it notes that it was imported.
NAMED_ALIKE = """
import os
os.write(os.open({seen!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), b"{name} ")
mine = 1
"""
ENDS = {
    "raise ValueError('boom')": ("ValueError: boom", 1, ""),
    "import json; raise ValueError(json.mine)": ("ValueError: 1", 1, "json "),
    "import shoal; raise ValueError(shoal.mine)": ("ValueError: 1", 1, "shoal "),
    "import sys, token, dataclasses; sys.exit('end')": (": end", 1, "token dataclasses "),
    "def f(:": ("SyntaxError: invalid syntax", 1, ""),
    "raise KeyboardInterrupt": ("KeyboardInterrupt", 130, ""),
    "import queue, threading; threading.current_thread": (
        "AttributeError: ",
        1,
        "queue threading ",
    ),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("program", [["fails.py"], ["-m", "fails"]], ids=["script", "module"])
def test_a_file_named_like_a_module_of_python_does_not_hide_it_from_the_report(
    launch, end, program
):
    words, code, imported = ENDS[end]
    seen = launch.folder / "seen"
    seen.touch()
    names = {*sys.stdlib_module_names, "shoal"}
    write(launch, {f"{n}.py": NAMED_ALIKE.format(seen=str(seen), name=n) for n in names})
    write(launch, {"fails.py": end})
    # The launcher itself looks for modules where the command `shoal` does.
    finished = run(launch, *program, python=[sys.executable, "-P"])
    assert finished.code == code, finished.err
    assert words in finished.err
    assert "os._exit" not in finished.err
    if sys.version_info >= (3, 13) and "sys.exit" not in end:
        imported += "traceback "  # by Python itself, which prints exceptions with that module
    assert seen.read_text() == imported
