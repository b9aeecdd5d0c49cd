"""The variables by which a process of a job gets its place, as it began: its children inherit them.

A process of the job may start another launcher, whose processes have the variables of both. So
`shoal run`, and a process that joins its job, note in the environment what the values are. Those
that a child finds changed, or new, are of a launcher further inside.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from shoal.runtime.failures.last_record import VARIABLE as RECORD_FILE

VARIABLE = "SHOAL_LAUNCHED"
# Of all launchers: what says which process of which job this is. Without `launcher_table`, which
# the start of `shoal run` does without.
_LAUNCHER_VARIABLES = (
    "SHOAL_PROCESS_ID", "SHOAL_NUM_PROCESSES", "SHOAL_COORDINATOR", "SHOAL_JAX_SERVICE",
    "SHOAL_JOB", "SHOAL_PROGRESS_FILE",
    "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS",
    "DTENSOR_CLIENT_ID", "DTENSOR_JOBS",
    "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri",
    "PMIX_RANK", "PMIX_NAMESPACE",
    "PMI_RANK", "PMI_SIZE", "PMI_JOBID",
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "JOB_COMPLETION_INDEX",
)  # fmt: skip


def note_of(env: Mapping[str, str], pid: int = 0) -> str:
    """Return the value of SHOAL_LAUNCHED for the children of a process with this environment.

    Args:
      pid: of that process; 0: not known yet.
    """
    values = [f"{name}:{_digest(env[name])}" for name in _LAUNCHER_VARIABLES if env.get(name)]
    return " ".join([str(pid), *values])


def inherited(env: Mapping[str, str]) -> set[str]:
    """Return the variables that this process shares with the process of a job that started it.

    Empty if there is none, or if that is this process, which may have changed them itself.
    """
    pid, *values = env.get(VARIABLE, "").split() or [""]
    of_recorder = env.get(RECORD_FILE, "").partition(":")[0]  # the process that `shoal run` started
    if str(os.getpid()) in (pid, of_recorder):
        return set()
    return {
        name
        for name in _LAUNCHER_VARIABLES
        if env.get(name) and f"{name}:{_digest(env[name])}" in values
    }


def _digest(value: str) -> str:
    return f"{zlib.crc32(value.encode(errors='surrogateescape')):08x}"
