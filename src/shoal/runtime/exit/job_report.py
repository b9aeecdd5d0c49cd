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
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess, speakers
from shoal.runtime.exit.causes import lost_services, record_sent
from shoal.runtime.exit.first_failure import (
    Gone,
    LastCall,
    ProcessExit,
    first_failures,
    has_only_learned,
    last_call_of,
    left_cause,
    names_no_process,
    shared_cause,
    stalled_cause,
)
from shoal.runtime.failures.exception_text import fate_of, is_torn
from shoal.runtime.failures.facts import (
    BystanderState,
    CallPlace,
    Cause,
    JobFailure,
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


def stopped_line(client: JobClient, end: EndOfThis) -> str:
    """Return the one line of a process that ends because of others; "": it prints a traceback.

    An error of the program's own, even if one of shoal's led to it, has its traceback; so has every
    error if the user asks for all frames.
    """
    error = end.error
    if settings.text("SHOAL_TRACEBACK") == "full" or not isinstance(error, _LEARNED + _SHARED):
        return ""
    me = ThisProcess(client.process, client.hosts)
    where = at_place(_stopped_at(client, error).place)
    return without_secrets(f"{PROGRAM}: {me}: stopped{where}: {_reason(client, me, end)}")


def _reason(client: JobClient, me: ThisProcess, end: EndOfThis) -> str:
    """Return why a process stopped: the process behind it, or what all of them were given."""
    stalled = [loss.words for loss in client.peer_losses.open() if loss.state == "stalled"]
    if isinstance(end.error, StalledError) and stalled:
        return one_line(stalled[0], _MOST)
    if end.peers is None:
        cause = _own_cause(client, end)
        if cause.difference is None and cause.wait is None:
            return one_line(headline_of(str(end.error)), _MOST)
        return job_headline(_failure(client, end, causes=[cause], others=(), since_s=None))
    if not end.peers:
        return one_line(_services_lost(client, end), _MOST)
    process, peer = next(iter(end.peers.items()))
    why = peer.why or headline_of(peer.words)
    if process == me.process:
        return one_line(f"it was declared lost: {why}", _MOST)
    fate = fate_of(peer)
    if isinstance(end.error, ProcessLostError):
        fate = f"is lost: {why}"
    reason = one_line(f"{me.name(process)} {fate}", _MOST)
    more = len(end.peers) - 1
    if not more:
        return reason
    return f"{reason} (and {counted(more, 'more process is', 'more processes are')} gone)"


def _services_lost(client: JobClient, end: EndOfThis) -> str:
    """Return which services are lost, which all processes need."""
    lost = [f"{service.name} is lost: {service.words}" for service in lost_services(client)]
    return "; ".join(lost) or headline_of(str(end.error))


def _stopped_at(client: JobClient, error: BaseException) -> BystanderState:
    """Return what this process did when it learned of the failure of others.

    It waited at a point, if the call of that one is at the line where the program stopped.
    """
    me = ProcessSet([client.process])
    trace, point = error.__traceback__, client.progress.point
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    site = ""
    if trace is not None:
        site = site_of(trace.tb_frame, trace.tb_lineno)
    if point is not None and split_site(point.site) == split_site(site or point.site):
        return BystanderState(processes=me, state="waiting", place=place_of(point))
    return BystanderState(processes=me, state="stopped", place=place_at("", "", site))


@contextlib.contextmanager
def without_sigterm() -> Iterator[list[int]]:
    """Add the first SIGTERM in the block to the yielded list, instead of ending the process.

    A launcher other than shoal's sends SIGTERM as soon as one process has ended. This process is
    ending anyway, and its report must not be lost. A second SIGTERM ends the process.
    """
    signals: list[int] = []  # no Event: its lock may be held where the handler interrupts

    def take(signal_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals.append(signal_number)

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
    sentences = tuple(map(sentence, more))
    advice: tuple[str, ...] = ()
    if refusal.reason == "unreachable":
        advice = (_DOCTOR,)
    failure = JobFailure(
        kind=cause.kind,
        headline=said,
        exit_code=error.exit_code,
        failed_after_s=_rounded(_age_s()),
        num_processes=num_processes,
        causes=(dataclasses.replace(cause, error=None, wait=None, words=sentences),),
        advice=advice,
    )
    if cause.wait is None or process in missing or refusal.reason != "late":
        # Others that have failed may know more: the file of process 0, or else the first, stays.
        is_first = process == 0 or not os.path.exists(settings.text("SHOAL_FAILURE_FILE"))
        _print(failure, writes=is_first)
        return True
    # Those that are not missing are there, if the coordinator has answered.
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
        waited = dataclasses.replace(waited, words=(sentence(refusal.strangers), *sentences))
        advice = ()
    failure = dataclasses.replace(failure, causes=(waited,), advice=advice)
    failure = dataclasses.replace(failure, headline=job_headline(failure))
    if process == min(there):
        _print(failure)
    else:
        stopped = ""
        if place is not None:
            stopped = f"stopped{at_place(place)}: "
        me = f"process {process} of {num_processes}"
        _write([f"{PROGRAM}: {me}: {stopped}{failure.headline}"])
    return True


def report_job(client: JobClient, end: EndOfThis, signals: Sequence[int]) -> None:
    """Print the report of the job's failure, and write SHOAL_FAILURE_FILE, if this process is the
    one that does.

    Call it after the failure was reported to the other processes.

    Args:
      signals: those that have asked this process to end; after the first one, no news of other
        processes is waited for.
    """
    if isinstance(end.error, KeyboardInterrupt):
        return  # of the user, who knows
    if end.peers is not None and client.process in end.peers:
        return  # it was declared lost: others have reported that
    if isinstance(end.error, StalledError) and client.stall is not None:
        if client.stall.reporter == client.process:
            _print(_failure_of_stall(client, end, client.stall))
        return
    until_s = time.monotonic() + _OTHERS_S
    job = _ask_report(client, end)
    while job and job.states and time.monotonic() < until_s:
        if not _awaits_news(client, end, job.states):
            break
        time.sleep(_POLL_S)
        if signals:
            break
        job = _ask_report(client, end)
    if job is None:
        return
    failure = failure_known(client, end, job.states)
    _print(with_programs(failure, job.programs))


class _KnownJob(NamedTuple):
    """What the coordinator knows of a job that fails."""

    states: Sequence[ProcessState] = ()  # of all processes; none: unknown
    programs: Differences = Differences()


def _ask_report(client: JobClient, end: EndOfThis) -> _KnownJob | None:
    """Return what the coordinator knows, if this process reports. None: another one reports."""
    sharing: Collection[int] = range(client.num_processes)
    if isinstance(end.error, _SHARED) and end.peers is None:
        # Others of the job may never learn of it, and one that arrives late is not awaited.
        sharing = _sharing(client, end.error)
    try:
        is_own = end.peers is None and not isinstance(end.error, _SHARED)
        answer = client.ask_report(sharing, waits=not is_own, timeout_s=_ASK_S)
    except UsageError:  # this process has left the job, in another thread
        return _KnownJob()
    except ShoalError:
        if client.process != 0:
            return None
        return _KnownJob()
    if answer is None:
        return None
    states = [ProcessState.of(*row) for row in enumerate(answer["states"])]
    return _KnownJob(states, differences_of(answer["programs"]))


def _failure_of_stall(client: JobClient, end: EndOfThis, stall: Stall) -> JobFailure:
    """Return the failure of a job in which no process has moved."""
    cause, headline = stalled_cause(stall)
    failure = _failure(client, end, causes=[cause], others=(), since_s=None)
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


def _sharing(client: JobClient, error: BaseException) -> Collection[int]:
    """Return the processes that got the same error at once."""
    if isinstance(error, DivergenceError) and error.sides:
        return {process for side in error.sides.values() for process in side}
    sharing = _group(client)
    if isinstance(error, DeadlineError):
        sharing -= set(error.missing)
    return sharing


def _group(client: JobClient) -> set[int]:
    """Return the processes of the point at which this process waited last; all if it has none."""
    point = client.progress.point
    if point is None or point.group is None:
        return set(range(client.num_processes))
    return set(point.group)


def _awaits_news(client: JobClient, end: EndOfThis, states: Sequence[ProcessState]) -> bool:
    """Return whether another process may soon end in a way that the report can say."""
    if end.peers is not None:  # one that has left a call may have failed a moment later
        return any(state.process in end.peers and state.gone is None for state in states)
    me = client.process
    awaited = [state for state in states if state.state == "here" and state.process != me]
    if isinstance(end.error, _SHARED):
        sharing = _sharing(client, end.error)
        awaited = [state for state in awaited if state.process not in sharing]
        return bool(awaited) and isinstance(end.error, DivergenceError)
    return bool(awaited)


class ProcessState(NamedTuple):
    """What the coordinator knows of a process."""

    process: int
    state: str  # "here" | "silent" | "left" | "failed" | "lost"
    at: LastCall | None = None  # its last call, at its end if it has one
    gone: Gone | None = None  # how it left the job
    how: str = ""  # of its end: see `Departure`

    @classmethod
    def of(cls, process: int, row: Mapping[str, Any]) -> ProcessState:
        """Parse a row of `Record.facts`."""
        state, last_call = str(row["state"]), last_call_of(row.get("at"))
        if state not in ("left", "failed", "lost"):
            return cls(process, state, last_call)
        departure = Departure(*(row[name] for name in Departure._fields))
        end = record_in(str(row.get("end", "")))
        at_s = time.monotonic() - float(row["since_s"])
        return cls(
            process,
            state,
            last_call,
            gone=_gone(departure, at_s, last_call, end),
            how=departure.how,
        )

    @classmethod
    def of_departure(cls, process: int, departure: Departure) -> ProcessState:
        """Return what an error says of a process."""
        gone = _gone(departure, time.monotonic(), None, None)
        return cls(process, departure.state, at=None, gone=gone, how=departure.how)

    @property
    def process_exit(self) -> ProcessExit:
        """How it ended, for the decision who failed first."""
        gone = self.gone
        if gone is None:
            return ProcessExit(self.process, 0, None)
        if gone.state == "left":
            return ProcessExit(self.process, 0, None, left=gone, ended_s=gone.at_s)
        code, record = ProcessLostError.exit_code, gone.record
        if gone.state == "failed":
            code = 1
            if record is not None and record.cause.exit_code:
                code = record.cause.exit_code
        return ProcessExit(
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
            text = f"{capital(gone.why or headline_of(gone.words))}."
            return Cause(processes=processes, kind="lost", words=(text,), place=place, step=step)
        if gone.record is None:
            text = f"It had reported: {headline_of(gone.words)}"
            return Cause(processes=processes, kind="exception", words=(text,), step=step)
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
    departure: Departure, at_s: float, last_call: LastCall | None, end: LastRecord | None
) -> Gone:
    return Gone(
        departure.state,
        departure.words,
        at_s,
        follows=departure.follows,
        at=last_call,
        why=departure.why,
        record=end,
    )


def failure_known(client: JobClient, end: EndOfThis, states: Sequence[ProcessState]) -> JobFailure:
    """Return the failure of the job, as far as this process knows it.

    Args:
      states: of all processes; none if they are unknown.
    """
    me, own = client.process, _own_cause(client, end)
    known = {state.process: state for state in states if state.process != me}
    for process, departure in (end.peers or {}).items():
        if process not in known or known[process].gone is None:
            known[process] = ProcessState.of_departure(process, departure)
    mine = _own_exit(client, end, states)
    roots = first_failures([mine, *(state.process_exit for state in known.values())])
    causes = _causes(client, end, own, roots, known)
    shown = {*(p for cause in causes for p in cause.processes)}
    if own.wait is not None:
        shown.update(p for group in own.wait.arrived for p in group.processes)
    stopped = _stopped_at(client, end.error)
    waited = stopped.place if stopped.state == "waiting" else None
    left = [state for state in known.values() if state.process not in shown]
    others = [other for state in left for other in _other(state, waited)]
    if me not in shown:
        others = [_other_self(client, end, own), *others]
    times_s = [root.known_failed_s for root in roots if root.known_failed_s is not None]
    since_s = 0.0
    if times_s:
        since_s = max(0.0, time.monotonic() - min(times_s))
    failure = _failure(client, end, causes=grouped(causes), others=_joined(others), since_s=since_s)
    services = lost_services(client)
    if failure.kind == "service_lost" and services:
        failure = dataclasses.replace(failure, headline=f"{services[0].name} was lost")
    return failure


def _causes(
    client: JobClient,
    end: EndOfThis,
    own: Cause,
    roots: Sequence[ProcessExit],
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
            causes = [_of_service(client, end)]
    else:
        causes = [known[root.process].cause if root.process in known else own for root in roots]
    if causes[0].kind in FOUND:
        first = causes[0]
        alike = [state.cause for state in known.values() if state.has_found(first.kind)]
        if own.kind == first.kind:
            first = own
            alike.append(own)
        if first is own and first.wait is not None:
            return [first]
        return [shared_cause(first, alike)]
    shown = {process for cause in causes for process in cause.processes}
    causes += [
        state.cause
        for state in known.values()
        if state.process not in shown and state.is_independent
    ]
    is_mine = end.peers is None and not is_torn(end.error) and not isinstance(end.error, _SHARED)
    if is_mine and own not in causes:
        causes.append(own)
    return causes


def _own_exit(client: JobClient, end: EndOfThis, states: Sequence[ProcessState]) -> ProcessExit:
    """Return how this process ends, for the decision who failed first."""
    record = record_sent(client, end.error, end.peers)
    at_s = time.monotonic()
    for state in states:
        if state.process == client.process and state.gone is not None:
            at_s = state.gone.at_s
    gone = Gone("failed", "", at_s, follows=end.peers is not None, record=record)
    return ProcessExit(client.process, end.code, at_s, gone=gone, record=record, ended_s=at_s)


def _failure(
    client: JobClient,
    end: EndOfThis,
    causes: Iterable[Cause],
    others: Iterable[BystanderState],
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
    for process, host in enumerate(client.hosts):
        hosts.setdefault(host, []).append(process)
    failure = JobFailure(
        kind=causes[0].kind,
        headline="",
        exit_code=end.code,
        started=started,
        failed_after_s=after_s,
        num_processes=client.num_processes,
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


def _own_cause(client: JobClient, end: EndOfThis) -> Cause:
    """Return the failure of this process; of an error that others share, of all of them."""
    here = client.progress
    me, point = client.process, here.point
    begins = speakers(client.hosts)
    cause = cause_of(end.error, process=me, step=here.step, point=point, speakers=begins)
    if cause.wait is not None:
        return _of_wait(client, cause, cause.wait)
    if cause.difference is not None:
        sides = cause.difference.sides
        processes = ProcessSet([me, *(p for side in sides for p in side.processes)])
        return dataclasses.replace(cause, processes=processes, error=None, frames=(), left_out={})
    return cause


def _of_wait(client: JobClient, cause: Cause, wait: Wait) -> Cause:
    """Return a deadline as the failure of those that did not arrive."""
    missing = ProcessSet(p for group in wait.missing for p in group.processes)
    there = ProcessSet(_group(client) - set(missing))
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


def _of_service(client: JobClient, end: EndOfThis) -> Cause:
    text = f"{capital(_services_lost(client, end))}."
    return Cause(processes=ProcessSet(), kind="service_lost", words=(text,))


def _other_self(client: JobClient, end: EndOfThis, own: Cause) -> BystanderState:
    """Return what this process did when others failed."""
    me = ProcessSet([client.process])
    if isinstance(end.error, ShoalError):
        return dataclasses.replace(_stopped_at(client, end.error), exit_code=end.code)
    text = raised_words(own)
    if own.error is not None:
        text = one_line(f"then {text}", _MOST)
    return BystanderState(processes=me, state="ended", exit_code=end.code, words=text)


def _other(process_state: ProcessState, own: CallPlace | None) -> list[BystanderState]:
    """Return what a process did that did not fail by itself, as far as it is known.

    Args:
      own: where this process has waited until it learned of the failure, with the source line:
        there the others have learned of it, too, and wait no more.
    """
    processes, last_call = ProcessSet([process_state.process]), process_state.at
    if process_state.gone is not None:
        return [_ended_after(processes, process_state.gone, own)]
    if last_call is None or last_call.place is None:
        return []
    place = dataclasses.replace(last_call.place, age_s=None)
    if _is_same_call(own, place):
        return [BystanderState(processes=processes, state="waiting", place=own)]
    if last_call.is_waiting:
        return [BystanderState(processes=processes, state="waiting", place=place)]
    text = f"had called {place_words(place)} last."
    return [BystanderState(processes=processes, state="running", words=text)]


def _ended_after(processes: ProcessSet, gone: Gone, own: CallPlace | None) -> BystanderState:
    """Return what a process did that has ended, and not failed by itself."""
    if gone.state == "left":
        return BystanderState(processes=processes, state="left")
    record = gone.record
    if record is None or record.cause.error is None or record.cause.kind == "exit":
        text = ""
        if not gone.follows:
            text = headline_of(gone.words)
        return BystanderState(processes=processes, state="ended", words=text)
    cause, error = record.cause, record.cause.error
    line = cause.frames[-1] if cause.frames else None
    if not has_only_learned(record):
        where = ""
        if line is not None:
            where = f" ({line.file}:{line.line})"
        text = f"then raised {error.type}{where}."
        return BystanderState(processes=processes, state="ended", words=text)
    place = cause.place
    # Its error was raised at the call in which it waited, or else at a later line.
    if line is not None and (place is None or (place.file, place.line) != (line.file, line.line)):
        position = CallPlace(file=line.file, line=line.line, source=line.source)
        return BystanderState(processes=processes, state="stopped", place=position)
    if place is not None and _is_same_call(own, place):
        place = own
    return BystanderState(processes=processes, state="waiting", place=place)


def _is_same_call(own: CallPlace | None, other: CallPlace) -> bool:
    return own is not None and dataclasses.replace(own, source=other.source) == other


def _joined(others: Iterable[BystanderState]) -> Iterator[BystanderState]:
    """Join those that did the same; their exit codes, which are known of this process, apart."""
    groups: dict[BystanderState, list[int]] = {}
    for other in others:
        key = dataclasses.replace(other, processes=ProcessSet(), exit_code=None)
        groups.setdefault(key, []).extend(other.processes)
    for key, processes in groups.items():
        yield dataclasses.replace(key, processes=ProcessSet(processes))
