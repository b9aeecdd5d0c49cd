"""The facts of a job's failure, from how its processes ended."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.errors import ProcessLostError
from shoal.launch.news import KeeperNews
from shoal.launch.output import is_notice
from shoal.runtime.exit.first_failure import (
    SHARED,
    Ending,
    Whereabouts,
    fails_by_itself,
    has_only_learned,
    is_signal_from_outside,
    left_cause,
    line_at,
    shared_cause,
    shell_code,
    signal_name,
)
from shoal.runtime.failures.facts import (
    CallPlace,
    Cause,
    JobFailure,
    Memory,
    Others,
    ProcessSet,
    Wait,
    grouped,
    utc,
)
from shoal.runtime.failures.headline import (
    advice_of,
    job_headline,
    raised_words,
)
from shoal.runtime.failures.last_record import LastRecord
from shoal.runtime.failures.process_text import listed
from shoal.runtime.failures.shortening import capital, sentence
from shoal.runtime.rules.point import STEP
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.foreign_text import headline_of, one_line

# Of the interpreter; of C++, as printed by absl and the standard library.
_FATAL = re.compile(r"Fatal Python|F\d{4} \d\d:\d\d:\d\d|terminate called |\*\*\* Check failure")
NOT_RECORDED = "No exception and no sys.exit was recorded: os._exit, or exit() in native code."
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OUTPUT_LINES = 3
_NOT_OUTPUT = ("shoal: ", "[Gloo] Rank ")
_CTRL_C = KeyboardInterrupt.__name__
_SAID = 400  # characters of a later error, its type and its place
_REQUEUED = f"Exit code {REQUEUE} means preempted and saved, but there was no preemption notice."


class EndedJob(NamedTuple):
    """The run of a job that has failed. Times are on one monotonic clock."""

    endings: Sequence[Ending]
    total: int
    start_s: float

    def failure(
        self, kind: str, code: int, causes: Iterable[Cause], headline: str = ""
    ) -> JobFailure:
        """Return the failure with these causes; the headline is derived from them if not given."""
        causes = tuple(causes)
        taken = {process for cause in causes for process in _shown_in(cause)}
        rest = [ending for ending in self.endings if ending.process not in taken]
        at_s = [cause.at_s for cause in causes if cause.at_s is not None]
        ended_s = [e.ended_s for e in self.endings if e.ended_s < float("inf")]
        started = time.time() - (time.monotonic() - self.start_s)
        logs = {os.path.dirname(ending.log) for ending in self.endings if ending.log}
        failure = JobFailure(
            kind=kind,
            headline=headline,
            exit_code=code,
            started=utc(started),
            failed_after_s=round(min(at_s), 3) if at_s else None,
            ended_after_s=round(max(ended_s) - self.start_s, 3) if ended_s else None,
            num_processes=self.total,
            hosts=_hosts(self.endings),
            causes=causes,
            others=_others(rest),
            advice=advice_of(causes),
            logs=min(logs, default=""),
        )
        return failure if headline else dataclasses.replace(failure, headline=job_headline(failure))

    def stopped(
        self, kind: str, code: int, at_s: float | None, *, headline: str = "", name: str = ""
    ) -> JobFailure:
        """Return the end of a job that was stopped, and of which no process has failed.

        Args:
          kind: "interrupted" or "preempted".
          at_s: when; None: unknown.
          headline: derived from what follows if not given.
          name: of the signal, if one has stopped it.
        """
        steps = [ending.step for ending in self.endings if ending.step >= 0]
        failure = dataclasses.replace(
            self.failure(kind, code, (), headline or kind),
            failed_after_s=None if at_s is None else round(max(0.0, at_s - self.start_s), 3),
            others=_ended(self.endings),
            signal=name,
            step=max(steps, default=None),
        )
        return failure if headline else dataclasses.replace(failure, headline=job_headline(failure))

    def of_processes(self, roots: Sequence[Ending], code: int) -> JobFailure:
        """Return the failure of a job whose first failure is that of a process; of several, if
        these left in order, and others missed them."""
        root, *with_it = roots
        first = self._cause(root)
        shared = [e for e in self.endings if _kind(e) == first.kind]
        if first.kind in SHARED and root.record is not None:
            return self.failure(first.kind, code, [self._of_all(first, shared)])
        own = [e for e in self.endings if e.process != root.process and _is_independent(e)]
        own.sort(key=lambda ending: ending.known_failed_s or 0.0)
        causes = grouped((first, *map(self._cause, with_it or own)), is_ordered=True)
        return self.failure(first.kind, code, causes)

    def _cause(self, ending: Ending) -> Cause:
        """Return the failure of one process."""
        at_s, left = ending.known_failed_s, ending.left if ending.has_left else None
        if left is not None:
            at_s = left.at_s
        if at_s is not None:
            at_s = round(at_s - self.start_s, 3)
        log = os.path.basename(ending.log)
        if log and ending.host:
            log = f"{ending.host}:{ending.log}"
        cause = _recorded(ending) or _by_itself(ending)
        code: int | None = shell_code(ending.code)
        if left is not None:
            code = 0
        elif ending.was_ended:  # the code of its own end, if it chose one
            code = cause.exit_code if cause.kind == "exit" else None
        place, step = _last_call(ending, cause)
        at = _whereabouts(ending)
        is_past = cause.error is None and at is not None and not at.is_waiting
        last_met = None
        if is_past and place is not None and place.call not in ("", STEP):
            last_met = place
        words = cause.words
        if cause.kind not in SHARED:
            raised = _thread_of(ending)
            if raised is not None:
                said = f"Thread '{raised.cause.thread}' had {raised_words(raised.cause)}"
                said = one_line(said, _SAID)
                words = (f"{said}.", *words)
        return dataclasses.replace(
            cause,
            words=words,
            processes=ProcessSet([ending.process]),
            at_s=at_s,
            exit_code=code,
            step=step,
            place=None if is_past else place,
            last_met=last_met,
            log=log,
        )

    def with_thread(self, cause: Cause) -> Cause:
        """Return the failure that processes did not come: of one, with its thread's exception."""
        late = self._only_of(cause.processes)
        raised = None if late is None else _thread_of(late)
        if raised is None:
            return cause
        before_s = None
        if cause.at_s is not None:
            before_s = round(max(0.0, self.start_s + cause.at_s - raised.at_s), 1)
        return dataclasses.replace(
            cause,
            error=raised.cause.error,
            frames=raised.cause.frames,
            left_out=raised.cause.left_out,
            thread=raised.cause.thread,
            thread_age_s=before_s,
        )

    def _of_all(self, first: Cause, shared: Sequence[Ending]) -> Cause:
        """Return a failure that all who met have been given."""
        cause = shared_cause(first, [self._cause(ending) for ending in shared])
        if cause.wait is not None:
            return self._not_arrived(cause, cause.wait)
        return dataclasses.replace(cause, log=first.log if len(cause.processes) == 1 else "")

    def _not_arrived(self, cause: Cause, wait: Wait) -> Cause:
        """Return the failure that processes did not arrive, with what is known of these."""
        processes = cause.processes
        words: tuple[str, ...] = ()
        if wait.missing and all(e.sent for e in self.endings if e.process in processes):
            was = "was" if len(processes) == 1 else "were"
            words = (f"{capital(listed(processes))} {was} still running.",)
        late = self._only_of(processes)
        log = "" if late is None else self._cause(late).log
        return self.with_thread(dataclasses.replace(cause, log=log, words=words))

    def _only_of(self, processes: ProcessSet) -> Ending | None:
        """Return how a process ended, if it is the only one of a set."""
        if len(processes) != 1:
            return None
        return next((e for e in self.endings if e.process in processes), None)


