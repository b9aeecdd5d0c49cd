"""News of the coordinator for the launcher: joined and lost processes, in order.

The launcher learns of a failure twice: from the coordinator, in the order in which processes
failed, and when it reaps a child, in the order in which they exited. The first order determines
which failure is the cause.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from shoal.runtime.exit.first_failure import Gone, last_call_of
from shoal.runtime.failures.last_record import record_in
from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.programs import Differences, differences_of
from shoal.runtime.rules.stalls import Stall, stall_of
from shoal.runtime.rules.stopping import SAVED

_BY = "shoal.initialize() or jax.distributed.initialize()"


class HostAgentNews(NamedTuple):
    """The host agent of a host, between JAX's service and the host's JAX clients."""

    pid: int
    host: str
    processes: tuple[int, ...]
    gone_s: float | None = None  # when its connection ended, if before the job's end
    code: int | None = None  # its return code as in subprocess, if known


class News:
    """All news so far."""

    def __init__(self, num_processes: int) -> None:
        self.joined: set[int] = set()  # to shoal's job, or to JAX's
        self.joined_by_jax: set[int] = set()  # of these, to JAX's alone
        self.gone: dict[int, Gone] = {}
        self.host_agents: dict[str, HostAgentNews] = {}
        self.stalled: Stall | None = None  # for which the job was ended
        self.programs = Differences()  # that only some had compiled, at the first failure
        self.lost_service = ""  # the lost service, and why
        self.has_notice = False  # a preemption notice is open
        self.notice_s: float | None = None  # when the first one came, on the monotonic clock
        self.has_saved = False  # all that the program did before it stopped for the notice
        self.preempted = ""  # and the program has stopped for it: what is saved, and what is lost
        self.has_failed_save = False  # and a save failed at its end
        self.is_said_apart = False  # that no process has joined, while they ran
        self._dismissed: set[int] = set()
        self._all = range(num_processes)

    def receive(self, message: Mapping[str, Any]) -> None:
        """Take one line of news.

        Raises:
          ValueError, KeyError, TypeError: it is not a line of `coordinator.Coordinator`.
        """
        if not self.programs and "programs" in message:
            self.programs = differences_of(message["programs"])
        if "notice" in message:
            self.has_notice = bool(message["notice"])
            if self.has_notice and self.notice_s is None:
                self.notice_s = time.monotonic()
            reason = str(message.get("words", ""))
            self.has_saved = bool(message["saved"])
            self.preempted = SAVED if self.has_saved else reason
            self.has_failed_save = bool(message.get("has_failed"))
        elif "joined" in message:
            self._join(int(message["joined"]), by_jax=bool(message.get("by_jax")))
        elif "dismissed" in message:
            self._dismissed.add(int(message["dismissed"]))
        elif "stalled" in message:
            self.stalled = stall_of(message["stalled"])
            self.programs = self.programs or self.stalled.programs
        elif "gone" in message:
            self._on_gone(int(message["gone"]), message)
        elif "keeper" in message:
            processes = tuple(map(int, message["processes"]))
            pid, host = int(message["pid"] or 0), str(message["host"])
            self.host_agents[message["keeper"]] = HostAgentNews(pid, host, processes)
        elif "keeper_gone" in message:
            kept = self.host_agents[message["keeper_gone"]]
            self.host_agents[message["keeper_gone"]] = kept._replace(gone_s=float(message["at_s"]))
        else:
            self.lost_service = f"{message['service']} is lost ({message['words']})"

    def absent_words(self) -> str:
        """Return a line about processes that never joined.

        Empty if all did, if there is one, or if it was said while they ran.
        """
        absent = [process for process in self._all if process not in self.joined]
        if not self.joined:
            return "" if self.is_said_apart else self.apart_words()
        if not absent:
            return ""
        return f"{listed(absent)} of {len(self._all)} never joined the job: each must call {_BY}"

    def apart_words(self, *, can_join: bool = False) -> str:
        """Return a line if none of several processes has joined, else an empty string.

        Args:
          can_join: whether one still can, as far as is known.
        """
        if self.joined or len(self._all) == 1:
            return ""
        yet, later = (" yet", "join later, or ") if can_join else ("", "")
        return (
            f"no process has joined the job{yet}, by {_BY}: unless they {later}joined by other "
            f"means, these are {len(self._all)} separate programs"
        )

    def note_end(self, pid: int, code: int, processes: Collection[int]) -> None:
        """Note the end of a child; a host agent becomes one as soon as its parent has ended.

        Args:
          processes: of this host: a host agent of another host may have the same pid.
        """
        for host, host_agent in self.host_agents.items():
            if host_agent.pid == pid and not set(processes).isdisjoint(host_agent.processes):
                self.host_agents[host] = host_agent._replace(code=code)

    def _join(self, process: int, *, by_jax: bool) -> None:
        """Record a join; the process may have left, or failed to join, an earlier job."""
        if process in self._all:
            if by_jax and process not in self.joined:
                self.joined_by_jax.add(process)
            elif not by_jax:
                self.joined_by_jax.discard(process)
            self.joined.add(process)
            self.gone.pop(process, None)
            self._dismissed.discard(process)

    def _on_gone(self, process: int, message: Mapping[str, Any]) -> None:
        others = self.joined - {process}
        knows_missed = message.get("is_missed")  # a launcher that hears of all processes does
        is_missed = any(p not in self.gone or self.gone[p].state != "left" for p in others)
        self.gone[process] = Gone(
            state=str(message["state"]),
            words=str(message["words"]),
            at_s=float(message["at_s"]),
            is_dismissed=process in self._dismissed,
            follows=bool(message.get("follows")),
            at=last_call_of(message.get("at")),
            is_missed=is_missed if knows_missed is None else bool(knows_missed),
            why=str(message.get("why", "")),
            record=record_in(str(message.get("end", ""))),
        )
