"""Preemption: a notice to any process makes all processes stop at one agreed step."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from os import PathLike

from shoal import settings
from shoal.arguments import as_integer
from shoal.colour import collective, local
from shoal.errors import DeadlineError, StepAlreadyCommittedError, UsageError, UsageTypeError
from shoal.runtime import process
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.client.record_search import raise_found
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.deadline import ends_at
from shoal.runtime.rules.point import Point, group_of
from shoal.runtime.rules.requested_saves import FAILED
from shoal.runtime.rules.stopping import (
    LAST,
    REQUEUE,
    SAVE_FAILED,
    Notice,
    StopReport,
    shown_step,
)
from shoal.runtime.startup.membership import wait_for_saves
from shoal.runtime.system.callsite import callsite, line_of
from shoal.runtime.system.progress_file import note_saved, note_turn
from shoal.runtime.uses_client import uses_client

_LOG = logging.getLogger("shoal")
_ASK_S = 2.0  # how long late processes may take to report
_DAY_S = 86_400.0  # a longer wait would overflow a lock's timeout


def _watching_client() -> JobClient:
    """Return the job client of this process, which from now on is notified of SIGTERM."""
    client = process.client()
    if not process.is_watching():
        process.sources().watch_by_default()
    return client


@collective("processes")
@uses_client(of=_watching_client)
def preempted(client: JobClient, step: int, *, timeout_s: float | None = None) -> bool:
    """Return whether to stop at this step: equal on all processes, from one agreed step on.

    Collective over processes.

    False until some process receives a notice (see `watch`), then True on every process from one
    agreed step on: the first that is greater than every step at which any process has returned
    False since the job began, or since the last `clear`. No step is ever True on one process and
    False on another. Processes that left or were lost before the notice no longer count.

    Call it as often as you like: at any stride, again for the same step in a long phase, with lower
    steps after a loop was resumed. Without a pending notice it sends nothing, never waits, and
    takes about a microsecond. With one it waits, once, until all living processes have reported
    their step. A background thread of each reports it, so no process waits for a long step.

    The first call watches for SIGTERM if `watch` was not called: from then on SIGTERM no
    longer ends this program.

    Args:
      step: the number of the step that is about to begin or has just ended (on all processes
        alike), 0 or greater, of any size.
      timeout_s: deadline of the wait for the other processes' steps, in seconds; None:
        SHOAL_TIMEOUT_S (600).

    Raises:
      ProcessLostError: a process is dead or unreachable, or the coordinator is.
      PeerFailedError: another process raised.
      DivergenceError: on each process, once: the processes made different calls that send nothing.
      DeadlineError: a process did not report its step in time: it is frozen.
      UsageError: on this process: `step` is negative or not an integer, `timeout_s` not positive.

    >>> for step in range(3):
    ...     if preempted(step):
    ...         break
    >>> step
    2
    """
    if timeout_s is not None:  # checked although it is seldom used
        timeout_s = settings.timeout("preempted", timeout_s, "")
    stops = _stops_at(client, step, timeout_s)
    if stops:
        _send(client, client.stop.stop_at(int(step)))
    return stops


def _stops_at(client: JobClient, step: int, timeout_s: float | None) -> bool:
    """Return whether to stop at a step, without saying that this process does."""
    if type(step) is not int or step < 0:
        step = checked_step("preempted", step)
    if client.peer_losses.any():
        client.check(f"preempted({shown_step(step)}) ({callsite()})")
    if client.call_records.found is not None:
        raise_found(client, f"preempted({shown_step(step)})", callsite())
    note_turn(step)  # at least the step before has ended: this one may be about to begin
    client.progress.turns += 1
    stop = client.stop
    answer = stop.should_stop(step)
    if answer is False:  # nearly always
        return False
    if answer is None:
        caller = f"preempted({shown_step(step)})"
        answer = _wait(client, caller, lambda: stop.should_stop(step), timeout_s)
    return answer


def reached(step: int) -> bool:
    """Return what `preempted` returns, for a library: it does not stop the program by that."""
    return _stops_at(_watching_client(), step, None)


def stops_at_save(client: JobClient, caller: str, step: int) -> bool:
    """Return whether the program stops at this save, or has stopped: equal on all processes.

    It is a question like `preempted`, which sends nothing and waits for nothing without a notice.

    Args:
      caller: the call that saves, for messages.
    """
    answer = client.stop.should_save(step)
    if answer is not None:
        return answer
    return _wait(client, caller, lambda: client.stop.should_save(step), None)


def is_requested(client: JobClient, caller: str, step: int) -> bool:
    """Return whether a save of this step answers `shoal save`: equal on all processes.

    Without a request it sends nothing and waits for nothing.

    Args:
      caller: the call that saves, for messages.
    """
    saves = client.stop.saves
    answer = saves.is_due(step)
    if answer is not None:
        return answer
    return _wait(client, caller, lambda: saves.is_due(step), None)


@contextlib.contextmanager
def save_noted(client: JobClient, step: int) -> Iterator[None]:
    """Record that a save begins in this block, and whether it fails there, for `shoal save`."""
    client.stop.saves.begin(step)
    try:
        yield
    except BaseException:
        note_requested(client, step, FAILED)
        raise


def note_requested(client: JobClient, step: int, state: str) -> None:
    """Report what has become of a save, if it was requested: COMMITTED or FAILED."""
    report = client.stop.saves.end(step, state)
    if report is not None:
        client.report_save(report)


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
    return process.client().stop.inform()


def _clearing(
    client: JobClient, *_: object, processes: tuple[int, ...] | None = None, **__: object
) -> tuple[int, ...] | None:
    """Return the processes that `clear` means."""
    if processes is not None:
        return processes
    return client.peer_losses.survivors(client.num_processes)


@collective("processes")
@uses_client
@collective_scope("preemption.clear", among=_clearing)
def clear(
    client: JobClient,
    *,
    processes: Iterable[int] | None = None,
    timeout_s: float | None = None,
) -> None:
    """Continue after a notice: `preempted` is False again until the next one.

    Collective over processes.

    Closes the notices that every process knows of. A notice that has not reached every process yet
    opens the next round at once. Steps are compared again: a loop may restart at a lower one.

    Args:
      processes: the processes that continue: all that are alive, including the caller. None: all of
        the job; after a loss those that `live_processes` returned.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600).

    Raises:
      DivergenceError, DeadlineError, ProcessLostError, PeerFailedError: as `barrier` does.

    >>> clear()
    >>> preempted(0)
    False
    """
    timeout_s = settings.timeout("preemption.clear()", timeout_s, "SHOAL_TIMEOUT_S")
    group = group_of(
        "preemption.clear",
        _clearing(client, processes=group_of("preemption.clear", processes)),
    )
    point = Point("preemption.clear", group, operation="preemption.clear", site=callsite())
    known = b"%d" % client.stop.known
    met = client.arrive(point, known, timeout_s=timeout_s)
    # All processes get the same numbers, so all close the same notices.
    client.report_stop(client.stop.rearm(min(map(int, met.values()))))


@local
@uses_client
def mark_saved(client: JobClient, step: int | None = None) -> None:
    """Declare that the program's state is safe on disk, so that the job may be requeued.

    Local.

    A program that stops for a notice has then lost nothing: no line says what will be repeated, and
    a save that failed before does not count. A program that does not use `preempted` stops by this
    call after a notice (see `exit_code`). A call on one process is enough. Call it after the save
    is complete on all processes; `save` and `Checkpoints` do.

    Args:
      step: the saved step; shown by `job_status` and `shoal watch`.

    Raises:
      UsageError: `step` is negative or not an integer.

    >>> mark_saved(12)
    """
    saved_step = None if step is None else checked_step("preemption.mark_saved", step)
    client.stop.keep(None, client.stop.number_of(saved_step))
    note_commit(client, saved_step)


def note_commit(client: JobClient, step: int | None) -> None:
    """Record that something is saved."""
    if step is not None:
        note_saved(step)
        client.report("doing", f"saved step {shown_step(step)}")
    _send(client, client.stop.save(step))


def note_kept(client: JobClient, path: str, number: float) -> None:
    """Record that a save of the program is committed: `number` is that of its call."""
    _send(client, client.stop.keep(path, number))


def note_failed(client: JobClient, path: str, number: float) -> None:
    """Record that a save of the program failed: `number` is that of the call which raises it."""
    _send(client, client.stop.fail(path, number))


@contextlib.contextmanager
def failure_noted(client: JobClient, path: str, step: object) -> Iterator[float]:
    """Record a failure of the save in this block; the value is the number of its call.

    The block begins before the arguments are checked: a save that is refused has failed, too.
    """
    index = as_integer(step)  # a save refuses a step that is no number
    number = client.stop.number_of(index)
    try:
        yield number
    except StepAlreadyCommittedError:  # what should be saved is
        raise
    except BaseException:
        note_failed(client, path, client.stop.number_of(index))
        raise


def _send(client: JobClient, report: StopReport | None) -> None:
    if report is not None:
        client.report_stop(report)


@local
def exit_code() -> int:
    """Return this program's exit code: 75 if it has stopped for a preemption notice, else 0.

    Local.

    75 (EX_TEMPFAIL) asks the scheduler to start the job again. `shoal run` returns it by itself; a
    program without it ends with `sys.exit(shoal.preemption.exit_code())`, also after `shutdown`.
    Saves in the background are waited for first, so the code never depends on how long they take.

    A program has stopped once `preempted` returned True; without `preempted`, once it saved after
    the notice. If the last step that it did is not saved, the code is 75 too: a line says which
    steps will be repeated, or that the attempt starts over. It is 0 if the program finished its
    work before the agreed step, after `clear`, and if a save failed at the agreed step or later,
    unless it was made good. It is equal on all processes that made the same calls, and after
    `shutdown` on all.

    Returns:
      75 or 0.

    Raises:
      DeadlineError: a save in the background still runs after SHOAL_TIMEOUT_S.

    >>> exit_code()
    0
    """
    client = process.last_client()
    if client.stop.notice() is not None:
        limit = ends_at(settings.seconds("SHOAL_TIMEOUT_S"))
        wait_for_saves(client, limit, "preemption.exit_code")
        if client.process == 0 and not settings.is_set("SHOAL_ATTEMPT"):
            _explain(client)  # else `shoal run` does, at the end of the job
    return client.stop.exit_code


def _explain(client: JobClient) -> None:
    """Log what is lost, or why nothing is to be started again: once."""
    stop = client.stop
    stopped = stop.stopped
    if stop.verdict > 1:  # a save has failed
        line = SAVE_FAILED
    elif stopped is None or stopped.kept == LAST:
        return
    else:
        line = f"{stopped.words}: start it again (exit code {REQUEUE})"
    if line != stop.explained:
        stop.explained = line
        _LOG.warning("%s", line)


@local
def watch(
    *,
    signals: Iterable[str | int] = ("SIGTERM",),
    files: Iterable[str | PathLike[str]] = (),
    poll: Iterable[Callable[[], object]] = (),
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
      poll: functions that return None, or why this process will be ended: text, or a pair of text
        and the seconds left. Each is called every `every_s` in its own thread; an unchanged answer
        is not a new notice. Those for clouds are in `shoal.preemption.clouds`.
      every_s: polling interval of files and functions, seconds.
      grace_s: seconds left after a signal or file, if known.

    Raises:
      UsageError: an argument is wrong, or signals are watched outside the main thread; all problems
        at once, and nothing is watched.

    >>> watch(signals=(), files=["/tmp/leave-this-machine"])
    >>> preempted(0)
    False
    """
    process.client()  # raises unless this process has joined its job
    process.sources().watch(signals, files, poll, every_s, grace_s)