def _shown_in(cause: Cause) -> Iterator[int]:
    """Yield the processes that the evidence of a cause shows."""
    yield from cause.processes
    for group in () if cause.wait is None else cause.wait.arrived:
        yield from group.processes


def of_keeper(job: EndedJob, keeper: KeeperNews) -> JobFailure:
    """Return the failure of a job by the death of a host's keeper, upon which JAX aborts."""
    died = "died"
    if keeper.code is not None and keeper.code < 0:
        died = f"was killed by {signal_name(-keeper.code)}"
    elif keeper.code is not None:
        died = f"ended with exit code {keeper.code}"
    ended = job.endings
    aborted = [e.process for e in ended if e.code == -signal.SIGABRT and not e.sent]
    at_s = keeper.gone_s - job.start_s if keeper.gone_s else None
    words = f"Its processes reach JAX's service through it: JAX aborted {listed(aborted)}."
    cause = Cause(
        processes=ProcessSet(aborted), kind="service_lost", at_s=at_s, words=(words,), log=""
    )
    headline = f"the agent of host {keeper.host} (pid {keeper.pid}) {died}"
    return job.failure("service_lost", ProcessLostError.exit_code, [cause], headline)


def of_coordinator(job: EndedJob, root: Ending) -> JobFailure:
    """Return the failure of a job whose processes have lost the coordinator, which runs: it is
    frozen, or cannot be reached."""
    error = root.record.cause.error if root.record is not None else None
    words = "" if error is None else sentence(error.message)
    at_s = None if root.known_failed_s is None else round(root.known_failed_s - job.start_s, 3)
    cause = Cause(processes=ProcessSet(), kind="service_lost", at_s=at_s, words=(words,))
    code = ProcessLostError.exit_code
    return job.failure("service_lost", code, [cause], "the coordinator was lost")


