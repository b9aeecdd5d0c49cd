"""End a process that hangs because a peer is gone or has made different calls, with a report and a
documented exit code.

A collective of XLA that waits for a lost process may never return, and cannot be interrupted. So
the watcher thread ends this process: only after a loss, and only when its main thread has reached
no shoal call for SHOAL_HANG_TIMEOUT_S since. Once an exception has reported the loss to the
program, the program may take its time, for example to save its work: it is then ended only when
its main thread has not moved, in Python, for SHOAL_TIMEOUT_S.

Where heartbeats have shown that processes made different calls, the next shoal call raises
DivergenceError. A program that reaches none, since its main thread has stood in native code for
SHOAL_HANG_TIMEOUT_S, is ended with that error: its collectives, which no one compares, wait for
each other.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Hashable
from types import FrameType

from shoal import settings
from shoal.errors import DivergenceError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.known_losses import TICK_S, PeerLoss, PeerLosses
from shoal.runtime.client.outcomes import ThisProcess, indented
from shoal.runtime.client.progress import Progress
from shoal.runtime.client.record_search import raise_found
from shoal.runtime.exit.causes import record_sent
from shoal.runtime.exit.guard import flush
from shoal.runtime.exit.torch_agent import TorchAgent
from shoal.runtime.failures.exception_text import failure_of, position_in_program
from shoal.runtime.failures.last_record import for_launcher, record, record_of_exit
from shoal.runtime.failures.program_text import program_lines
from shoal.runtime.failures.stack_text import shown_stacks
from shoal.runtime.system.callsite import line_of
from shoal.runtime.system.foreign_text import headline_of
from shoal.runtime.system.stacks import stacks

_NOT_ENDED = "is not ended, because initialize(hooks=False) forbids it"
_LOG = logging.getLogger("shoal")
_FLUSH_S = 2.0  # time limit of the flush: a stream's lock may never be free


class HangTimeout:
    """The hang time-outs of this process. Call `is_over` every TICK_S after a loss."""

    def __init__(self, hang_timeout_s: float, timeout_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._timeout_s = timeout_s
        self._mark: Hashable = None
        self._at = math.inf
        self._waited_s = 0.0

    def is_stuck(self, now: float, progress: Progress, frame: Hashable) -> bool:
        """Return whether the main thread has stood in native code for SHOAL_HANG_TIMEOUT_S."""
        mark: Hashable = None
        if frame is not None and not progress.is_waiting:
            mark = ("stuck", progress.since, progress.worked, frame)
        return self._stood_s(now, mark) >= self._hang_timeout_s and mark is not None

    @classmethod
    def of_settings(cls) -> HangTimeout:
        """Return the hang time-outs of the settings.

        Raises:
          UsageError: a variable is not a positive number.
        """
        return cls(settings.seconds("SHOAL_HANG_TIMEOUT_S"), settings.seconds("SHOAL_TIMEOUT_S"))

    def is_over(
        self, now: float, peer_losses: PeerLosses, progress: Progress, frame: Hashable
    ) -> PeerLoss | None:
        """Return why this process must be ended now, or None.

        `frame` is the main thread's current position in Python, None if the interpreter exits.
        """
        cause = next(iter(peer_losses.unreported()), None)
        is_reported, limit_s, position = False, self._hang_timeout_s, None
        if cause is None:
            is_reported, limit_s, position = True, self._timeout_s, frame
            cause = next(iter(peer_losses.open()), None)
        mark: Hashable = None
        if cause is not None and frame is not None and not progress.is_waiting:
            mark = (is_reported, progress.since, progress.worked, position)
        waited_s = self._stood_s(now, mark)
        if mark is None or math.isinf(self._hang_timeout_s) or waited_s < limit_s:
            return None
        return cause

    def _stood_s(self, now: float, mark: Hashable) -> float:
        """Return for how long the mark has been the same."""
        # Ignore time while this process was suspended.
        passed_s = min(max(0.0, now - self._at), 4 * TICK_S)
        if mark == self._mark:
            self._waited_s += passed_s
        else:
            self._waited_s = 0.0
        self._mark, self._at = mark, now
        return self._waited_s


class HangWatch:
    """Checks this process after a loss, and ends it when it hangs; or only reports that, once."""

    def __init__(self, client: JobClient, hang_timeout: HangTimeout, *, ends: bool = True) -> None:
        self._client = client
        self._hang_timeout = hang_timeout
        self._ends = ends
        self._has_reported = False

    def look(self, now: float) -> None:
        """Check for a hang; called by the watcher after a loss, or a difference."""
        here = self._client
        if not here.peer_losses.open():
            self._look_apart(now)
            return
        cause = self._hang_timeout.is_over(now, here.peer_losses, here.progress, main_frame())
        if cause is None or self._has_reported:
            return
        if not self._ends:
            self._has_reported = True
            with contextlib.suppress(Exception):  # handlers and filters may raise
                _LOG.warning("%s", self.report(cause, now).strip())
            return
        with contextlib.suppress(Exception):
            reason = f"it hung, and was ended: {cause.name} {cause.fate}"
            of: list[int] = []
            if cause.process is not None:
                of = [cause.process]
            end = record_of_exit(cause.exit_code, reason, of, here.process)
            here.report("followed", reason, end)
        write_before_exit(f"shoal: {self.report(cause, now)}")
        os._exit(cause.exit_code)

    def _look_apart(self, now: float) -> None:
        """End this process if it hangs after calls that differ from those of its peers."""
        here = self._client
        if here.call_records.found is None or self._has_reported:
            return
        # A prompt waits for its user, with no frame of the program.
        site = position_in_program(innermost_frame())
        frame = main_frame() if site else None
        if not self._hang_timeout.is_stuck(now, here.progress, frame):
            return
        self._has_reported = True
        if not self._ends:  # its next call raises DivergenceError
            me = ThisProcess(here.process, here.hosts)
            with contextlib.suppress(Exception):  # handlers and filters may raise
                _LOG.warning(
                    "%s is in native code at %s, after calls that differ between processes: "
                    "it hangs, and %s", me, line_of(site), _NOT_ENDED,
                )  # fmt: skip
            return
        # The search for the call that differs takes up to ten seconds, and the watcher must watch.
        search = threading.Thread(target=self._end_apart, name="shoal last words", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            search.start()

    def _end_apart(self) -> None:
        """Report the call that differs, and end this process."""
        here, progress = self._client, self._client.progress
        place = position_in_program(innermost_frame())
        try:
            raise_found(here, "hang", place)
        except DivergenceError as error:
            error.add_note(
                f"the main thread has been in native code, at {line_of(place) or '?'}, for "
                f"{time.monotonic() - progress.since:.0f} s"
            )
            headline, *rest = f"{error}\n{error.__notes__[-1]}".split("\n")
            message = "\n".join([headline, *self._program_lines(), *rest])
            record(error, process=here.process, step=progress.step, point=progress.point)
            with contextlib.suppress(Exception):
                here.report("failed", failure_of(error).words, record_sent(here, error))
            write_before_exit(f"shoal: {message}\n")
            os._exit(error.exit_code)
        self._has_reported = False  # a meeting of another thread has reported it

    def report(self, cause: PeerLoss, now: float) -> str:
        """Return the report: the programs that only some have compiled, the losses, their age, this
        process's position, the exit code."""
        here, progress = self._client, self._client.progress
        me, end = ThisProcess(here.process, here.hosts), _NOT_ENDED
        if self._ends:
            end = f"is ended with exit code {cause.exit_code}"
        lines = [
            f"{me} has not called shoal for {now - progress.since:.0f} s, and "
            f"{self._describe(cause)}: it hangs, and {end}",
            *self._program_lines(),
        ]
        for loss in here.peer_losses.open():
            ago = f"known for {now - loss.since:.0f} s"
            lines.append(f"  {self._describe(loss)} ({ago}): {headline_of(loss.words)}")
        step, place = progress.step, progress.place or "the start of the job"
        if step is not None:
            place = f"step {step}, {place}"
        lines.append(f"  it was last at {place}")
        return "\n".join([*lines, indented(shown_stacks(stacks())), ""])

    def _program_lines(self) -> list[str]:
        return [f"  {line}" for line in program_lines(self._client.programs.differences)]

    def _describe(self, loss: PeerLoss) -> str:
        if loss.process == self._client.process:
            return "it was declared lost"
        return f"{loss.name} {loss.fate}"


def innermost_frame() -> FrameType | None:
    """Return the main thread's innermost frame."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def main_frame() -> Hashable:
    """Return the main thread's current position; None once the interpreter runs exit handlers.

    Before those it joins threads, which may hang as the main thread may.
    """
    main = threading.main_thread()
    frame = innermost_frame()
    joins = frame is not None and frame.f_code.co_name == "_shutdown"  # of `threading`
    if sys.is_finalizing() or not (main.is_alive() or joins):
        return None
    if frame is None:
        return ()
    return (id(frame), frame.f_lasti)


def write_before_exit(text: str) -> None:
    """Write `text` to stderr and flush Python's buffers, giving up after _FLUSH_S."""

    def run() -> None:
        with contextlib.suppress(OSError), for_launcher():
            os.write(2, text.encode(errors="replace"))
        flush()
        TorchAgent(os.environ).record_words(text, time.time())

    # The hanging thread may hold a stream's lock, and the pipe may have no reader.
    writer = threading.Thread(target=run, name="shoal last words", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending: it starts no threads
        writer.start()
        writer.join(_FLUSH_S)
