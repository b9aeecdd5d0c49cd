"""What a process reports of itself when it makes no progress, with clocks of the test."""

from __future__ import annotations

import math
import sys
import threading
import time
import types
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import shoal
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.exit import idle
from shoal.runtime.exit.idle import StallWatch, _frames, innermost_frame
from shoal.runtime.failures.stall_text import stall_headline
from shoal.runtime.jax_service.jax_runtime import COMPILER
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.stalls import IN_SHOAL, Stall, StalledGroup
from shoal.runtime.rules.stopping import ReceivedNotice


class Probe:
    """A main thread that comes back to the interpreter, or stays in native code."""

    asks = True

    def __init__(self):
        self.has_returned = self.returns = False

    def post(self):
        self.has_returned = self.returns


class Looks:
    """A process whose time, and the processor time that it uses, the test determines."""

    def __init__(self, monkeypatch, shown=None, **variables):
        for name, value in {"SHOAL_STALL_WARN_S": "300", **variables}.items():
            monkeypatch.setenv(name, value)
        self.here = LocalJob(1).clients[0]
        self.said, self.now, self.cpu = [], 1000.0, [0.0, 0.0]
        self.probe, self.are_idle, self.may_poll = Probe(), False, False
        self.watch = StallWatch(
            self.here, self.said.append, shown, cpu_times=lambda: tuple(self.cpu),
            probe=self.probe, are_devices_idle=lambda: self.are_idle,
            may_poll=lambda: self.may_poll,
        )  # fmt: skip
        self.watch.look(self.now)

    def last(self, seconds, *, main=0.0, others=0.0, every_s=1.0):
        """Let time pass, in which the threads use these shares of a core; return the last words."""
        del self.said[:]
        for _ in range(int(seconds / every_s)):
            self.now += every_s
            self.cpu[0] += main * every_s
            self.cpu[1] += (main + others) * every_s
            self.watch.look(self.now)
        return self.said[-1] if self.said else None

    def turn(self, times=1):
        self.here.progress.turns += times


def test_process_that_makes_progress_is_not_reported_idle(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="5")
    for _ in range(20):
        looks.turn()
        assert looks.last(4) is None


def test_a_stuck_process_says_so_and_that_it_moves_again(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="5")
    looks.turn(3)
    said = looks.last(7)
    assert (said.is_stuck, said.is_due, said.limit_s) == (True, False, 5.0)
    looks.turn()
    assert looks.last(1) is None
    assert looks.said == [None]


@pytest.mark.parametrize(
    ("turns", "main", "others", "is_stuck"),
    [
        (3, 0.0, 0.0, True),
        (3, 0.019, 3.0, True),  # other threads may do what they want
        (3, 0.03, 0.0, False),
        (0, 0.0, 0.0, True),  # a loop without marks, or a compilation
        (0, 0.015, 0.015, True),  # JAX's wait for devices uses some
        (0, 0.03, 0.0, False),
        (0, 0.0, 1.7, False),
        (2, 0.0, 1.7, False),  # of a warm-up
    ],
)
def test_process_that_uses_the_processor_is_not_stuck(monkeypatch, turns, main, others, is_stuck):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="20")
    looks.turn(turns)
    assert looks.last(30, main=main, others=others).is_stuck is is_stuck


@pytest.mark.parametrize("turns", [0, 3])
@pytest.mark.parametrize("main", [0.0, 0.02, 0.5, 1.0])
def test_where_a_runtime_may_poll_a_main_thread_that_returns_is_not_stuck(monkeypatch, turns, main):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="20")
    looks.may_poll = True
    looks.turn(turns)
    assert looks.last(30, main=main).is_stuck
    looks.probe.returns = looks.probe.has_returned = True
    assert looks.last(30, main=main).is_stuck is (turns == 3 and main == 0.0)


def test_work_before_the_limit_does_not_count(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="20")
    looks.turn(3)
    assert not looks.last(60, main=1.0).is_stuck
    assert not looks.last(18).is_stuck
    assert looks.last(4).is_stuck


