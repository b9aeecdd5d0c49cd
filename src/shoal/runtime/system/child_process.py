"""Start shoal's own processes, beside those of the job."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, cast

_CHECK_S = 0.2


class Spawned:
    """A process that runs a module of shoal and prints one line when it is ready.

    It has a session of its own: neither Ctrl-C nor its parent's end reaches it.
    """

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        # A file, not a pipe: later output must not block it, nor hold the parent's stderr open.
        self._errors = open_memory_file()
        try:
            self._process = subprocess.Popen(
                # -P: the directory of the user's script must not shadow its imports.
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=uninspected({**own_environment(), **(env or {})}),
                start_new_session=True,
            )
        except BaseException:
            self._errors.close()
            raise
        self._why = ""
        self.pid = self._process.pid
        self.stdin = cast("IO[bytes]", self._process.stdin)
        self.stdout = cast("IO[bytes]", self._process.stdout)

    def first_line(self, timeout_s: float, *, check: Callable[[], None] = lambda: None) -> bytes:
        """Return the first line that it prints; if it ends or is late, kill it and return b"".

        Args:
          timeout_s: time limit, seconds.
          check: called periodically; its exception ends the wait, and kills the process too.
        """
        line = b""
        deadline = time.monotonic() + timeout_s
        readable = select.poll()  # select() takes no descriptor above 1023
        readable.register(self.stdout, select.POLLIN)
        try:
            while not line.endswith(b"\n"):
                left_s = deadline - time.monotonic()
                if not readable.poll(max(0.0, min(left_s, _CHECK_S)) * 1000):
                    if left_s <= 0:
                        self._end(f"it did not start within {timeout_s:.1f} s")
                        return b""
                    check()
                elif part := os.read(self.stdout.fileno(), 4096):
                    line += part
                else:
                    self._end("")
                    return b""
        except BaseException:
            self._end("")
            raise
        return line

    def _end(self, why: str) -> None:
        self.stdin.close()
        self.stdout.close()
        self._process.kill()
        code = self._process.wait()
        self._why = self._last_line() or why or f"it ended, code {code}"
        self._errors.close()

    def last_words(self) -> str:
        """Return the last line that it wrote to stderr; if none, why there was no first line."""
        return self._why or self._last_line()

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it has ended; return its exit code.

        Raises:
          subprocess.TimeoutExpired: it has not ended in time.
        """
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()

    def detach(self) -> None:
        """Detach it: it runs on, and is not waited for."""
        self.stdout.close()
        self._errors.close()
        self._process.returncode = 0  # avoids Popen's warning when it is collected


# ---- Copy the environment of this process while other threads may change it.


def own_environment() -> dict[str, str]:
    """Return a copy, for starting a process.

    Without one, exec reads the environment itself, and fails with "Bad address" if another thread
    changes it meanwhile, as pytest does for every test. `dict(os.environ)` fails, too, if a
    variable is removed during the copy.
    """
    variables = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in variables if value is not None}


def uninspected(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy for a process without a terminal.

    With PYTHONINSPECT, Python shows the end of a program by `sys.exit(0)` as an error, and its exit
    code is 1: it would go on at a terminal, interactively.
    """
    return {name: value for name, value in env.items() if name != "PYTHONINSPECT"}


# ---- A temporary file without a name.


def open_memory_file(name: str = "shoal") -> IO[bytes]:
    """Open an empty file that ends with its last descriptor.

    On Linux it lies in memory (memfd_create(2)): no directory need be writable, as in a container
    whose file system is read-only.
    """
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()
