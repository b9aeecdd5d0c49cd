"""Threads that share work have all come back when it is over, whatever interrupts it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkpoint.interrupts import Interrupt
from shoal.runtime.system import threads
from shoal.runtime.system.threads import ended_with_others, in_threads


@pytest.mark.parametrize("most", [1, 3])
def test_every_item_is_given_to_one(most):
    seen = []
    in_threads(lambda share: seen.extend(share), range(100), most)
    assert sorted(seen) == list(range(100))


def test_the_first_error_ends_all_shares():
    def work(share):
        for item in share:
            if item == 3:
                raise ValueError(item)

    with pytest.raises(ValueError, match="3"):
        in_threads(work, range(1000), 3)


@pytest.mark.parametrize("failing", [True, False], ids=["the caller", "a helper"])
def test_what_others_wait_for_is_ended(failing):
    """A barrier that never opens stands for requests to a server that does not answer."""
    waiting, caller = threading.Barrier(4), threading.current_thread()
    started = threading.Barrier(3)

    def work(share):
        for _ in share:
            with ended_with_others(waiting.abort):
                started.wait(30)
                if (threading.current_thread() is caller) is failing:
                    raise ValueError
                waiting.wait(30)

    with pytest.raises(ValueError):  # noqa: PT011 - the first error, not one of those it causes
        in_threads(work, range(3), 3)
    with ended_with_others(waiting.reset):  # nothing is shared any more
        pass
    assert waiting.broken


def test_work_is_done_without_further_threads(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen = []
    in_threads(lambda share: seen.extend(share), range(10), 4)
    assert seen == list(range(10))


class Interrupted:
    """Work in threads whose caller gets an interrupt at one place."""

    def __init__(self, place: int) -> None:
        self.interrupt = Interrupt(place, (threads, threading))
        self.items: list[int] = []
        self.is_over = False
        self.late: list[str] = []
        self.caller = threading.Thread(target=self._call, daemon=True)

    def run(self) -> None:
        self.caller.start()
        self.caller.join(30)
        assert not self.caller.is_alive(), "waits for ever"

    def _call(self) -> None:
        try:
            with self.interrupt.on():
                in_threads(self._work, range(50), 3)
        except KeyboardInterrupt:
            pass
        finally:
            self.is_over = True

    def _work(self, share):
        for item in share:
            with ended_with_others(int):
                self.items.append(item)
            if self.is_over:
                self.late.append(threading.current_thread().name)


def interrupt_everywhere() -> None:
    place = 0
    while True:
        place += 1
        job = Interrupted(place)
        job.run()
        assert not job.late, f"place {place}"
        if job.interrupt.left > 0:  # it was over before
            break
    assert place > 50
    assert sorted(job.items) == list(range(50))


def test_an_interrupt_anywhere_waits_for_those_that_work(child_env):
    """In a process of its own: of threads that it kept from starting `threading` keeps a list."""
    code = "from runtime.system.test_threads import interrupt_everywhere as run; run()"
    env = child_env | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, timeout=60, check=True)
