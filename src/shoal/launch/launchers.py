"""The interface of a job to its launchers: this one alone, or those of several hosts."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from shoal.launch.conclusion import Conclusion, Facts, Loss, conclude
from shoal.launch.environment import Addresses, HostShare, JobStart, free_port
from shoal.launch.loop import Console
from shoal.launch.news import News
from shoal.launch.order import JobOrder
from shoal.launch.services import EarlyServices, ServiceProcesses
from shoal.runtime.exit.first_failure import ProcessExit
from shoal.runtime.system.progress_file import StepProgress


class JobExit(NamedTuple):
    """How the job ended on this host."""

    exits: Sequence[ProcessExit]
    start_s: float
    problem: str  # why it failed, if no process was the cause
    interrupted: signal.Signals | None
    progress: StepProgress = StepProgress()  # by the processes of this host
    is_of_services: bool = False  # the problem
    is_service_killed: bool = False  # by a signal from outside
    remaining: str = ""  # the processes that exist in spite of SIGKILL


Judge = Callable[[Conclusion, StepProgress, int], Conclusion]  # see `restarts.RestartRules.judge`


def facts_of(
    end: JobExit,
    exits: Iterable[ProcessExit],
    news: News,
    total: int,
    losses: Sequence[Loss] = (),
) -> Facts:
    """Return the facts about a job that has ended.

    Args:
      exits: of all known processes, on all nodes.
      total: the planned number of processes; -1: it has not begun.
    """
    reported = [
        process_exit.with_report(news.gone.get(process_exit.process))._replace(
            joined_by_jax=process_exit.process in news.joined_by_jax
        )
        for process_exit in exits
    ]
    return Facts(
        exits=reported,
        news=news,
        total=total,
        start_s=end.start_s,
        problem=end.problem,
        interrupted=end.interrupted,
        losses=losses if total >= 0 else (),
        is_of_services=end.is_of_services,
        is_service_killed=end.is_service_killed,
        progress=end.progress,
        remaining=end.remaining,
    )


class PassedSignal(NamedTuple):
    """A signal of another node's launcher."""

    number: signal.Signals
    source: str  # "node 1 (host)"


class Launchers(Protocol):
    """The launchers of a job. `turn` must be called after each turn of the loop."""

    @property
    def start(self) -> JobStart | None:
        """The addresses for the processes, once available."""

    @property
    def news(self) -> News:
        """The news of the coordinator."""

    @property
    def services(self) -> ServiceProcesses | None:
        """The services, where this launcher runs them."""

    @property
    def problem(self) -> str:
        """Why the job cannot start or continue."""

    @property
    def has_failure(self) -> bool:
        """Whether a process of another node has failed, or a node is lost."""

    @property
    def is_waiting(self) -> bool:
        """Whether other nodes still have to end, or to say how the job ended."""

    @property
    def next_s(self) -> float:
        """When `turn` must be called at the latest."""

    def open(self, early: EarlyServices) -> None:
        """Start the services that the processes need; `early`: services that wait already."""

    def turn(self) -> Sequence[str]:
        """Perform due actions; return lines to print."""

    def take_signals(self) -> Sequence[PassedSignal]:
        """Return the signals of other nodes since the last call."""

    def report_failure(self) -> None:
        """Report the first failure on this host."""

    def report_signal(self, number: signal.Signals) -> None:
        """Report a signal that ends the job."""

    def finish(self, end: JobExit) -> None:
        """Report that all processes of this host have ended."""

    def conclude(self, end: JobExit) -> Conclusion:
        """Return how the whole job ended, and whether a new attempt begins.

        Called when `is_waiting` is over.
        """

    def close(self) -> None:
        """End the services and all connections: nothing of this attempt is left."""


class SingleHost:
    """This launcher alone: a job on one host."""

    problem = ""
    has_failure = is_waiting = False
    next_s = math.inf

    def __init__(
        self, order: JobOrder, attempt: int, console: Console, env: dict[str, str], judge: Judge
    ) -> None:
        """`env`: of the services, with the token of the job."""
        self._console, self._env, self._judge = console, env, judge
        self._attempt, self._log_dir = attempt, order.attempt_dir(attempt)
        self._processes = order.processes
        self.news = News(order.processes)
        self.services: ServiceProcesses | None = None
        self._start: JobStart | None = None

    def open(self, early: EarlyServices) -> None:
        """Start the services."""
        self.services = ServiceProcesses(
            self._processes, self._env, self._log_dir, self._console.loop, early=early
        )
        self.news = self.services.news

    @property
    def start(self) -> JobStart | None:
        """The addresses for the processes, once both services listen."""
        if self._start is None and self.services and self.services.addresses:
            addresses = Addresses.of(self.services.addresses, f"127.0.0.1:{free_port()}")
            share = HostShare(0, 0, self._processes)
            token = self._env["SHOAL_TOKEN"]
            self._start = JobStart(share, self._processes, addresses, token, self._attempt)
        return self._start

    def turn(self) -> Sequence[str]:
        """Do nothing: no action is ever due."""
        return ()

    def take_signals(self) -> Sequence[PassedSignal]:
        """Return none: there is no other node."""
        return ()

    def report_failure(self) -> None:
        """Do nothing: there is no other node."""

    def report_signal(self, number: signal.Signals) -> None:
        """Do nothing: there is no other node."""

    def finish(self, end: JobExit) -> None:
        """Do nothing: there is no other node."""

    def conclude(self, end: JobExit) -> Conclusion:
        """Return how the job ended."""
        facts = facts_of(end, end.exits, self.news, self._processes)
        return self._judge(conclude(facts), end.progress, self._attempt)

    def close(self) -> None:
        """End the services."""
        if self.services:
            self.services.close()
