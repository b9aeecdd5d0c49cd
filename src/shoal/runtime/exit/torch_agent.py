"""Report the end of a process to torchrun, so that it names the process that failed.

torchrun's agent, one on each node, polls its processes every 0.1 s (`--monitor-interval`). Once one
has ended with another code than 0, it sends SIGTERM to the others and waits for them. Its "root
cause" is the process with the earliest time in whole seconds: that in the error file
(`TORCHELASTIC_ERROR_FILE`), or without a file that of the poll; of equal times the process that was
seen first; of those the lowest rank. So

* a process that fails writes its file before any other process learns of the failure, with its time
  rounded down, as torch does. A file that exists, as `@record` writes one, is not replaced;
* a process that ends because another one of its node did outlasts it: it stays until the agent's
  SIGTERM shows that the end of the other was seen. Only then it writes its file, or changes the
  time in that of `@record`, rounded up. On other nodes all processes are such survivors: the file
  of any of them names the process that failed.

Source: torch.distributed.elastic.multiprocessing, `api.py` and `errors/` (torch 2.13).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from shoal.runtime.failures.exception_text import failure_of
from shoal.runtime.rules.point import Departure
from shoal.runtime.system.foreign_text import headline_of, text_of

_AGENT_S = 10.0  # for the agent's SIGTERM; twice the interval of polls that torch had until 2.3
_POLL_S = 0.02


class TorchAgent:
    """torchrun's agent on this node, as far as the variables of this process describe it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._has_signalled = False

    def record(self, error: BaseException, at_s: float, explanation: str = "") -> None:
        """Write the error file, unless there is one: `error` ended this process at `at_s`."""
        if isinstance(error, Exception):  # not Ctrl-C, which torch does not record either
            message = f"{type(error).__name__}: {text_of(error)}"
            self._record(message, failure_of(error).text + explanation, at_s)

    def record_words(self, words: str, at_s: float) -> None:
        """Write the error file, unless there is one, of an end without an exception."""
        self._record(headline_of(words), words, at_s)

    def note_signals(self, process: int | None) -> None:
        """From now on only record the agent's signals: this process ends, with its own exit code.

        Args:
          process: its index; None: not known.
        """
        if self._on_node(process) and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)  # they are not notices either
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signal_number, self._note_one)

    def outlast(self, process: int | None, peers: Mapping[int, Departure]) -> float:
        """Return the time of an end that was caused by the end of other processes.

        If the agent has the first of them, wait until it has seen that one end; the time is then
        later than that of the other, also in an error file that exists.

        Args:
          process: the index of this process; None: not known.
          peers: how they ended.
        """
        first, on_node = _first_failed(peers), self._on_node(process)
        if first is None or first not in on_node:
            return time.time()  # or a process that SIGTERM ends would be earlier
        self.note_signals(process)
        until = time.monotonic() + _AGENT_S
        while not self._has_signalled and time.monotonic() < until:
            time.sleep(_POLL_S)
        at_s = time.time() + 1  # rounded down when it is written
        self._postpone(at_s)
        return at_s

    def _note_one(self, _number: int, _frame: object) -> None:
        self._has_signalled = True

    def _on_node(self, process: int | None) -> range:
        """Return the processes that this node's agent started; empty: it started no such job."""
        env = self._env
        if "TORCHELASTIC_RUN_ID" not in env or "SHOAL_PROCESS_ID" in env:
            return range(0)
        try:
            index, local, count = (int(env[n]) for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        except (KeyError, ValueError):
            return range(0)
        is_other = process is not None and process != index  # the program chose numbers of its own
        return range(0) if is_other else range(index - local, index - local + count)

    @property
    def _file(self) -> str:
        return self._env.get("TORCHELASTIC_ERROR_FILE", "")

    def _record(self, message: str, callstack: str, at_s: float) -> None:
        if self._file and not os.path.exists(self._file):
            extra = {"py_callstack": callstack, "timestamp": str(int(at_s))}
            self._write({"message": {"message": message, "extraInfo": extra}})

    def _postpone(self, at_s: float) -> None:
        """Change the time in an error file of torch's format; leave any other file alone."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            with open(self._file, encoding="utf-8") as file:
                record = json.load(file)
            record["message"]["extraInfo"]["timestamp"] = str(int(at_s))
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        """Write the file atomically: torchrun itself fails on a partial one."""
        part = f"{self._file}.{os.getpid()}"
        try:
            with open(part, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(part, self._file)
        except OSError as problem:
            message = f"TORCHELASTIC_ERROR_FILE={self._file} cannot be written: {problem.strerror}"
            print(f"shoal: {message}", file=sys.stderr)


def _first_failed(peers: Mapping[int, Departure]) -> int | None:
    """Return the first of them, if it may have ended with another code than 0."""
    first = next(iter(peers), None)
    if first is None or peers[first].is_in_order:
        return None
    return first
