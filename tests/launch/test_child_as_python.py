"""A program runs under `child.py` exactly as `python` itself would run it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shoal.launch import child

SHOW = """
import os, sys
import __main__
print(sys.argv, sys.path[0], __name__ == "__main__", __main__.__dict__ is globals())
print({k: v for k, v in sorted(globals().items()) if k in
       ("__file__", "__package__", "__doc__", "__cached__", "__annotations__")})
print(sorted(k for k in globals() if k.startswith("__")))
print(type(__builtins__), type(__loader__).__name__, __spec__ and __spec__.name)
print(sorted(k for k in sys.modules if "shoal" in k or k == "runpy_noise"))
"""

PROGRAMS = {
    "show.py": SHOW,
    "raise.py": (
        "def f():\n    raise ValueError('é')\ntry:\n    1 / 0\nexcept Exception:\n    f()\n"
    ),
    "syntax.py": "print('never')\nx = = 1\n",
    "exit3.py": "import sys; sys.exit(3)",
    "exit_words.py": "import sys; sys.exit('some words')",
    "interrupt.py": "raise KeyboardInterrupt",
    "latin.py": b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n",
    "late.py": (
        "import atexit, threading, time\n"
        "atexit.register(lambda: print('atexit', threading.main_thread().name, here))\n"
        "import __main__; here = 1\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print(__main__.here))).start()\n"
    ),
    "hook.py": (
        "import sys, traceback\n"
        "def hook(kind, value, trace):\n"
        "    print(kind.__name__, [f.name for f in traceback.extract_tb(trace)])\n"
        "sys.excepthook = hook\n"
        "def f(): raise ValueError\n"
        "f()\n"
    ),
    "pickles.py": (
        "import pickle\nclass Mine: pass\nprint(pickle.loads(pickle.dumps(Mine)) is Mine)\n"
    ),
    "spawn.py": (
        "import multiprocessing\n"
        "def work(x): print('worked', x, __name__)\n"
        "if __name__ == '__main__':\n"
        "    p = multiprocessing.get_context('spawn').Process(target=work, args=(5,))\n"
        "    p.start(); p.join(); print(p.exitcode)\n"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "below").mkdir()
    for name, text in PROGRAMS.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / "below" / name).write_bytes(data)
    (folder / "link.py").symlink_to(folder / "below/show.py")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(SHOW)
    (package / "__main__.py").write_text(SHOW)
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    # Names that would take the place of what child.py, or shoal, might import.
    for name in ("output.py", "runpy.py", "shoal.py", "typing.py"):
        (folder / "below" / name).write_text("raise SystemExit('shadowed')")
    return folder


def both(folder: Path, env: dict[str, str], *arguments: str) -> list[tuple[int, str, str]]:
    """Return (code, stdout, stderr) under python itself and under child.py."""
    ended = []
    for program in ([], [child.__file__]):
        done = subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        ended.append((done.returncode, done.stdout.decode(), done.stderr.decode()))
    return ended


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_scripts(folder, child_env, name):
    plain, ours = both(folder, child_env, f"below/{name}", "a", "-b", "--", "-m")
    assert ours == plain
    assert plain[1] or plain[2] or name == "exit3.py"


@pytest.mark.parametrize("program", ["link.py", "package", "zipped.zip"])
def test_links_folders_and_archives(folder, child_env, program):
    plain, ours = both(folder, child_env, program, "a")
    assert ours == plain
    assert plain[0] == 0


@pytest.mark.parametrize("module", ["package.inner", "package", "package.missing", "nowhere"])
def test_modules(folder, child_env, module):
    plain, ours = both(folder, child_env, "-m", module, "a", "-m", "b")
    assert ours == plain
    assert (plain[0] == 0) == ("missing" not in module and module != "nowhere")


def test_a_safe_path_stays_safe(folder, child_env):
    plain, ours = both(folder, child_env | {"PYTHONSAFEPATH": "1"}, "below/show.py")
    assert ours == plain
    assert str(folder) not in plain[1].split("]", 1)[1].splitlines()[0]
