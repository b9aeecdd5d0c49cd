"""Environments that are partial, contradict themselves, or carry two launchers.

The variables of Open MPI, PRRTE, MPICH and torchrun are those that the real ones set (see
`tests/processes/test_starting.py`); Slurm's, Kubernetes' and TPUs' are as their manuals have them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InitializeError, UsageError
from shoal.runtime.startup import launcher_table
from shoal.runtime.startup.launcher_table import counts_of_nodes
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.options import Arguments
from shoal.runtime.system import local_devices
from shoal.runtime.system.local_devices import share

MPI4 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "15315.0;tcp://10.96.0.1:34911",
}  # fmt: skip
MPI5 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-h-7@1",
    "PRTE_LAUNCHED": "1",
}  # fmt: skip
TWO_HOSTS = {**MPI5, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCH = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
# `srun` of one task a node, in which torchrun or mpirun's daemon then starts the processes.
ONE_A_NODE = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
              "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2",
    "SHOAL_NUM_PROCESSES": "4",
}  # fmt: skip
SET = {
    **POD, "HOSTNAME": "run-pods-1-2", "JOBSET_NAME": "run", "JOB_INDEX": "1",
    "REPLICATED_JOB_REPLICAS": "2", "SHOAL_NUM_PROCESSES": "8",
}  # fmt: skip
TRAINER = {  # Kubeflow's, for JAX
    **POD, "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2", "SHOAL_NUM_PROCESSES": "",
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job", "JAX_COORDINATOR_PORT": "8476",
}  # fmt: skip
DTENSOR = {"DTENSOR_JOBS": "a:1,b:2", "DTENSOR_CLIENT_ID": "1"}
HERE = "a directory of this host"


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


@pytest.fixture(autouse=True)
def in_a_headless_service(monkeypatch):
    monkeypatch.setattr(
        launcher_table.socket, "getfqdn", lambda host: f"{host}.jobs.space.svc.cluster.local"
    )


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch):
    """Whatever this machine has."""
    monkeypatch.setattr(local_devices, "devices_seen", lambda platform, env: (0, False))


@pytest.mark.parametrize(
    ("env", "process", "count", "rule", "place"),
    [
        # one launcher
        (MPI4, 1, 4, "Open MPI", HERE),
        (MPI5, 1, 4, "Open MPI", HERE),
        (MPICH, 1, 2, "MPICH", HERE),
        (without(MPICH, "MPI_LOCALRANKID"), 1, 2, "MPICH", HERE),
        (TORCH, 5, 8, "torchrun", "node0:"),
        (SLURM, 5, 8, "Slurm step", "n1:"),
        (POD, 2, 4, "SHOAL_*", "train-0.jobs.space.svc.cluster.local:"),
        ({**POD, "JOBSET_NAME": "run", "HOSTNAME": "run-a-0-2"}, 2, 4, "SHOAL_*", "run-a-0-0.run:"),
        (SET, 6, 8, "SHOAL_*", "run-pods-0-0.run:"),
        ({**SET, "JOB_INDEX": "0", "HOSTNAME": "run-pods-0-2"}, 2, 8, "SH", "run-pods-0-0.run:"),
        (TRAINER, 2, 4, "JAX_*", "job-node-0-0.job:8476"),
        (without(TRAINER, "JAX_PROCESS_ID"), 2, 4, "JAX_*", "job-node-0-0.job:8476"),
        # on several hosts, with a place of the user's
        ({**TWO_HOSTS, "SHOAL_RENDEZVOUS": "/nfs/a"}, 1, 4, "Open MPI", "SHOAL_RENDEZVOUS"),
        ({**TWO_HOSTS, "SHOAL_COORDINATOR": "h:1"}, 1, 4, "Open MPI", "h:1"),
        ({**MPI5, "SHOAL_RENDEZVOUS": "/nfs/a"}, 1, 4, "Open MPI", "SHOAL_RENDEZVOUS"),
        ({**MPI5, "SHOAL_RENDEZVOUS": "/a", "SHOAL_COORDINATOR": "h:1"}, 1, 4, "Open MPI", "h:1"),
        ({**TWO_HOSTS, "JAX_COORDINATOR_ADDRESS": "j:2"}, 1, 4, "Open MPI", "j:2"),
        # nested: the inner one wins
        ({**TORCH, **ONE_A_NODE}, 5, 8, "torchrun", "node0:"),
        ({**MPI5, **ONE_A_NODE}, 1, 4, "Open MPI", HERE),
        ({**MPICH, **ONE_A_NODE}, 1, 2, "MPICH", HERE),
        ({**MPI5, **BATCH}, 1, 4, "Open MPI", HERE),
        ({**TORCH, **BATCH}, 5, 8, "torchrun", "node0:"),
        ({**TORCH, **MPI5}, 5, 8, "torchrun", "node0:"),
        ({**TORCH, **without(POD, "SHOAL_NUM_PROCESSES")}, 5, 8, "torchrun", "node0:"),
        ({**MPI5, **SLURM, **TORCH}, 5, 8, "torchrun", "node0:"),
        ({**DTENSOR, **TORCH}, 1, 2, "DTensor", "a:1"),
        ({**SLURM, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, 5, 8, "Slurm", "n1:"),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "77.0"}, 5, 8, "MPICH", "n1:"),
        ({**POD, "SHOAL_PROCESS_ID": "3", "SHOAL_COORDINATOR": "h:1"}, 3, 4, "SHOAL_*", "h:1"),
        # of one process
        (BATCH, 0, 1, "a job of one process", None),
        ({"SHOAL_NUM_PROCESSES": "1"}, 0, 1, "SHOAL_*", None),
        ({**POD, "SHOAL_NUM_PROCESSES": "1"}, 0, 1, "SHOAL_*", None),
        ({"WORLD_SIZE": "1"}, 0, 1, "torchrun", None),
        ({**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0",
          "MPI_LOCALNRANKS": "1"}, 0, 1, "MPICH", None),
    ],
)  # fmt: skip
def test_environment_selects_the_rule_and_place(env, process, count, rule, place):
    decided = decide(Arguments(), env)
    assert (decided.process, decided.num_processes) == (process, count)
    assert decided.reason.startswith(rule) or rule in decided.reason
    assert (decided.rendezvous is not None) == (place in (HERE, "SHOAL_RENDEZVOUS"))
    if decided.rendezvous is not None:
        assert decided.reason.endswith(f"address from {place}")
        assert decided.rendezvous.on_one_host == (place == HERE)
    else:
        assert (decided.address is None) == (place is None)
        assert (decided.address or "").startswith(place or "")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        # partial
        ({"RANK": "3"}, ["RANK=3", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        ({"RANK": "3", **MPICH}, ["RANK=3", "WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "3"}, ["OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, ["OMPI_COMM_WORLD_SIZE=3", "OMPI_COMM_WORLD_RANK"]),
        ({"PMI_RANK": "3"}, ["PMI_RANK=3", "PMI_SIZE"]),
        ({"PMI_SIZE": "3"}, ["PMI_SIZE=3", "PMI_RANK"]),
        ({**BATCH, "SLURM_PROCID": "3"}, ["SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS"]),
        (without(SLURM, "SLURM_PROCID"), ["SLURM_STEP_NUM_TASKS=8", "SLURM_PROCID"]),
        ({"SHOAL_PROCESS_ID": "1"}, ["SHOAL_PROCESS_ID=1", "SHOAL_NUM_PROCESSES"]),
        ({"JAX_NUM_PROCESSES": "2", **TORCH}, ["JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID"]),
        ({"SHOAL_COORDINATOR": "h:1"}, ["SHOAL_COORDINATOR=h:1", "SHOAL_NUM_PROCESSES"]),
        ({"SHOAL_RENDEZVOUS": "/a"}, ["SHOAL_RENDEZVOUS=/a", "SHOAL_NUM_PROCESSES"]),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, ["JAX_COORDINATOR_ADDRESS=h:1", "without a count"]),
        (without(SET, "REPLICATED_JOB_REPLICAS"), ["JOB_INDEX=1", "REPLICATED_JOB_REPLICAS"]),
        (without(SET, "JOB_INDEX"), ["REPLICATED_JOB_REPLICAS=2", "without JOB_INDEX"]),
        # no address
        (TWO_HOSTS, ["on several hosts", "LOCAL_SIZE=2", "SHOAL_RENDEZVOUS", "SHOAL_COORDINATOR"]),
        (without(MPICH, "MPI_LOCALNRANKS"), ["nothing shows that all", "SHOAL_RENDEZVOUS"]),
        (without(TORCH, "MASTER_ADDR"), ["MASTER_PORT=29500 without MASTER_ADDR"]),
        ({**POD, "HOSTNAME": "other"}, ["headless service", "subdomain"]),
        ({**TWO_HOSTS, "SHOAL_RENDEZVOUS": "here"}, ["'here'", "absolute path"]),
        # contradictions within one launcher
        ({**MPI5, "PMIX_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=1", "PMIX_RANK=0"]),
        ({**MPI5, "OMPI_COMM_WORLD_RANK": "4", "PMIX_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4",
                                                                  "OMPI_COMM_WORLD_SIZE=4"]),
        ({**TORCH, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCH, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCH, "LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9", "8 processes"]),
        ({**MPICH, "MPI_LOCALNRANKS": "3"}, ["MPI_LOCALNRANKS=3", "2 processes"]),
        ({**SLURM, "SLURM_PROCID": "8"}, ["SLURM_PROCID=8", "SLURM_STEP_NUM_TASKS=8"]),
        ({**SLURM, "SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4", "tasks of this node=4"]),
        ({**SET, "JOB_INDEX": "2"}, ["JOB_INDEX=2", "REPLICATED_JOB_REPLICAS=2"]),
        ({**SET, "SHOAL_NUM_PROCESSES": "7"}, ["SHOAL_NUM_PROCESSES=7", "contradict"]),
        ({**SET, "JOB_COMPLETION_INDEX": "4"}, ["JOB_COMPLETION_INDEX=4", "contradict"]),
        ({**SET, "JOB_INDEX": "x"}, ["JOB_INDEX=x", "whole numbers"]),
        ({**POD, "JOB_COMPLETION_INDEX": "4"}, ["=4", "SHOAL_NUM_PROCESSES=4"]),
        ({"RANK": "-1", "WORLD_SIZE": "x"}, ["RANK='-1'", "WORLD_SIZE='x'"]),
    ],
)  # fmt: skip
def test_invalid_environments_raise_with_every_problem(env, words):
    with pytest.raises(UsageError) as caught:
        decide(Arguments(), env)
    for part in words:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (without(POD, "SHOAL_NUM_PROCESSES"), ["JOB_COMPLETION_INDEX=2", "SHOAL_NUM_PROCESSES"]),
        ({"PMIX_RANK": "0", "PRTE_LAUNCHED": "1", **SLURM}, ["PRRTE", "PMIX_RANK=0"]),
        ({"PMIX_RANK": "0"}, ["PMIx", "num_processes="]),
    ],
)
def test_process_index_without_a_count_raises(env, words):
    with pytest.raises(InitializeError) as caught:
        decide(Arguments(), env)
    for part in words:
        assert part in str(caught.value)


def test_a_pod_without_a_headless_service(monkeypatch):
    monkeypatch.setattr(launcher_table.socket, "getfqdn", lambda host: host)
    with pytest.raises(UsageError, match="name one as `subdomain`"):
        decide(Arguments(), POD)


def test_jobs_of_one_launcher_meet_apart():
    here = decide(Arguments(), MPI5).rendezvous
    assert here == decide(Arguments(), {**MPI5, "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0",
                                        "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).rendezvous  # fmt: skip
    assert here != decide(Arguments(), {**MPI5, "PMIX_NAMESPACE": "prterun-h-8@1"}).rendezvous


@given(st.integers(1, 9), st.integers(1, 9))
def test_shares_cover_all_devices_once(count, each):
    shares = [share(index, count, count * each) for index in range(count)]
    assert [device for own in shares for device in own] == list(range(count * each))
    assert {len(own) for own in shares} == {each}


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1))
def test_the_tasks_of_slurms_nodes(runs):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else f"{tasks}" for tasks, nodes in runs)
    assert counts_of_nodes(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]


@pytest.mark.parametrize("listed", ["", "4(x", "x", "4,,2", "-1"])
def test_malformed_task_list_gives_no_counts(listed):
    assert counts_of_nodes(listed) == []


@pytest.mark.parametrize(
    ("env", "seen", "ids"),
    [
        (MPI5, (4, False), (1,)),
        (MPI5, (8, False), (2, 3)),
        (MPI5, (8, True), (2, 3)),
        (MPI5, (1, True), None),  # bound by the launcher
        (MPI5, (2, True), None),
        (MPI5, (0, False), None),
        ({**MPI5, "JAX_PLATFORMS": "cpu"}, (4, False), None),
        ({**MPI5, "SHOAL_VIRTUAL_DEVICES": "2"}, (3, False), None),
        ({**MPI5, "JAX_LOCAL_DEVICE_IDS": "3"}, (4, False), (3,)),
        (TORCH, (4, False), (1,)),
        (SLURM, (4, True), (1,)),
        ({**SLURM, "SLURM_GPUS_PER_TASK": "1"}, (4, True), None),
        ({**SLURM, "SLURM_TRES_PER_TASK": "cpu=2"}, (4, True), (1,)),
        ({**ONE_A_NODE}, (4, True), None),  # all of a host
        ({**TORCH, "SHOAL_PROCESS_ID": "5", "SHOAL_NUM_PROCESSES": "8",
          "SHOAL_COORDINATOR": "node0:1"}, (4, False), (1,)),  # as `shoal run` sets them
        (POD, (8, False), None),
    ],
)  # fmt: skip
def test_the_gpus_of_a_process(monkeypatch, env, seen, ids):
    monkeypatch.setattr(local_devices, "devices_seen", lambda platform, env: seen)
    assert decide(Arguments(), env).local_device_ids == ids
    assert decide(Arguments(local_device_ids=[7]), env).local_device_ids == (7,)


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        (MPI5, (3, False)),  # for four processes
        (MPI5, (1, False)),
        (MPI5, (6, True)),
        (without(TORCH, "LOCAL_WORLD_SIZE"), (4, False)),
        (without(SLURM, "SLURM_NODEID"), (4, True)),
    ],
)
def test_gpus_that_cannot_be_shared(monkeypatch, env, seen):
    monkeypatch.setattr(local_devices, "devices_seen", lambda platform, env: seen)
    with pytest.raises(UsageError, match=f"sees {seen[0]} GPUs? .*local_device_ids="):
        decide(Arguments(), env)
