"""See whether this process is idle, report it, and end it with a stalled job.

The watcher thread looks; the coordinator decides (see `rules.stalls`). A main thread in native
code cannot be interrupted: so a process of a stalled job is ended here, with a report, unless its
main thread is in a wait of shoal, which raises StalledError.

Once a process has left the job in order, the others can wait for it for ever inside a jitted
program: then SHOAL_HANG_TIMEOUT_S is the limit of a process that waits for devices.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import NamedTuple

from shoal import settings
from shoal.errors import StalledError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess, indented
from shoal.runtime.exit.causes import record_sent
from shoal.runtime.exit.hang import innermost_frame, write_before_exit
from shoal.runtime.failures.exception_text import is_of_program, position_in_program
from shoal.runtime.failures.stack_text import shown_stacks, threads_of
from shoal.runtime.failures.stall_text import stall_headline, stall_lines
from shoal.runtime.jax_service import device_work
from shoal.runtime.jax_service.jax_runtime import COMPILER, is_starting
from shoal.runtime.rules.stalls import Idle, Stall, Stalls
from shoal.runtime.system.callsite import line_of, split_site
from shoal.runtime.system.stacks import DumpFile, stacks

_LOG = logging.getLogger("shoal")
_LOOK_S, _IDLE_LOOK_S = 1.0, 2.0  # with a limit, and without
_NO_TIME_S = 1e-4  # of the processor: none. Without hooks, more is taken for a return
_LEAST_S = 1e-3
_HOUR_S = 3600.0
_STEPS = 10  # a limit is at least as many median steps
_NOTICE_S, _NOTICE_STEPS = 5.0, 3  # until a warning that a notice is not asked for
_ASK_S = 2.0  # for the stacks of others
_RAISE_S = 3.0  # until a wait of shoal has raised StalledError
_STARTING = "its devices start, and wait for those of all processes: every process must use JAX"
_STARTED = "its devices have started"
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "IPython.core.debugger", "debugpy")


class _Sample(NamedTuple):
    """Processor time used until a moment, seconds."""

    at_s: float  # on a clock that runs only while this process does
    main_s: float
    all_s: float


class _ReturnProbe:
    """Finds out whether the main thread comes back to the interpreter, which runs a pending call
    then; in native code, as in a wait for devices, it does not. Without hooks it asks nothing."""

    def __init__(self, *, asks: bool = True) -> None:
        self.asks = self.has_returned = asks
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._note)

    def post(self) -> None:
        """Ask from now on; one call is pending at most."""
        if self.has_returned:
            self.has_returned = False  # before the call is pending: it may run at once
            if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
                self.has_returned = True  # too many are pending: they run once it returns

    def _note(self, _argument: object) -> int:
        self.has_returned = True
        return 0


class StallWatch:
    """Looks whether this process is idle. Call `look` about every second."""

    def __init__(
        self,
        client: JobClient,
        send: Callable[[Idle | None], None],
        shown: DumpFile | None = None,
        *,
        ends: bool = True,
        cpu_times: Callable[[], tuple[float, float]] | None = None,
        probe: _ReturnProbe | None = None,
        are_devices_idle: Callable[[], bool] = device_work.is_idle,
        may_poll: Callable[[], bool] = device_work.may_poll,
    ) -> None:
        """`send` sends a report to the coordinator, None once this process moves again; `shown`
        shows this process to others of its host; `ends` is whether it is ended when it is stalled.
        Tests give the last four in place of those of this process.

        Raises:
          UsageError: a variable is not a positive number.
        """
        self._client, self._send, self._shown = client, send, shown
        self._ends = ends
        client.progress.is_watched = True
        client.progress.on_limit = self._show_limit
        self._cpu_times = cpu_times or _cpu_times
        self._warn_s = settings.seconds("SHOAL_STALL_WARN_S")
        self._limit_s = settings.seconds("SHOAL_STALLED_AFTER_S")
        self._hang_timeout_s = settings.seconds("SHOAL_HANG_TIMEOUT_S")
        self._has_left = False  # another process, in order
        self._probe = probe or _ReturnProbe(asks=ends)
        self._are_devices_idle = are_devices_idle
        self._may_poll = may_poll
        self._at = self._ran_s = self._since_s = self._returned_s = 0.0
        self._mark: object = None
        self._samples: collections.deque[_Sample] = collections.deque()
        self._said = False
        self._is_starting = False  # its devices
        self._source = "", ""  # of the place at which it was idle last
        self._notice: tuple[int, float] | None = None  # the open one; when it was first seen
        self._pending_end: tuple[object, float, Callable[[], None]] | None = None
        self._show(time.monotonic(), self._current_limit_s())

    @property
    def every_s(self) -> float:
        """How often to call `look`, seconds."""
        within_s = self._client.progress.within_s
        limit_s = min(self._limit_s, within_s or math.inf)
        if self._has_left or limit_s < math.inf:
            return _LOOK_S
        return _IDLE_LOOK_S

    def on_left(self) -> None:
        """Take the news that a process has left in order: this one may wait for it in JAX."""
        self._has_left = True

    def look(self, now: float) -> None:
        """Look at the main thread; report what it does, once it has left no mark for long."""
        # The time while this process was suspended does not count, but for that of one look.
        passed_s = max(0.0, now - self._at)
        if passed_s > 2 * self.every_s:
            passed_s = self.every_s
        self._ran_s += passed_s
        self._at = now
        self._warn_of_notice(now)
        self._tell_of_start()
        progress = self._client.progress
        if self._pending_end is not None and self._pending_end[1] <= self._ran_s:
            mark, _, end = self._pending_end
            self._pending_end = None
            if mark == progress.mark:
                end()
        if progress.mark != self._mark:
            self._mark, self._since_s = progress.mark, self._ran_s
            self._samples.clear()
            if self._said:
                self._said = False
                self._send(None)
        if self._probe.has_returned:
            self._returned_s = self._ran_s
        self._probe.post()
        idle_s, limit_s = self._ran_s - self._since_s, self._current_limit_s()
        # The first step may be a compilation; later ones are known to take as long.
        warn_s = max(self._warn_s, progress.within_s or _STEPS * (progress.step_s or 0.0))
        self._sample(limit_s)
        self._show(now, limit_s)
        if idle_s >= min(warn_s, limit_s):
            idle = self._idle(idle_s, limit_s, is_due=idle_s >= warn_s)
            if idle is not None:
                self._said = True
                self._send(idle)

    def _tell_of_start(self) -> None:
        """Let the processes that wait for this one know that its devices start, if they are."""
        if is_starting() != self._is_starting:
            self._is_starting = not self._is_starting
            self._client.report("doing", _STARTING if self._is_starting else _STARTED)

    def _current_limit_s(self) -> float:
        """Return after which time without a mark this process counts as stuck.

        It decides twice: in what this process reports, and, as `_show` writes it, in what others
        see while native code holds the interpreter lock and nothing here runs. So what exempts a
        process from being stuck belongs here; what changes it between two looks calls
        `progress.on_limit`. Whether it is idle is decided in `look`, and, for a process that gives
        no heartbeat, in `Stalls.judge`.
        """
        progress = self._client.progress
        if progress.within_s is not None:
            return progress.within_s
        steps_s = _STEPS * (progress.step_s or 0.0)
        limit_s = self._limit_s
        if self._has_left and self._may_wait_in_jax():
            limit_s = min(limit_s, self._hang_timeout_s)
        return max(limit_s, steps_s)

    def _may_wait_in_jax(self) -> bool:
        """Return whether the main thread may wait for devices, or for their start.

        It calls JAX's native code from the program, from a library, or from JAX; not from the
        standard library, as a queue does. The devices may wait for a callback.
        """
        frame, name = innermost_frame(), ""
        if frame is not None:
            name = _top_module(frame)
        if name in sys.stdlib_module_names or _in_callback():
            return False
        return is_starting() or not self._are_devices_idle()

    def _show(self, now: float, limit_s: float) -> None:
        if self._shown is not None:
            self._shown.write(now, self._cpu_times()[0], limit_s)

    def _show_limit(self) -> None:
        if self._shown is not None:
            self._shown.write_limit(self._current_limit_s())

    def _sample(self, limit_s: float) -> None:
        """Sample the processor times, so that the first sample is as old as the limit."""
        if not math.isfinite(limit_s):
            limit_s = _HOUR_S
        samples, every_s = self._samples, min(limit_s, _HOUR_S) / 64
        if not samples or self._ran_s - samples[-1].at_s >= every_s:
            samples.append(_Sample(self._ran_s, *self._cpu_times()))
        while len(samples) > 1 and samples[1].at_s <= self._ran_s - limit_s:
            samples.popleft()

    def _idle(self, idle_s: float, limit_s: float, *, is_due: bool) -> Idle | None:
        """Return what to report; None: a prompt waits for its user."""
        frame = innermost_frame()
        site, is_prompt = position_in_program(frame), hasattr(sys, "ps1") or _is_kernel()
        if is_prompt and not site:
            return None
        progress, first = self._client.progress, self._samples[0]
        main_s, all_s = self._cpu_times()
        main_s, all_s = main_s - first.main_s, all_s - first.all_s
        passed_s = self._ran_s - first.at_s
        has_returned = self._ran_s - self._returned_s < limit_s
        if not self._probe.asks:  # a loop that comes back to the interpreter takes some time
            has_returned = main_s > _NO_TIME_S
        return Idle(
            idle_s,
            limit_s,
            site,
            _below(frame),
            is_waiting=self._waits_for_others(),
            seen_s=passed_s,
            main_share=main_s / max(passed_s, _LEAST_S),
            other_share=(all_s - main_s) / max(passed_s, _LEAST_S),
            has_returned=has_returned,
            marks_its_loop=progress.marks_its_loop,
            is_compiling=COMPILER in _frames(frame),
            may_poll=self._may_poll(),
            is_due=is_due,
            is_held=is_prompt or _is_debugged(frame),
            is_reading=progress.reads is not None and progress.reads(),
            source=self._source_at(site),
        )

    def _waits_for_others(self) -> bool:
        """Whether the program waits for other processes, in a call or for a batch of a `feed`."""
        progress = self._client.progress
        reads = progress.reads
        return progress.is_waiting or (reads is not None and not reads())

    def _source_at(self, site: str) -> str:
        """Return the source line of a place, as `stacks` reads it: the disk may hang."""
        if self._source[0] != site:
            self._source = site, ""
            with contextlib.suppress(OSError):  # e.g. too many open files
                for frame in threads_of(stacks())[0].of_program:
                    if frame.line == split_site(site)[1]:
                        self._source = site, frame.source
        return self._source[1]

    def _warn_of_notice(self, now: float) -> None:
        """Warn once if a notice is open and the program does not ask for it."""
        here = self._client
        if not here.stop.is_unasked:
            self._notice = None
            return
        if self._notice is None or self._notice[0] != here.stop.known:
            self._notice = here.stop.known, now
            return
        known, since = self._notice
        patience_s = max(_NOTICE_S, _NOTICE_STEPS * (here.progress.step_s or 0.0))
        if since + patience_s <= now:
            self._notice = known, math.inf
            place = line_of(position_in_program(innermost_frame())) or "an unknown place"
            _warn(
                f"{ThisProcess(here.process, here.hosts)}: a preemption notice is open, and "
                f"`preempted` has not been called for {now - since:.0f} s: the main thread is at "
                f"{place}"
            )

    def on_stalled(
        self, stall: Stall, representatives: Sequence[int], *, prints_report: bool
    ) -> None:
        """Take the decision of the coordinator.

        Args:
          representatives: those whose stacks are shown: one for each place.
          prints_report: whether this process shows the whole report; others have two lines.
        """
        here = self._client
        me = ThisProcess(here.process, here.hosts)
        headline = stall_headline(stall)
        rest = "\n".join(f"  {line}" for line in stall_lines(stall))
        if not (stall.is_final and self._ends):
            if prints_report:
                _warn(f"{headline}\n{rest}")
                name = "shoal stacks"
                asks = threading.Thread(
                    target=self._show_stacks, args=(representatives,), name=name, daemon=True
                )
                asks.start()
            else:
                place = line_of(position_in_program(innermost_frame())) or "an unknown place"
                _warn(f"{headline}\n  {me} is at {place}")
        if not stall.is_final:
            return
        if not prints_report:
            rest = ""
        end = partial(self._end, headline, rest, is_shown=here.process in representatives)
        progress = here.progress
        mark, is_waiting = progress.mark, self._waits_for_others()
        here.end_stalled(headline)
        if not self._ends:
            return  # its next wait, or step, raises StalledError
        if is_waiting:  # it raises StalledError there, if that wait can be woken
            self._pending_end = mark, self._ran_s + _RAISE_S, end
        elif mark == self._mark and self._said:  # if not, it raises StalledError at its next call
            end()

    def _end(self, headline: str, rest: str, *, is_shown: bool) -> None:
        """End this process, with a report."""
        here = self._client
        me = ThisProcess(here.process, here.hosts)
        with contextlib.suppress(Exception):
            end = record_sent(here, StalledError(headline))
            here.report("followed", f"stalled: {headline}", end)
        code = StalledError.exit_code
        place = line_of(position_in_program(innermost_frame())) or "an unknown place"
        parts = []
        if is_shown:
            parts.append(_own_stacks())
        if rest:
            parts.append(rest)
        parts.append(f"shoal: {me} is at {place}: ended with exit code {code}, because {headline}")
        write_before_exit("\n".join([*parts, ""]))
        os._exit(code)

    def _show_stacks(self, representatives: Sequence[int]) -> None:
        with contextlib.suppress(Exception):  # they are gone, or the job is
            stacks_by_process = self._client.stacks(representatives, timeout_s=_ASK_S)
            lines = [
                f"  process {process}:\n{indented(shown_stacks(stacks_shown))}"
                for process, stacks_shown in stacks_by_process.items()
            ]
            _warn("\n".join(["stacks of the stalled processes:", *lines]))


def watch_alone(client: JobClient, *, ends: bool = True) -> None:
    """Watch a job of one process, in a thread: it decides by itself. `ends`: see `StallWatch`."""
    stalls, here = Stalls(), [client.process]

    def take(idle: Idle | None) -> None:
        now = time.monotonic()
        stalls.receive(now, client.process, idle)
        if idle is None:
            return
        stall = stalls.judge(now, here, {}, {})
        if stall is not None:
            watch.on_stalled(stall, here, prints_report=True)

    def run() -> None:
        while client.progress.is_watched:  # until it is closed
            time.sleep(watch.every_s)
            watch.look(time.monotonic())

    watch = StallWatch(client, take, ends=ends)
    threading.Thread(target=run, name="shoal watcher", daemon=True).start()


def _warn(message: str) -> None:
    with contextlib.suppress(Exception):  # handlers and filters may raise
        _LOG.warning("%s", message)


def _own_stacks() -> str:
    try:
        return indented(shown_stacks(stacks()))
    except OSError as error:  # e.g. too many open files
        return f"no stacks: {error}"


def _cpu_times() -> tuple[float, float]:
    """Return the processor time of the main thread, and of all threads but the caller, seconds.

    The caller is the watcher, whose own looks are no work of the program: on a slow machine they
    use more of a core than the least that counts as work.
    """
    main, all_s = threading.main_thread(), time.process_time() - time.thread_time()
    if not (hasattr(time, "pthread_getcpuclockid") and main.ident and main.is_alive()):
        return all_s, all_s
    return time.clock_gettime(time.pthread_getcpuclockid(main.ident)), all_s


def _is_kernel() -> bool:
    """Return whether this process runs the cells of a notebook: any may import the package."""
    application = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    return application is not None and bool(application.initialized())


def _frames(frame: FrameType | None) -> Iterator[str]:
    """Yield the modules of a stack, innermost first."""
    while frame is not None:
        yield str(frame.f_globals.get("__name__"))
        frame = frame.f_back


def _top_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _in_callback() -> bool:
    """Return whether a thread of XLA runs Python code: such a thread begins in JAX."""
    main = threading.main_thread().ident
    for thread, frame in sys._current_frames().items():
        while frame.f_back is not None:
            frame = frame.f_back
        if thread != main and _top_module(frame) == "jax":
            return True
    return False


def _below(frame: FrameType | None) -> str:
    """Return what the innermost frame of the program has called: see `Idle.below`."""
    below = ""
    while frame is not None and not is_of_program(frame):
        if _top_module(frame) in ("jax", "jaxlib"):
            return "jax"
        below, frame = "library", frame.f_back
    return below


def _is_debugged(frame: FrameType | None) -> bool:
    """Return whether a debugger has stopped this process, or traces it."""
    status = contextlib.suppress(OSError)
    with status, open("/proc/self/status", encoding="ascii", errors="replace") as file:
        traced = [line.split()[1] for line in file if line.startswith("TracerPid:")]
        if traced and traced[0] != "0":
            return True
    return any(
        name == debugger or name.startswith(f"{debugger}.")
        for name in _frames(frame)
        for debugger in _DEBUGGERS
    )
