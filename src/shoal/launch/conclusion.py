"""How a job ended: its exit code, and what is said of it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from shoal.errors import InitializeError, ProcessLostError, StalledError, UsageError
from shoal.launch.news import News
from shoal.launch.report import (
    Ending,
    cause_of,
    dead_host_keeper,
    describe_failure,
    describe_host_keeper,
    describe_others,
    exit_code,
    fails_by_itself,
    first_failure,
    is_from_outside,
)
from shoal.runtime.rules.stopping import REQUEUE, SAVE_FAILED
from shoal.runtime.system.failure_words import listed


class Loss(NamedTuple):
    """A node that was lost, with its launcher."""

    name: str  # "node 1 (host)"
    words: str  # why it counts as lost
    last_seen_s: float  # its last sign of life, on the monotonic clock
    processes: tuple[int, ...]


class Facts(NamedTuple):
    """Everything known of a job that has ended. Times are on one monotonic clock."""

    endings: Sequence[Ending]  # of all processes that were started, on all nodes
    news: News
    total: int  # processes of the job
    start_s: float
    trouble: str = ""  # why it failed, if no process was the cause
    interrupted: signal.Signals | None = None
    losses: Sequence[Loss] = ()
    is_of_services: bool = False  # the trouble: they ended, or did not start
    is_service_killed: bool = False  # by a signal from outside, which is the trouble


class Conclusion(NamedTuple):
    """The end of a job."""

    code: int
    lines: tuple[str, ...] = ()
    sentence: str = ""  # the last line, which names the cause
    names_logs: bool = False  # the first line names the log directory
    has_failed: bool = False  # its logs are kept
    is_final: bool = False  # a new attempt is unwanted, or would end in the same way
    again: bool | None = None  # whether a new attempt begins; None: not judged yet
    next_words: str = ""  # said before it
    is_announced: bool = False  # by node 0, which is thus there for it
    cause: str = ""  # the exception and its place: equal if an attempt fails like another
    step: int = -1  # of the process that failed
    is_from_outside: bool = False  # nothing that the program did


def conclude(facts: Facts) -> Conclusion:
    """Return how the job ended."""
    conclusion = _conclude(facts)
    is_usage = conclusion.code == UsageError.exit_code
    # Services that fail before the processes start: an attempt, which the next one may better.
    has_begun = len(facts.endings) == facts.total or facts.losses or facts.is_of_services
    is_final = is_usage or facts.interrupted is not None or not has_begun
    return conclusion._replace(is_final=bool(is_final))


def _conclude(facts: Facts) -> Conclusion:
    endings, news = facts.endings, facts.news
    # Without a notice, 75 is a failure: the job would be started again for ever.
    is_requeue = bool(news.has_notice or news.preempted)
    failed = [e for e in endings if not (is_requeue and e.code == REQUEUE)]
    is_alike = {e.code for e in endings} <= {0, REQUEUE}  # a program that has its own reason
    root = None if is_alike else first_failure(failed)
    if facts.losses and not (root and _precedes(root, facts.losses[0])):
        return _lost(facts)
    if news.stalled and any(ending.code == StalledError.exit_code for ending in endings):
        lines = tuple(describe_others(endings))
        code = StalledError.exit_code
        return Conclusion(code, lines, f"the job was stalled: {news.stalled}", has_failed=True)
    if facts.trouble:
        complete = len(endings) == facts.total
        code = (ProcessLostError if complete else InitializeError).exit_code
        lines = tuple(facts.trouble.splitlines())
        killed = facts.is_service_killed
        return Conclusion(code, lines, names_logs=True, has_failed=True, is_from_outside=killed)
    if root:
        return _failed(root, facts)
    codes = {ending.code for ending in endings}
    if facts.interrupted and not (codes and codes <= {0, REQUEUE}):
        words = f"the job was ended by {facts.interrupted.name}"
        return Conclusion(128 + facts.interrupted, (words,))
    # Where a save has failed, only some may return 75: those that took no part in it. A program
    # that returns it on all has its own reason.
    if codes == {REQUEUE} or ((REQUEUE in codes or news.preempted) and not news.has_failed_save):
        words = f"{news.preempted or 'preempted, and saved'}: start it again (exit code {REQUEUE})"
        return Conclusion(REQUEUE, (words,))
    if news.preempted:
        return Conclusion(0, (SAVE_FAILED,))
    return Conclusion(0, (absent,) if (absent := news.absent_words()) else ())


def _precedes(root: Ending, loss: Loss) -> bool:
    """Return whether a process failed by itself before a node was last heard of."""
    return fails_by_itself(root) and (root.known_failed_s or 0.0) < loss.last_seen_s


def _lost(facts: Facts) -> Conclusion:
    lines = [*describe_others(facts.endings)]
    for loss in facts.losses[1:]:
        lines.append(f"{loss.name} was lost too: {loss.words}")
    first = facts.losses[0]
    having = f", with {listed(first.processes)}," if first.processes else ""
    sentence = (
        f"{first.name}{having} was lost {max(0.0, first.last_seen_s - facts.start_s):.1f} s "
        f"after the start: {first.words}"
    )
    code = ProcessLostError.exit_code
    return Conclusion(code, tuple(lines), sentence, has_failed=True, is_from_outside=True)


def _failed(root: Ending, facts: Facts) -> Conclusion:
    """Return the conclusion about the first failure."""
    endings, news = facts.endings, facts.news
    if keeper := dead_host_keeper(root, news.host_keepers.values()):
        code = ProcessLostError.exit_code
        lines, sentence = describe_host_keeper(keeper, root, endings, facts.start_s)
    else:
        code = exit_code(root, endings)
        lines, sentence = describe_failure(root, endings, facts.start_s)
    if code == InitializeError.exit_code and news.joined and (absent := news.absent_words()):
        lines.append(absent)
    return Conclusion(
        code,
        tuple(lines),
        sentence,
        has_failed=True,
        cause=cause_of(root),
        step=root.step,
        is_from_outside=is_from_outside(root) or keeper is not None,
    )
