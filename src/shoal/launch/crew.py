"""What a job needs of the launchers that run it: of this one alone, or of several hosts'."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shoal.launch.conclusion import Conclusion, Facts, conclude
from shoal.launch.console import Console
from shoal.launch.environment import Addresses, HostShare, free_port
from shoal.launch.news import News
from shoal.launch.report import Ending
from shoal.launch.services import ServiceProcesses


class JobStart(NamedTuple):
    """What the processes of this host need to start."""

    share: HostShare
    total: int  # processes of the whole job
    addresses: Addresses
    token: str


class JobEnd(NamedTuple):
    """How the job ended on this host."""

    endings: Sequence[Ending]
    start_s: float
    trouble: str  # why it failed, if no process was the cause
    interrupted: signal.Signals | None


class PassedSignal(NamedTuple):
    """A signal of another node's launcher."""

    number: signal.Signals
    source: str  # "node 1 (host)"


class Crew(Protocol):
    """The launchers of a job. `turn` must be called whenever the loop has turned."""

    @property
    def start(self) -> JobStart | None:
        """What the processes need, once all is there."""

    @property
    def news(self) -> News:
        """The news of the meeting place."""

    @property
    def services(self) -> ServiceProcesses | None:
        """The services, where this launcher runs them."""

    @property
    def trouble(self) -> str:
        """Why the job cannot start or go on."""

    @property
    def has_failure(self) -> bool:
        """Whether a process of another node has failed, or a node is lost."""

    @property
    def is_waiting(self) -> bool:
        """Whether other nodes still have to end, or to say how the job ended."""

    @property
    def next_s(self) -> float:
        """When `turn` must be called at the latest."""

    def open(self) -> None:
        """Start what must be there before the processes."""

    def turn(self) -> Sequence[str]:
        """Do what is due; return lines to print."""

    def take_signals(self) -> Sequence[PassedSignal]:
        """Return the signals of other nodes since the last call."""

    def report_failure(self) -> None:
        """Report the first failure on this host."""

    def report_signal(self, number: signal.Signals) -> None:
        """Report a signal that ends the job."""

    def finish(self, end: JobEnd) -> None:
        """Report that all processes of this host have ended."""

    def conclude(self, end: JobEnd) -> Conclusion:
        """Return how the whole job ended; called when `is_waiting` is over."""


class Alone:
    """This launcher alone: a job on one host."""

    trouble = ""
    has_failure = is_waiting = False
    next_s = math.inf

    def __init__(self, console: Console, env: dict[str, str], log_dir: str, processes: int) -> None:
        """`env`: of the services, with the token of the job."""
        self._console, self._env, self._log_dir = console, env, log_dir
        self._processes = processes
        self.news = News(processes)
        self.services: ServiceProcesses | None = None
        self._start: JobStart | None = None

    def open(self) -> None:
        """Start the services."""
        loop = self._console.loop
        self.services = ServiceProcesses(self._processes, self._env, self._log_dir, loop)
        self.news = self.services.news

    @property
    def start(self) -> JobStart | None:
        """What the processes need, once both services listen."""
        if self._start is None and self.services and self.services.addresses:
            addresses = Addresses.of(self.services.addresses, f"127.0.0.1:{free_port()}")
            share = HostShare(0, 0, self._processes)
            self._start = JobStart(share, self._processes, addresses, self._env["SHOAL_TOKEN"])
        return self._start

    def turn(self) -> Sequence[str]:
        """Nothing is ever due."""
        return ()

    def take_signals(self) -> Sequence[PassedSignal]:
        """There are none."""
        return ()

    def report_failure(self) -> None:
        """There is no other node."""

    def report_signal(self, number: signal.Signals) -> None:
        """There is no other node."""

    def finish(self, end: JobEnd) -> None:
        """There is no other node."""

    def conclude(self, end: JobEnd) -> Conclusion:
        """Return how the job ended."""
        endings = [e.with_report(self.news.gone.get(e.process)) for e in end.endings]
        return conclude(
            Facts(
                endings,
                self.news,
                self._processes,
                end.start_s,
                end.trouble,
                end.interrupted,
                self.news.has_saved,
            )
        )
