"""The rules of watching, each with a clock of its own: losses, patience, echoes, progress."""

import errno
import json
import logging
import math
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from shoal.errors import PeerFailedError, ProcessLostError
from shoal.runtime.client import heartbeat
from shoal.runtime.client.heartbeat import SilenceDetector
from shoal.runtime.client.known_losses import PeerLosses
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.client.programs import ProgramNotes
from shoal.runtime.client.progress import STEPS, Progress, memory_bytes
from shoal.runtime.exit.hang import TICK_S, HangTimeout, main_frame
from shoal.runtime.failures.stack_text import shown_stacks, threads_of
from shoal.runtime.rules.point import Departure, Point
from shoal.runtime.rules.programs import CompiledProgram
from shoal.runtime.system.stacks import stacks
from shoal.runtime.wire.frames import Frame
from shoal.testing.clock import Clock

PATIENCE_S = 30.0  # a deadline of the test itself: reached only when something is broken
ME = ThisProcess(0, ("here", "there", "far"))


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def losses(clock):
    return PeerLosses(ME, clock)


def test_received_loss_is_raised_repeatedly_until_acknowledged(losses):
    losses.check("step 1")
    losses.receive(2, "", Departure("its connection closed", "lost"))
    losses.receive(2, "", Departure("said later, and not the cause", "failed"))
    for _ in range(2):
        with pytest.raises(ProcessLostError) as caught:
            losses.check("step 1 (train.py:3 (main))")
        assert caught.value.lost == {2: "its connection closed"}
        assert str(caught.value) == (
            "process 0 of 3 (here): step 1 (train.py:3 (main)) cannot continue: process 2 (far) is"
            " lost: its connection closed"
        )
    losses.acknowledge([2])
    losses.check("step 2")
    losses.receive(1, "", Departure("Traceback\nValueError: no data", "failed"))
    with pytest.raises(PeerFailedError, match="raised ValueError: no data") as caught:
        losses.check("step 3")
    assert caught.value.failed == {1: "Traceback\nValueError: no data"}


def test_loss_acknowledged_before_it_is_received_is_ignored(losses):
    losses.acknowledge([1])
    losses.receive(1, "", Departure("late", "lost"))
    losses.check("step")
    assert (losses.open(), losses.any()) == ([], True)


def test_the_first_that_went_is_the_cause_and_the_others_are_named(losses):
    losses.receive(2, "", Departure("killed", "lost"))
    losses.receive(1, "", Departure("killed too", "lost"))
    with pytest.raises(ProcessLostError, match=r"process 2 .*\(also gone: process 1\)") as caught:
        losses.check("")
    assert list(caught.value.lost) == [2, 1]


def test_a_service_is_named_until_the_survivors_go_on_without_it(losses):
    losses.receive(None, "JAX's service", Departure("killed?", "lost"))
    losses.acknowledge(range(3))
    with pytest.raises(ProcessLostError) as caught:
        losses.check("step 4")
    assert str(caught.value).endswith("step 4 cannot continue: JAX's service is lost: killed?")
    assert caught.value.lost == {}
    losses.acknowledge(["JAX's service"])
    losses.check("step 5")


class Watched:
    """A process that knows of a loss, checked at every moment, as by the watcher."""

    def __init__(self, clock, losses, hang_timeout_s=30.0, timeout_s=600.0):
        self.clock, self.peer_losses = clock, losses
        self.progress = Progress(clock)
        self.patience = HangTimeout(hang_timeout_s, timeout_s)
        self.frame = "here"

    def ended_after(self, limit_s, move=lambda: None):
        """Return after how many seconds it is ended, None if not within `limit_s`."""
        began = self.clock()
        while self.clock() < began + limit_s:
            move()
            if self.patience.is_over(self.clock(), self.peer_losses, self.progress, self.frame):
                return self.clock() - began
            self.clock.advance(TICK_S)
        return None


@pytest.fixture
def watched(clock, losses):
    return Watched(clock, losses)


def test_process_is_not_ended_without_a_peer_loss(watched):
    assert watched.ended_after(10_000) is None


def test_process_that_hangs_after_a_peer_loss_is_ended_after_the_limit(watched, losses):
    assert watched.ended_after(100) is None
    losses.receive(1, "", Departure("killed", "lost"))
    assert watched.ended_after(100) == pytest.approx(30, abs=TICK_S)


