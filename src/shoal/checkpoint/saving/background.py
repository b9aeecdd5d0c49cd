"""Save in the background: values are copied first, then the program continues."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.format.records import Commit
from shoal.checkpoint.saving.agreeing import agree_on
from shoal.checkpoint.saving.protocol import complete, snapshot
from shoal.checkpoint.saving.request import Request
from shoal.errors import DeadlineError, UsageError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.startup.membership import SAVES
from shoal.runtime.system.interrupts import interrupts_delivered

_LOG = logging.getLogger("shoal")


class Saving:
    """A save in a thread, which interpreter shutdown waits for."""

    def __init__(self, operation: str, work: Callable[[], None]) -> None:
        self._operation = operation
        self._work = work
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None  # of the error, as it was raised in the thread
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=SAVES, daemon=False)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Is it over, successful or not?"""
        return self._is_over.is_set()

    @property
    def is_of_fork_parent(self) -> bool:
        """Is this process a fork of the saving process? Its thread is then not in this one."""
        return self._pid != os.getpid()

    def wait(self, timeout_s: float | None = None, *, keep_error: bool = False) -> None:
        """Wait until it is over.

        Args:
          keep_error: raise the save's error again on the next call.

        Raises:
          DeadlineError: it still runs after `timeout_s`; it continues.
          UsageError: this process is a fork of the saving process. Otherwise the save's error,
          once, as `save` does.
        """
        if not self.await_end(timeout_s):
            raise DeadlineError(
                f"{self._operation} still runs after {timeout_s} s; it continues",
                name="save",
                waited_s=timeout_s or 0.0,
            )
        self._thread.join()
        error = self._error
        if not keep_error:
            self._error = None
        if error is not None:
            raise error.with_traceback(self._trace)  # otherwise each raise would lengthen it

    def await_end(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over, successful or not; return whether it is.

        Raises:
          UsageError: this process is a fork of the saving process.
        """
        if self.is_of_fork_parent:
            raise UsageError(
                f"{self._operation} was begun by the process with pid {self._pid}, of which this "
                "is a fork: wait for it there"
            )
        # Not `join`: before Python 3.13, an interrupted join marks the thread as ended.
        return self._is_over.wait(
            None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
        )

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error, self._trace = error, error.__traceback__
            _LOG.warning("%s failed: %s", self._operation, error)  # `wait` may never be called
        finally:
            del self._work
            self._is_over.set()


@interrupts_delivered
def start_save(
    client: JobClient,
    request: Request,
    tree: Any,
    processes: Iterable[int] | None = None,
    *,
    arena: Arena,
    on_done: Callable[[Commit], None] = lambda _: None,
    on_failed: Callable[[], None] = lambda: None,
) -> Saving:
    """Save a tree as requested, in a thread as soon as all agree and the values are copied.

    Afterwards the values may be modified, donated and deleted. The thread communicates in a lane of
    its own.

    Args:
      arena: memory for the copies; this save owns it until it is over.
      on_done: called in the thread after the commit.
      on_failed: called in the thread if there is none, before `Saving.wait` raises why.

    Raises:
      What `save` raises before anything is written.
    """
    attempt, state, own = agree_on(client, request, tree, processes, own_lane=True)
    group = attempt.members.group
    with client.call("save", attempt.lane, group.named):  # if left, no thread follows
        taken = snapshot(attempt, state, own, arena)

    def work() -> None:
        try:
            with client.call("save", attempt.lane, group.named, ends_lane=True):
                commit = complete(attempt, taken)
        except BaseException:
            on_failed()
            raise
        on_done(commit)

    return Saving(request.operation, work)
