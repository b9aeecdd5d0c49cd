"""Work shared by a few threads, which end before it returns, whatever happens.

No pool of `concurrent.futures`: those take no work while the interpreter ends, and a save that
was begun before is finished then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[Iterator[T]], None], items: Iterable[T], most: int) -> None:
    """Call `work` in up to `most` threads, one of them this one, each with a share of `items`.

    A share is an iterator: a thread takes an item when it has done its last one. The first error
    ends all shares, and is raised when all threads have come back; an interrupt is one.
    """
    crew = _Crew(work, items)
    crew.note_errors_of(lambda: crew.call(most - 1))
    crew.note_errors_of(crew.do_a_share)
    while not crew.note_errors_of(crew.wait):
        pass
    if crew.errors:
        raise crew.errors[0]


class _Crew(Generic[T]):
    """Threads that do the same work.

    Of a thread that an interrupt kept this one from starting nobody knows whether it will come:
    each signs up before it begins, until the list is closed. Only locks, which are not Python's
    own code: an interrupt finds them taken or not.
    """

    def __init__(self, work: Callable[[Iterator[T]], None], items: Iterable[T]) -> None:
        self._work = work
        self._waiting = iter(list(items))
        self._lock = threading.Lock()
        self._is_closed = False
        self._called: list[threading.Lock] = []  # each is free again when that thread is done
        self._signed_up: list[threading.Lock] = []
        self.errors: list[BaseException] = []

    def note_errors_of(self, act: Callable[[], None]) -> bool:
        """Do it; say whether it went well. The threads take no more items if not."""
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised when all have come back
            self.errors.append(error)
            return False
        return True

    def call(self, count: int) -> None:
        """Start so many threads."""
        with contextlib.suppress(RuntimeError):  # no more threads: those that run do it
            for _ in range(count):
                busy = threading.Lock()
                busy.acquire()
                threading.Thread(
                    target=self._come, args=(busy,), name="shoal files", daemon=True
                ).start()
                self._called.append(busy)

    def _come(self, busy: threading.Lock) -> None:
        try:
            with self._lock:
                if self._is_closed or self.errors:
                    return
                self._signed_up.append(busy)
            self.note_errors_of(self.do_a_share)
        finally:
            busy.release()

    def do_a_share(self) -> None:
        """Do a share of the work in this thread."""
        self._work(self._share())

    def wait(self) -> None:
        """Wait for all that came or will come; nobody else begins."""
        with self._lock:
            self._is_closed = True
        for busy in (*self._called, *self._signed_up):
            with busy:
                pass

    def _share(self) -> Iterator[T]:
        while True:
            with self._lock:
                if self.errors:
                    return
                try:
                    item = next(self._waiting)
                except StopIteration:
                    return
            yield item
