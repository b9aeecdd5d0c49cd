"""Share work among a few threads, all of which have ended when the call returns.

`concurrent.futures` cannot be used: its pools take no work during interpreter shutdown, which is
when a save in the background may have to finish.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[Iterator[T]], None], items: Iterable[T], most: int) -> None:
    """Call `work` in up to `most` threads, the caller's among them, each with a share of `items`.

    There are no more threads than items. A share is an iterator: a thread takes the next item when
    it has finished the last one. The first error, or an interrupt, ends all shares and is raised
    once all threads have returned. What may take long in an item, such as a request, is to be in an
    `ended_with_others`.
    """
    listed = list(items)
    workers = _Workers(work, listed)
    workers.note_errors_of(lambda: workers.call(min(most, len(listed)) - 1))
    workers.note_errors_of(workers.do_a_share)
    while not workers.note_errors_of(workers.wait):
        pass
    if workers.errors:
        raise workers.errors[0]


@contextlib.contextmanager
def ended_with_others(end: Callable[[], object]) -> Iterator[None]:
    """Call `end`, from any thread, if the work that this thread shares fails during the block.

    It may be called again, and also if the block has just ended.
    """
    workers = _WORKERS.get()
    if workers is None or workers.is_over:  # an interrupt may have kept it from being reset
        yield
        return
    workers.ends.append(end)
    try:
        if workers.errors:
            end()
        yield
    finally:
        workers.ends.remove(end)


class _Workers(Generic[T]):
    """Threads that do the same work.

    If an interrupt hits while a thread is being started, it is unknown whether it will run: so each
    thread registers before it begins, until registration is closed. Only locks are used, since an
    interrupt leaves a lock either taken or free, whereas Python code may stop half-way.
    """

    def __init__(self, work: Callable[[Iterator[T]], None], items: Iterable[T]) -> None:
        self._work = work
        self._items = iter(items)
        self._lock = threading.Lock()  # of the iterator, and of registration
        self._is_closed = False  # registration
        # A lock for each thread, which it releases when it ends. An interrupt may keep a started
        # thread out of the first list; it is then in the second one, or finds registration closed.
        self._started: list[threading.Lock] = []
        self._registered: list[threading.Lock] = []
        self.is_over = False  # all threads have returned
        self.errors: list[BaseException] = []
        self.ends: list[Callable[[], object]] = []  # each ends a request in which a thread waits

    def note_errors_of(self, act: Callable[[], None]) -> bool:
        """Run it and return whether it succeeded. On failure the threads take no more items."""
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised when all have come back
            self.errors.append(error)
            return False
        return True

    def call(self, count: int) -> None:
        """Start this many threads."""
        with contextlib.suppress(RuntimeError):  # thread limit: the others do the work
            for _ in range(count):
                busy = threading.Lock()
                busy.acquire()
                threading.Thread(
                    target=self._help, args=(busy,), name="shoal files", daemon=True
                ).start()
                self._started.append(busy)

    def _help(self, busy: threading.Lock) -> None:
        try:
            with self._lock:
                if self._is_closed or self.errors:
                    return
                self._registered.append(busy)
            if not self.note_errors_of(self.do_a_share):
                self.note_errors_of(self._end_all)
        finally:
            busy.release()

    def do_a_share(self) -> None:
        """Do a share of the work in the calling thread."""
        token = _WORKERS.set(self)
        try:
            self._work(self._share())
        finally:
            _WORKERS.reset(token)

    def _end_all(self) -> None:
        for end in list(self.ends):
            end()

    def wait(self) -> None:
        """Close registration and wait for all registered threads."""
        with self._lock:
            self._is_closed = True
        if self.errors:
            self._end_all()
        for busy in (*self._started, *self._registered):
            with busy:
                pass
        self.is_over = True

    def _share(self) -> Iterator[T]:
        while True:
            with self._lock:
                if self.errors:
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item


_WORKERS: ContextVar[_Workers[Any] | None] = ContextVar("shoal_workers", default=None)
