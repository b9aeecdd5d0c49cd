"""How a job ended: its exit code, and what is said of it."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.errors import InitializeError, ProcessLostError, StalledError, UsageError
from shoal.launch.diagnose import ExitedJob, of_coordinator, of_host_agent
from shoal.launch.news import HostAgentNews, News
from shoal.runtime.exit.first_failure import (
    ProcessExit,
    cause_of,
    exit_code,
    fails_by_itself,
    first_failures,
    is_from_outside,
    names_no_process,
    stalled_cause,
)
from shoal.runtime.failures.facts import Cause, JobFailure, ProcessSet
from shoal.runtime.failures.process_text import listed
from shoal.runtime.failures.program_text import with_programs
from shoal.runtime.failures.shortening import capital, sentence
from shoal.runtime.rules.stalls import Stall
from shoal.runtime.rules.stopping import REQUEUE, SAVE_FAILED
from shoal.runtime.system.progress_file import StepProgress

# What native code does that is not for this processor, or is damaged.
_CRASHES = (-signal.SIGILL, -signal.SIGSEGV, -signal.SIGBUS)
_REQUESTS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)  # to end


class Loss(NamedTuple):
    """A node that was lost, with its launcher."""

    name: str  # "node 1 (host)"
    words: str  # why it counts as lost
    last_seen_s: float  # its last sign of life, on the monotonic clock
    processes: tuple[int, ...]


class Facts(NamedTuple):
    """Everything known of a job that has ended. Times are on one monotonic clock."""

    exits: Sequence[ProcessExit]  # of all processes that were started, on all nodes
    news: News
    total: int  # processes of the job
    start_s: float
    problem: str = ""  # why it failed, if no process was the cause
    interrupted: signal.Signals | None = None
    losses: Sequence[Loss] = ()
    is_of_services: bool = False  # the problem: they ended, or did not start
    is_service_killed: bool = False  # by a signal from outside, which is the problem
    progress: StepProgress = StepProgress()  # by all processes together
    of_job: int = 0  # processes, if `total` are those of this host alone
    remaining: str = ""  # the processes that exist in spite of SIGKILL


class Conclusion(NamedTuple):
    """The end of a job."""

    code: int
    lines: tuple[str, ...] = ()
    failure: JobFailure | None = None
    has_failed: bool = False  # its logs are kept
    is_final: bool = False  # a new attempt is unwanted, or would end in the same way
    again: bool | None = None  # whether a new attempt begins; None: not judged yet
    next_words: str = ""  # said before it
    reported_by: str = ""  # "node 0 (host)", whose launcher prints the report; empty: this one
    is_announced: bool = False  # by node 0, which is thus there for it
    cause: str = ""  # the exception and its place: equal if an attempt fails like another
    step: int = -1  # of the process that failed
    is_from_outside: bool = False  # nothing that the program did
    suspicion: str = ""  # why the compile cache is not used any more; empty: it is
    remaining: str = ""  # the processes that exist in spite of SIGKILL


def conclude(facts: Facts) -> Conclusion:
    """Return how the job ended."""
    conclusion = _conclude(facts)
    if conclusion.failure is not None:
        failure = with_programs(conclusion.failure, facts.news.programs)
        conclusion = conclusion._replace(failure=failure)
    is_usage = conclusion.code == UsageError.exit_code
    # Services that fail before the processes start: an attempt, which the next one may better.
    has_begun = len(facts.exits) == facts.total or facts.losses or facts.is_of_services
    is_final = is_usage or facts.interrupted is not None or not has_begun
    suspicion = _suspicion(facts.exits)
    return conclusion._replace(
        is_final=bool(is_final), suspicion=suspicion, remaining=facts.remaining
    )


def _suspicion(exits: Iterable[ProcessExit]) -> str:
    """Return which process has crashed in code that the compile cache may have had; "": none."""
    for process_exit in exits:
        if process_exit.code in _CRASHES and process_exit.ran_loaded:
            name = signal.Signals(-process_exit.code).name
            return f"process {process_exit.process} died of {name} before its first step"
    return ""


def _conclude(facts: Facts) -> Conclusion:
    exits, news = facts.exits, facts.news
    job = ExitedJob(exits, max(facts.total, facts.of_job, len(exits)), facts.start_s)
    # Without a notice, 75 is a failure: the job would be started again for ever.
    is_requeue = bool(news.has_notice or news.preempted)
    failed = [e for e in exits if not (is_requeue and e.code == REQUEUE)]
    is_alike = {e.code for e in exits} <= {0, REQUEUE}  # a program that has its own reason
    roots = [] if is_alike else first_failures(failed)
    root = roots[0] if roots else None
    if facts.losses and not (root and _precedes(root, facts.losses[0])):
        return _lost(job, facts.losses, news)
    if news.stalled is not None and any(map(_has_stalled, exits)):
        return _stalled(job, news.stalled)
    if facts.problem:
        return _with_problem(job, facts)
    if roots:
        return _failed(roots, job, news)
    codes = {process_exit.code for process_exit in exits}
    if facts.interrupted and not (codes and codes <= {0, REQUEUE}):
        return _interrupted(job, facts.interrupted)
    if facts.interrupted in _REQUESTS and codes == {0} and news.notice_s is None:
        if any(process_exit.asked_s < math.inf or process_exit.sent for process_exit in exits):
            return _interrupted(job, facts.interrupted)  # by handlers of the program's own
    # Where a save has failed, only some may return 75: those that took no part in it. A program
    # that returns it on all has its own reason.
    if codes == {REQUEUE} or ((REQUEUE in codes or news.preempted) and not news.has_failed_save):
        headline = news.preempted or "exit code 75, without a preemption notice"
        if news.has_saved and facts.progress.saved >= 0:
            headline = f"preempted: step {facts.progress.saved} is saved; start it again"
        else:
            headline = f"{headline}: start it again"
        failure = job.stopped("preempted", REQUEUE, news.notice_s, headline=headline)
        return Conclusion(REQUEUE, failure=failure)
    if news.preempted:
        return Conclusion(0, (SAVE_FAILED,))
    absent = news.absent_words()
    return Conclusion(0, (absent,) if absent else ())


def _has_stalled(process_exit: ProcessExit) -> bool:
    """Return whether the stall of the job has ended a process."""
    is_raised = process_exit.record is not None and process_exit.record.cause.kind == "stalled"
    return is_raised or process_exit.code == StalledError.exit_code


def _precedes(root: ProcessExit, loss: Loss) -> bool:
    """Return whether a process failed by itself before a node was last heard of."""
    return fails_by_itself(root) and (root.known_failed_s or 0.0) < loss.last_seen_s


def _lost(job: ExitedJob, losses: Sequence[Loss], news: News) -> Conclusion:
    first = losses[0]
    having = f", with {listed(first.processes)}," if first.processes else ""
    at_s = max(0.0, first.last_seen_s - job.start_s)
    sentences = [f"{capital(first.words)}."]
    sentences += [f"{loss.name} was lost too: {loss.words}" for loss in losses[1:]]
    processes, code = ProcessSet(first.processes), ProcessLostError.exit_code
    # One sentence says where they were seen last: of what all of them share.
    seen = [gone.at for p in processes if (gone := news.gone.get(p)) and gone.at]
    places = {call.place and dataclasses.replace(call.place, age_s=None) for call in seen}
    steps = {call.step for call in seen}
    cause = Cause(
        processes=processes,
        kind="host_lost",
        at_s=at_s,
        words=tuple(sentences),
        step=steps.pop() if len(steps) == 1 else None,
        place=places.pop() if len(places) == 1 else None,
    )
    headline = f"{first.name}{having} was lost"
    failure = job.failure("host_lost", code, [cause], headline)
    return Conclusion(code, failure=failure, has_failed=True, is_from_outside=True)


def _with_problem(job: ExitedJob, facts: Facts) -> Conclusion:
    """Return the conclusion of a job that lost its services, or could not start."""
    complete = len(facts.exits) == facts.total
    code = (ProcessLostError if complete else InitializeError).exit_code
    headline, *details = facts.problem.splitlines()
    is_of_services = complete or facts.is_of_services
    kind = "service_lost" if is_of_services else "not_started"
    cause = Cause(processes=ProcessSet(), kind=kind, words=tuple(map(sentence, details)))
    failure = job.failure(kind, code, [cause], headline)
    killed = facts.is_service_killed
    return Conclusion(code, failure=failure, has_failed=True, is_from_outside=killed)


def _stalled(job: ExitedJob, stall: Stall) -> Conclusion:
    code = StalledError.exit_code
    cause, headline = stalled_cause(stall)
    failure = job.failure("stalled", code, [job.with_thread(cause)], headline)
    # Processes without hooks write no stacks.
    if any(process_exit.code == code for process_exit in job.exits):
        advice = (*failure.advice, "Stacks, one for each place, are in the logs.")
        failure = dataclasses.replace(failure, advice=advice)
    return Conclusion(code, failure=failure, has_failed=True)


def _interrupted(job: ExitedJob, number: signal.Signals) -> Conclusion:
    code = 128 + number
    sent_s = min((min(e.sent_s, e.asked_s) for e in job.exits), default=math.inf)
    at_s = sent_s if sent_s < math.inf else None
    return Conclusion(code, failure=job.stopped("interrupted", code, at_s, name=number.name))


def dead_host_agent(
    root: ProcessExit, host_agents: Iterable[HostAgentNews]
) -> HostAgentNews | None:
    """Return the host agent whose death made JAX abort the root, or None."""
    if root.code != -signal.SIGABRT or root.sent:
        return None
    failed_s = root.known_failed_s or 0.0
    for host_agent in host_agents:
        died_first = host_agent.gone_s is not None and host_agent.gone_s <= failed_s
        if root.process in host_agent.processes and died_first and host_agent.code != 0:
            return host_agent
    return None


def _wants_input(root: ProcessExit) -> bool:
    """Return whether a process failed since a debugger, or `input`, found no standard input."""
    if root.has_input or root.record is None:
        return False
    error = root.record.cause.error
    if error is None:
        return False
    # JAX's debugger calls sys.exit(0), in a callback of the device.
    of_jax = "SystemExit: 0" in error.message and "(jdb)" in root.output
    of_input = error.type == "EOFError" and error.message == "EOF when reading a line"
    return error.type == "BdbQuit" or of_jax or of_input


def _failed(roots: Sequence[ProcessExit], job: ExitedJob, news: News) -> Conclusion:
    """Return the conclusion about the first failure."""
    root = roots[0]
    host_agent = dead_host_agent(root, news.host_agents.values())
    if host_agent is not None:
        failure = of_host_agent(job, host_agent)
    elif names_no_process(root):
        failure = of_coordinator(job, root)
    else:
        failure = job.of_processes(roots, exit_code(root))
    is_explained = any(cause.wait is not None for cause in failure.causes)
    absent = "" if is_explained else news.absent_words()
    if failure.kind == "not_joined" and news.joined and absent:
        failure = dataclasses.replace(failure, advice=(f"{capital(absent)}.",))
    if _wants_input(root):
        process = root.process
        advice = (
            f"Process {process} has no standard input. To give it yours, pass --stdin {process}."
        )
        failure = dataclasses.replace(failure, advice=(*failure.advice, advice))
    return Conclusion(
        failure.exit_code,
        failure=failure,
        has_failed=True,
        cause=cause_of(root),
        step=root.step,
        is_from_outside=is_from_outside(root) or host_agent is not None,
    )
