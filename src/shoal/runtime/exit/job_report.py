"""The report of a failed job by its own processes, where no launcher of shoal makes one.

A process that ends because of others prints one line in place of a traceback. One process adds the
report: the coordinator names it, and passes on what all have recorded of their ends. Who failed
first is decided from that, as `shoal run` does. Without the coordinator process 0 reports what it
knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shoal import settings
from shoal.errors import (
    DeadlineError,
    DeviceStartError,
    DivergenceError,
    InitializeError,
    PeerFailedError,
    ProcessLostError,
    ShoalError,
    StalledError,
    UsageError,
    counted,
)
from shoal.paths import write_private
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.outcomes import ThisProcess, speakers
from shoal.runtime.exit.causes import lost_services, record_sent
from shoal.runtime.exit.first_failure import (
    Ending,
    Gone,
    Whereabouts,
    first_failures,
    has_only_learned,
    left_cause,
    names_no_process,
    shared_cause,
    stalled_cause,
    whereabouts_of,
)
from shoal.runtime.failures.exception_text import fate_of, is_torn
from shoal.runtime.failures.facts import (
    CallPlace,
    Cause,
    JobFailure,
    Others,
    ProcessSet,
    Wait,
    Waiting,
    grouped,
    to_json,
    utc,
)
from shoal.runtime.failures.headline import (
    advice_of,
    at_place,
    job_headline,
    place_words,
    raised_words,
)
from shoal.runtime.failures.joining_text import not_joined_of
from shoal.runtime.failures.last_record import (
    FOUND,
    LastRecord,
    cause_of,
    has_launcher,
    place_at,
    place_of,
    record_in,
)
from shoal.runtime.failures.program_text import with_programs
from shoal.runtime.failures.rendering import (
    Style,
    facts_without_secrets,
    plain_text,
    report,
    without_secrets,
)
from shoal.runtime.failures.shortening import capital, sentence
from shoal.runtime.rules.point import Departure
from shoal.runtime.rules.programs import Differences, differences_of
from shoal.runtime.rules.stalls import Stall
from shoal.runtime.system.callsite import site_of, split_site
from shoal.runtime.system.foreign_text import headline_of, one_line
from shoal.runtime.system.process_status import status_of

PROGRAM = "shoal"
_LEARNED = (PeerFailedError, ProcessLostError)
_SHARED = (DivergenceError, DeadlineError, StalledError)  # of all processes of a meeting
_ASK_S = 2.0  # for the coordinator to answer
_OTHERS_S = 0.5  # for the others to end, so that the report says how
_POLL_S = 0.02
_DOCTOR = "To check the address from this host: shoal doctor"
_MOST = 400  # characters of the one line about another process


class EndOfThis(NamedTuple):
    """How this process ends."""

    error: BaseException
    code: int
    peers: Mapping[int, Departure] | None  # whose end led to it; None: its own


def stopped_line(coordinator: Coordinator, end: EndOfThis) -> str:
    """Return the one line of a process that ends because of others; "": it prints a traceback.

    An error of the program's own, even if one of shoal's led to it, has its traceback; so has every
    error if the user asks for all frames.
    """
    error = end.error
    if settings.text("SHOAL_TRACEBACK") == "full" or not isinstance(error, _LEARNED + _SHARED):
        return ""
    me = ThisProcess(coordinator.process, coordinator.hosts)
    where = at_place(_stopped_at(coordinator, error).place)
    return without_secrets(f"{PROGRAM}: {me}: stopped{where}: {_reason(coordinator, me, end)}")


def _reason(coordinator: Coordinator, me: ThisProcess, end: EndOfThis) -> str:
    """Return why a process stopped: the process behind it, or what all of them were given."""
    stalled = [one.words for one in coordinator.troubles.open() if one.state == "stalled"]
    if isinstance(end.error, StalledError) and stalled:
        return one_line(stalled[0], _MOST)
    if end.peers is None:
        cause = _own_cause(coordinator, end)
        if cause.difference is None and cause.wait is None:
            return one_line(headline_of(str(end.error)), _MOST)
        return job_headline(_failure(coordinator, end, causes=[cause], others=(), since_s=None))
    if not end.peers:
        return one_line(_services_lost(coordinator, end), _MOST)
    process, peer = next(iter(end.peers.items()))
    why = peer.why or headline_of(peer.words)
    if process == me.process:
        return one_line(f"it was declared lost: {why}", _MOST)
    fate = fate_of(peer)
    if isinstance(end.error, ProcessLostError):
        fate = f"is lost: {why}"
    words = one_line(f"{me.name(process)} {fate}", _MOST)
    more = len(end.peers) - 1
    if not more:
        return words
    return f"{words} (and {counted(more, 'more process is', 'more processes are')} gone)"


def _services_lost(coordinator: Coordinator, end: EndOfThis) -> str:
    """Return which services are lost, which all processes need."""
    lost = [f"{service.name} is lost: {service.words}" for service in lost_services(coordinator)]
    return "; ".join(lost) or headline_of(str(end.error))


def _stopped_at(coordinator: Coordinator, error: BaseException) -> Others:
    """Return what this process did when it learned of the failure of others.

    It waited at a point, if the call of that one is at the line where the program stopped.
    """
    me = ProcessSet([coordinator.process])
    trace, point = error.__traceback__, coordinator.progress.point
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    site = ""
    if trace is not None:
        site = site_of(trace.tb_frame, trace.tb_lineno)
    if point is not None and split_site(point.site) == split_site(site or point.site):
        return Others(processes=me, state="waiting", place=place_of(point))
    return Others(processes=me, state="stopped", place=place_at("", "", site))


@contextlib.contextmanager
def without_sigterm() -> Iterator[list[int]]:
    """Add the first SIGTERM in the block to the yielded list, instead of ending the process.

    A launcher other than shoal's sends SIGTERM as soon as one process has ended. This process is
    ending anyway, and its report must not be lost. A second SIGTERM ends the process.
    """
    signals: list[int] = []  # no Event: its lock may be held where the handler interrupts

    def take(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL):
        yield signals
        return
    signal.signal(signal.SIGTERM, take)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shows_not_joined(error: BaseException, process: int, num_processes: int) -> bool:
    """Show that a process could not join its job; return whether it did, in place of a traceback.

    Processes that waited for others print one line, and the lowest of them the report. One that has
    failed by itself prints its own.
    """
    if has_launcher() or settings.text("SHOAL_TRACEBACK") == "full" or num_processes == 1:
        return False
    if not isinstance(error, InitializeError) or isinstance(error, DeviceStartError):
        return False
    cause, missing = cause_of(error, process=process), ProcessSet(error.missing)
    refusal = not_joined_of(error)
    said, *more = str(error).splitlines()
    words = tuple(map(sentence, more))
    advice: tuple[str, ...] = ()
    if refusal.reason == "unreachable":
        advice = (_DOCTOR,)
    failure = JobFailure(
        kind=cause.kind,
        headline=said,
        exit_code=error.exit_code,
        failed_after_s=_rounded(_age_s()),
        num_processes=num_processes,
        causes=(dataclasses.replace(cause, error=None, wait=None, words=words),),
        advice=advice,
    )
    if cause.wait is None or process in missing or refusal.reason != "late":
        # Others that have failed may know more: the file of process 0, or else the first, stays.
        is_first = process == 0 or not os.path.exists(settings.text("SHOAL_FAILURE_FILE"))
        _print(failure, writes=is_first)
        return True
    # Those that are not missing are there, if the meeting place has answered.
    there = {process}
    if 0 not in missing:
        there = {*range(num_processes)} - {*missing}
    place = None
    if cause.frames:
        frame = cause.frames[-1]
        place = CallPlace(file=frame.file, line=frame.line, source=frame.source)
    arrived = Waiting(processes=ProcessSet(there), place=place)
    waited = dataclasses.replace(
        cause,
        processes=missing,
        wait=dataclasses.replace(cause.wait, arrived=(arrived,)),
        error=None,
        frames=(),
        left_out={},
    )
    advice = advice_of([waited])
    if refusal.strangers:  # they may have called it, with another token
        waited = dataclasses.replace(waited, words=(sentence(refusal.strangers), *words))
        advice = ()
    failure = dataclasses.replace(failure, causes=(waited,), advice=advice)
    failure = dataclasses.replace(failure, headline=job_headline(failure))
    if process == min(there):
        _print(failure)
    else:
        at = ""
        if place is not None:
            at = f"stopped{at_place(place)}: "
        me = f"process {process} of {num_processes}"
        _write([f"{PROGRAM}: {me}: {at}{failure.headline}"])
    return True


def report_job(coordinator: Coordinator, end: EndOfThis, hurry: Sequence[int]) -> None:
    """Print the report of the job's failure, and write SHOAL_FAILURE_FILE, if this process is the
    one that does.

    Call it after the failure was reported to the other processes.

    Args:
      hurry: the signals that have asked this process to end; after the first one, no news of other
        processes is waited for.
    """
    if isinstance(end.error, KeyboardInterrupt):
        return  # of the user, who knows
    if end.peers is not None and coordinator.process in end.peers:
        return  # it was declared lost: others have reported that
    if isinstance(end.error, StalledError) and coordinator.stall is not None:
        if coordinator.stall.reporter == coordinator.process:
            _print(_failure_of_stall(coordinator, end, coordinator.stall))
        return
    until_s = time.monotonic() + _OTHERS_S
    job = _ask_report(coordinator, end)
    while job and job.states and time.monotonic() < until_s:
        if not _awaits_news(coordinator, end, job.states):
            break
        time.sleep(_POLL_S)
        if hurry:
            break
        job = _ask_report(coordinator, end)
    if job is None:
        return
    failure = failure_known(coordinator, end, job.states)
    _print(with_programs(failure, job.programs))


class _KnownJob(NamedTuple):
    """What the coordinator knows of a job that fails."""

    states: Sequence[ProcessState] = ()  # of all processes; none: unknown
    programs: Differences = Differences()


def _ask_report(coordinator: Coordinator, end: EndOfThis) -> _KnownJob | None:
    """Return what the coordinator knows, if this process reports. None: another one reports."""
    sharing: Collection[int] = range(coordinator.num_processes)
    if isinstance(end.error, _SHARED) and end.peers is None:
        # Others of the job may never learn of it, and one that arrives late is not awaited.
        sharing = _sharing(coordinator, end.error)
    try:
        is_own = end.peers is None and not isinstance(end.error, _SHARED)
        answer = coordinator.ask_report(sharing, waits=not is_own, timeout_s=_ASK_S)
    except UsageError:  # this process has left the job, in another thread
        return _KnownJob()
    except ShoalError:
        if coordinator.process != 0:
            return None
        return _KnownJob()
    if answer is None:
        return None
    states = [ProcessState.of(*one) for one in enumerate(answer["states"])]
    return _KnownJob(states, differences_of(answer["programs"]))


def _failure_of_stall(coordinator: Coordinator, end: EndOfThis, stall: Stall) -> JobFailure:
    """Return the failure of a job in which no process has moved."""
    cause, headline = stalled_cause(stall)
    failure = _failure(coordinator, end, causes=[cause], others=(), since_s=None)
    return with_programs(dataclasses.replace(failure, headline=headline), stall.programs)


def _print(failure: JobFailure, *, writes: bool = True) -> None:
    """Print a report, and write SHOAL_FAILURE_FILE unless `writes` is false."""
    failure = facts_without_secrets(failure)
    failure = dataclasses.replace(failure, text=plain_text(failure, PROGRAM))
    is_terminal, columns = sys.stderr.isatty(), 80
    if is_terminal:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    style = Style.for_stream(is_terminal, columns, os.environ, sys.stderr.encoding)
    lines = report(failure, style, PROGRAM)
    path = settings.text("SHOAL_FAILURE_FILE")
    if path and writes:
        try:
            write_private(path, json.dumps(to_json(failure), ensure_ascii=False))
        except OSError as error:
            reason = f"SHOAL_FAILURE_FILE={path} cannot be written: {error.strerror}"
            lines.insert(0, f"{PROGRAM}: {reason}")
    _write(lines)


def _write(lines: Iterable[str]) -> None:
    """Print lines at once: other processes print to the same stream."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


