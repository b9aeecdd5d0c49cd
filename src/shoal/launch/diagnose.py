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
from shoal.launch.news import HostAgentNews
from shoal.launch.output import is_notice
from shoal.runtime.exit.first_failure import (
    SHARED,
    LastCall,
    ProcessExit,
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
    BystanderState,
    CallPlace,
    Cause,
    JobFailure,
    Memory,
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


class ExitedJob(NamedTuple):
    """The run of a job that has failed. Times are on one monotonic clock."""

    exits: Sequence[ProcessExit]
    total: int
    start_s: float

    def failure(
        self, kind: str, code: int, causes: Iterable[Cause], headline: str = ""
    ) -> JobFailure:
        """Return the failure with these causes; the headline is derived from them if not given."""
        causes = tuple(causes)
        taken = {process for cause in causes for process in _shown_in(cause)}
        rest = [process_exit for process_exit in self.exits if process_exit.process not in taken]
        at_s = [cause.at_s for cause in causes if cause.at_s is not None]
        ended_s = [e.ended_s for e in self.exits if e.ended_s < float("inf")]
        started = time.time() - (time.monotonic() - self.start_s)
        logs = {
            os.path.dirname(process_exit.log) for process_exit in self.exits if process_exit.log
        }
        failure = JobFailure(
            kind=kind,
            headline=headline,
            exit_code=code,
            started=utc(started),
            failed_after_s=round(min(at_s), 3) if at_s else None,
            ended_after_s=round(max(ended_s) - self.start_s, 3) if ended_s else None,
            num_processes=self.total,
            hosts=_hosts(self.exits),
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
        steps = [process_exit.step for process_exit in self.exits if process_exit.step >= 0]
        failure = dataclasses.replace(
            self.failure(kind, code, (), headline or kind),
            failed_after_s=None if at_s is None else round(max(0.0, at_s - self.start_s), 3),
            others=_ended(self.exits),
            signal=name,
            step=max(steps, default=None),
        )
        return failure if headline else dataclasses.replace(failure, headline=job_headline(failure))

    def of_processes(self, roots: Sequence[ProcessExit], code: int) -> JobFailure:
        """Return the failure of a job whose first failure is that of a process; of several, if
        these left in order, and others missed them."""
        root, *with_it = roots
        first = self._cause(root)
        shared = [e for e in self.exits if _kind(e) == first.kind]
        if first.kind in SHARED and root.record is not None:
            return self.failure(first.kind, code, [self._of_all(first, shared)])
        own = [e for e in self.exits if e.process != root.process and _is_independent(e)]
        own.sort(key=lambda process_exit: process_exit.known_failed_s or 0.0)
        causes = grouped((first, *map(self._cause, with_it or own)), is_ordered=True)
        return self.failure(first.kind, code, causes)

    def _cause(self, process_exit: ProcessExit) -> Cause:
        """Return the failure of one process."""
        at_s = process_exit.known_failed_s
        left = process_exit.left if process_exit.has_left else None
        if left is not None:
            at_s = left.at_s
        if at_s is not None:
            at_s = round(at_s - self.start_s, 3)
        log = os.path.basename(process_exit.log)
        if log and process_exit.host:
            log = f"{process_exit.host}:{process_exit.log}"
        cause = _recorded(process_exit) or _by_itself(process_exit)
        code: int | None = shell_code(process_exit.code)
        if left is not None:
            code = 0
        elif process_exit.was_ended:  # the code of its own end, if it chose one
            code = cause.exit_code if cause.kind == "exit" else None
        place, step = _place_and_step(process_exit, cause)
        last_call = _last_call(process_exit)
        is_past = cause.error is None and last_call is not None and not last_call.is_waiting
        last_met = None
        if is_past and place is not None and place.call not in ("", STEP):
            last_met = place
        details = cause.words
        if cause.kind not in SHARED:
            raised = _thread_of(process_exit)
            if raised is not None:
                said = f"Thread '{raised.cause.thread}' had {raised_words(raised.cause)}"
                said = one_line(said, _SAID)
                details = (f"{said}.", *details)
        return dataclasses.replace(
            cause,
            words=details,
            processes=ProcessSet([process_exit.process]),
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

    def _of_all(self, first: Cause, shared: Sequence[ProcessExit]) -> Cause:
        """Return a failure that all who met have been given."""
        cause = shared_cause(first, [self._cause(process_exit) for process_exit in shared])
        if cause.wait is not None:
            return self._not_arrived(cause, cause.wait)
        return dataclasses.replace(cause, log=first.log if len(cause.processes) == 1 else "")

    def _not_arrived(self, cause: Cause, wait: Wait) -> Cause:
        """Return the failure that processes did not arrive, with what is known of these."""
        processes = cause.processes
        details: tuple[str, ...] = ()
        if wait.missing and all(e.sent for e in self.exits if e.process in processes):
            was = "was" if len(processes) == 1 else "were"
            details = (f"{capital(listed(processes))} {was} still running.",)
        late = self._only_of(processes)
        log = "" if late is None else self._cause(late).log
        return self.with_thread(dataclasses.replace(cause, log=log, words=details))

    def _only_of(self, processes: ProcessSet) -> ProcessExit | None:
        """Return how a process ended, if it is the only one of a set."""
        if len(processes) != 1:
            return None
        return next((e for e in self.exits if e.process in processes), None)


def _shown_in(cause: Cause) -> Iterator[int]:
    """Yield the processes that the evidence of a cause shows."""
    yield from cause.processes
    for group in () if cause.wait is None else cause.wait.arrived:
        yield from group.processes


def of_host_agent(job: ExitedJob, host_agent: HostAgentNews) -> JobFailure:
    """Return the failure of a job by the death of a host agent, upon which JAX aborts."""
    died = "died"
    if host_agent.code is not None and host_agent.code < 0:
        died = f"was killed by {signal_name(-host_agent.code)}"
    elif host_agent.code is not None:
        died = f"ended with exit code {host_agent.code}"
    ended = job.exits
    aborted = [e.process for e in ended if e.code == -signal.SIGABRT and not e.sent]
    at_s = host_agent.gone_s - job.start_s if host_agent.gone_s else None
    detail = f"Its processes reach JAX's service through it: JAX aborted {listed(aborted)}."
    cause = Cause(
        processes=ProcessSet(aborted), kind="service_lost", at_s=at_s, words=(detail,), log=""
    )
    headline = f"the agent of host {host_agent.host} (pid {host_agent.pid}) {died}"
    return job.failure("service_lost", ProcessLostError.exit_code, [cause], headline)


def of_coordinator(job: ExitedJob, root: ProcessExit) -> JobFailure:
    """Return the failure of a job whose processes have lost the coordinator, which runs: it is
    frozen, or cannot be reached."""
    error = root.record.cause.error if root.record is not None else None
    detail = "" if error is None else sentence(error.message)
    at_s = None if root.known_failed_s is None else round(root.known_failed_s - job.start_s, 3)
    cause = Cause(processes=ProcessSet(), kind="service_lost", at_s=at_s, words=(detail,))
    code = ProcessLostError.exit_code
    return job.failure("service_lost", code, [cause], "the coordinator was lost")


def _recorded(process_exit: ProcessExit) -> Cause | None:
    """Return what a process has recorded of its end, if that was its end."""
    if process_exit.record is None or process_exit.is_lost or process_exit.was_frozen:
        return None
    cause = process_exit.record.cause
    if process_exit.sent:
        name = signal_name(process_exit.sent[-1])
        detail = f"Did not end by itself: shoal run sent {name}."
    elif process_exit.code == REQUEUE:
        detail = _REQUEUED
    elif process_exit.code == cause.exit_code:
        return cause
    elif process_exit.code == 0:
        detail = "Ended with code 0 before it left the job."
    elif process_exit.code < 0:
        detail = f"Then killed by {signal_name(-process_exit.code)}."
    else:
        detail = f"Then ended with exit code {process_exit.code}."
    return dataclasses.replace(cause, words=(*cause.words, detail))


def _place_and_step(process_exit: ProcessExit, cause: Cause) -> tuple[CallPlace | None, int | None]:
    """Return the last call and step of a process: as it recorded them, or as others know them."""
    last_call = _last_call(process_exit)
    place, step = cause.place or (last_call and last_call.place), cause.step
    if step is None:
        step = process_exit.step
        if step < 0 and last_call is not None:
            step = last_call.step
    if step is not None and step < 0:
        step = None
    return place, step


def _last_call(process_exit: ProcessExit) -> LastCall | None:
    gone = process_exit.gone or process_exit.left
    return None if gone is None else gone.at


def _by_itself(process_exit: ProcessExit) -> Cause:
    """Return the cause of a process that has recorded nothing."""
    cause = Cause(
        processes=ProcessSet(), kind="exit", last_output=_last_output(process_exit.output)
    )
    if process_exit.was_frozen or process_exit.is_lost:
        return dataclasses.replace(cause, kind="lost", words=(_lost(process_exit),))
    if process_exit.code < 0 and not process_exit.has_left:
        name = signal_name(-process_exit.code)
        is_outside = is_signal_from_outside(process_exit.code)
        return dataclasses.replace(
            cause,
            kind="signal",
            signal=name,
            sent_by_launcher=-process_exit.code in process_exit.sent if is_outside else None,
            frames=() if is_outside else process_exit.crashed_at,
            memory=_memory(process_exit) if name == "SIGKILL" else None,
        )
    detail = NOT_RECORDED
    if process_exit.gone is not None and process_exit.gone.state == "failed":
        if process_exit.gone.record is not None:
            return dataclasses.replace(
                process_exit.gone.record.cause, last_output=cause.last_output
            )
        said = headline_of(process_exit.gone.words)
        return dataclasses.replace(cause, words=(f"It had reported: {said}",))
    if process_exit.has_left:
        detail, *_ = left_cause(process_exit.left).words
    elif process_exit.code == 0:
        detail = "It ended before it left the job: os._exit, exit() in native code, or "
        detail += "initialize(hooks=False) without shutdown()."
    elif process_exit.code == REQUEUE:
        detail = _REQUEUED
    elif not process_exit.is_python:
        return cause
    return dataclasses.replace(cause, words=(detail,))


def _memory(process_exit: ProcessExit) -> Memory | None:
    """Return what is known of the memory of a process; its cgroup's only if that ended it."""
    if process_exit.memory is None or process_exit.is_oom:
        return process_exit.memory
    return dataclasses.replace(process_exit.memory, cgroup_peak_bytes=None, cgroup_limit_bytes=None)


def _lost(process_exit: ProcessExit) -> str:
    """Describe how a process was lost, and how it ended."""
    if process_exit.sent:
        how = f"was ended by shoal run with {signal_name(process_exit.sent[-1])}"
    else:
        code = process_exit.code
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if process_exit.was_frozen:
        return f"It was stopped by a signal (SIGSTOP), and {how}."
    gone = process_exit.gone
    reason = capital(gone.why or gone.words) if gone is not None else ""
    if gone is None or not reason:
        return f"It {how}."
    lived = "" if gone.is_dismissed else ", but it lived on"
    return f"{reason}{lived}; it {how}."


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


def _thread_of(process_exit: ProcessExit) -> LastRecord | None:
    """Return the last exception that ended a thread of a process, if it was its own, and is not
    that of the process."""
    if not process_exit.own_threads:
        return None
    last = process_exit.own_threads[-1]
    if process_exit.record is not None and process_exit.record.cause.error == last.cause.error:
        return None
    return last


def _kind(process_exit: ProcessExit) -> str:
    return "" if process_exit.record is None else process_exit.record.cause.kind


def _is_independent(process_exit: ProcessExit) -> bool:
    """Return whether a process raised an exception of its own before it knew of another failure."""
    record = process_exit.record
    if record is None or record.because_of is not None or process_exit.known_failed_s is None:
        return False
    kind = record.cause.kind
    if kind in SHARED or not (kind == "exception" or fails_by_itself(process_exit)):
        return False
    error = record.cause.error
    return error is not None and error.type != _CTRL_C and not record.is_torn


def _ended(exits: Sequence[ProcessExit]) -> tuple[BystanderState, ...]:
    """Group the processes of a job that was stopped: apart are those that had ended well before,
    and those that had to be killed."""
    first_s = min(
        (min(process_exit.sent_s, process_exit.asked_s) for process_exit in exits), default=math.inf
    )
    groups: dict[BystanderState, list[int]] = {}
    for process_exit in exits:
        other = BystanderState(processes=ProcessSet(), state="ended")
        if signal.SIGKILL in process_exit.sent:
            other = dataclasses.replace(other, state="running", ended_by=signal.SIGKILL.name)
        elif process_exit.code == 0 and process_exit.ended_s < first_s < math.inf:
            other = dataclasses.replace(other, exit_code=0, words="had ended with exit code 0")
        groups.setdefault(other, []).append(process_exit.process)
    return _grouped(groups)


def _others(exits: Iterable[ProcessExit]) -> tuple[BystanderState, ...]:
    """Group the processes that did not fail themselves, by what they did."""
    groups: dict[BystanderState, list[int]] = {}
    for process_exit in exits:
        groups.setdefault(_other(process_exit), []).append(process_exit.process)
    return _grouped(groups)


def _grouped(groups: Mapping[BystanderState, list[int]]) -> tuple[BystanderState, ...]:
    return tuple(
        dataclasses.replace(other, processes=ProcessSet(group)) for other, group in groups.items()
    )


def _other(process_exit: ProcessExit) -> BystanderState:
    none, code, record = ProcessSet(), shell_code(process_exit.code), process_exit.record
    if record is not None and has_only_learned(record):
        place, _ = _place_and_step(process_exit, record.cause)
        place = place and dataclasses.replace(place, age_s=None)
        # Its error was raised at the call in which it waited, or else at a later line.
        line = place if record.cause.kind == "exit" else line_at(record.cause)
        if place is not None and place.call and (line is None or _is_same_line(place, line)):
            return BystanderState(processes=none, state="waiting", place=place, exit_code=code)
        return BystanderState(processes=none, state="running", place=line, exit_code=code)
    if record is not None and record.cause.error and record.cause.error.type == _CTRL_C:
        return BystanderState(processes=none, state="running", place=line_at(record.cause))
    if process_exit.was_ended:
        name = signal.SIGTERM.name
        if process_exit.sent:
            name = signal_name(
                process_exit.sent[-1] if process_exit.code >= 0 else -process_exit.code
            )
        is_deaf = process_exit.joined_by_jax and name == signal.SIGKILL.name
        return BystanderState(processes=none, state="running", ended_by=name, joined_by_jax=is_deaf)
    if record is not None and record.cause.error is not None and record.cause.kind != "exit":
        then = "" if record.because_of is None else "then "
        outcome = one_line(f"{then}{raised_words(record.cause)}", _SAID)
    elif process_exit.code < 0:
        outcome = f"was killed by {signal_name(-process_exit.code)}"
    else:
        outcome = f"ended with exit code {code}"
    return BystanderState(processes=none, state="ended", exit_code=code, words=outcome)


def _is_same_line(one: CallPlace, other: CallPlace) -> bool:
    return (one.file, one.line) == (other.file, other.line)


def _hosts(exits: Sequence[ProcessExit]) -> Mapping[str, ProcessSet]:
    hosts: dict[str, list[int]] = {}
    for process_exit in exits:
        hosts.setdefault(process_exit.host or socket.gethostname(), []).append(process_exit.process)
    return {host: ProcessSet(group) for host, group in hosts.items()}
