"""Real launches of `shoal run`, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from processes.run.forked_launch import ForkedLaunch
from processes.run.launchers import verdict_of
from shoal.runtime.system.process_status import status_of
from shoal.testing.warden import MARK, marked
from shoal.testing.warding import Warden

DEADLINE_S = 60.0


class Finished(NamedTuple):
    """How a launch ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.splitlines())

    @property
    def verdict(self) -> str:
        """What is said first of the last failure; else the last line."""
        return verdict_of(self.err)


class Launch:
    """One `shoal run` of a script, in a folder of its own."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.forks = False  # see `forked_launch`
        self._outside = env
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.warden = Warden(0)
        self.env = {**env, MARK: self.warden.mark, "TMPDIR": str(self.temporary)}
        self.env |= {"SHOAL_FAILURE_GRACE_S": "0.3", "SHOAL_GRACE_S": "5", "COLUMNS": "200"}
        self.popen: subprocess.Popen[str] | ForkedLaunch | None = None

    def start(
        self,
        *options: str,
        script: str,
        arguments: tuple[str, ...] = (),
        before: Iterable[str] = (),
        **popen: object,
    ) -> subprocess.Popen[str] | ForkedLaunch:
        """Start it, by the command `before` if one is given."""
        (self.folder / "script.py").write_text(textwrap.dedent(script))
        if self.forks and not (before or popen):
            words = ["run", *options, "script.py", *arguments]
            self.popen = ForkedLaunch(words, self.folder, self.env, self._outside)
            return self.popen
        self.popen = subprocess.Popen(
            [*before, sys.executable, "-m", "shoal", "run", *options, "script.py", *arguments],
            cwd=self.folder,
            env=self.env,
            **{"stdin": subprocess.DEVNULL, "stdout": -1, "stderr": -1}
            | {"text": True, "errors": "surrogateescape"}
            | popen,
        )
        return self.popen

    def run(
        self,
        *options: str,
        script: str,
        arguments: tuple[str, ...] = (),
        before: Iterable[str] = (),
    ) -> Finished:
        self.start(*options, script=script, arguments=arguments, before=before)
        return self.finish()

    def finish(self) -> Finished:
        out, err = self.popen.communicate(timeout=DEADLINE_S)
        return Finished(self.popen.returncode, out, err)

    def await_words(self, words: str, times: int) -> None:
        """Read the launcher's stdout until `words` was said so often."""
        while times > 0:
            line = self.popen.stdout.readline()
            assert line, "the launcher ended before it was ready"
            times -= line.count(words)  # what is not buffered may share a line

    def pids(self, words: str = "") -> list[int]:
        """Return the living processes of this launch whose command line has `words`.

        By the mark in their environment, or, for one that wiped it, by what it left in a file.
        """
        found = {int(path.read_text()) for path in self.folder.glob("*.pid")}
        found.update(marked(self.warden.mark))
        return sorted(pid for pid in found if is_alive(pid) and words in command_line(pid))

    def leaves_nobody(self, within_s: float = 10.0) -> bool:
        """Look at /proc until nobody is left."""
        deadline_s = time.monotonic() + within_s
        while self.pids():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        """Kill what a failed test left, by pid."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.warden.close()
        if self.popen is not None:
            self.popen.wait()
            for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
                if pipe is not None:
                    pipe.close()


def is_alive(pid: int) -> bool:
    status = status_of(pid)
    return status is not None and not status.has_ended


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@pytest.fixture
def launch(tmp_path: Path, child_env: dict[str, str]) -> Iterator[Launch]:
    """Return a launch to start; nothing of it outlives the test."""
    # A suite that runs in the background may ignore SIGINT, which the launcher would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    launch = Launch(tmp_path, child_env)
    yield launch
    launch.end()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def forks(launch: Launch) -> None:
    """Let the launcher and its processes be forks: they do not start as a user's do."""
    launch.forks = True


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Return whether a pid is that of a living process."""
    return is_alive
