"""What two processes do of which one is left by the exception of a signal handler while it waits.

Process 1 makes a call that process 0 has yet to make. A thread sees that the main thread stands
still in a wait, and sends it SIGALRM, whose handler raises. Only then process 0 makes the call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import shoal
from shoal.errors import DeadlineError
from shoal.runtime import process
from shoal.runtime.rules.stopping import ReceivedNotice, StopReport
from shoal.runtime.system import fault_points

RAISED: dict[str, Callable[[], BaseException]] = {
    "TimeoutError": lambda: TimeoutError("the step took too long"),
    "ValueError": lambda: ValueError("the step took too long"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "OSError": lambda: OSError(5, "Input/output error"),
    "BlockingIOError": lambda: BlockingIOError(11, "try again"),
    "BrokenPipeError": lambda: BrokenPipeError(32, "Broken pipe"),
    "ConnectionResetError": lambda: ConnectionResetError(104, "Connection reset by peer"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "x"),
    "JSONDecodeError": lambda: json.JSONDecodeError("Expecting value", "", 0),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "KeyError": lambda: KeyError("x"),
    "RuntimeError": lambda: RuntimeError("the step took too long"),
}
STILL = 5  # looks at a main thread that stands still
LOGGED_S = 0.4  # a wait has been logged by then: SHOAL_WARN_AFTER_S is 0.3
LOOK_S = 0.01


class Case(NamedTuple):
    """A call that waits, what the handler raises there, and whether the wait was logged before."""

    call: str
    raised: str
    is_late: bool


class Came(NamedTuple):
    """What came out of a case on one process."""

    error: str  # the type of what the call raised; "": it returned
    is_own: bool  # whether that is the very exception of the handler
    is_in_step: bool  # whether the next call meets the next call


class Scene:
    """What the calls need, made once."""

    def __init__(self, folder: str) -> None:
        mesh = shoal.make_mesh({"x": -1})
        self.mesh, self.rows = mesh, shoal.Layout(mesh, "x", None)
        self.columns = shoal.Layout(mesh, None, "x")
        self.array = shoal.put(np.ones((4, 4), np.float32), self.rows)
        self.program = jax.jit(lambda x: x + x)
        self.folder, self.step = folder, 0
        self.history = shoal.Checkpoints(f"{folder}/history", keep=2)
        self.plain = shoal.Checkpoints(f"{folder}/plain", asynchronous=False, keep=2)
        shoal.save(f"{folder}/saved", {"w": self.array})
        self.history.save(0, {"w": self.array})
        self.history.wait()
        self.held = threading.Event()  # set: saves are written, and notices answered
        self.held.set()
        reach, here = fault_points.reach, process.client()
        report_stop = here.report_stop

        def hold(point: str, *more: Any, **options: Any) -> None:
            if point == "save.write":
                self.held.wait()
            reach(point, *more, **options)

        def hold_report(report: StopReport) -> None:
            self.held.wait()
            report_stop(report)

        fault_points.reach, here.report_stop = hold, hold_report

    def path(self) -> str:
        """Return a path that is not there."""
        return f"{self.folder}/of{self.step}"

    def feed(self) -> None:
        self.batches = shoal.feed(np.ones((8, 4), np.float32), self.rows, batch=4)
        next(self.batches)

    def wait(self) -> None:
        self.history.wait()

    def open(self) -> None:
        shoal.Checkpoints(self.path()).close()

    def save_step(self) -> None:
        self.plain.save(self.step, {"w": self.array})

    def preempted(self) -> None:
        shoal.preempted(self.step)


CALLS: dict[str, Callable[[Scene], object]] = {
    "barrier": lambda _: shoal.barrier("b"),
    "broadcast": lambda _: shoal.broadcast(b"few"),
    "save": lambda scene: shoal.save(scene.path(), {"w": scene.array}),
    "live_processes": lambda _: shoal.live_processes(),
    "allgather": lambda _: shoal.allgather(b"few"),
    "assert_same": lambda _: shoal.assert_same(3),
    "assert_same_program": lambda scene: shoal.assert_same_program(scene.program, scene.array),
    "sync_devices": lambda scene: shoal.sync_devices(scene.mesh),
    "make_mesh": lambda _: shoal.make_mesh({"x": -1}),
    "relayout": lambda scene: shoal.relayout(scene.array, scene.columns),
    "feed": Scene.feed,
    "restore": lambda scene: shoal.restore(f"{scene.folder}/saved"),
    "Checkpoints": Scene.open,
    "Checkpoints.save": Scene.save_step,
    "Checkpoints.wait": Scene.wait,
    "Checkpoints.restore": lambda scene: scene.history.restore(),
    "Checkpoints.resume": lambda scene: scene.history.resume(None, {"w": scene.array}),
    "preempted": Scene.preempted,
    "preemption.clear": lambda _: shoal.preemption.clear(),
}


def play(folder: str, cases: list[tuple[str, str, bool]]) -> list[tuple[str, bool, bool]]:
    """Play the cases, one after the other; return what came of each, as `Came`."""
    scene, warned = Scene(folder), _Warned()
    logging.getLogger("shoal").addHandler(warned)
    numbered = enumerate(cases, 1)
    return [(*_play(scene, Case(*case), number, warned),) for number, case in numbered]


def _play(scene: Scene, case: Case, number: int, warned: _Warned) -> Came:
    me, error = shoal.process_index(), None
    scene.step, own = number, RAISED[case.raised]()
    _prepare(scene, case.call)
    if me == 0:
        shoal.barrier(f"raised {number}", lane="bench")
        scene.held.set()
    try:
        with _interrupted(own, warned, case.is_late) if me == 1 else contextlib.nullcontext():
            CALLS[case.call](scene)
    except BaseException as raised:  # noqa: BLE001 - what it is, is the question
        error = raised
    if me == 1:
        if case.call == "Checkpoints.wait":
            with contextlib.suppress(DeadlineError):  # the save is not over
                scene.history.wait(timeout_s=0)
                raise AssertionError("the save was forgotten")
        shoal.barrier(f"raised {number}", lane="bench")
    if case.call == "preempted":
        shoal.preemption.clear()
    if case.call == "feed":
        with scene.batches:
            if error is not None:
                next(scene.batches)  # the same batch
    words = "" if error is None else type(error).__name__
    return Came(words, error is own, set(shoal.allgather(number)) == {number})


def _prepare(scene: Scene, call: str) -> None:
    """Hold process 0 where the call does not wait for its main thread."""
    me = shoal.process_index()
    if call in ("Checkpoints.wait", "preempted") and me == 0:
        scene.held.clear()
    if call == "Checkpoints.wait":
        scene.history.save(scene.step, {"w": scene.array})
    if call == "preempted":
        shoal.barrier("held")
        if me == 1:
            process.client().give_notice(ReceivedNotice(f"notice {scene.step}", "file"))
            while shoal.preemption.notice() is None:
                time.sleep(LOOK_S)


class _Warned(logging.Handler):
    """Tells that a wait was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "has waited" in record.getMessage():
            self.has_come.set()


@contextlib.contextmanager
def _interrupted(error: BaseException, warned: _Warned, is_late: bool) -> Iterator[None]:
    """Let a handler of SIGALRM raise once the main thread stands still in the block."""
    warned.has_come.clear()
    main, is_over = threading.main_thread().ident, threading.Event()
    assert main is not None

    def send() -> None:
        # If both processes wait at one place, one of them logs it, perhaps the other one.
        logged_s = time.monotonic() + LOGGED_S
        spot, still = None, 0
        while not is_over.wait(LOOK_S) and still < STILL:
            frame = sys._current_frames()[main]
            module = frame.f_globals.get("__name__", "")
            waits = module.startswith("shoal.") or module == "threading"
            is_logged = warned.has_come.is_set() or time.monotonic() > logged_s
            waits = waits and (is_logged or not is_late)
            still = still + 1 if waits and spot == (id(frame), frame.f_lasti) else 0
            spot = id(frame), frame.f_lasti
        if not is_over.is_set():
            signal.pthread_kill(main, signal.SIGALRM)

    def handler(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        sender.join()
        signal.signal(signal.SIGALRM, before)