def test_moving_in_python_is_no_call_of_shoal(watched, losses):
    losses.receive(1, "", Departure("killed", "lost"))

    def move():
        watched.frame += "."

    assert watched.ended_after(100, move) == 30


def test_a_call_of_shoal_begins_the_count_anew_and_a_wait_does_not_count(watched, losses, clock):
    losses.receive(1, "", Departure("killed", "lost"))
    assert watched.ended_after(29) is None
    watched.progress.begin_wait(Point("among the living"), clock())
    assert watched.ended_after(1000) is None
    watched.progress.end_wait(Point("among the living"))
    assert watched.ended_after(29) is None
    watched.progress.begin(3, "step")
    assert watched.ended_after(100) == pytest.approx(30, abs=TICK_S)


def test_process_that_progresses_in_a_long_call_is_not_hanging(watched, losses):
    losses.receive(1, "", Departure("killed", "lost"))

    def work():
        watched.progress.worked += 1

    assert watched.ended_after(1000, work) is None
    assert watched.ended_after(100) == pytest.approx(30, abs=TICK_S)


def test_process_that_got_the_loss_may_continue_as_long_as_it_progresses(watched, losses):
    losses.receive(1, "", Departure("killed", "lost"))
    with pytest.raises(ProcessLostError):
        losses.check("step")

    def move():
        watched.frame += "."

    assert watched.ended_after(2000, move) is None
    assert watched.ended_after(2000) == pytest.approx(600, abs=TICK_S)
    losses.acknowledge([1])
    assert watched.ended_after(2000) is None


def test_later_loss_restarts_the_limit_after_a_reported_one(watched, losses):
    losses.mark_reported([1])
    losses.receive(1, "", Departure("killed", "lost"))  # the call was faster than the watcher
    assert watched.ended_after(100) is None
    losses.receive(2, "", Departure("no data", "failed"))
    assert watched.ended_after(100) == pytest.approx(30, abs=TICK_S)


def test_time_in_which_this_process_was_stopped_does_not_count(watched, losses, clock):
    losses.receive(1, "", Departure("killed", "lost"))
    assert watched.ended_after(20) is None
    clock.advance(3600)
    assert watched.ended_after(100) == pytest.approx(10, abs=1)


def test_an_interpreter_that_ends_in_order_is_left_alone(watched, losses):
    losses.receive(1, "", Departure("killed", "lost"))
    watched.frame = None
    assert watched.ended_after(1000) is None


def test_infinite_limit_switches_it_off(clock, losses):
    watched = Watched(clock, losses, hang_timeout_s=math.inf, timeout_s=1.0)
    losses.receive(1, "", Departure("killed", "lost"))
    assert watched.ended_after(1000) is None
    losses.mark_all_reported()
    assert watched.ended_after(1000) is None


def test_coordinator_is_lost_only_if_it_does_not_answer():
    echo = SilenceDetector(10.0)
    assert echo.due == math.inf
    echo.sent(100.0)
    echo.sent(102.0)
    assert echo.due == 110.0
    echo.heard()
    assert echo.due == math.inf
    echo.suspended(50.0)
    echo.sent(200.0)
    assert echo.due == 210.0
    assert SilenceDetector(math.inf).due == math.inf


def test_the_median_is_of_the_last_steps(clock):
    progress = Progress(clock)
    assert progress.step_s is None
    for seconds in [100.0] * 10 + [2.0] * STEPS:
        began = progress.begin(7, "here")
        clock.advance(seconds)
        progress.end(began, "here")
    assert progress.step_s == 2.0
    assert progress.ended == 10 + STEPS


def test_heartbeat_has_the_place_of_the_main_lane(clock):
    progress = Progress(clock)
    progress.begin(12, "'step' (t.py:1)")
    progress.begin_wait(Point("epoch", site="t.py:3 (f)"), clock())
    clock.advance(4)
    beat = progress.beat()
    assert (beat["step"], beat["place"], beat["since_s"]) == (12, "'epoch' (t.py:3)", 4)
    assert beat["memory_bytes"] == pytest.approx(memory_bytes(), rel=0.5)
    assert (memory_bytes() > 1 << 20) == (sys.platform == "linux")


