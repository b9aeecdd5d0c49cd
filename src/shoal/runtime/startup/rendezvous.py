"""A rendezvous in a directory, for jobs without an address: process 0 publishes its own there.

Each process creates an empty file, whose name is its index and a random number. Process 0 waits
for all of them and answers with one file: the address, and the random numbers that it saw. A
process accepts only an answer that holds its own number, so files of an earlier job cannot mislead
it. Process 0 first deletes existing files; a process whose file is gone creates it again. The
answer is renamed into place, and all files are deleted when the job has begun.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal import settings
from shoal.errors import InitializeError
from shoal.paths import dangling_link, make_private
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.deadline import given_s
from shoal.runtime.wire.socket_calls import LinkError, encoded_name, socket_call

_LOG = logging.getLogger("shoal")
_ANSWER = "address"
_ARRIVAL = re.compile(r"process-([0-9]+)-([0-9a-f]{16})")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.25
_PROCESSES_PER_S = 2000  # processes that read the directory per second, at most


class Rendezvous(NamedTuple):
    """The directory of one job, `base`/`name`; `base` must exist."""

    base: str
    name: str
    on_one_host: bool


def local_base() -> str:
    """Return the directory of this machine for the rendezvous of this user's jobs."""
    return os.path.join(tempfile.gettempdir(), f"shoal-{os.geteuid()}")


class Visit:
    """One process's part in a rendezvous, from `announce` until `leave`."""

    def __init__(self, where: Rendezvous, process: int, num_processes: int) -> None:
        self._where, self._process, self._num_processes = where, process, num_processes
        self._directory = Path(where.base, where.name)
        self._drawn = secrets.token_hex(8)
        self._own = self._directory / f"process-{process}-{self._drawn}"
        self._waiting = f"process {process} of {num_processes} joins in {self._directory}"

    def announce(self) -> None:
        """Create the file of this process; process 0 first deletes existing files.

        Raises:
          InitializeError: the directory cannot be used.
        """
        try:
            if self._where.on_one_host:
                make_private(self._where.base)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            if self._process == 0:
                for path in self._files():
                    path.unlink(missing_ok=True)
            self._own.touch(mode=0o600)
        except OSError as error:
            why = dangling_link(str(self._directory)) or error
            raise self._error(f"{why}; pass a directory that exists and can be written") from None

    def lead(self, place: Mapping[str, str], deadline: float) -> None:
        """Wait for all others, as process 0, and publish `place`.

        Raises:
          InitializeError: processes are missing at the deadline, two have one index, or there is
            another process 0. All that arrived get it too, but for that other one.
        """
        try:
            self._wait(deadline)
        except InitializeError as error:
            with contextlib.suppress(OSError):
                self._answer({"error": str(error), "missing": error.missing})
            raise
        self._answer(place)

    def follow(self, deadline: float) -> Mapping[str, str]:
        """Return the place that process 0 published.

        Raises:
          InitializeError: it published nothing by the deadline, or gave up.
        """
        pause = _Pause(self._waiting, deadline, self._num_processes)
        while True:
            answer = self._read()
            if self._drawn in answer.get("to", ()):
                break
            with contextlib.suppress(OSError):  # process 0 may be deleting old files
                if not self._own.exists():
                    self._directory.mkdir(mode=0o700, exist_ok=True)
                    self._own.touch(mode=0o600)
            if not pause.wait("process 0 has not published its address"):
                raise self._error(
                    f"process 0 published no address within {given_s(deadline):g} s"
                    + ("; another job uses this directory" if answer else "")
                    + f"\n{self._arrived_words()}: {self._advice()}",
                    missing=[0] if not answer else [],
                )
        if "error" in answer:
            raise InitializeError(
                f"process 0 gave up: {answer['error']}", missing=answer["missing"]
            )
        return answer

    def leave(self, *, has_begun: bool) -> None:
        """Delete this process's file; all files if the job has begun or no process is left."""
        with contextlib.suppress(OSError):
            if not has_begun:
                self._own.unlink(missing_ok=True)
            is_last = self._process == 0 if has_begun else not self._arrived()
            if is_last:
                for path in self._files():
                    path.unlink(missing_ok=True)
                self._directory.rmdir()

    def _wait(self, deadline: float) -> None:
        pause = _Pause(self._waiting, deadline, self._num_processes)
        while True:
            arrived = self._arrived()
            if self._drawn not in arrived.get(0, ()):
                raise self._error("another process 0 is here: does another job use the directory?")
            twice = [index for index, drawn in arrived.items() if len(drawn) > 1]
            if twice:
                advice = self._advice()
                if self._where.on_one_host:
                    advice = "does a child of theirs call initialize(), too?"
                raise self._error(f"{listed(twice)} arrived more than once: {advice}")
            missing = [index for index in range(self._num_processes) if index not in arrived]
            if not missing:
                return
            if not pause.wait(f"waiting for {listed(missing)}"):
                raise self._error(
                    f"{listed(missing)} did not arrive within {given_s(deadline):g} s: "
                    f"{self._advice()}",
                    missing=missing,
                )

    def _answer(self, place: Mapping[str, object]) -> None:
        drawn = [draw for several in self._arrived().values() for draw in several]
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

    def _arrived(self) -> dict[int, list[str]]:
        """Return the random numbers of the processes that have arrived, by index."""
        arrived: dict[int, list[str]] = {}
        with contextlib.suppress(FileNotFoundError):  # no process has yet, or the last one left
            for name in os.listdir(self._directory):
                match = _ARRIVAL.fullmatch(name)
                if match:
                    arrived.setdefault(int(match[1]), []).append(match[2])
        return arrived

    def _arrived_words(self) -> str:
        arrived = sorted(self._arrived())
        return f"{listed(arrived)} of {self._num_processes} arrived"

    def _files(self) -> list[Path]:
        return [
            path
            for path in self._directory.iterdir()
            if _ARRIVAL.fullmatch(path.name) or path.name.partition(".")[0] == _ANSWER
        ]

    def _advice(self) -> str:
        if self._where.on_one_host:
            return "did they end before initialize()?"
        return (
            "SHOAL_RENDEZVOUS must be one directory that all hosts share, and no other job of the "
            "same launcher may use it at the same time"
        )

    def _error(self, message: str, missing: list[int] | None = None) -> InitializeError:
        return InitializeError(f"{self._waiting}: {message}", missing=missing or ())