def test_without_a_limit_it_is_only_reported(monkeypatch):
    looks = Looks(monkeypatch)
    looks.turn(3)
    assert looks.last(298, every_s=2.0) is None
    said = looks.last(10, every_s=2.0)
    assert (said.is_due, said.is_stuck, said.limit_s) == (True, False, math.inf)


def test_time_in_which_it_was_suspended_does_not_count(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="20")
    looks.turn(3)
    looks.last(9)
    assert looks.last(36000, every_s=3600.0) is None  # ten of them count as ten looks
    assert looks.last(3).is_stuck


@pytest.mark.parametrize(("every_s", "is_said"), [(1.9, True), (2.1, False), (5.0, False)])
def test_a_suspension_counts_as_one_look(monkeypatch, every_s, is_said):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="3")
    looks.turn(3)
    assert (looks.last(7, every_s=every_s) is not None) is is_said


def test_the_limit_is_at_least_ten_steps(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="5")
    progress = looks.here.progress
    monkeypatch.setattr(progress, "_clock", lambda: looks.now)
    for step in range(3):
        began = progress.begin(step, "")
        looks.now += 4.0
        progress.end(began, "")
    looks.watch.look(looks.now)
    assert looks.last(39) is None
    assert looks.last(5).limit_s == 40.0


def test_a_step_may_have_a_limit_of_its_own(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="5", SHOAL_STALL_WARN_S="50")
    looks.turn(3)
    step = partial(shoal.step.on, looks.here)
    with step(1, within_s=math.inf):
        assert looks.last(100) is None
        with step(2, within_s=10):
            assert looks.last(9) is None
            assert looks.last(3).limit_s == 10.0
        assert looks.last(100) is None
    assert looks.last(6).limit_s == 5.0
    for wrong in (0, -1, "x", True, math.nan):
        with pytest.raises(shoal.UsageError, match="within_s"):
            step(1, within_s=wrong)


def test_a_notice_that_the_program_does_not_ask_for_is_warned_of_once(monkeypatch, caplog):
    looks = Looks(monkeypatch)
    looks.here.give_notice(ReceivedNotice("Terminated", "SIGTERM"))
    looks.last(4)
    assert caplog.text == ""
    looks.last(10)
    assert caplog.text.count("`preempted` has not been called for 5 s: the main thread is at") == 1
    looks.here.stop.should_stop(3)
    looks.last(10)
    assert caplog.text.count("has not been called") == 1


def test_the_watcher_keeps_few_samples_without_a_limit(monkeypatch):
    looks = Looks(monkeypatch)
    looks.last(4 * 3600, every_s=4.0)
    assert len(looks.watch._samples) < 70


def test_steps_that_take_long_are_reported_only_if_they_take_much_longer(monkeypatch):
    looks = Looks(monkeypatch)
    progress = looks.here.progress
    monkeypatch.setattr(progress, "_clock", lambda: looks.now)
    began = progress.begin(0, "")
    assert looks.last(400).is_due, "it may be a compilation"
    progress.end(began, "")
    looks.watch.look(looks.now)
    assert looks.last(3990) is None
    assert looks.last(20).is_due


def test_a_wait_that_cannot_be_woken_is_ended(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="5")
    looks.turn(3)
    ended, progress = [], looks.here.progress
    monkeypatch.setattr(looks.watch, "_end", lambda *given, **more: ended.append(given[0]))
    for is_woken in (True, False):
        progress.begin_wait(Point("'it'"), looks.now)
        assert looks.last(7).is_waiting
        stall = Stall(True, 7.0, (StalledGroup((0,), IN_SHOAL, "", ""),), places=1)
        looks.watch.on_stalled(stall, [0], prints_report=True)
        if is_woken:
            progress.end_wait(Point("'it'"))
        looks.last(5)
        assert ended == ([] if is_woken else [stall_headline(stall)])


def test_a_package_of_notebooks_that_is_only_imported_holds_nothing(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="5")
    looks.turn(3)
    kernel = types.SimpleNamespace(initialized=lambda: False)
    module = types.SimpleNamespace(IPKernelApp=kernel)
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", module)
    assert not looks.last(7).is_held
    kernel.initialized = lambda: True
    assert looks.last(2).is_held


