"""N processes that are threads, of which one runs at a time, under a clock that stands still.

Which one runs next is drawn from a seed, so that a program of many processes runs again as it ran.
When all of them wait, the clock goes on to the next deadline, or to the next one that wakes.
"""

import faulthandler
import math
import random
import threading

from shoal.runtime.client.in_process import LocalJob
from shoal.testing.clock import Clock

PATIENCE_S = 60.0  # reached only when something is broken


class Hung(BaseException):
    """All processes wait, and nothing is due."""


class StagedJob(LocalJob):
    """A job whose waits are turns on a stage."""

    def __init__(self, stage, processes):
        super().__init__(processes, clock=stage.clock, warn_after_s=math.inf)
        self.stage = stage

    def _wait(self, box, process, point, since):
        del point, since
        self.stage.wait_for_answer(process, box)
        return box.answer

    @property
    def next_deadline(self):
        return self._meeting.next_deadline


class Stage:
    """The threads, the clock, and whose turn it is."""

    def __init__(self, processes, seed):
        self.clock = Clock()
        self.chance = random.Random(seed)
        self.job = StagedJob(self, processes)
        self.interrupts = {}  # process: (after this many seconds of a wait, what it raises)
        self._turns = [threading.Semaphore(0) for _ in range(processes)]
        self._ready = [lambda: True for _ in range(processes)]
        self._wakes = [math.inf] * processes
        self._on_stage = set(range(processes))
        self._is_hung = False
        self._ended = threading.Event()

    def run(self, function):
        """Call `function(process)` on all; return what each returned or raised."""
        results = [None] * len(self._turns)

        def work(process):
            self._turns[process].acquire()
            try:
                results[process] = function(process)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                results[process] = error
            self._on_stage.discard(process)
            self._next()

        threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in self._on_stage]
        for thread in threads:
            thread.start()
        self._next()
        if not self._ended.wait(PATIENCE_S):
            faulthandler.dump_traceback()
            raise AssertionError("a thread does not come back")
        for thread in threads:
            thread.join(PATIENCE_S)
        return results

    def wait_for_answer(self, process, box):
        """Wait as a process that has arrived; an interrupt may come first."""
        after_s, error = self.interrupts.pop(process, (math.inf, None))
        self.wait(process, lambda: box.answer is not None, self.clock() + after_s)
        if box.answer is None:
            raise error

    def pause(self, process, duration_s):
        """The process is late, or gives way to others."""
        self.wait(process, lambda: duration_s <= 0, self.clock() + duration_s)

    def wait(self, process, ready, until=math.inf):
        """Let others run until `ready()`, or until then by the clock."""
        self._ready[process], self._wakes[process] = ready, until
        self._next()
        self._turns[process].acquire()
        if self._is_hung:
            raise Hung
        self._ready[process], self._wakes[process] = (lambda: True), math.inf

    def _next(self):
        if not self._on_stage:
            self._ended.set()
            return
        while not (runnable := self._runnable()):
            due = min(self.job.next_deadline, *(self._wakes[p] for p in self._on_stage))
            if due == math.inf:
                self._is_hung = True
                runnable = sorted(self._on_stage)
                break
            self.clock.advance(max(0.0, due - self.clock()))
            self.job.tick()
        self._turns[self.chance.choice(runnable)].release()

    def _runnable(self):
        now = self.clock()
        return [p for p in sorted(self._on_stage) if self._ready[p]() or self._wakes[p] <= now]
