"""One agreed step at which all processes stop, whoever of them is told that it will be ended."""

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
from shoal.runtime.rules.outcomes import ThisProcess, listed
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.stopping import REQUEUE, Notice
from shoal.runtime.system.callsite import callsite

_LOG = logging.getLogger("shoal")
_ASK_S = 2.0  # who is late may be asked for this long
_DAY_S = 86_400.0  # a wait longer than that would overflow a lock's


@collective("processes")
def preempted(step: int) -> bool:
    """Say whether to stop at this step: the same answer on all processes, from one step on.

    Collective over processes.

    False until some process has a notice (see `watch_notices`), then True on every process from
    one agreed step on: the first that is greater than every step at which any of them was told
    False since the job began, or since the last `rearm`. It is impossible that one process is told
    True and another False for one step. Who left or was lost before the notice counts no more.

    Call it as often as you like: at any stride, again for the same step in a long phase, with
    lower steps after a loop was resumed. Without an open notice nothing is sent, nobody is waited
    for, and it takes less than a microsecond. With one it waits, once, until all who live have
    said how far they are; that is said by a thread of each, so nobody waits for a long step.

    The first call watches for SIGTERM, if `watch_notices` was not called: from then on SIGTERM no
    longer ends this program.

    Args:
      step: the number of the step that is about to begin or has just ended (on all processes
        alike), 0 or greater, of any size.

    Raises:
      ProcessLostError: a process is dead or unreachable, or the meeting place is.
      PeerFailedError: another process raised.
      DivergenceError: on each process, once: they have made different calls that send nothing.
      DeadlineError: a process did not say how far it is within SHOAL_TIMEOUT_S: it is frozen.
      UsageError: on this process: `step` is negative or no whole number.

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
    """Do what `preempted` does, with the coordinator given; it watches for nothing."""
    if type(step) is not int or step < 0:
        step = checked_step("preempted", step)
    if coordinator.troubles.any():
        coordinator.check(f"preempted({_shown(step)}) ({callsite()})")
    if coordinator.trails.found is not None:
        raise_found(coordinator, f"preempted({_shown(step)})", callsite())
    answer = coordinator.stop.ask(step)
    return _wait(coordinator, step, timeout_s) if answer is None else answer


@local
def notice() -> Notice | None:
    """Return why this job will be ended, or None if nobody was told so.

    Local.

    Another process's notice is known here a moment after it came there.

    Returns:
      The first notice that is open: its reason, source ("SIGTERM", "file /run/leave", "gce"),
      process, the step from which on `preempted` is true (None: not agreed yet), and `deadline_s`:
      the seconds that are left now, by the earliest deadline of all that are open (None: none is
      known). Those that came later are its `others`.

    >>> notice() is None
    True
    """
    return process.coordinator().stop.notice()


@collective("processes")
def rearm(*, timeout_s: float | None = None) -> None:
    """Go on after a notice: `preempted` is False again until the next one.

    Collective over processes.

    It closes the notices that every process knows of. One that somebody does not know of yet
    opens the next round at once. Steps are compared anew: a loop may begin again at a lower one.

    Args:
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600).

    Raises:
      DivergenceError, DeadlineError, ProcessLostError, PeerFailedError: as `barrier` does.

    >>> rearm()
    >>> preempted(0)
    False
    """
    rearm_with(process.coordinator(), timeout_s=timeout_s)


@one_call("rearm")
def rearm_with(coordinator: Coordinator, *, timeout_s: float | None = None) -> None:
    """Do what `rearm` does, with the coordinator given."""
    timeout_s = settings.timeout("rearm()", timeout_s, "SHOAL_TIMEOUT_S")
    point = Point("rearm", fingerprint="rearm", site=callsite())
    known = b"%d" % coordinator.stop.known
    met = coordinator.arrive(point, known, timeout_s=timeout_s)
    # All get the same numbers, so all close the same notices.
    coordinator.tell_stop(coordinator.stop.rearm(min(map(int, met.values()))))


@local
def saved(step: int | None = None) -> None:
    """Say that the state of the program is safe on disk, so that the job may be started again.

    Local.

    It counts if a notice is open: then `exit_code` returns 75, and so does `shoal run`. It is
    enough that one process says it. Say it after the save is complete on all processes.

    Args:
      step: which step was saved; shown by `roll_call` and `shoal watch`.

    Raises:
      UsageError: `step` is negative or no whole number.

    >>> saved(12)
    """
    saved_with(process.coordinator(), step)


def saved_with(coordinator: Coordinator, step: int | None = None) -> None:
    """Do what `saved` does, with the coordinator given."""
    if step is not None:
        coordinator.tell("doing", f"saved step {_shown(checked_step('saved', step))}")
    told = coordinator.stop.save()
    if told is not None:
        coordinator.tell_stop(told)


@local
def exit_code() -> int:
    """Return what this program should exit with: 75 if it was preempted and has saved, else 0.

    Local.

    75 (EX_TEMPFAIL) asks whoever started the job to start it again. `shoal run` returns it by
    itself; a program without it ends with `sys.exit(shoal.exit_code())`, also after `shutdown`.

    Returns:
      75 if a notice is open and this process said `saved` since it knew of it, else 0.

    >>> exit_code()
    0
    """
    return exit_code_with(process.last_coordinator())


def exit_code_with(coordinator: Coordinator) -> int:
    """Do what `exit_code` does, with the coordinator given."""
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
    """Say how this process is told that it will be ended. Call it again to add to that.

    Local.

    Any process may have sources of its own; one notice is enough for all. Call it after
    `initialize`, in the main thread if it names signals. `shutdown` ends it.

    A signal that is watched no longer ends the program, however often it comes. Handlers that were
    installed before are called after the notice was taken; Python's default ones are not. A
    handler that is installed later, by `signal.signal`, takes nothing away. Forked children (data
    loaders) have the handlers of before. Once another process of the job is gone, a watched signal
    ends this one as if it were not watched: it is the launcher's, and no notice.

    Args:
      signals: names or numbers.
      files: a notice comes when the file appears; its first line is the reason. It is looked for
        every `every_s`, and once more when it has been removed.
      ask: functions that return None or why this process will be ended: text, or a pair of text
        and the seconds that are left. Each is called every `every_s` in a thread of its own; the
        same answer again is no new notice. Those for clouds are in `shoal.runtime.clouds`.
      every_s: seconds between two looks at files, and between two calls.
      grace_s: how many seconds are left after a signal or file, if that is known.

    Raises:
      UsageError: an argument is wrong, or signals are watched from another thread than the main
        one; all offences at once, and nothing is watched.

    >>> watch_notices(signals=(), files=["/tmp/leave-this-machine"])
    >>> preempted(0)
    False
    """
    process.coordinator()  # this process has joined its job, or is one
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
    """Return a step for messages. Python writes no decimals of numbers of thousands of digits."""
    return str(step) if step.bit_length() <= 512 else f"a number of {step.bit_length()} bits"


def _wait(coordinator: Coordinator, step: int, timeout_s: float | None) -> bool:
    """Wait until all have said where they are; return what `preempted` does."""
    site, stop, progress = callsite(), coordinator.stop, coordinator.progress
    asked = f"preempted({_shown(step)})"
    timeout_s = settings.timeout(asked, timeout_s, "SHOAL_TIMEOUT_S")
    began = time.monotonic()
    limit, warn_at = began + timeout_s, began + settings.seconds("SHOAL_WARN_AFTER_S")
    point = Point("preempted", site=site)
    progress.come(point, began)
    try:
        while True:
            changes = stop.changes
            coordinator.check(f"{asked} ({site})")
            if (answer := stop.ask(step)) is not None:
                return answer
            now = time.monotonic()
            if now >= limit:
                told = f"waited until its deadline ({timeout_s:g} s)"
                raise _late(coordinator, f"{asked} ({site}) {told}", now - began)
            if now >= warn_at:
                warn_at = math.inf
                told = f"{asked} ({site}) has waited {now - began:.1f} s"
                _LOG.warning("%s", _late(coordinator, told, now - began))
            stop.wait(changes, min(limit, warn_at, now + _DAY_S) - now)
    finally:
        progress.go(point)


def _late(coordinator: Coordinator, asked: str, waited_s: float) -> DeadlineError:
    """Return the error that says who has not answered, as far as that can be learnt."""
    missing: tuple[int, ...] = ()
    words: dict[int, str] = {}
    me = ThisProcess(coordinator.process, coordinator.hosts)
    try:
        missing = coordinator.awaited(timeout_s=_ASK_S)
        members = coordinator.members(timeout_s=_ASK_S) if missing else ()
        words = {m.process: m.said for m in members if m.process in missing}
    except DeadlineError:
        pass
    who = listed(missing) if missing else "processes that are not known"
    subject = "it is" if len(missing) == 1 else "they are"
    lines = [f"{me}: {asked} for {who} to say at which step {subject}"]
    lines += [f"{me.name(process)}: {said}" for process, said in list(words.items())[:8]]
    return DeadlineError(
        "\n  ".join(lines),
        name="preempted",
        waited_s=waited_s,
        missing=missing,
        last_words=words,
    )
