"""The launchers that shoal detects: one row each, with the variables that each sets.

The order is the rule: from the innermost launcher outwards, because `srun torchrun` and `mpirun`
inside an allocation carry the variables of both, and the outer one says "one task".

PMIx gives a process its rank, and no count. Where its server is a scheduler's (`srun --mpi=pmix`),
the scheduler's own variables have both. PRRTE (`prterun` of Open MPI 5) sets no others, and those
of an allocation around it are of another job: there the count is missing, which is an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from shoal.errors import InitializeError
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.system.local_devices import devices_seen
from shoal.runtime.system.process_status import status_of
from shoal.runtime.wire.frames import address_text

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """The variables of one launcher. Those of one number must agree; half a pair is an error."""

    name: str
    indices: tuple[str, ...]
    counts: tuple[str, ...]
    address: Callable[[Environment], str | None] = lambda env: None  # of the coordinator
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
    def identity(self) -> tuple[str, ...]:
        """The variables that say which process of which job this is."""
        return (*self.indices, *self.counts, *self.same_index, *self.job)

    @property
    def own(self) -> tuple[str, ...]:
        """The variables that a process gets again where its job is started within another one."""
        numbers = (*self.indices, *self.counts, *self.local_indices, *self.local_counts)
        return (*numbers, *self.same_index, *self.job)


def variables_of(env: Environment, names: Iterable[str]) -> dict[str, str]:
    """Return those of the variables that are set, stripped."""
    return {name: env[name].strip() for name in names if env.get(name, "").strip()}


def shown(variables: Mapping[str, object]) -> str:
    """Return variables or arguments as text.

    >>> shown({"RANK": "1", "WORLD_SIZE": "4"})
    'RANK=1, WORLD_SIZE=4'
    """
    return ", ".join(f"{name}={value}" for name, value in variables.items())


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
    if not host or not port:
        return None
    return address_text(host, derived_port(f"torchrun {host} {port}"))


def _slurm_address(env: Environment) -> str | None:
    host = first_host(env.get("SLURM_STEP_NODELIST", ""))
    step = f"slurm {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return address_text(host, derived_port(step)) if host else None


def _pmi_address(env: Environment) -> str | None:
    """`srun --mpi=pmi2` sets PMI's variables too: the job is the step itself."""
    step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return _slurm_address(env) if env.get("PMI_JOBID", "").strip() == step else None


# ---- The pods of a Kubernetes Job or JobSet, by their variables and names, without its API.
#
# Kubernetes sets JOB_COMPLETION_INDEX in each pod of an indexed Job, and names it
# `<job>-<index>`. It does not set their number, so the manifest does, in SHOAL_NUM_PROCESSES. A
# JobSet names its jobs `<set>-<name>-<job index>`; if several have one name, the manifest passes
# JOB_INDEX and REPLICATED_JOB_REPLICAS to the pods from their annotations (JOBSET_NAME too, if
# its headless service has that name and the pod's fully qualified name does not show it).


POD_OWN = "JOB_COMPLETION_INDEX"
# In all jobs of its JobSet; stands in the environment like a variable.
POD_INDEX = "index of the pod"
_JOB, _JOBS, _SET = "JOB_INDEX", "REPLICATED_JOB_REPLICAS", "JOBSET_NAME"


def pods_completing(index: str, count: str) -> Callable[[Environment, list[str]], Environment]:
    """Return a function that adds the pod's index to an environment with a count and no index."""

    def completed(env: Environment, problems: list[str]) -> Environment:
        if (
            _pod_text(env, index)
            or _pod_text(env, count) in ("", "1")
            or not _pod_text(env, POD_OWN)
        ):
            return env  # with "1", each pod is process 0 of a job of its own
        return {**env, POD_INDEX: _pod_index(env, count, problems)}

    return completed


def _pod_address(env: Environment) -> str | None:
    """Return the address of pod 0, by its name in the headless service; None: unknown."""
    own, job_index = _pod_text(env, POD_OWN), _pod_text(env, _JOB)
    host = _pod_text(env, "HOSTNAME") or socket.gethostname()
    if not own or not host.endswith(f"-{own}"):
        return None
    job = host.removesuffix(f"-{own}")
    if job_index and _pod_text(env, _JOBS) not in ("", "1"):
        if not job.endswith(f"-{job_index}"):
            return None
        job = job.removesuffix(f"-{job_index}") + "-0"
    domain = _pod_text(env, _SET) or socket.getfqdn(host).partition(".")[2]
    return f"{job}-0.{domain}:{derived_port(f'pods of {job}')}" if domain else None