def _sharing(coordinator: Coordinator, error: BaseException) -> Collection[int]:
    """Return the processes that got the same error at once."""
    if isinstance(error, DivergenceError) and error.sides:
        return {process for side in error.sides.values() for process in side}
    sharing = _group(coordinator)
    if isinstance(error, DeadlineError):
        sharing -= set(error.missing)
    return sharing


def _group(coordinator: Coordinator) -> set[int]:
    """Return the processes of the point at which this process waited last; all if it has none."""
    point = coordinator.progress.point
    if point is None or point.group is None:
        return set(range(coordinator.num_processes))
    return set(point.group)


def _awaits_news(coordinator: Coordinator, end: EndOfThis, states: Sequence[ProcessState]) -> bool:
    """Return whether another process may soon end in a way that the report can say."""
    if end.peers is not None:  # one that has left a call may have failed a moment later
        return any(one.process in end.peers and one.gone is None for one in states)
    me = coordinator.process
    awaited = [one for one in states if one.state == "here" and one.process != me]
    if isinstance(end.error, _SHARED):
        sharing = _sharing(coordinator, end.error)
        awaited = [one for one in awaited if one.process not in sharing]
        return bool(awaited) and isinstance(end.error, DivergenceError)
    return bool(awaited)


class ProcessState(NamedTuple):
    """What the coordinator knows of a process."""

    process: int
    state: str  # "here" | "silent" | "left" | "failed" | "lost"
    at: Whereabouts | None = None  # its last call, at its end if it has one
    gone: Gone | None = None  # how it left the job
    how: str = ""  # of its end: see `Departure`

    @classmethod
    def of(cls, process: int, row: Mapping[str, Any]) -> ProcessState:
        """Parse a row of `Record.facts`."""
        state, at = str(row["state"]), whereabouts_of(row.get("at"))
        if state not in ("left", "failed", "lost"):
            return cls(process, state, at)
        departure = Departure(*(row[name] for name in Departure._fields))
        end = record_in(str(row.get("end", "")))
        at_s = time.monotonic() - float(row["since_s"])
        return cls(process, state, at, gone=_gone(departure, at_s, at, end), how=departure.how)

    @classmethod
    def of_departure(cls, process: int, departure: Departure) -> ProcessState:
        """Return what an error says of a process."""
        gone = _gone(departure, time.monotonic(), None, None)
        return cls(process, departure.state, at=None, gone=gone, how=departure.how)

    @property
    def ending(self) -> Ending:
        """How it ended, for the decision who failed first."""
        gone = self.gone
        if gone is None:
            return Ending(self.process, 0, None)
        if gone.state == "left":
            return Ending(self.process, 0, None, left=gone, ended_s=gone.at_s)
        code, record = ProcessLostError.exit_code, gone.record
        if gone.state == "failed":
            code = 1
            if record is not None and record.cause.exit_code:
                code = record.cause.exit_code
        return Ending(
            self.process,
            code,
            gone.at_s,
            gone=gone,
            is_lost=gone.state == "lost",
            record=record,
            ended_s=gone.at_s,
        )

    @property
    def cause(self) -> Cause:
        """Its end as the failure of the job."""
        step = place = None
        if self.at is not None:
            step, place = self.at.step, self.at.place
        gone, processes = self.gone, ProcessSet([self.process])
        if gone is None or gone.state == "left":
            return dataclasses.replace(left_cause(gone), processes=processes, step=step)
        if gone.state == "lost":
            words = f"{capital(gone.why or headline_of(gone.words))}."
            return Cause(processes=processes, kind="lost", words=(words,), place=place, step=step)
        if gone.record is None:
            words = f"It had reported: {headline_of(gone.words)}"
            return Cause(processes=processes, kind="exception", words=(words,), step=step)
        cause = gone.record.cause
        if cause.step is not None:
            step = cause.step
        return dataclasses.replace(cause, processes=processes, step=step, place=None)

    def has_found(self, kind: str) -> bool:
        """Whether it has failed with an error of this kind, which several were given."""
        if self.gone is None or self.gone.record is None:
            return False
        return self.gone.record.cause.kind == kind

    @property
    def is_independent(self) -> bool:
        """Whether it failed by itself."""
        gone = self.gone
        if gone is None or gone.state == "left":
            return False
        record = gone.record
        if gone.state == "lost" or record is None:
            return gone.state == "lost"
        error = record.cause.error
        is_ctrl_c = error is not None and error.type == KeyboardInterrupt.__name__
        return not (gone.follows or self.how == "found" or record.is_torn or is_ctrl_c)


