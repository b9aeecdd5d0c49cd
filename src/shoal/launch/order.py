"""The order of a job: the request of the command line."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # which would import hashlib: a job on this host alone does without
    from shoal.runtime.startup.job_token import JobToken

# Of node 0, all of which all hosts must reach: four in a row, so that a firewall can open them.
#
#     P      the launchers of all nodes
#     P + 1  the coordinator
#     P + 2  JAX's service
#     P + 3  torch's store (MASTER_PORT), where the program starts it
NUM_PORTS = 4


class NodesOrder(NamedTuple):
    """The place of this launcher among those of a job on several hosts."""

    nodes: int  # number of nodes
    node: int
    host: str  # by which the launchers of all hosts reach that of node 0
    port: int
    token: JobToken  # of the launchers; that of the job's processes is derived from it
    timeout_s: float  # for all launchers to join
    warn_after_s: float  # a wait this long names the missing nodes
    lost_after_s: float = math.inf  # a launcher that was there and is silent this long is lost
    is_announced: bool = False  # node 0 has said that this attempt begins


class Restarts(NamedTuple):
    """When a job that has ended is started again."""

    most: int  # new attempts after failures
    after_preemption: bool  # as often as needed, after exit code 75

    @property
    def options(self) -> str:
        """The options of the command line."""
        flag = " --restart-preempted" if self.after_preemption else ""
        return f"--max-restarts {self.most}{flag}"


class JobOrder(NamedTuple):
    """The order of a job: what to run, and how."""

    command: tuple[str, ...]  # `script, args…` or `-m, module, args…`; see `is_python`
    processes: int  # on this host
    devices: int | None  # virtual CPU devices per process; None: the existing devices
    shown: frozenset[int] | None  # processes whose output is shown; None: all
    log_dir: str
    keeps_logs: bool  # always; else only if the job fails
    failure_grace_s: float  # from the first failure to SIGTERM for the others, at the last attempt
    grace_s: float  # from SIGTERM to SIGKILL
    prefix: bool = True  # prefix each line with its process
    leave_s: float = math.inf  # from a SIGTERM taken as a notice to SIGKILL
    warn_after_s: float = math.inf  # from the end of the others until the remaining ones are listed
    lost_after_s: float = math.inf  # how long a process may live without its connection
    nodes: NodesOrder | None = None  # None: a job on this host alone
    restarts: Restarts | None = None  # None: one attempt
    between_s: float = math.inf  # like failure_grace_s, if a new attempt follows and none saves
    stdin: int | None = None  # the process that reads standard input; None: the only one
    is_python: bool = True  # False: `command` is a program with its arguments
    quiet: bool = False  # print nothing at the end of a good run
    suspect_since_s: float | None = None  # of the compile cache; see `environment.variables`

    def next(self, *, is_announced: bool) -> JobOrder:
        """Return the order of the next attempt."""
        nodes = self.nodes and self.nodes._replace(is_announced=is_announced)
        return self._replace(nodes=nodes)

    @property
    def import_root(self) -> str:
        """The directory from which the program's own modules are imported."""
        return "" if self.command[0] == "-m" else os.path.dirname(self.command[0])

    def attempt_dir(self, attempt: int) -> str:
        """Return the directory of the logs of an attempt."""
        return os.path.join(self.log_dir, f"attempt{attempt}") if self.restarts else self.log_dir
