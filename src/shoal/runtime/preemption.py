"""Preemption: a notice to any process makes all processes stop at one agreed step."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterable
from os import PathLike

from shoal import settings
from shoal.colour import collective, local
from shoal.errors import DeadlineError, UsageError, UsageTypeError
from shoal.runtime import process
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.lanes import one_call
from shoal.runtime.client.trail_search import raise_found
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.stopping import REQUEUE, Notice
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.failure_words import listed
from shoal.runtime.system.progress_file import note_saved, note_step
from shoal.runtime.verb import verb

_LOG = logging.getLogger("shoal")
_ASK_S = 2.0  # how long late processes may take to report
_DAY_S = 86_400.0  # a longer wait would overflow a lock's timeout


@collective("processes")
def preempted(step: int) -> bool:
    """Return whether to stop at this step: equal on all processes, from one agreed step on.

    Collective over processes.

    False until some process receives a notice (see `watch_notices`), then True on every process
    from one agreed step on: the first that is greater than every step at which any process has
    returned False since the job began, or since the last `rearm`. It is impossible that one process
    gets True and another False for the same step. Processes that left or were lost before the
    notice no longer count.

    Call it as often as you like: at any stride, again for the same step in a long phase, with
    lower steps after a loop was resumed. Without an open notice nothing is sent, nothing is waited
    for, and it takes less than a microsecond. With one it waits, once, until all living processes
    have reported their step; a background thread of each reports it, so long steps delay nothing.

    The first call watches for SIGTERM if `watch_notices` was not called: from then on SIGTERM no
    longer ends this program.

    Args:
      step: the number of the step that is about to begin or has just ended (on all processes
        alike), 0 or greater, of any size.

    Raises:
      ProcessLostError: a process is dead or unreachable, or the meeting place is.
      PeerFailedError: another process raised.
      DivergenceError: on each process, once: they made different calls of those that send nothing.
      DeadlineError: a process did not report its step within SHOAL_TIMEOUT_S: it is frozen.
      UsageError: on this process: `step` is negative or not an integer.

    >>> for step in range(3):
    ...     if preempted(step):
    ...         break
    >>> step
    2
    """
    coordinator = process.coordinator()
    if not process.is_watching():
        process.sources().watch_by_default()
    return preempted_with(coordinator, step)


def preempted_with(coordinator: Coordinator, step: int, *, timeout_s: float | None = None) -> bool:
    """Like `preempted`, with an explicit coordinator; watches no signal."""
    if type(step) is not int or step < 0:
        step = checked_step("preempted", step)
    if coordinator.troubles.any():
        coordinator.check(f"preempted({_shown(step)}) ({callsite()})")
    if coordinator.trails.found is not None:
        raise_found(coordinator, f"preempted({_shown(step)})", callsite())
    note_step(step)
    answer = coordinator.stop.should_stop(step)
    return _wait(coordinator, step, timeout_s) if answer is None else answer


@local
def notice() -> Notice | None:
    """Return the open preemption notice, or None.

    Local.

    A notice to another process is known here a moment later.

    Returns:
      The first open notice: its reason, source ("SIGTERM", "file /run/leave", "gce"), process, the
      step from which on `preempted` is true (None: not agreed yet), and `deadline_s`: the seconds
      that are left now, by the earliest deadline of all open notices (None: unknown). Later
      notices are its `others`.

    >>> notice() is None
    True
    """
    return process.coordinator().stop.notice()


@collective("processes")
@verb
@one_call("rearm")
def rearm(coordinator: Coordinator, *, timeout_s: float | None = None) -> None:
    """Continue after a notice: `preempted` is False again until the next one.

    Collective over processes.

    Closes the notices that every process knows of. A notice that has not reached every process yet
    opens the next round at once. Steps are compared anew: a loop may restart at a lower one.

    Args:
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600).

    Raises:
      DivergenceError, DeadlineError, ProcessLostError, PeerFailedError: as `barrier` does.

    >>> rearm()
    >>> preempted(0)
    False
    """
    timeout_s = settings.timeout("rearm()", timeout_s, "SHOAL_TIMEOUT_S")
    point = Point("rearm", fingerprint="rearm", site=callsite())
    known = b"%d" % coordinator.stop.known
    met = coordinator.arrive(point, known, timeout_s=timeout_s)
    # All processes get the same numbers, so all close the same notices.
    coordinator.report_stop(coordinator.stop.rearm(min(map(int, met.values()))))


@local
@verb
def saved(coordinator: Coordinator, step: int | None = None) -> None:
    """Declare that the program's state is safe on disk, so that the job may be requeued.

    Local.

    If a notice is open, `exit_code` then returns 75, and so does `shoal run`. A call on one process
    is enough. Call it after the save is complete on all processes.

    Args:
      step: the saved step; shown by `roll_call` and `shoal watch`.

    Raises:
      UsageError: `step` is negative or not an integer.

    >>> saved(12)
    """
    if step is not None:
        number = checked_step("saved", step)
        note_saved(number)
        coordinator.report("doing", f"saved step {_shown(number)}")
    report = coordinator.stop.save()
    if report is not None:
        coordinator.report_stop(report)


@local
def exit_code() -> int:
    """Return this program's exit code: 75 if it was preempted and has saved, else 0.

    Local.

    75 (EX_TEMPFAIL) asks the scheduler to start the job again. `shoal run` returns it by itself; a
    program without it ends with `sys.exit(shoal.exit_code())`, also after `shutdown`.

    Returns:
      75 if a notice is open and this process has called `saved` since it arrived, else 0.

    >>> exit_code()
    0
    """
    return exit_code_with(process.last_coordinator())


def exit_code_with(coordinator: Coordinator) -> int:
    """Like `exit_code`, with an explicit coordinator."""
    return REQUEUE if coordinator.stop.has_saved else 0


@local
def watch_notices(
    signals: Iterable[str | int] = ("SIGTERM",),
    *,
    files: Iterable[str | PathLike[str]] = (),
    ask: Iterable[Callable[[], object]] = (),
    every_s: float = 5.0,
    grace_s: float | None = None,
) -> None:
    """Set the sources of preemption notices of this process. Further calls add sources.

    Local.

    Each process may have its own sources; one notice is enough for all. Call it after `initialize`,
    and in the main thread if it names signals. `shutdown` removes the sources.

    A watched signal no longer ends the program, however often it arrives. Handlers that were
    installed before run after the notice was taken, except Python's default ones. A handler
    installed later with `signal.signal` does not disable the watch. Forked children (data
    loaders) keep the previous handlers. Once another process of the job is gone, a watched signal
    ends this one as if it were not watched: the launcher sent it, and it is not a notice.

    Args:
      signals: names or numbers.
      files: a notice is given when the file appears; its first line is the reason. Checked every
        `every_s`; a file that was removed and appears again is a new notice.
      ask: functions that return None, or why this process will be ended: text, or a pair of text
        and the seconds left. Each is called every `every_s` in its own thread; an unchanged answer
        is not a new notice. Those for clouds are in `shoal.runtime.clouds`.
      every_s: polling interval of files and functions, seconds.
      grace_s: seconds left after a signal or file, if known.

    Raises:
      UsageError: an argument is wrong, or signals are watched outside the main thread; all problems
        at once, and nothing is watched.

    >>> watch_notices(signals=(), files=["/tmp/leave-this-machine"])
    >>> preempted(0)
    False
    """
    process.coordinator()  # raises unless this process has joined its job
    process.sources().watch(signals, files, ask, every_s, grace_s)


def checked_step(name: str, step: object) -> int:
    try:
        index = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        index = None
    if index is None or isinstance(step, bool):
        raise UsageTypeError(f"{name}({step!r}): the step must be a whole number")
    if index < 0:
        raise UsageError(f"{name}({_shown(index)}): the step must not be negative")
    return index


def _shown(step: int) -> str:
    """Return a step for messages. Python refuses to print numbers of thousands of digits."""
    return str(step) if step.bit_length() <= 512 else f"a number of {step.bit_length()} bits"


def _wait(coordinator: Coordinator, step: int, timeout_s: float | None) -> bool:
    """Wait until all processes have reported their step; return the result of `preempted`."""
    site, stop, progress = callsite(), coordinator.stop, coordinator.progress
    caller = f"preempted({_shown(step)})"
    timeout_s = settings.timeout(caller, timeout_s, "SHOAL_TIMEOUT_S")
    began = time.monotonic()
    limit, warn_at = began + timeout_s, began + settings.seconds("SHOAL_WARN_AFTER_S")
    point = Point("preempted", site=site)
    progress.begin_wait(point, began)
    try:
        while True:
            changes = stop.changes
            coordinator.check(f"{caller} ({site})")
            if (answer := stop.should_stop(step)) is not None:
                return answer
            now = time.monotonic()
            if now >= limit:
                text = f"waited until its deadline ({timeout_s:g} s)"
                raise _late(coordinator, f"{caller} ({site}) {text}", now - began)
            if now >= warn_at:
                warn_at = math.inf
                text = f"{caller} ({site}) has waited {now - began:.1f} s"
                _LOG.warning("%s", _late(coordinator, text, now - began))
            stop.wait(changes, min(limit, warn_at, now + _DAY_S) - now)
    finally:
        progress.end_wait(point)


def _late(coordinator: Coordinator, caller: str, waited_s: float) -> DeadlineError:
    """Return the error that names the processes that have not reported, if they can be found."""
    missing: tuple[int, ...] = ()
    words: dict[int, str] = {}
    me = ThisProcess(coordinator.process, coordinator.hosts)
    try:
        missing = coordinator.awaited(timeout_s=_ASK_S)
        members = coordinator.members(timeout_s=_ASK_S) if missing else ()
        words = {m.process: m.last_words for m in members if m.process in missing}
    except DeadlineError:
        pass
    who = listed(missing) if missing else "unknown processes"
    steps = "its step" if len(missing) == 1 else "their steps"
    lines = [f"{me}: {caller} for {who} to report {steps}"]
    lines += [f"{me.name(process)}: {said}" for process, said in list(words.items())[:8]]
    return DeadlineError(
        "\n  ".join(lines),
        name="preempted",
        waited_s=waited_s,
        missing=missing,
        last_words=words,
    )