class _Pause:
    """Growing pauses between two reads of the directory, until the deadline; one warning."""

    def __init__(self, waiting: str, deadline: float, num_processes: int) -> None:
        self._waiting, self._deadline, self._pause_s = waiting, deadline, _FIRST_PAUSE_S
        self._last_s = max(_LAST_PAUSE_S, num_processes / _PROCESSES_PER_S)
        self._warn_at = time.monotonic() + settings.seconds("SHOAL_WARN_AFTER_S")

    def wait(self, message: str) -> bool:
        """Wait, or return False at the deadline. `message` is logged once if waiting takes long."""
        now = time.monotonic()
        if now >= self._deadline:
            return False
        if now >= self._warn_at:
            _LOG.warning("%s: %s", self._waiting, message)
            self._warn_at = float("inf")
        time.sleep(min(self._pause_s, self._deadline - now))
        self._pause_s = min(1.5 * self._pause_s, self._last_s)
        return True


def own_host() -> str:
    """Return the address by which other hosts are most likely to reach this one.

    The address of its name; if that is the loopback (as on Debian), that of the default route. A
    host with neither reaches only itself.
    """
    name = "127.0.0.1"
    with contextlib.suppress(LinkError):
        host = socket_call(socket.gethostbyname, encoded_name(socket.gethostname()))
        if not host.startswith("127."):
            return host
        name = socket.gethostname()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return name
