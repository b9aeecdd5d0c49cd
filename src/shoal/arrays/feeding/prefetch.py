"""Results of one thread, made a few ahead of who takes them, in order.

The thread is a daemon that holds nothing of who takes: when that is forgotten, it is closed. What
the thread raises is raised at its place in the order, again and again. Once the thread is over it
is joined: one that still frees arrays of JAX while Python ends would abort the process (Python
ends a daemon where it takes the lock of the interpreter, inside C++ that must not be left so).
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
_LOOK_S = 1.0  # how often who waits looks whether it still makes sense
_CLOSE_S = 10.0  # how long closing waits for a reader that is under way


class Work(Protocol[T]):
    """What the thread does."""

    def step(self, line: Prefetch[T]) -> T | None:
        """Make one result; None at the end."""

    def leave(self, line: Prefetch[T]) -> None:
        """It was closed before its end: tell others, who may wait for it."""

    def finish(self) -> None:
        """Let go of everything; the last call."""


class Prefetch(Generic[T]):
    """A thread that is at most `depth` results ahead.

    Args:
      work: what it does.
      depth: how many results may be ready before they are taken.
      meets: may it wait for other processes? Closing does not wait for these.
    """

    def __init__(self, work: Work[T], depth: int, *, meets: bool) -> None:
        self.is_closed = False
        self.why = ""  # it was closed; empty: nothing is wrong
        self.taken = 0  # how many results were taken
        self._work: Work[T] | None = work
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._room = depth
        self._meets = meets
        self._phase = (READING, time.monotonic())
        self._waiting_since: float | None = None  # since when a result is waited for
        self._is_over = False
        self._error: BaseException | None = None
        # A default mesh of the block that this is made in holds in the thread, too.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run,), name="shoal feed", daemon=True
        )

    @property
    def phase(self) -> tuple[str, float]:
        """What the thread does, and since when."""
        return self._phase

    @property
    def waited_s(self) -> float:
        """How long the caller of `next` has waited for its result by now, in seconds."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def has_started(self) -> bool:
        """Does the thread run, or has it run?"""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread, once."""
        if not self.has_started and not self.is_closed:
            self._thread.start()

    def enter(self, phase: str) -> bool:
        """The thread begins something else; but meet others, nothing once it is closed: False."""
        with self._changed:
            if self.is_closed and phase != MEETING:
                return False
            self._phase = (phase, time.monotonic())
            self._changed.notify_all()
            return True

    def take(self, look: Callable[[float], None]) -> T | None:
        """Return the next result; None at the end.

        Args:
          look: called again and again with the time since when it waits; may raise.
        """
        with self._changed:
            if not self._ready and not self._is_over:
                self._await_result(look)
            if self._ready:
                self._room += 1
                self.taken += 1
                self._changed.notify_all()
                return self._ready.popleft()
        self._thread.join()  # else it would free arrays while the program, and Python, ends
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

    def close(self, why: str = "", *, wait_s: float = _CLOSE_S, tells: bool = True) -> bool:
        """Make no more results. Return whether the thread has let go; wait so long for that.

        It may still wait for other processes, and hold nothing but that.

        Args:
          why: what went wrong, for the others.
          wait_s: for what is under way.
          tells: should others know, even if nothing was asked for here?
        """
        with self._changed:
            if not self.is_closed:
                self.is_closed, self.why = True, why
                self._ready.clear()
                self._changed.notify_all()
        if not self.has_started:
            if tells and self._meets:
                self._thread.start()
            else:
                self._end()
        if threading.current_thread() is self._thread:  # where garbage happened to be collected
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
        """Wait for room; False once it is closed."""
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
