"""Where the processes of a job meet if no variable says it: process 0 tells them in a directory.

Each process leaves an empty file there, whose name is its index and a number drawn at random.
Process 0 waits for all of them and answers with one file: the address, and the numbers that it
saw. A process believes only an answer with its own number in it, so nothing that an earlier job
left can mislead it. Process 0 first takes away what lies there; who finds its file gone puts it
back. Files appear whole (renamed into place), and go when the job has begun.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal import settings
from shoal.errors import InitializeError
from shoal.runtime.rules.deadline import given_s
from shoal.runtime.rules.outcomes import listed

_LOG = logging.getLogger("shoal")
_ANSWER = "address"
_COMER = re.compile(r"process-([0-9]+)-([0-9a-f]{16})")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.25
_PROCESSES_PER_S = 2000  # that look into the directory, where there are thousands


class Rendezvous(NamedTuple):
    """The directory of one job. `base` exists; what lies in it is the job's."""

    base: str
    name: str
    on_one_host: bool


def local_base() -> str:
    """Return the directory of this machine in which jobs of this user meet."""
    return os.path.join(tempfile.gettempdir(), f"shoal-{os.getuid()}")


class Visit:
    """One process's stay in the directory: from `come` until `leave`."""

    def __init__(self, where: Rendezvous, process: int, num_processes: int) -> None:
        self._where, self._process, self._num_processes = where, process, num_processes
        self._directory = Path(where.base, where.name)
        self._drawn = secrets.token_hex(8)
        self._own = self._directory / f"process-{process}-{self._drawn}"
        self._waiting = f"process {process} of {num_processes} meets in {self._directory}"

    def come(self) -> None:
        """Leave the file of this process; process 0 takes away what lies there.

        Raises:
          InitializeError: that cannot be done here.
        """
        try:
            if self._where.on_one_host:
                _make_private(self._where.base)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if self._process == 0:
                for path in self._files():
                    path.unlink(missing_ok=True)
            self._own.touch(mode=0o600)
        except OSError as error:
            raise self._error(f"{error}; give a directory that exists and can be written") from None

    def lead(self, place: Mapping[str, str], deadline: float) -> None:
        """Wait for all others, as process 0, and tell them `place`.

        Raises:
          InitializeError: not all came by the deadline, one index came twice, or another process
            0 came. Those that came get it too, but for that other one.
        """
        try:
            self._wait(deadline)
        except InitializeError as error:
            with contextlib.suppress(OSError):
                self._answer({"error": str(error), "missing": error.missing})
            raise
        self._answer(place)

    def follow(self, deadline: float) -> Mapping[str, str]:
        """Return what process 0 tells.

        Raises:
          InitializeError: it told nothing by the deadline, or that it gave up.
        """
        pause = _Pause(self._waiting, deadline, self._num_processes)
        while True:
            answer = self._read()
            if self._drawn in answer.get("to", ()):
                break
            with contextlib.suppress(OSError):  # process 0, which takes all away, may be there now
                if not self._own.exists():
                    self._directory.mkdir(mode=0o700, exist_ok=True)
                    self._own.touch(mode=0o600)
            if not pause.wait("process 0 has not said where"):
                raise self._error(
                    f"process 0 said nothing within {given_s(deadline):g} s"
                    + ("; another job uses this directory" if answer else "")
                    + f"\nhere {self._came_words()}: {self._advice()}",
                    missing=[0] if not answer else [],
                )
        if "error" in answer:
            raise InitializeError(
                f"process 0 gave up: {answer['error']}", missing=answer["missing"]
            )
        return answer

    def leave(self, *, has_begun: bool) -> None:
        """Take this process's file away; all files, when the job has begun or nobody is left."""
        with contextlib.suppress(OSError):
            if not has_begun:
                self._own.unlink(missing_ok=True)
            is_last = self._process == 0 if has_begun else not self._came()
            if is_last:
                for path in self._files():
                    path.unlink(missing_ok=True)
                self._directory.rmdir()

    def _wait(self, deadline: float) -> None:
        pause = _Pause(self._waiting, deadline, self._num_processes)
        while True:
            came = self._came()
            if self._drawn not in came.get(0, ()):
                raise self._error("another process 0 meets here too: does a job use it already?")
            twice = [index for index, drawn in came.items() if len(drawn) > 1]
            if twice:
                raise self._error(f"{_words(twice)} came more than once: {self._advice()}")
            missing = [index for index in range(self._num_processes) if index not in came]
            if not missing:
                return
            if not pause.wait(f"{_words(missing)} did not come yet"):
                raise self._error(
                    f"{_words(missing)} did not come within {given_s(deadline):g} s: "
                    f"{self._advice()}",
                    missing=missing,
                )

    def _answer(self, place: Mapping[str, object]) -> None:
        drawn = [one for several in self._came().values() for one in several]
        whole = self._directory / f"{_ANSWER}.{self._drawn}"
        with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({**place, "to": drawn}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, self._directory / _ANSWER)

    def _read(self) -> dict[str, Any]:
        try:
            answer = json.loads((self._directory / _ANSWER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _came(self) -> dict[int, list[str]]:
        came: dict[int, list[str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                if match := _COMER.fullmatch(name):
                    came.setdefault(int(match[1]), []).append(match[2])
        return came

    def _came_words(self) -> str:
        came = sorted(self._came())
        return f"came {_words(came)} of {self._num_processes}"

    def _files(self) -> list[Path]:
        return [
            path
            for path in self._directory.iterdir()
            if _COMER.fullmatch(path.name) or path.name.partition(".")[0] == _ANSWER
        ]

    def _advice(self) -> str:
        if self._where.on_one_host:
            return "did the others end before initialize()?"
        return (
            "SHOAL_RENDEZVOUS must be one directory that all hosts share, and no other job of the "
            "same launcher may use it meanwhile"
        )

    def _error(self, words: str, missing: list[int] | None = None) -> InitializeError:
        return InitializeError(f"{self._waiting}: {words}", missing=missing or ())


class _Pause:
    """Pauses between two looks, longer and longer, until the deadline; one warning."""

    def __init__(self, waiting: str, deadline: float, num_processes: int) -> None:
        self._waiting, self._deadline, self._pause_s = waiting, deadline, _FIRST_PAUSE_S
        self._last_s = max(_LAST_PAUSE_S, num_processes / _PROCESSES_PER_S)
        self._warn_at = time.monotonic() + settings.seconds("SHOAL_WARN_AFTER_S")

    def wait(self, words: str) -> bool:
        """Wait; return False at the deadline instead. `words` are logged where that takes long."""
        now = time.monotonic()
        if now >= self._deadline:
            return False
        if now >= self._warn_at:
            _LOG.warning("%s: %s", self._waiting, words)
            self._warn_at = float("inf")
        time.sleep(min(self._pause_s, self._deadline - now))
        self._pause_s = min(1.5 * self._pause_s, self._last_s)
        return True


def _make_private(directory: str) -> None:
    """Make a directory for this user alone, in one that others may write to."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, mode=0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")


def _words(processes: list[int]) -> str:
    return listed(processes) if processes else "no process"


def own_host() -> str:
    """Return the address by which other hosts are most likely to reach this one.

    That of its name; if that is the loopback's (as Debian has it), that of the default route.
    """
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(socket.gethostname())
        if not host.startswith("127."):
            return host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return socket.gethostname()
