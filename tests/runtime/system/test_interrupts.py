"""Ctrl-C in the middle of a call is raised where it is heard, once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from shoal.checkpoint.saving.background import Saving
from shoal.runtime.system import interrupts
from shoal.runtime.system.interrupts import interrupts_delivered


def press(*_):
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler():
    """As in a program that was started in the foreground; and so it is left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def output(script, env):
    """Return what a program prints to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    return done.stdout, done.stderr


IN_THE_COLLECTOR = """
import gc, signal, sys
from shoal.runtime.system.interrupts import interrupts_delivered
lost, done = [], []
sys.unraisablehook = lambda hook: lost.append(hook.exc_type.__name__)
def press(phase, _):
    if phase == "start":
        signal.raise_signal(signal.SIGINT)
def collect():
    for _ in range({times}):
        gc.collect()
        done.append("collected")
gc.callbacks.append(press)
gc.disable()
try:
    interrupts_delivered(collect)()
except KeyboardInterrupt:
    print(*done, "raised", *lost)
"""


@pytest.mark.parametrize(
    ("times", "said"),
    [(1, "collected raised"), (2, "collected collected raised KeyboardInterrupt")],
    ids=["one", "the second is lost there"],
)
def test_interrupt_in_the_garbage_collector_is_not_lost(child_env, times, said):
    """Where exceptions are lost. In a process without other threads: `gc.collect` does nothing
    while another thread collects."""
    assert output(IN_THE_COLLECTOR.format(times=times), child_env) == (said + "\n", "")


def test_while_a_name_of_the_package_is_loaded(child_env):
    """The first `shoal.save` imports much."""
    script = """
import gc, signal, sys
import numpy
import shoal
def press(phase, _):
    if "shoal.checkpoint" in sys.modules:
        gc.callbacks.remove(press)
        signal.raise_signal(signal.SIGINT)
gc.callbacks.append(press)
try:
    gc.set_threshold(5)
    shoal.save
    print("lost")
except KeyboardInterrupt:
    print("raised", press not in gc.callbacks, callable(shoal.save))
"""
    assert output(script, child_env) == ("raised True True\n", "")


class Pressed(float):
    """A number of seconds; Ctrl-C is pressed where it is compared."""

    def __gt__(self, other):
        press()
        return float(self) > other


def test_what_was_kept_ends_the_next_wait_of_ours():
    end = threading.Event()
    saving = Saving("save", end.wait)
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupts_delivered(saving.wait)(Pressed(60.0))
    assert caught.value.__cause__ is None  # the wait has not come to its end
    end.set()
    saving.wait()


def test_a_second_is_raised_wherever_it_comes(monkeypatch):
    monkeypatch.setattr(interrupts, "_AGAIN_S", 1.0)  # else it may count as the first, sent again
    done = []

    @interrupts_delivered
    def call():
        press()
        done.append("the first was kept")
        press()
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["the first was kept"]


def test_an_error_of_the_call_is_the_cause():
    def call():
        press()
        raise ValueError("no more data")

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupts_delivered(call)()
    assert str(caught.value.__cause__) == "no more data"


def test_blocks_in_blocks_raise_at_the_end_of_the_outermost():
    done = []

    @interrupts_delivered
    def outer():
        interrupts_delivered(press)()
        done.append("after the inner one")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["after the inner one"]


def test_a_handler_of_the_program_is_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    interrupts_delivered(press)()
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_take_no_signals():
    handlers = []
    look = interrupts_delivered(lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_many_interrupts_are_raised_once_each():
    """Each from another thread, while the block begins, works, waits or ends."""
    main, never = threading.main_thread().ident, threading.Event()
    raised = 0
    for number in range(300):
        sender = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT))
        try:
            try:
                interrupts_delivered(sender.start)()
                interrupts_delivered(sorted)(range(number))
                never.wait(60.0)
            finally:
                sender.join()
        except KeyboardInterrupt:
            raised += 1
    assert raised == 300
