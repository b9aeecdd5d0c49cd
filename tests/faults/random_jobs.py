"""What each process of a job of random programs does: real clocks, real signals, the real wire.

The programs are those of `collectives.random_programs`, ten times as fast.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from collectives import random_programs as programs
from shoal.errors import ShoalError
from shoal.runtime import process
from shoal.runtime.system import fault_points

SPEED = 10.0
LARGE = 9 << 20  # bytes: three pieces of a host's memory
_AGAIN_S = 0.001


class Failed(BaseException):
    """The program has an error, and does not catch it."""


def play(seeds: list[int], deadly: bool) -> list[list[Any]]:
    """Play the programs of the seeds one after the other; return how the calls of each ended."""
    return [play_one(seed, deadly) for seed in seeds]


def play_one(seed: int, deadly: bool) -> list[Any]:
    """Play one program; return a row of each call, and how the point at last failed, or None."""
    client = process.client()
    me = client.process
    program = programs.program_of(seed, deadly=deadly, processes=client.num_processes)
    rows, last = [], None
    for at, operation in enumerate(program.operations):
        if me in (operation.group or range(program.processes)):
            operation = operation._replace(timeout_s=operation.timeout_s / SPEED)
            rows.append(_call(client, operation, at, _faster(program.of(me, at))))
    try:
        programs.agree_at_last(client, program)
    except ShoalError as error:
        last = repr(error)
    return [seed, rows, last]


def _faster(faults: list[Any]) -> list[Any]:
    timed = ("late", "deadline", "interrupt")
    return [f._replace(value=f.value / SPEED) if f.kind in timed else f for f in faults]


def _call(client: Any, operation: Any, at: int, faults: list[Any]) -> list[Any]:
    began, error, is_own = time.monotonic(), None, False
    try:
        began = _prepare(client, faults)
        if not programs.perform(client, operation, at, faults, large=LARGE):
            error = "the values of another operation came back"
    except (fault_points.InjectedError, KeyboardInterrupt) as raised:
        error, is_own = repr(raised), True
    except Exception as raised:  # noqa: BLE001 - the test looks at it
        error = repr(raised)
    finally:
        _disarm()
        os.environ.pop(fault_points.VARIABLE, None)
    took_s = time.monotonic() - began
    return [at, took_s, programs.timeout_of(operation, faults), error, is_own]


def _prepare(client: Any, faults: list[Any]) -> float:
    """Let happen what comes before the call, and arm what comes in it; return the time."""
    me = client.process
    for fault in faults:
        if fault.kind == "late":
            time.sleep(fault.value)
        elif fault.kind == "raise":
            point, turn, _ = fault.value
            os.environ[fault_points.VARIABLE] = f"{point}@{me}#{turn}:raise"
        elif fault.kind == "interrupt":
            signal.signal(signal.SIGALRM, _interrupter(client))
            signal.setitimer(signal.ITIMER_REAL, max(_AGAIN_S, fault.value))
        elif fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "failed":
            raise Failed("no data")
        elif fault.kind == "exit":
            sys.exit(3)
    return time.monotonic()


def _interrupter(client: Any) -> Any:
    """Return a handler that interrupts the call, wherever it is, and not what is around it."""

    def handle(number: int, frame: object) -> None:
        if client._lanes._calls:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    return handle


def _disarm() -> None:
    """Interrupt no later call, not even if the alarm came a moment ago and is still unhandled."""
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0)
