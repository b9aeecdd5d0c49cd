"""The attempts of a job: until one ends well, or no new one is allowed.

Each attempt is a separate job: its services, its token and its processes are new, and nothing of
the earlier one survives. Attempts share the console and the signals to the launcher.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

from shoal.launch.console import Console
from shoal.launch.crew import Crew, Judge
from shoal.launch.descendants import kill_all
from shoal.launch.job import Job
from shoal.launch.order import JobOrder
from shoal.launch.restarting.restarts import RestartRules

_BETWEEN_S = 5.0  # for the rest of an attempt to end

CrewOf = Callable[[JobOrder, int, Console, Judge], Crew]


class Attempts:
    """Runs a job, in a process of its own (`keeper.run_in_keeper`), repeatedly if so ordered.

    Args:
      crew_of: returns the launchers of an attempt, by its number: this one alone, or all nodes'.
    """

    def __init__(self, order: JobOrder, crew_of: CrewOf) -> None:
        self._order, self._crew_of = order, crew_of

    def run(self, orders_fd: int) -> int:
        """Run the job to the end of its last attempt; return the exit code of that one."""
        order, console, rules = self._order, Console(), RestartRules(self._order.restarts)
        keeps_logs = order.keeps_logs
        while True:
            crew = self._crew_of(order, rules.attempt, console, rules.judge)
            # The reports of the others are of use after the last failure; before, they cost time.
            aftermath_s = order.aftermath_s if rules.is_last else order.between_s
            job = Job(order, rules.attempt, console, crew, min(aftermath_s, order.aftermath_s))
            conclusion = job.run(orders_fd)
            keeps_logs |= conclusion.has_failed
            if not conclusion.again:
                break
            order = order.next(is_announced=conclusion.is_announced)
            kill_all(within_s=_BETWEEN_S)
            console.print(conclusion.next_words)
        if not keeps_logs:
            shutil.rmtree(order.log_dir, ignore_errors=True)
        return conclusion.code
