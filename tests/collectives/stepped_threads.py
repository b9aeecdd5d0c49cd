"""N processes that are threads, of which one runs at a time, under a clock that stands still.

A process may start more threads, which are actors of their own.

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
        self.results = []  # what each actor returned or raised; first those that are processes
        self._processes = processes
        self._threads = []
        self._turns = []
        self._ready = []
        self._wakes = []
        self._on_stage = set()
        self._here = threading.local()  # the number of the actor of this thread
        self._is_hung = False
        self._ended = threading.Event()

    def run(self, function):
        """Call `function(process)` on all; return what each returned or raised, and each thread
        that they started."""
        for process in range(self._processes):
            self.start(function, process)
        self._next()
        if not self._ended.wait(PATIENCE_S):
            faulthandler.dump_traceback()
            raise AssertionError("a thread does not come back")
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self.results

    def start(self, function, *args):
        """Start a thread, which gets its turns as the others do; return a function that waits for
        its end."""
        actor = len(self._threads)

        def work():
            self._here.actor = actor
            self._turns[actor].acquire()
            try:
                self.results[actor] = function(*args)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                self.results[actor] = error
            self._on_stage.discard(actor)
            self._next()

        self.results.append(None)
        self._turns.append(threading.Semaphore(0))
        self._ready.append(lambda: True)
        self._wakes.append(math.inf)
        self._on_stage.add(actor)
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()
        return lambda: self.wait(lambda: actor not in self._on_stage)

    def wait_for_answer(self, process, box):
        """Wait as a process that has arrived; an interrupt of its first thread may come first."""
        after_s, error = math.inf, None
        if self._here.actor == process:
            after_s, error = self.interrupts.pop(process, (math.inf, None))
        self.wait(lambda: box.answer is not None, self.clock() + after_s)
        if box.answer is None:
            raise error

    def pause(self, duration_s):
        """The thread is late, or gives way to others."""
        self.wait(lambda: duration_s <= 0, self.clock() + duration_s)

    def wait(self, ready, until=math.inf):
        """Let others run until `ready()`, or until then by the clock."""
        actor = self._here.actor
        self._ready[actor], self._wakes[actor] = ready, until
        self._next()
        self._turns[actor].acquire()
        if self._is_hung:
            raise Hung
        self._ready[actor], self._wakes[actor] = (lambda: True), math.inf

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
