"""The files of docs/clusters, and a folder in which they run as a reader would run them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import shoal

PAGES = Path(__file__).parents[3] / "docs" / "clusters"
WAIT_S = 100
STEPS_WITH_NOTICE = 2000  # seconds of work: they are not over before a notice arrives


def page_file(page, name):
    """Return a file that a page shows: a code block with the file's name after its language."""
    text = (PAGES / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```\S+ {re.escape(name)}\n(.*?)^```$", text, re.M | re.S)
    return found


class Folder:
    """A folder with train.py and the files of a page, and an environment to run them in."""

    def __init__(self, folder, env):
        self.path = folder
        (folder / "train.py").write_text(page_file("index.md", "train.py"))
        (folder / "bin").mkdir()
        source = str(Path(shoal.__file__).parents[1])
        scripts = Path(sys.executable).parent
        packages = [path for path in sys.path if path.endswith("site-packages")]
        self.env = {
            **env, "JAX_PLATFORMS": "cpu", "RUN": str(folder / "run"), "STEPS": "60",
            "SHOAL_INITIALIZE_TIMEOUT_S": "60", "PYTHONUNBUFFERED": "1",
            "PATH": f"{folder / 'bin'}:{scripts}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], source, *packages]),
        }  # fmt: skip
        self._started = []

    def add(self, page, name):
        """Copy a file of a page."""
        (self.path / name).write_text(page_file(page, name))

    def stand_in(self, name, text):
        """Put a program on the path."""
        path = self.path / "bin" / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def stand_in_python(self, name, text):
        """Put a Python program on the path. (The line `#!` cannot name a Python with a space.)"""
        program = self.path / "bin" / f"{name}.py"
        program.write_text(text)
        command = shlex.join([sys.executable, str(program)])
        self.stand_in(name, f'#!/bin/sh\nexec {command} "$@"\n')

    def start(self, *command, **env):
        """Start a command, in a session of its own."""
        self._started.append(Started(command, self.path, {**self.env, **env}))
        return self._started[-1]

    def close(self):
        for started in self._started:
            started.end()


class Started:
    """A command that runs: its lines as they come."""

    def __init__(self, command, folder, env):
        self.popen = subprocess.Popen(
            command, cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._lines, self._changed = [], threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self):
        with self._changed:
            return "".join(self._lines)

    def until(self, words, times=1):
        """Wait until these words were printed."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: "".join(self._lines).count(words) >= times or self._lines[-1:] == [""],
                WAIT_S,
            )
        assert there, self.said
        assert self.said.count(words) >= times, self.said

    def code(self):
        """Wait for its end; return its exit code."""
        self._reader.join(WAIT_S)
        return self.popen.wait(WAIT_S)

    def pids(self, words):
        """Return the processes of its session whose command line has these words, oldest first."""
        found = []
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words in line and os.getsid(pid) == self.popen.pid:
                    found.append(pid)
        return found

    def end(self):
        """End its session: the processes of all launchers here end with theirs."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        for pid in self.pids(""):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(WAIT_S)

    def _read(self):
        for line in self.popen.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._lines.append("")  # the end
            self._changed.notify_all()
        self.popen.stdout.close()


def is_done(said, processes, devices=None):
    """Return whether this is what the pages show of a job that works."""
    start = f"{processes} processes, {devices or processes} devices\nfrom step 0\n"
    return start in said and "done after 60 steps\n" in said


def check_went_on(said, processes, devices=None):
    """Check that a job worked as the pages show, was preempted, and went on in a second start."""
    said = said.replace("\r", "")
    start = f"{processes} processes, {devices or processes} devices\nfrom step "
    assert said.count(start) == 2, said
    first, second = (int(part.split()[0]) for part in said.split(start)[1:])
    assert first == 0, said
    assert 0 < second < STEPS_WITH_NOTICE, said
    assert f"done after {STEPS_WITH_NOTICE} steps\n" in said, said