@pytest.fixture
def deep_threads():
    """Return names of threads that stand deep in a recursion."""
    release, ready = threading.Event(), threading.Semaphore(0)

    def stand(depth):
        if depth:
            stand(depth - 1)
        else:
            ready.release()
            release.wait()

    names = [f"deep {index}" for index in range(4)]
    threads = [threading.Thread(target=stand, args=(60,), name=name) for name in names]
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.acquire()
    yield names
    release.set()
    for thread in threads:
        thread.join()


def test_stacks_name_the_threads_the_main_one_first(deep_threads):
    text = stacks()
    assert text.startswith("Thread 'MainThread' (most recent call first):\n")
    assert all(f"Thread {name!r} (" in text for name in deep_threads)
    assert "in test_stacks_name_the_threads_the_main_one_first" in text
    main, *others = threads_of(text)
    assert main.of_program[-1].function == "test_stacks_name_the_threads_the_main_one_first"
    assert {*deep_threads} <= {thread.name for thread in others}


def test_the_main_thread_is_shown_however_many_others_there_are():
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(120)]
    for thread in threads:
        thread.start()
    try:
        text = stacks()
    finally:
        release.set()
        for thread in threads:
            thread.join()
    assert text.startswith("Thread 'MainThread' (most recent call first):\n  File ")
    functions = [frame.function for frame in threads_of(text)[0].of_program]
    assert any(function.startswith("test_the_main_thread_is_shown_") for function in functions)


def test_stacks_that_are_too_long_keep_the_innermost_frames_of_all(deep_threads):
    text = stacks(4000)
    assert len(text.encode()) <= 4000
    heads = [line for line in text.splitlines() if line.startswith("Thread ")]
    assert len(heads) >= 5
    assert text.count(" in wait\n") >= 4  # the innermost of each
    assert " more\n" in text
    assert len(stacks(100).encode()) <= 100


def test_the_main_thread_is_seen_to_move():
    first = main_frame()
    second = main_frame()
    assert first is not None
    assert first != second


def test_unreadable_stacks_return_the_reason(coordinators, run_all, monkeypatch):
    members = coordinators.join_all(2)

    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(heartbeat, "stacks", fail)
    assert "Too many open files" in members[0].stacks([1], timeout_s=PATIENCE_S)[1]
    meets = [lambda c=c: c.arrive(Point("on"), timeout_s=PATIENCE_S) for c in members]
    assert run_all(*meets) == [{0: b"", 1: b""}] * 2
    for member in members:
        member.close()


def test_a_program_whose_logging_raises_stays_in_the_job(caplog):
    def fail(_record):
        raise RuntimeError("as asked")

    watching = heartbeat.Watcher(None, heartbeat.HeartbeatTiming(math.inf, math.inf), ME, None)
    log = logging.getLogger("shoal")
    log.addFilter(fail)
    try:
        assert watching._on_frame(Frame({"is": "silent", "process": 1}, b"for 2 s"))
    finally:
        log.removeFilter(fail)
    assert watching._on_frame(Frame({"is": "silent", "process": 1}, b"for 4 s"))
    told = "process 0 of 3 (here): process 1 (there) is silent: for 4 s"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_the_programs_of_the_last_loss_count():
    """The others may have compiled them since."""
    watched = SimpleNamespace(programs=ProgramNotes(2), peer_losses=Mock(), stop=Mock())
    watching = heartbeat.Watcher(None, heartbeat.HeartbeatTiming(math.inf, math.inf), ME, watched)
    program = CompiledProgram("d", "jit(f)", "f32[8]", 2, "eval.py:31 (main)")
    programs_row = [[[program, [[0, 0]], [[1, 1]], [[0, 1]], None]], 0]
    gone = {"is": "gone", "process": 1, "name": "process 1", "state": "lost"}
    for programs, is_shown in (
        ({"programs": json.loads(json.dumps(programs_row))}, True),
        ({}, False),
    ):
        assert watching._on_frame(Frame({**gone, **programs}, b"its connection closed"))
        assert bool(watched.programs.differences) is is_shown


def test_stacks_do_not_depend_on_a_thread_that_can_start(monkeypatch):
    """None can while the interpreter exits, or where the host has too many."""

    def refused(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert "test_stacks_do_not_depend_on_a_thread_that_can_start" in stacks()


def test_the_reason_why_there_are_no_stacks_is_shown_whole():
    assert shown_stacks("no stacks: Too many open files") == "no stacks: Too many open files"