def _gone(
    departure: Departure, at_s: float, at: Whereabouts | None, end: LastRecord | None
) -> Gone:
    return Gone(
        departure.state,
        departure.words,
        at_s,
        follows=departure.follows,
        at=at,
        why=departure.why,
        record=end,
    )


def failure_known(
    coordinator: Coordinator, end: EndOfThis, states: Sequence[ProcessState]
) -> JobFailure:
    """Return the failure of the job, as far as this process knows it.

    Args:
      states: of all processes; none if they are unknown.
    """
    me, own = coordinator.process, _own_cause(coordinator, end)
    known = {one.process: one for one in states if one.process != me}
    for process, departure in (end.peers or {}).items():
        if process not in known or known[process].gone is None:
            known[process] = ProcessState.of_departure(process, departure)
    mine = _own_ending(coordinator, end, states)
    roots = first_failures([mine, *(one.ending for one in known.values())])
    causes = _causes(coordinator, end, own, roots, known)
    shown = {*(p for cause in causes for p in cause.processes)}
    if own.wait is not None:
        shown.update(p for one in own.wait.arrived for p in one.processes)
    stopped = _stopped_at(coordinator, end.error)
    waited = stopped.place if stopped.state == "waiting" else None
    left = [one for one in known.values() if one.process not in shown]
    others = [other for one in left for other in _other(one, waited)]
    if me not in shown:
        others = [_other_self(coordinator, end, own), *others]
    times_s = [root.known_failed_s for root in roots if root.known_failed_s is not None]
    since_s = 0.0
    if times_s:
        since_s = max(0.0, time.monotonic() - min(times_s))
    failure = _failure(
        coordinator, end, causes=grouped(causes), others=_joined(others), since_s=since_s
    )
    services = lost_services(coordinator)
    if failure.kind == "service_lost" and services:
        failure = dataclasses.replace(failure, headline=f"{services[0].name} was lost")
    return failure


