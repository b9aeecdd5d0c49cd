"""A thread that makes results a few ahead of who takes them."""

from __future__ import annotations

import threading

import pytest

from shoal.arrays.feeding.prefetch import MEETING, READING, Prefetch

PATIENCE_S = 60.0  # reached only when something is broken


class Halts(threading.Condition):
    """Says when the thread has to wait for room."""

    def __init__(self):
        super().__init__()
        self.halted = threading.Event()

    def wait_for(self, predicate, timeout=None):
        if threading.current_thread().name == "shoal feed" and not predicate():
            self.halted.set()
        return super().wait_for(predicate, timeout)


class Counting:
    """Results 1, 2, 3, …; it may be told to raise, or to end."""

    def __init__(self, last=10**9, error=None):
        self.made, self.last, self.error = 0, last, error
        self.left, self.finished = [], 0

    def step(self, line):
        line.enter(READING)
        if self.made == self.last:
            if self.error is not None:
                raise self.error
            return None
        self.made += 1
        return self.made

    def leave(self, line):
        line.enter(MEETING)
        self.left.append(line.why)

    def finish(self):
        self.finished += 1


def started(work, depth, *, meets=False):
    line = Prefetch(work, depth, meets=meets)
    line._changed = Halts()
    line.start()
    return line


def look(since):
    """Nothing is wrong."""


def test_prefetch_reads_exactly_to_its_depth():
    work = Counting()
    line = started(work, 3)
    for taken in range(5):
        assert line._changed.halted.wait(PATIENCE_S)
        assert work.made == taken + 3
        line._changed.halted.clear()
        assert line.take(look) == taken + 1
    assert line.close()
    assert work.left == [""]
    assert work.finished == 1


def test_an_error_comes_after_the_results_before_it():
    line = started(Counting(2, OSError("torn")), 5)
    assert [line.take(look), line.take(look)] == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="torn"):
            line.take(look)


def test_the_end():
    work = Counting(2)
    line = started(work, 1)
    assert [line.take(look) for _ in range(4)] == [1, 2, None, None]
    assert (work.left, work.finished) == ([], 1)
    assert line.close("why")
    assert work.left == []


def test_waiting_consumer_can_give_up():
    class Hangs(Counting):
        over = threading.Event()

        def step(self, line):
            line.enter(READING)
            self.over.wait()

    def give_up(since):
        raise TimeoutError

    work = Hangs()
    line = started(work, 1)
    with pytest.raises(TimeoutError):
        line.take(give_up)
    assert line.waited_s == 0
    assert not line.close(wait_s=0), "its reader goes on"
    work.over.set()
    assert line.close()


@pytest.mark.parametrize(("announces", "left"), [(True, ["why"]), (False, [])])
def test_closing_an_unstarted_prefetch_announces_it_if_requested(announces, left):
    work = Counting()
    line = Prefetch(work, 1, meets=True)
    assert line.close("why", announces=announces)
    line.start()
    assert not line.has_started or line._thread.join(PATIENCE_S) is None
    assert (work.left, work.finished, work.made) == (left, 1, 0)


def test_prefetch_closed_before_its_start_returns_none():
    prefetch = Prefetch(Counting(), 1, meets=False)
    prefetch.close()
    assert prefetch.take(lambda since: None) is None
