"""Prefetch: a thread that computes a few results ahead of their consumer, in order.

The thread is a daemon that holds no reference to its consumer: when that is garbage-collected, the
thread is closed. An error is raised in its place in the order, on every further call. When the
thread ends it is joined: a thread that still frees JAX arrays during interpreter shutdown would
abort the process (Python terminates daemons where they take the GIL, inside C++ frames that must
not be unwound).
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shoal.errors import UsageError

T = TypeVar("T")

READING, MEETING, PLACING = "reading", "meeting", "placing"
_LOOK_S = 1.0  # interval at which a waiting caller calls `look`
_CLOSE_S = 10.0  # how long `close` waits for a running step


class Work(Protocol[T]):
    """The work of the thread."""

    def step(self, prefetch: Prefetch[T]) -> T | None:
        """Make one result; None at the end."""

    def leave(self, prefetch: Prefetch[T]) -> None:
        """Closed before its end: notify peers that may wait for it."""

    def finish(self) -> None:
        """Release everything; the last call."""


class Prefetch(Generic[T]):
    """A thread that is at most `depth` results ahead.

    Args:
      work: the work of the thread.
      depth: how many results may be buffered.
      meets: may it wait for other processes? Closing does not wait for them.
    """

    def __init__(self, work: Work[T], depth: int, *, meets: bool) -> None:
        self.is_closed = False
        self.why = ""  # reason of an early close; empty: no error
        self.taken = 0  # number of results taken
        self._work: Work[T] | None = work
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._room = depth
        self._meets = meets
        self._phase = (READING, time.monotonic())
        self._waiting_since: float | None = None  # when the caller began to wait
        self._is_over = False
        self._error: BaseException | None = None
        # The thread inherits the default mesh of the enclosing block.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run,), name="shoal feed", daemon=True
        )

    @property
    def phase(self) -> tuple[str, float]:
        """The current phase of the thread, and its start time."""
        return self._phase

    @property
    def waited_s(self) -> float:
        """How long the caller of `next` has been waiting, in seconds."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def has_started(self) -> bool:
        """Is or was the thread running?"""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread, once."""
        if not self.has_started and not self.is_closed:
            self._thread.start()

    def enter(self, phase: str) -> bool:
        """Record the thread's next phase. False once closed, except for meeting other processes."""
        with self._changed:
            if self.is_closed and phase != MEETING:
                return False
            self._phase = (phase, time.monotonic())
            self._changed.notify_all()
            return True

    def take(self, look: Callable[[float], None]) -> T | None:
        """Return the next result; None at the end.

        Args:
          look: called periodically with the time at which the wait began; may raise.
        """
        with self._changed:
            if not self._ready and not self._is_over:
                self._await_result(look)
            if self._ready:
                self._room += 1
                self.taken += 1
                self._changed.notify_all()
                return self._ready.popleft()
        if self.has_started:  # another thread may have closed it before
            self._thread.join()  # otherwise it may free arrays during interpreter shutdown
        if isinstance(self._error, StopIteration):  # which would end the caller's loop in silence
            raise UsageError("feed: the reader raised StopIteration") from self._error
        if self._error is not None:
            raise self._error
        return None

    def _await_result(self, look: Callable[[float], None]) -> None:
        self._waiting_since = since = time.monotonic()
        try:
            while not self._changed.wait_for(lambda: self._ready or self._is_over, _LOOK_S):
                look(since)
        finally:
            self._waiting_since = None

    def close(self, why: str = "", *, wait_s: float = _CLOSE_S, announces: bool = True) -> bool:
        """Stop producing results. Wait up to `wait_s`; return whether the thread holds nothing.

        It may then still be waiting for other processes, holding nothing else.

        Args:
          why: the reason, for the other processes.
          wait_s: limit for a running step.
          announces: notify the other processes even if no result was requested here?
        """
        with self._changed:
            if not self.is_closed:
                self.is_closed, self.why = True, why
                self._ready.clear()
                self._changed.notify_all()
        if not self.has_started:
            if announces and self._meets:
                self._thread.start()
            else:
                self._end()
        if threading.current_thread() is self._thread:  # if garbage collection ran there
            return True
        with self._changed:
            has_let_go = self._changed.wait_for(
                lambda: self._is_over or (self._meets and self._phase[0] == MEETING), wait_s
            )
        if self._is_over and self.has_started:
            self._thread.join()
        return has_let_go

    def _run(self) -> None:
        work = self._work
        try:
            while work is not None and self._may_go_on():
                result = work.step(self)
                if result is None:
                    break
                with self._changed:
                    self._ready.append(result)
                    self._changed.notify_all()
                del result
            else:
                if work is not None:
                    work.leave(self)
        except BaseException as error:  # noqa: BLE001 - raised where results are taken
            self._error = error
        finally:
            self._end()

    def _may_go_on(self) -> bool:
        """Wait for room in the buffer; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self._room)
            self._room -= 1
            return not self.is_closed

    def _end(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work.finish()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
