"""The report of a failed job by its own processes, where no launcher of shoal makes one.

A process that ends because of others prints one line in place of a traceback. One process adds the
report: the lowest of those that end with the failure. Each finds out by itself whether it is that
one, from the states that the coordinator knows: it reports unless a lower process is still here, or
has failed with an exception and so has reported, or knew of a lower one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
)
from shoal.paths import write_private
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.exit.causes import UNHEARD, has_followed, lost_services, peers_of
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
    as_reported,
    job_headline,
    place_words,
    raised_words,
)
from shoal.runtime.failures.last_record import cause_of, has_launcher, place_at, place_in, place_of
from shoal.runtime.failures.rendering import (
    Style,
    facts_without_secrets,
    plain_text,
    report,
    without_secrets,
)
from shoal.runtime.failures.shortening import capital, sentence
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.rules.point import Member, Point
from shoal.runtime.system.callsite import site_of, split_site
from shoal.runtime.system.failure_words import (
    HAD_WRONG_TOKEN,
    fate_of,
    headline_of,
    is_torn_text,
    one_line,
    raised_at,
)
from shoal.runtime.system.process_status import status_of

PROGRAM = "shoal"
_LEARNED = (PeerFailedError, ProcessLostError)
_SHARED = (DivergenceError, DeadlineError, StalledError)  # of all processes of a meeting
_OTHERS_S = 0.5  # for the others to end, so that the report says how
_POLL_S = 0.02
_AGO = re.compile(r", [\d.]+ s ago\Z")
_SEEN_AT = re.compile(r"; (?:step \d+, )?(?:waited|last) at (.+?\(.+?:\d+\))(?= for |, )")
# Of a message: what could not go on, and where.
_CANNOT = re.compile(r"\): (.+? \(.+?:\d+\)) cannot (?:complete|continue)")
_LOST_STEP = re.compile(r"; step (\d+), ")

_TRIED = "; tried for "  # of a message: nothing answered at the address of the job
_DID_NOT_JOIN = " did not join within "  # of the same: the meeting place's answer to those that did
_DOCTOR = "To check the address from this host: shoal doctor"
_MOST = 400  # characters of the one line about another process


class EndOfThis(NamedTuple):
    """How this process ends."""

    error: BaseException
    code: int
    peers: Mapping[int, str] | None  # whose end led to it, with their words; None: its own


def stopped_line(coordinator: Coordinator, end: EndOfThis) -> str:
    """Return the one line of a process that ends because of others; "": it prints a traceback.

    An error of the program's own, even if one of shoal's led to it, has its traceback; so has every
    error if the user asks for all frames.
    """
    error = end.error
    if settings.text("SHOAL_TRACEBACK") == "full" or not isinstance(error, _LEARNED + _SHARED):
        return ""
    me = ThisProcess(coordinator.process, coordinator.hosts)
    at = _stopped_at(coordinator, error).place
    where = f"stopped at {place_words(at)}" if at is not None else "stopped"
    return without_secrets(f"{PROGRAM}: {me}: {where}: {_reason(coordinator, me, end)}")


def _reason(coordinator: Coordinator, me: ThisProcess, end: EndOfThis) -> str:
    """Return why a process stopped: the process behind it, or what all of them were given."""
    if end.peers is None:
        cause = _own_cause(coordinator, end)
        if cause.difference is None and cause.wait is None:
            return one_line(_after_place(end.error), _MOST)
        return job_headline(_failure(coordinator, end, [cause], (), None))
    if not end.peers:
        return one_line(_services_lost(coordinator, end), _MOST)
    process, words = next(iter(end.peers.items()))
    is_lost = isinstance(end.error, ProcessLostError)
    if process == me.process:
        return one_line(f"it was declared lost: {_plain(words)}", _MOST)
    fate = f"is lost: {_plain(words)}" if is_lost else fate_of(words)
    more = len(end.peers) - 1
    also = f" (and {more} more {'process is' if more == 1 else 'processes are'} gone)"
    return one_line(f"{me.name(process)} {fate}", _MOST) + (also if more else "")


def _services_lost(coordinator: Coordinator, end: EndOfThis) -> str:
    """Return which services are lost, which all processes need."""
    lost = [f"{service.name} is lost: {service.words}" for service in lost_services(coordinator)]
    return "; ".join(lost) or _after_place(end.error)


def _after_place(error: BaseException) -> str:
    """Return what a message says after this process and its place."""
    first = headline_of(str(error))
    for mark in (" cannot complete: ", " cannot continue: "):
        if mark in first:
            return first.partition(mark)[2]
    return first


def _plain(words: str) -> str:
    """Return why a process is lost, without its place and guesses."""
    return _AGO.sub("", headline_of(words)).partition("; ")[0].removesuffix(" (killed?)")


def _stopped_at(coordinator: Coordinator, error: BaseException) -> Others:
    """Return what this process did when it learned of the failure of others.

    It waited at a point, if the call of that one is at the line where the program stopped.
    """
    me = ProcessSet([coordinator.process])
    trace, point = error.__traceback__, coordinator.progress.point
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    site = "" if trace is None else site_of(trace.tb_frame, trace.tb_lineno)
    if point is not None and split_site(point.site) == split_site(site or point.site):
        return Others(processes=me, state="waiting", place=place_of(point))
    found = _CANNOT.search(headline_of(str(error)))
    at = place_in(found[1]) if found else None
    if at is None or (at.file, at.line) != split_site(site):
        at = place_at("", "", site)
    return Others(processes=me, state="stopped", place=at)


@contextlib.contextmanager
def without_sigterm() -> Iterator[threading.Event]:
    """Set the yielded event at the first SIGTERM in the block, instead of ending the process.

    A launcher other than shoal's sends SIGTERM as soon as one process has ended. This process is
    ending anyway, and its report must not be lost. A second SIGTERM ends the process.
    """
    came = threading.Event()

    def take(*_: object) -> None:
        came.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL):
        yield came
        return
    signal.signal(signal.SIGTERM, take)
    try:
        yield came
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
    said, *more = str(error).splitlines()
    words = tuple(map(sentence, more))
    failure = JobFailure(
        kind=cause.kind,
        headline=said,
        exit_code=error.exit_code,
        failed_after_s=_rounded(_age_s()),
        num_processes=num_processes,
        causes=(dataclasses.replace(cause, error=None, wait=None, words=words),),
        advice=(_DOCTOR,) if _TRIED in said else (),
    )
    if cause.wait is None or process in missing or _DID_NOT_JOIN not in said:
        # Others that have failed may know more: the file of process 0, or else the first, stays.
        is_first = process == 0 or not os.path.exists(settings.text("SHOAL_FAILURE_FILE"))
        _print(failure, writes=is_first)
        return True
    # Those that are not missing are there, if the meeting place has answered.
    there = {process} if 0 in missing else {*range(num_processes)} - {*missing}
    frame = cause.frames[-1] if cause.frames else None
    place = None
    if frame is not None:
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
    if HAD_WRONG_TOKEN in said:  # they may have called it, with another token
        refused = said[said.index(HAD_WRONG_TOKEN) :]
        waited, advice = dataclasses.replace(waited, words=(sentence(refused), *words)), ()
    failure = dataclasses.replace(failure, causes=(waited,), advice=advice)
    failure = dataclasses.replace(failure, headline=job_headline(failure))
    if process == min(there):
        _print(failure)
    else:
        at = f"stopped at {place_words(place)}: " if place is not None else ""
        me = f"process {process} of {num_processes}"
        _write([f"{PROGRAM}: {me}: {at}{failure.headline}"])
    return True


def report_job(coordinator: Coordinator, end: EndOfThis, hurry: threading.Event) -> None:
    """Print the report of the job's failure, and write SHOAL_FAILURE_FILE, if this process is the
    one that does.

    Call it after the failure was reported to the other processes.

    Args:
      hurry: once set, no news of other processes is waited for.
    """
    if isinstance(end.error, KeyboardInterrupt):
        return  # of the user, who knows
    members = peers_of(coordinator)
    if not makes_report(coordinator, end, members):
        return
    until_s = time.monotonic() + _OTHERS_S
    while _awaits_news(coordinator, end, members) and time.monotonic() < until_s:
        if hurry.wait(_POLL_S):
            break
        members = peers_of(coordinator)
    if not makes_report(coordinator, end, members):  # a lower one has arrived late, and knows more
        return
    _print(failure_known(coordinator, end, members))


def _print(failure: JobFailure, *, writes: bool = True) -> None:
    """Print a report, and write SHOAL_FAILURE_FILE unless `writes` is false."""
    failure = facts_without_secrets(failure)
    failure = dataclasses.replace(failure, text=plain_text(failure, PROGRAM))
    is_terminal = sys.stderr.isatty()
    columns = os.get_terminal_size(sys.stderr.fileno()).columns if is_terminal else 80
    style = Style.for_stream(is_terminal, columns, os.environ, sys.stderr.encoding)
    lines = report(failure, style, PROGRAM)
    if (path := settings.text("SHOAL_FAILURE_FILE")) and writes:
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


def makes_report(coordinator: Coordinator, end: EndOfThis, members: Sequence[Member]) -> bool:
    """Return whether this process makes the report."""
    me = coordinator.process
    if end.peers is not None and me in end.peers:
        return False  # it was declared lost: others have reported that
    if _is_unheard(members):
        return me == 0
    lower = [member for member in members if member.process < me and not _is_mute(member)]
    if isinstance(end.error, _SHARED) and end.peers is None:
        # Others of the job may never learn of it, and one that arrives late is not awaited.
        sharing = _sharing(coordinator, end.error)
        return not any(m.process in sharing or has_followed(m.last_words) for m in lower)
    return not lower


def _is_mute(member: Member) -> bool:
    """Return whether a process is gone and has reported nothing: it was killed, or has exited."""
    if member.state in ("lost", "left"):
        return True
    return member.state == "failed" and not raised_at(_headline_of(member))[0]


def _headline_of(member: Member) -> str:
    """Return why a process is gone, in one line."""
    return headline_of(_AGO.sub("", member.last_words))


def _is_unheard(members: Iterable[Member]) -> bool:
    return any(member.last_words == UNHEARD for member in members)


def _sharing(coordinator: Coordinator, error: BaseException) -> set[int]:
    """Return the processes that got the same error at once."""
    if isinstance(error, DivergenceError) and error.sides:
        return {process for side in error.sides.values() for process in side}
    group = coordinator.progress.point.group if coordinator.progress.point is not None else None
    everyone = set(range(coordinator.num_processes) if group is None else group)
    return everyone - set(error.missing) if isinstance(error, DeadlineError) else everyone


def _awaits_news(coordinator: Coordinator, end: EndOfThis, members: Sequence[Member]) -> bool:
    """Return whether another process may soon end in a way that the report can say."""
    if end.peers is not None or _is_unheard(members):
        return False
    awaited = [member for member in members if member.state == "here"]
    if isinstance(end.error, _SHARED):
        sharing = _sharing(coordinator, end.error)
        awaited = [member for member in awaited if member.process not in sharing]
        return bool(awaited) and isinstance(end.error, DivergenceError)
    return bool(awaited)


def failure_known(
    coordinator: Coordinator, end: EndOfThis, members: Sequence[Member]
) -> JobFailure:
    """Return the failure of the job, as far as this process knows it.

    Args:
      members: the other processes; those whose words are UNHEARD are unknown.
    """
    known = [] if _is_unheard(members) else members
    by_process = {member.process: member for member in known}
    own, me = _own_cause(coordinator, end), coordinator.process
    causes = [own]
    if end.peers is not None:
        state = "lost" if isinstance(end.error, ProcessLostError) else ""
        causes = [_cause_of(p, w, state, by_process.get(p)) for p, w in end.peers.items()]
        causes = causes or [_of_service(coordinator, end)]
    shown = {*(p for cause in causes for p in cause.processes)}
    if own.wait is not None:
        shown.update(p for one in own.wait.arrived for p in one.processes)
    if not isinstance(end.error, _SHARED):
        for member in known:
            if member.process not in shown and _is_independent(member):
                causes.append(_cause_of(member.process, member.last_words, member.state, member))
                shown.add(member.process)
    others = _others(coordinator, [m for m in known if m.process not in shown])
    if me not in shown:
        others = [_other_self(coordinator, end, own), *others]
    since_s = max((by_process[p].since_s for p in end.peers or () if p in by_process), default=0.0)
    return _failure(coordinator, end, grouped(causes), _joined(others), since_s)


def _failure(
    coordinator: Coordinator,
    end: EndOfThis,
    causes: Iterable[Cause],
    others: Iterable[Others],
    since_s: float | None,
) -> JobFailure:
    """Return the failure with its headline; `since_s`: how long ago it was, if known."""
    causes, age_s = tuple(causes), _age_s()
    after_s = None if age_s is None or since_s is None else _rounded(age_s - since_s)
    hosts: dict[str, list[int]] = {}
    for process, host in enumerate(coordinator.hosts):
        hosts.setdefault(host, []).append(process)
    failure = JobFailure(
        kind=causes[0].kind,
        headline="",
        exit_code=end.code,
        started="" if age_s is None else utc(time.time() - age_s),
        failed_after_s=after_s,
        num_processes=coordinator.num_processes,
        hosts={host: ProcessSet(of) for host, of in hosts.items()},
        causes=causes,
        others=tuple(others),
        advice=advice_of(causes),
    )
    return dataclasses.replace(failure, headline=job_headline(failure))


def _rounded(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(max(0.0, duration_s), 3)


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
    cause = cause_of(end.error, process=me, step=here.step, point=point)
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
    point = coordinator.progress.point
    group = (
        range(coordinator.num_processes) if point is None or point.group is None else point.group
    )
    arrived = ProcessSet(set(group) - set(missing))
    at = (Waiting(processes=arrived, place=cause.place),) if arrived else ()
    call = cause.place.call if cause.place is not None else wait.call
    return dataclasses.replace(
        cause,
        processes=missing,
        wait=dataclasses.replace(wait, call=call, arrived=at),
        error=None,
        frames=(),
        left_out={},
    )


def _cause_of(process: int, words: str, state: str, member: Member | None) -> Cause:
    """Return the failure of another process, from its words.

    Args:
      state: "lost": so it is; else they are those of a process that has failed or left.
    """
    step = None if member is None else member.step
    if state == "lost":
        found, number = _SEEN_AT.search(words), _LOST_STEP.search(words)
        cause = Cause(
            processes=ProcessSet([process]),
            kind="lost",
            words=(f"{capital(_plain(words))}.",),
            place=place_in(found[1]) if found else None,
        )
        return dataclasses.replace(cause, step=int(number[1]) if number else step)
    cause = as_reported(_AGO.sub("", words))
    return dataclasses.replace(cause, processes=ProcessSet([process]), step=step)


def _of_service(coordinator: Coordinator, end: EndOfThis) -> Cause:
    words = f"{capital(_services_lost(coordinator, end))}."
    return Cause(processes=ProcessSet(), kind="service_lost", words=(words,))


def _is_independent(member: Member) -> bool:
    """Return whether a process failed by itself."""
    if member.state == "lost":
        return True
    words = _headline_of(member)
    return member.state == "failed" and not (
        has_followed(member.last_words) or is_torn_text(words) or "KeyboardInterrupt" in words
    )


def _other_self(coordinator: Coordinator, end: EndOfThis, own: Cause) -> Others:
    """Return what this process did when others failed."""
    me = ProcessSet([coordinator.process])
    if isinstance(end.error, ShoalError):
        return dataclasses.replace(_stopped_at(coordinator, end.error), exit_code=end.code)
    words = raised_words(own)
    words = words if own.error is None else one_line(f"then {words}", 240)
    return Others(processes=me, state="ended", exit_code=end.code, words=words)


def _others(coordinator: Coordinator, members: Iterable[Member]) -> list[Others]:
    """Return what other processes did that did not fail by themselves, as far as it is known."""
    mine = coordinator.progress.point
    others = []
    for member in members:
        one = ProcessSet([member.process])
        words = _headline_of(member)
        if member.state == "left":
            others.append(Others(processes=one, state="left"))
        elif member.state == "failed" and not has_followed(words):
            kind, place = raised_at(words)
            at = f" ({place})" if place else ""
            then = f"then raised {kind.rpartition('.')[2]}{at}." if kind else words
            others.append(Others(processes=one, state="ended", words=then))
        else:
            others += _stopped(one, member, words, mine)
    return others


def _stopped(one: ProcessSet, member: Member, words: str, mine: Point | None) -> list[Others]:
    """Return where a process was that waits, or that has learned of the failure."""
    text = member.place
    if member.state == "failed":
        at = _CANNOT.search(words)
        if at is None:
            return [Others(processes=one, state="ended")]
        text = at[1]
    place = place_in(text)
    if place is None:
        return []
    if member.state == "failed" and place.call.startswith("step"):
        return [Others(processes=one, state="stopped", place=place)]
    own = None if mine is None else place_of(mine)
    is_mine = own is not None and dataclasses.replace(own, source="") == place
    if member.is_waiting or member.state == "failed" or is_mine:
        return [Others(processes=one, state="waiting", place=own if is_mine else place)]
    words = f"had called {place_words(place)} last."
    return [Others(processes=one, state="running", words=words)]


def _joined(others: Iterable[Others]) -> Iterator[Others]:
    """Join those that did the same; their exit codes, which are known of this process, apart."""
    groups: dict[Others, list[int]] = {}
    for other in others:
        key = dataclasses.replace(other, processes=ProcessSet(), exit_code=None)
        groups.setdefault(key, []).extend(other.processes)
    for key, processes in groups.items():
        yield dataclasses.replace(key, processes=ProcessSet(processes))
