"""What real processes do in wide random programs; see `collectives.random_programs`.

What fails there at a deadline fails here a tenth of the time after it began.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time

from collectives import random_programs as programs
from collectives.random_programs import APART, wide_program_of
from shoal.errors import ShoalError
from shoal.runtime import process
from shoal.runtime.preemption import clear, preempted
from shoal.runtime.rules.stopping import ReceivedNotice

PROCESSES = 3
TIME = 0.1  # what a second of a program takes
DEADLINES_S = {2.0: 0.2, 5.0: 0.5, 100.0: 1.0}
FAULTS = (
    *APART,
    *APART,
    "notice",
    "late",
    "interrupt",
    "name",
    "shape",
    "usage",
    "deadline",
    "values",
)
PATIENCE_S = 30.0


def program_of(seed, *, deadly=False):
    """Return the program of a seed, with a time-out of its own for each call."""
    faults = ("killed", "killed", *FAULTS) if deadly else FAULTS
    program = wide_program_of(seed, faults=faults, processes=PROCESSES)
    short = [one._replace(timeout_s=DEADLINES_S[one.timeout_s]) for one in program.operations]
    return program._replace(operations=tuple(short))


def play(seeds):
    """Play programs one after the other in one job; return how the calls of each ended."""
    client, played = process.client(), []
    for number, seed in enumerate(seeds):
        one = Play(client, program_of(seed), 100 * number)
        one.make_all_calls()
        lanes = ["main", "side"] if one.program.in_lane("side") else ["main"]
        ends = [
            [lane, programs.come_together(client, one.program, lane, timeout_s=PATIENCE_S)]
            for lane in lanes
        ]
        clear.on(client, timeout_s=PATIENCE_S)
        played.append({"calls": one.calls, "ends": ends, "stops": one.stops})
    return played


def survive(seed):
    """Play a program in which processes are killed; those that live agree and meet at last."""
    client = process.client()
    one = Play(client, program_of(seed, deadly=True), 0)
    one.make_all_calls()
    programs.agree_at_last(client, one.program, timeout_s=PATIENCE_S)
    return [call[1] - call[2] for call in one.calls]


class Play:
    """One program on one process."""

    def __init__(self, client, program, first_step):
        self.client, self.program, self.first_step = client, program, first_step
        self.me = client.process
        self.calls = []  # of `Ended`
        self.stops = []  # [step, what `preempted` returned]
        self.threads = []

    def make_all_calls(self):
        self._start(self._make_calls, "side")
        self._make_calls("main")
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a call in a thread does not end"

    def _start(self, function, *args):
        self.threads.append(threading.Thread(target=function, args=args, daemon=True))
        self.threads[-1].start()

    def _make_calls(self, lane):
        for at, operation in self.program.in_lane(lane):
            kinds = {fault.kind for fault in self.program.of(self.me, at)}
            if self.me not in (operation.group or range(PROCESSES)):
                continue
            if "more" in kinds:
                self._call(operation._replace(kind="barrier", name="one more"), -1)
            if "thread" in kinds:
                self._start(self._call, operation, at)
            elif "less" not in kinds:
                self._call(operation, at)

    def _call(self, operation, at):
        faults = self.program.of(self.me, at)
        timeout_s = programs.timeout_of(operation, [])
        faults = [f._replace(value=f.value * TIME) if f.kind == "deadline" else f for f in faults]
        began, error, is_own = time.monotonic(), None, False
        try:
            with self._disturbed(faults):
                if operation.kind == "step":
                    step = self.first_step + at
                    stop = preempted.on(self.client, step, timeout_s=timeout_s)
                    self.stops.append([step, stop])
                else:
                    assert programs.perform(self.client, operation, at, faults), operation
        except (ShoalError, KeyboardInterrupt) as raised:
            error, is_own = repr(raised), isinstance(raised, KeyboardInterrupt)
        if at >= 0:
            self.calls.append([at, time.monotonic() - began, timeout_s, error, is_own])

    @contextlib.contextmanager
    def _disturbed(self, faults):
        """Let happen what happens to this process; at the end of the block it has happened."""
        sender = None
        for fault in faults:
            if fault.kind == "late":
                self._stop_for(fault.value * TIME)
            elif fault.kind == "notice":
                self.client.give_notice(ReceivedNotice("Terminated", "SIGTERM"))
            elif fault.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "interrupt":
                sender = threading.Timer(fault.value * TIME, os.kill, (os.getpid(), signal.SIGINT))
                sender.start()
        try:
            yield
        finally:
            if sender is not None:
                sender.join()

    def _stop_for(self, seconds):
        """Stop this process, all of its threads, until another wakes it."""
        wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["/bin/sh", "-c", wake]):
            os.kill(os.getpid(), signal.SIGSTOP)