def _causes(
    coordinator: Coordinator,
    end: EndOfThis,
    own: Cause,
    roots: Sequence[Ending],
    known: Mapping[int, ProcessState],
) -> list[Cause]:
    """Return the first failure, or several that came first, and then the independent ones.

    Args:
      own: the failure of this process.
      known: the other processes.
    """
    if not roots or names_no_process(roots[0]):
        causes = [own]
        if end.peers is not None:
            causes = [_of_service(coordinator, end)]
    else:
        causes = [known[one.process].cause if one.process in known else own for one in roots]
    if causes[0].kind in FOUND:
        first = causes[0]
        alike = [one.cause for one in known.values() if one.has_found(first.kind)]
        if own.kind == first.kind:
            first = own
            alike.append(own)
        if first is own and first.wait is not None:
            return [first]
        return [shared_cause(first, alike)]
    shown = {process for cause in causes for process in cause.processes}
    causes += [
        one.cause for one in known.values() if one.process not in shown and one.is_independent
    ]
    is_mine = end.peers is None and not is_torn(end.error) and not isinstance(end.error, _SHARED)
    if is_mine and own not in causes:
        causes.append(own)
    return causes


def _own_ending(coordinator: Coordinator, end: EndOfThis, states: Sequence[ProcessState]) -> Ending:
    """Return how this process ends, for the decision who failed first."""
    record = record_sent(coordinator, end.error, end.peers)
    at_s = time.monotonic()
    for one in states:
        if one.process == coordinator.process and one.gone is not None:
            at_s = one.gone.at_s
    gone = Gone("failed", "", at_s, follows=end.peers is not None, record=record)
    return Ending(coordinator.process, end.code, at_s, gone=gone, record=record, ended_s=at_s)


