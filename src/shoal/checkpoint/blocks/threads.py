"""Work shared by a few threads, which end before it returns, whatever happens.

No pool of `concurrent.futures`: those take no work while the interpreter ends, and a save that
was begun before is finished then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["in_threads"]

T = TypeVar("T")


def in_threads(work: Callable[[Iterator[T]], None], items: Iterable[T], most: int) -> None:
    """Call `work` in up to `most` threads, one of them this one, each with a share of `items`.

    A share is an iterator: a thread takes an item when it has done its last one. The first error
    ends all shares, and is raised when all threads have come back.
    """
    waiting = iter(list(items))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def share() -> Iterator[T]:
        while True:
            with lock:
                if errors:
                    return
                try:
                    item = next(waiting)
                except StopIteration:
                    return
            yield item

    def run(is_over: threading.Event) -> None:
        try:
            work(share())
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            errors.append(error)
        finally:
            is_over.set()

    ends = []
    for _ in range(most - 1):
        is_over = threading.Event()
        thread = threading.Thread(target=run, args=(is_over,), name="shoal files", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: those that run do it
            break
        ends.append(is_over)
    run(threading.Event())
    _wait_for(ends, errors)
    if errors:
        raise errors[0]


def _wait_for(ends: list[threading.Event], errors: list[BaseException]) -> None:
    """Wait for all; an interrupt of this thread ends the others' shares, and then this.

    Not by `join`: before Python 3.13 an interrupt of it takes the thread for one that ended.
    """
    for is_over in ends:
        while not is_over.is_set():
            try:
                is_over.wait()
            except BaseException as error:  # noqa: BLE001 - raised when all have come back
                errors.append(error)
