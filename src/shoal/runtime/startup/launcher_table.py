"""The launchers that shoal detects: one row each, with the variables that each sets.

The order is the rule: from the innermost launcher outwards, because `srun torchrun` and `mpirun`
inside an allocation carry the variables of both, and the outer one says "one task".

PMIx gives a process its rank, and no count. Where its server is a scheduler's (`srun --mpi=pmix`),
the scheduler's own variables have both. PRRTE (`prterun` of Open MPI 5) sets no others, and those
of an allocation around it are of another job: there the count is missing, which is an error.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from shoal.runtime.startup import dtensor_jobs, pods, slurm_step, tpu_hosts
from shoal.runtime.wire.frames import address_text

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """The variables of one launcher. Those of one number must agree; half a pair is an error."""

    name: str
    indices: tuple[str, ...]
    counts: tuple[str, ...]
    address: Callable[[Environment], str | None] = lambda env: None  # of the meeting place
    local_indices: tuple[str, ...] = ()  # among the processes of this host
    local_counts: tuple[str, ...] = ()
    same_index: tuple[str, ...] = ()  # must agree with the index; not sufficient alone
    job: tuple[str, ...] = ()  # identify the job
    needs: tuple[str, ...] = ()  # required: without these the variables are not this launcher's
    no_job: tuple[str, ...] = ()  # halves of a pair that mean a job of one process
    binds_devices: Callable[[Environment], bool] = lambda env: False  # each process sees its own
    completed: Callable[[Environment, list[str]], Environment] = lambda env, problems: env
    advice: str = ""  # if the pair has no count
    shows_job: bool = True  # also before `initialize` is called
    daemon: str = ""  # the program that starts the processes of a host, and has their environment

    @property
    def own(self) -> tuple[str, ...]:
        """The variables that a process gets anew where its job is started within another one."""
        numbers = (*self.indices, *self.counts, *self.local_indices, *self.local_counts)
        return (*numbers, *self.same_index, *self.job)


def variables_of(env: Environment, names: Iterable[str]) -> dict[str, str]:
    """Return those of the variables that are set, stripped."""
    return {name: env[name].strip() for name in names if env.get(name, "").strip()}


def shown(found: Mapping[str, object]) -> str:
    """Return variables or arguments as text.

    >>> shown({"RANK": "1", "WORLD_SIZE": "4"})
    'RANK=1, WORLD_SIZE=4'
    """
    return ", ".join(f"{name}={value}" for name, value in found.items())


def derived_port(key: str) -> int:
    """Return a port derived from `key`, above Linux's ephemeral ports (as JAX does)."""
    return 61440 + zlib.crc32(key.encode()) % 4096


def jax_address(env: Environment) -> str | None:
    """Return JAX_COORDINATOR_ADDRESS, completed with JAX_COORDINATOR_PORT."""
    address = env.get("JAX_COORDINATOR_ADDRESS", "").strip()
    port = env.get("JAX_COORDINATOR_PORT", "").strip()
    if address and port and not re.search(r"(^[^:]*|\]):\d+$", address):
        address = address_text(address.strip("[]"), int(port)) if port.isdigit() else address
    return address or None


def _torchrun_address(env: Environment) -> str | None:
    """MASTER_PORT itself is in use by torch's own store."""
    host, port = env.get("MASTER_ADDR", "").strip(), env.get("MASTER_PORT", "").strip()
    return address_text(host, derived_port(f"torchrun {host} {port}")) if host and port else None


def _slurm_address(env: Environment) -> str | None:
    host = slurm_step.first_host(env.get("SLURM_STEP_NODELIST", ""))
    step = f"slurm {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return address_text(host, derived_port(step)) if host else None


def _pmi_address(env: Environment) -> str | None:
    """`srun --mpi=pmi2` sets PMI's variables too: the job is the step itself."""
    step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return _slurm_address(env) if env.get("PMI_JOBID", "").strip() == step else None


def _pod_address(env: Environment) -> str | None:
    return pods.address(env, derived_port)


_PMIX = (
    "give num_processes=, process_id= and coordinator_address=, or set SHOAL_NUM_PROCESSES,"
    " SHOAL_PROCESS_ID and SHOAL_COORDINATOR (mpirun of Open MPI sets the count itself)"
)

LAUNCHERS = (
    Launcher(
        "SHOAL_*",
        ("SHOAL_PROCESS_ID", pods.INDEX),
        ("SHOAL_NUM_PROCESSES",),
        _pod_address,
        ("LOCAL_RANK",),  # `shoal run` sets torchrun's, too
        ("LOCAL_WORLD_SIZE",),
        completed=pods.completing("SHOAL_PROCESS_ID", "SHOAL_NUM_PROCESSES"),
    ),
    Launcher(
        "JAX_*",
        ("JAX_PROCESS_ID", pods.INDEX),
        ("JAX_NUM_PROCESSES",),
        _pod_address,
        completed=pods.completing("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ),
    Launcher(
        "DTensor",
        (dtensor_jobs.INDEX,),
        (dtensor_jobs.COUNT,),
        dtensor_jobs.address,
        completed=dtensor_jobs.completed,
    ),
    Launcher(
        "torchrun",
        ("RANK",),
        ("WORLD_SIZE",),
        _torchrun_address,
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        same_index=("PMIX_RANK",),
        local_indices=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_counts=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    Launcher("PRRTE", ("PMIX_RANK",), (), needs=("PRTE_LAUNCHED",), advice=_PMIX),
    Launcher(
        "MPICH",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        _pmi_address,
        ("MPI_LOCALRANKID",),
        ("MPI_LOCALNRANKS",),
        job=("PMI_JOBID",),
        daemon="hydra_pmi_proxy",
    ),
    Launcher(
        "Slurm step",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        _slurm_address,
        ("SLURM_LOCALID",),
        (slurm_step.LOCAL_COUNT,),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        no_job=("SLURM_PROCID=0",),  # a batch script, which is not a step of several processes
        binds_devices=slurm_step.binds_gpus,
        completed=slurm_step.completed,
    ),
    Launcher("TPU", (tpu_hosts.INDEX,), (tpu_hosts.COUNT,), tpu_hosts.address,
             completed=tpu_hosts.completed),
    Launcher(
        "Kubernetes", (pods.OWN,), (), needs=("KUBERNETES_SERVICE_HOST",),
        advice="let the manifest set SHOAL_NUM_PROCESSES to the Job's parallelism, or to 1 where "
        "each pod is a job of its own",
        shows_job=False,  # the pods of an indexed Job may be independent
    ),
    Launcher("PMIx", ("PMIX_RANK",), (), advice=_PMIX),
)  # fmt: skip