def _failure(
    coordinator: Coordinator,
    end: EndOfThis,
    causes: Iterable[Cause],
    others: Iterable[Others],
    since_s: float | None,
) -> JobFailure:
    """Return the failure with its headline; `since_s`: how long ago it was, if known."""
    causes, age_s = tuple(causes), _age_s()
    started, after_s = "", None
    if age_s is not None:
        started = utc(time.time() - age_s)
        if since_s is not None:
            after_s = _rounded(age_s - since_s)
    hosts: dict[str, list[int]] = {}
    for process, host in enumerate(coordinator.hosts):
        hosts.setdefault(host, []).append(process)
    failure = JobFailure(
        kind=causes[0].kind,
        headline="",
        exit_code=end.code,
        started=started,
        failed_after_s=after_s,
        num_processes=coordinator.num_processes,
        hosts={host: ProcessSet(of) for host, of in hosts.items()},
        causes=causes,
        others=tuple(others),
        advice=advice_of(causes),
    )
    return dataclasses.replace(failure, headline=job_headline(failure))


def _rounded(duration_s: float | None) -> float | None:
    if duration_s is None:
        return None
    return round(max(0.0, duration_s), 3)


def _age_s() -> float | None:
    """Return how long ago this process was started; None: unknown."""
    status = status_of(os.getpid())
    if status is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - status.started_ticks / os.sysconf("SC_CLK_TCK")