def _recorded(ending: Ending) -> Cause | None:
    """Return what a process has recorded of its end, if that was its end."""
    if ending.record is None or ending.is_lost or ending.was_frozen:
        return None
    cause = ending.record.cause
    if ending.sent:
        name = signal_name(ending.sent[-1])
        words = f"Did not end by itself: shoal run sent {name}."
    elif ending.code == REQUEUE:
        words = _REQUEUED
    elif ending.code == cause.exit_code:
        return cause
    elif ending.code == 0:
        words = "Ended with code 0 before it left the job."
    elif ending.code < 0:
        words = f"Then killed by {signal_name(-ending.code)}."
    else:
        words = f"Then ended with exit code {ending.code}."
    return dataclasses.replace(cause, words=(*cause.words, words))


def _last_call(ending: Ending, cause: Cause) -> tuple[CallPlace | None, int | None]:
    """Return the last call and step of a process: as it recorded them, or as others know them."""
    at = _whereabouts(ending)
    place, step = cause.place or (at and at.place), cause.step
    if step is None:
        step = ending.step
        if step < 0 and at is not None:
            step = at.step
    if step is not None and step < 0:
        step = None
    return place, step


def _whereabouts(ending: Ending) -> Whereabouts | None:
    gone = ending.gone or ending.left
    return None if gone is None else gone.at


def _by_itself(ending: Ending) -> Cause:
    """Return the cause of a process that has recorded nothing."""
    cause = Cause(processes=ProcessSet(), kind="exit", last_output=_last_output(ending.output))
    if ending.was_frozen or ending.is_lost:
        return dataclasses.replace(cause, kind="lost", words=(_lost(ending),))
    if ending.code < 0 and not ending.has_left:
        name, is_outside = signal_name(-ending.code), is_signal_from_outside(ending.code)
        return dataclasses.replace(
            cause,
            kind="signal",
            signal=name,
            sent_by_launcher=-ending.code in ending.sent if is_outside else None,
            frames=() if is_outside else ending.crashed_at,
            memory=_memory(ending) if name == "SIGKILL" else None,
        )
    words = NOT_RECORDED
    if ending.gone is not None and ending.gone.state == "failed":
        if ending.gone.record is not None:
            return dataclasses.replace(ending.gone.record.cause, last_output=cause.last_output)
        said = headline_of(ending.gone.words)
        return dataclasses.replace(cause, words=(f"It had reported: {said}",))
    if ending.has_left:
        words, *_ = left_cause(ending.left).words
    elif ending.code == 0:
        words = "It ended before it left the job: os._exit, exit() in native code, or "
        words += "initialize(hooks=False) without shutdown()."
    elif ending.code == REQUEUE:
        words = _REQUEUED
    elif not ending.is_python:
        return cause
    return dataclasses.replace(cause, words=(words,))


def _memory(ending: Ending) -> Memory | None:
    """Return what is known of the memory of a process; its cgroup's only if that ended it."""
    if ending.memory is None or ending.is_oom:
        return ending.memory
    return dataclasses.replace(ending.memory, cgroup_peak_bytes=None, cgroup_limit_bytes=None)


def _lost(ending: Ending) -> str:
    """Describe how a process was lost, and how it ended."""
    how = f"was ended by shoal run with {signal_name(ending.sent[-1])}" if ending.sent else ""
    if not how:
        code = ending.code
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if ending.was_frozen:
        return f"It was stopped by a signal (SIGSTOP), and {how}."
    gone = ending.gone
    words = capital(gone.why or gone.words) if gone is not None else ""
    if gone is None or not words:
        return f"It {how}."
    lived = "" if gone.is_dismissed else ", but it lived on"
    return f"{words}{lived}; it {how}."