def test_the_state_of_a_process_is_shown_to_others_of_its_host(monkeypatch):
    shown = []

    class Shown:
        write = staticmethod(lambda *given: shown.append(given))
        write_limit = staticmethod(lambda limit_s: shown.append(limit_s))

    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="5", shown=Shown)
    looks.last(1, main=0.5)
    assert shown[-1] == (looks.now, 0.5, 5.0)
    with shoal.step.on(looks.here, 1, within_s=math.inf):
        assert shown[-1] == math.inf, "at once: the watcher may not run in it"
    assert shown[-1] == 5.0


def test_while_it_compiles_its_other_threads_count(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="20")
    looks.turn(3)
    compiler = {"__name__": COMPILER}
    exec("def call(function, **given): return function(**given)", compiler)
    assert not compiler["call"](looks.last, seconds=30, others=1.7).is_stuck
    assert looks.last(30, others=1.7).is_stuck
    assert compiler["call"](looks.last, seconds=30).is_stuck


def test_a_compilation_of_jax_is_recognized():
    def many(x):
        for _ in range(300):
            x = jnp.sin(x @ x)
        return x

    seen, is_over = set(), threading.Event()

    def look():
        while not is_over.wait(0.002):
            seen.update(_frames(innermost_frame()))

    looking = threading.Thread(target=look)
    looking.start()
    jax.jit(many)(jnp.ones((2, 2)))
    is_over.set()
    looking.join()
    assert COMPILER in seen


def test_a_loop_without_marks_that_comes_back_to_the_interpreter_is_not_stuck(monkeypatch):
    looks = Looks(monkeypatch, SHOAL_STALLED_AFTER_S="20")
    looks.probe.returns = True
    assert not looks.last(40).is_stuck
    looks.probe.returns = looks.probe.has_returned = False
    assert not looks.last(15).is_stuck
    assert looks.last(10).is_stuck


@pytest.mark.parametrize(
    ("module", "are_idle", "is_ended"),
    [
        ("jax._src.array", False, True),
        ("flax.nnx.transforms", False, True),
        ("train", False, True),
        ("queue", False, False),
        ("train", True, False),
    ],
)
def test_once_a_process_has_left_one_that_waits_in_jax_has_less_time(
    monkeypatch, module, are_idle, is_ended
):
    looks = Looks(monkeypatch, SHOAL_HANG_TIMEOUT_S="20")
    looks.are_idle = are_idle
    monkeypatch.setattr(idle, "_top_module", lambda frame: module.partition(".")[0])
    monkeypatch.setattr(idle, "_in_callback", lambda: False)
    assert looks.last(60) is None
    looks.watch.on_left()
    said = looks.last(40)
    assert (said is not None and said.is_stuck) is is_ended


def test_a_callback_is_no_wait():
    """On several devices it runs in a thread of XLA."""
    seen = []

    def note(value):
        seen.append((threading.current_thread() is threading.main_thread(), idle._in_callback()))
        return value

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P("x")))
    jax.jit(lambda v: jax.pure_callback(note, v, v) + v.sum())(rows).block_until_ready()
    assert (False, True) in seen
    assert not idle._in_callback()


def test_the_probe_of_a_real_main_thread():
    probe = idle._ReturnProbe()
    post = threading.Thread(target=probe.post)
    post.start()
    post.join()
    while not probe.has_returned:  # runs in this thread
        pass
    probe.post()  # from the main thread itself
    while not probe.has_returned:
        pass


def test_the_time_of_the_watcher_itself_is_no_work():
    """It measures in its own thread, and another thread's time counts."""

    def burn():
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass

    def watch(before, after):
        start = idle._cpu_times()
        before()
        after.append(idle._cpu_times()[1] - start[1])

    def beside():
        worker = threading.Thread(target=burn)
        worker.start()
        worker.join()

    for work in (burn, beside):
        after = []
        watcher = threading.Thread(target=watch, args=(work, after))
        watcher.start()
        watcher.join()
        assert (after[0] > 0.29) == (work is beside), after