def _own_cause(coordinator: Coordinator, end: EndOfThis) -> Cause:
    """Return the failure of this process; of an error that others share, of all of them."""
    here = coordinator.progress
    me, point = coordinator.process, here.point
    begins = speakers(coordinator.hosts)
    cause = cause_of(end.error, process=me, step=here.step, point=point, speakers=begins)
    if cause.wait is not None:
        return _of_wait(coordinator, cause, cause.wait)
    if cause.difference is not None:
        sides = cause.difference.sides
        processes = ProcessSet([me, *(p for side in sides for p in side.processes)])
        return dataclasses.replace(cause, processes=processes, error=None, frames=(), left_out={})
    return cause


def _of_wait(coordinator: Coordinator, cause: Cause, wait: Wait) -> Cause:
    """Return a deadline as the failure of those that did not arrive."""
    missing = ProcessSet(p for one in wait.missing for p in one.processes)
    there = ProcessSet(_group(coordinator) - set(missing))
    arrived: tuple[Waiting, ...] = ()
    if there:
        arrived = (Waiting(processes=there, place=cause.place),)
    call = wait.call
    if cause.place is not None:
        call = cause.place.call
    return dataclasses.replace(
        cause,
        processes=missing,
        wait=dataclasses.replace(wait, call=call, arrived=arrived),
        error=None,
        frames=(),
        left_out={},
    )


def _of_service(coordinator: Coordinator, end: EndOfThis) -> Cause:
    words = f"{capital(_services_lost(coordinator, end))}."
    return Cause(processes=ProcessSet(), kind="service_lost", words=(words,))


def _other_self(coordinator: Coordinator, end: EndOfThis, own: Cause) -> Others:
    """Return what this process did when others failed."""
    me = ProcessSet([coordinator.process])
    if isinstance(end.error, ShoalError):
        return dataclasses.replace(_stopped_at(coordinator, end.error), exit_code=end.code)
    words = raised_words(own)
    if own.error is not None:
        words = one_line(f"then {words}", _MOST)
    return Others(processes=me, state="ended", exit_code=end.code, words=words)


def _other(one: ProcessState, own: CallPlace | None) -> list[Others]:
    """Return what a process did that did not fail by itself, as far as it is known.

    Args:
      own: where this process has waited until it learned of the failure, with the source line:
        there the others have learned of it, too, and wait no more.
    """
    processes, at = ProcessSet([one.process]), one.at
    if one.gone is not None:
        return [_ended_after(processes, one.gone, own)]
    if at is None or at.place is None:
        return []
    place = dataclasses.replace(at.place, age_s=None)
    if _is_same_call(own, place):
        return [Others(processes=processes, state="waiting", place=own)]
    if at.is_waiting:
        return [Others(processes=processes, state="waiting", place=place)]
    words = f"had called {place_words(place)} last."
    return [Others(processes=processes, state="running", words=words)]


def _ended_after(processes: ProcessSet, gone: Gone, own: CallPlace | None) -> Others:
    """Return what a process did that has ended, and not failed by itself."""
    if gone.state == "left":
        return Others(processes=processes, state="left")
    record = gone.record
    if record is None or record.cause.error is None or record.cause.kind == "exit":
        words = ""
        if not gone.follows:
            words = headline_of(gone.words)
        return Others(processes=processes, state="ended", words=words)
    cause, error = record.cause, record.cause.error
    line = cause.frames[-1] if cause.frames else None
    if not has_only_learned(record):
        where = ""
        if line is not None:
            where = f" ({line.file}:{line.line})"
        words = f"then raised {error.type}{where}."
        return Others(processes=processes, state="ended", words=words)
    place = cause.place
    # Its error was raised at the call in which it waited, or else at a later line.
    if line is not None and (place is None or (place.file, place.line) != (line.file, line.line)):
        stands = CallPlace(file=line.file, line=line.line, source=line.source)
        return Others(processes=processes, state="stopped", place=stands)
    if place is not None and _is_same_call(own, place):
        place = own
    return Others(processes=processes, state="waiting", place=place)


def _is_same_call(one: CallPlace | None, other: CallPlace) -> bool:
    return one is not None and dataclasses.replace(one, source=other.source) == other


def _joined(others: Iterable[Others]) -> Iterator[Others]:
    """Join those that did the same; their exit codes, which are known of this process, apart."""
    groups: dict[Others, list[int]] = {}
    for other in others:
        key = dataclasses.replace(other, processes=ProcessSet(), exit_code=None)
        groups.setdefault(key, []).extend(other.processes)
    for key, processes in groups.items():
        yield dataclasses.replace(key, processes=ProcessSet(processes))