def _last_output(output: str) -> tuple[str, ...]:
    """Return the last lines that a process wrote, without those of shoal, and of gloo about its
    connections; from a fatal one, if any."""
    lines = [line.rstrip() for line in _ESCAPE.sub("", output).splitlines()]
    lines = [
        line
        for line in lines
        if line.strip() and not line.startswith(_NOT_OUTPUT) and not is_notice(line.encode())
    ]
    fatal = next((i for i, line in enumerate(lines) if _FATAL.match(line)), None)
    if fatal is not None:
        return tuple(lines[fatal : fatal + _OUTPUT_LINES])
    return tuple(lines[-_OUTPUT_LINES:])


def _thread_of(ending: Ending) -> LastRecord | None:
    """Return the last exception that ended a thread of a process, if it was its own, and is not
    that of the process."""
    if not ending.own_threads:
        return None
    last = ending.own_threads[-1]
    if ending.record is not None and ending.record.cause.error == last.cause.error:
        return None
    return last


def _kind(ending: Ending) -> str:
    return "" if ending.record is None else ending.record.cause.kind


def _is_independent(ending: Ending) -> bool:
    """Return whether a process raised an exception of its own before it knew of another failure."""
    record = ending.record
    if record is None or record.because_of is not None or ending.known_failed_s is None:
        return False
    kind = record.cause.kind
    if kind in SHARED or not (kind == "exception" or fails_by_itself(ending)):
        return False
    error = record.cause.error
    return error is not None and error.type != _CTRL_C and not record.is_torn


def _ended(endings: Sequence[Ending]) -> tuple[Others, ...]:
    """Group the processes of a job that was stopped: apart are those that had ended well before,
    and those that had to be killed."""
    first_s = min((min(one.sent_s, one.asked_s) for one in endings), default=math.inf)
    groups: dict[Others, list[int]] = {}
    for ending in endings:
        other = Others(processes=ProcessSet(), state="ended")
        if signal.SIGKILL in ending.sent:
            other = dataclasses.replace(other, state="running", ended_by=signal.SIGKILL.name)
        elif ending.code == 0 and ending.ended_s < first_s < math.inf:
            other = dataclasses.replace(other, exit_code=0, words="had ended with exit code 0")
        groups.setdefault(other, []).append(ending.process)
    return _grouped(groups)


def _others(endings: Iterable[Ending]) -> tuple[Others, ...]:
    """Group the processes that did not fail by themselves, by what they did."""
    groups: dict[Others, list[int]] = {}
    for ending in endings:
        groups.setdefault(_other(ending), []).append(ending.process)
    return _grouped(groups)


def _grouped(groups: Mapping[Others, list[int]]) -> tuple[Others, ...]:
    return tuple(
        dataclasses.replace(other, processes=ProcessSet(group)) for other, group in groups.items()
    )


def _other(ending: Ending) -> Others:
    none, code, record = ProcessSet(), shell_code(ending.code), ending.record
    if record is not None and has_only_learned(record):
        place, _ = _last_call(ending, record.cause)
        place = place and dataclasses.replace(place, age_s=None)
        # Its error was raised at the call in which it waited, or else at a later line.
        line = place if record.cause.kind == "exit" else line_at(record.cause)
        if place is not None and place.call and (line is None or _is_same_line(place, line)):
            return Others(processes=none, state="waiting", place=place, exit_code=code)
        return Others(processes=none, state="running", place=line, exit_code=code)
    if record is not None and record.cause.error and record.cause.error.type == _CTRL_C:
        return Others(processes=none, state="running", place=line_at(record.cause))
    if ending.was_ended:
        name = signal.SIGTERM.name
        if ending.sent:
            name = signal_name(ending.sent[-1] if ending.code >= 0 else -ending.code)
        is_deaf = ending.joined_by_jax and name == signal.SIGKILL.name
        return Others(processes=none, state="running", ended_by=name, joined_by_jax=is_deaf)
    if record is not None and record.cause.error is not None and record.cause.kind != "exit":
        then = "" if record.because_of is None else "then "
        words = one_line(f"{then}{raised_words(record.cause)}", _SAID)
    elif ending.code < 0:
        words = f"was killed by {signal_name(-ending.code)}"
    else:
        words = f"ended with exit code {code}"
    return Others(processes=none, state="ended", exit_code=code, words=words)


def _is_same_line(one: CallPlace, other: CallPlace) -> bool:
    return (one.file, one.line) == (other.file, other.line)


def _hosts(endings: Sequence[Ending]) -> Mapping[str, ProcessSet]:
    hosts: dict[str, list[int]] = {}
    for ending in endings:
        hosts.setdefault(ending.host or socket.gethostname(), []).append(ending.process)
    return {host: ProcessSet(group) for host, group in hosts.items()}