def checked_step(name: str, step: object) -> int:
    index = as_integer(step)
    if index is None:
        raise UsageTypeError(f"{name}({step!r}): the step must be a whole number")
    if index < 0:
        raise UsageError(f"{name}({shown_step(index)}): the step must not be negative")
    return index


def _wait(
    client: JobClient,
    caller: str,
    ask: Callable[[], bool | None],
    timeout_s: float | None,
) -> bool:
    """Wait until all processes have reported their step; return the answer then."""
    site, stop, progress = callsite(), client.stop, client.progress
    call = f"{caller} ({line_of(site)})"
    timeout_s = settings.timeout(caller, timeout_s, "SHOAL_TIMEOUT_S")
    began = time.monotonic()
    limit, warn_at = began + timeout_s, began + settings.seconds("SHOAL_WARN_AFTER_S")
    point = Point("preempted", operation="preempted", site=site)
    progress.begin_wait(point, began)
    try:
        while True:
            changes = stop.changes
            client.check(call)
            answer = ask()
            if answer is not None:
                return answer
            now = time.monotonic()
            if now >= limit:
                text = f"waited until its deadline ({timeout_s:g} s)"
                raise _late(client, f"{call} {text}", now - began)
            if now >= warn_at:
                warn_at = math.inf
                text = f"{call} has waited {now - began:.1f} s"
                _LOG.warning("%s", _late(client, text, now - began))
            stop.wait(changes, min(limit, warn_at, now + _DAY_S) - now)
    finally:
        progress.end_wait(point)


def _late(client: JobClient, caller: str, waited_s: float) -> DeadlineError:
    """Return the error that names the processes that have not reported, if they can be found."""
    missing: tuple[int, ...] = ()
    last_words: dict[int, str] = {}
    me = ThisProcess(client.process, client.hosts)
    try:
        missing = client.awaited(timeout_s=_ASK_S)
        members = client.members(timeout_s=_ASK_S) if missing else ()
        last_words = {m.process: m.last_words for m in members if m.process in missing}
    except DeadlineError:
        pass
    who = listed(missing) if missing else "unknown processes"
    steps = "its step" if len(missing) == 1 else "their steps"
    lines = [f"{me}: {caller} for {who} to report {steps}"]
    lines += [f"{me.name(process)}: {said}" for process, said in list(last_words.items())[:8]]
    return DeadlineError(
        "\n  ".join(lines),
        name="preempted",
        waited_s=waited_s,
        missing=missing,
        last_words=last_words,
    )