def _pod_index(env: Environment, count: str, problems: list[str]) -> str:
    """Return the index of the pod in all jobs; JOB_COMPLETION_INDEX after a problem."""
    texts = {name: _pod_text(env, name) for name in (POD_OWN, _JOB, _JOBS, count)}
    if not texts[_JOB] and not texts[_JOBS]:
        return texts[POD_OWN]
    shown = ", ".join(f"{name}={value}" for name, value in texts.items() if value)
    if not texts[_JOB] or not texts[_JOBS]:
        lacking = _JOB if texts[_JOBS] else _JOBS
        if texts[_JOB] != "0" and texts[_JOBS] != "1":  # else it has no effect
            problems.append(f"{shown} without {lacking}: which of the JobSet's jobs is this?")
        return texts[POD_OWN]
    if not all(value.isascii() and value.isdigit() for value in texts.values()):
        problems.append(f"{shown}: all of them must be whole numbers")
        return texts[POD_OWN]
    own, job, jobs, pods = (int(value) for value in texts.values())
    if jobs < 1 or pods % jobs or job >= jobs or own >= pods // jobs:
        problems.append(
            f"{shown} contradict each other: {count} counts the pods of all {jobs} jobs, and "
            f"{POD_OWN} those of one"
        )
        return texts[POD_OWN]
    return str(job * (pods // jobs) + own)


def _pod_text(env: Environment, name: str) -> str:
    return env.get(name, "").strip()


# ---- The hosts of a Slurm step, from its variables.


SLURM_LOCAL_COUNT = "tasks of this node"  # stands in the environment like a variable
_PER_NODE, _NODE = "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
_SLURM_BINDING = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")


def slurm_completed(env: Mapping[str, str], problems: list[str]) -> Mapping[str, str]:
    """Return the environment, with the number of tasks of this node if it is known."""
    counts = counts_of_nodes(env.get(_PER_NODE, ""))
    node = env.get(_NODE, "").strip()
    if node.isascii() and node.isdigit() and int(node) < len(counts):
        return {**env, SLURM_LOCAL_COUNT: str(counts[int(node)])}
    return env


def counts_of_nodes(listed: str) -> list[int]:
    """Return the tasks of each node, from Slurm's short form; [] if it is malformed.

    >>> counts_of_nodes("4(x2),1")
    [4, 4, 1]
    """
    counts: list[int] = []
    for part in listed.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def binds_gpus(env: Mapping[str, str]) -> bool:
    """Return whether Slurm shows each task only its own GPUs.

    >>> binds_gpus({"SLURM_GPUS_PER_TASK": "1"}), binds_gpus({"SLURM_GPU_BIND": "none"})
    (True, False)
    """
    if "gpu" in env.get("SLURM_TRES_PER_TASK", ""):
        return True
    given = (env.get(name, "").strip() for name in _SLURM_BINDING)
    return any(value not in ("", "none") for value in given)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("n[007-010,12],m1")
    'n007'
    """
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodes.strip())
    return "".join(part or "" for part in match.groups()) if match else ""


# ---- The hosts of a TPU slice, as JAX's own detection finds them.
#
# On GKE it reads variables, on other TPU VMs the metadata server. It runs only if chips are
# attached or variables name TPU hosts, and JAX may use them.


TPU_INDEX, TPU_COUNT = "TPU host", "TPU hosts"  # stand in the environment like variables
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES_PATH", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_TPU_READ = (
    "JAX_PLATFORMS", *_TPU_HOSTS, "TPU_WORKER_ID", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES",
    "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS",
)  # fmt: skip
_RESOLVE_S = 300


def tpu_completed(env: Environment, problems: list[str]) -> Environment:
    """Return the environment, with index and count if this is a TPU host.

    Raises:
      InitializeError: it looks like a TPU host, and JAX's detection failed.
    """
    numbers = _tpu_numbers(*(env.get(name) for name in _TPU_READ))
    return (
        env if numbers is None else {**env, TPU_INDEX: str(numbers[0]), TPU_COUNT: str(numbers[1])}
    )


def tpu_address(env: Environment) -> str | None:
    """Return the address of the first host, with the port that JAX would use.

    Raises:
      InitializeError: its name does not resolve.
    """
    detected = _tpu_detected(*(env.get(name) for name in _TPU_READ))
    if detected is None:
        return None
    try:
        return str(
            detected.get_coordinator_address(
                timeout_secs=_RESOLVE_S, override_coordinator_port=None
            )
        )
    except Exception as error:
        raise _tpu_undetected(error) from error


@functools.cache  # if the metadata server does not answer, JAX retries for seconds
def _tpu_numbers(*values: str | None) -> tuple[int, int] | None:
    """Return the index of this host and the number of hosts, given the values of `_TPU_READ`."""
    numbers = _tpu_detected(*values)
    if numbers is None:
        return None
    try:
        return int(numbers.get_process_id()), int(numbers.get_process_count())
    except Exception as error:  # of JAX and of the metadata server: many types
        raise _tpu_undetected(error) from error


def _tpu_detected(*values: str | None) -> Any:
    """Return JAX's description of the TPU slice of this host; None: it has none."""
    env = {name: value for name, value in zip(_TPU_READ, values, strict=True) if value is not None}
    platforms = env.get("JAX_PLATFORMS", "").strip()
    if platforms and "tpu" not in platforms.split(","):
        return None
    if not devices_seen("tpu", env)[0] and not any(env.get(name) for name in _TPU_HOSTS):
        return None
    try:
        return next((kind for kind in jax_runtime.tpu_hosts() if kind.is_env_present()), None)
    except Exception as error:
        raise _tpu_undetected(error) from error


def _tpu_undetected(error: Exception) -> InitializeError:
    return InitializeError(
        "initialize: this is a TPU host, but JAX's detection of its slice failed: "
        f"{type(error).__name__}: {error}\n"
        "pass num_processes=, process_id= and coordinator_address=, or set JAX_PLATFORMS=cpu to "
        "leave the TPU alone"
    )


# ---- The variables that start a job of TensorFlow's DTensor.
#
# DTENSOR_JOBS lists host:port of every process; the processes meet at its first entry.
# DTENSOR_CLIENT_ID is the index of this process's entry, 0 by default. DTENSOR_NUM_CLIENTS, of
# early versions, is the number of processes.


DTENSOR_INDEX = "DTENSOR_CLIENT_ID"
DTENSOR_COUNT = "entries of DTENSOR_JOBS"  # named like a variable
_DTENSOR_JOBS, _NUMBER = "DTENSOR_JOBS", "DTENSOR_NUM_CLIENTS"


def jobs_of(listed: str) -> list[str]:
    """Return the entries of DTENSOR_JOBS, without surrounding blanks; [] if there are none.

    >>> jobs_of("a:1, b:1"), jobs_of("")
    (['a:1', 'b:1'], [])
    """
    return [entry.strip() for entry in listed.split(",")] if listed.strip() else []


def dtensor_completed(env: Mapping[str, str], problems: list[str]) -> Mapping[str, str]:
    """Return the environment, with index and count added if this is a process of DTensor."""
    jobs = jobs_of(env.get(_DTENSOR_JOBS, ""))
    index, count = (env.get(name, "").strip() for name in (DTENSOR_INDEX, _NUMBER))
    if jobs:
        if "" in jobs:
            problems.append(f"{_DTENSOR_JOBS}={env[_DTENSOR_JOBS]!r} has an empty entry")
        if count and count != str(len(jobs)):
            problems.append(f"{_NUMBER}={count} contradicts the {len(jobs)} {DTENSOR_COUNT}")
        return {**env, DTENSOR_INDEX: index or "0", DTENSOR_COUNT: str(len(jobs))}
    shown = [
        f"{name}={value}"
        for name, value, alone in ((DTENSOR_INDEX, index, "0"), (_NUMBER, count, "1"))
        if value not in ("", alone)
    ]
    if shown:
        problems.append(
            f"{' and '.join(shown)} without {_DTENSOR_JOBS}: in multi-client mode it lists "
            "host:port of every process"
        )
    return {name: value for name, value in env.items() if name != DTENSOR_INDEX}


def dtensor_address(env: Mapping[str, str]) -> str | None:
    """Return the coordinator's address: the entry of process 0, or None if it is not an address."""
    first = next(iter(jobs_of(env.get(_DTENSOR_JOBS, ""))), None)
    if first is None or first.startswith("/bns/"):
        return None
    return first


# ---- Find the process of this machine that launched the local processes of a job.


def launcher_of(variables: Collection[str], daemon: str = "") -> str:
    """Return an identifier of the launcher, equal for all processes of this host that it started.

    The launcher is the nearest ancestor that was started without all of `variables` ("PMI_RANK=3"),
    which it sets for its children: wrapper scripts in between inherit them. So does a launcher that
    is started within a process of another job; it has other ones, or is known as a program called
    `daemon`. Without /proc it is the parent.
    """
    wanted = {variable.encode() for variable in variables}
    status = status_of(os.getpid())
    with contextlib.suppress(OSError):  # one of them has ended
        while status is not None:
            pid = status.parent
            if pid == 0:  # outside of this container
                return "outside"
            status = status_of(pid)
            is_launcher = pid == 1 or _name(pid) == daemon or not wanted <= environment_of(pid)
            if status is not None and is_launcher:
                return f"{pid} started {status.started_ticks}"
    return str(os.getppid())


def environment_of(pid: int) -> set[bytes]:
    """Return the variables that a process was started with; empty for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except PermissionError:
        return set()


def _name(pid: int) -> str:
    """Return the name of a process's program: at most 15 characters of it."""
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()


# ---- The table, in the order in which it is searched.
#
# A row needs more elsewhere: what identifies a process in `inherited`, its index on the host in
# `host_agent_link`, its variables on docs/settings.md and docs/starting.md, their prefix in
# tests/conftest.py (test_launchers.py compares all of these), and its name where `initialize` and
# docs/install.md list them.

_PMIX = (
    "pass num_processes=, process_id= and coordinator_address=, or set SHOAL_NUM_PROCESSES,"
    " SHOAL_PROCESS_ID and SHOAL_COORDINATOR (mpirun of Open MPI sets the count itself)"
)

LAUNCHERS = (
    Launcher(
        name="SHOAL_*",
        indices=("SHOAL_PROCESS_ID", POD_INDEX),
        counts=("SHOAL_NUM_PROCESSES",),
        address=_pod_address,
        local_indices=("LOCAL_RANK",),  # `shoal run` sets torchrun's, too
        local_counts=("LOCAL_WORLD_SIZE",),
        completed=pods_completing("SHOAL_PROCESS_ID", "SHOAL_NUM_PROCESSES"),
    ),
    Launcher(
        name="JAX_*",
        indices=("JAX_PROCESS_ID", POD_INDEX),
        counts=("JAX_NUM_PROCESSES",),
        address=_pod_address,
        completed=pods_completing("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ),
    Launcher(
        name="DTensor",
        indices=(DTENSOR_INDEX,),
        counts=(DTENSOR_COUNT,),
        address=dtensor_address,
        completed=dtensor_completed,
    ),
    Launcher(
        name="torchrun",
        indices=("RANK",),
        counts=("WORLD_SIZE",),
        address=_torchrun_address,
        local_indices=("LOCAL_RANK",),
        local_counts=("LOCAL_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        name="Open MPI",
        indices=("OMPI_COMM_WORLD_RANK",),
        counts=("OMPI_COMM_WORLD_SIZE",),
        same_index=("PMIX_RANK",),
        local_indices=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_counts=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    Launcher(
        name="PRRTE", indices=("PMIX_RANK",), counts=(), needs=("PRTE_LAUNCHED",), advice=_PMIX
    ),
    Launcher(
        name="MPICH",
        indices=("PMI_RANK",),
        counts=("PMI_SIZE",),
        address=_pmi_address,
        local_indices=("MPI_LOCALRANKID",),
        local_counts=("MPI_LOCALNRANKS",),
        job=("PMI_JOBID",),
        daemon="hydra_pmi_proxy",
    ),
    Launcher(
        name="Slurm step",
        indices=("SLURM_PROCID",),
        counts=("SLURM_STEP_NUM_TASKS",),
        address=_slurm_address,
        local_indices=("SLURM_LOCALID",),
        local_counts=(SLURM_LOCAL_COUNT,),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        no_job=("SLURM_PROCID=0",),  # a batch script, which is not a step of several processes
        binds_devices=binds_gpus,
        completed=slurm_completed,
    ),
    Launcher(
        name="TPU",
        indices=(TPU_INDEX,),
        counts=(TPU_COUNT,),
        address=tpu_address,
        completed=tpu_completed,
    ),
    Launcher(
        name="Kubernetes",
        indices=(POD_OWN,),
        counts=(),
        needs=("KUBERNETES_SERVICE_HOST",),
        advice="let the manifest set SHOAL_NUM_PROCESSES to the Job's parallelism, or to 1 where "
        "each pod is a job of its own",
        shows_job=False,  # the pods of an indexed Job may be independent
    ),
    Launcher(name="PMIx", indices=("PMIX_RANK",), counts=(), advice=_PMIX),
)  # fmt: skip
