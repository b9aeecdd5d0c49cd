"""Where a process's numbers come from: a table of situations, and properties over all families."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InitializeError, UsageError
from shoal.runtime.jax_service.host_agent_link import _LOCAL_INDICES
from shoal.runtime.process import initialize, is_initialized
from shoal.runtime.startup.inherited import note_of
from shoal.runtime.startup.launcher_table import LAUNCHERS, first_host
from shoal.runtime.startup.launchers import decide, numbers_of, shown_job
from shoal.runtime.startup.options import Arguments
from shoal.runtime.wire.sockets import is_loopback

DOCS = Path(__file__).parents[3] / "docs"
OF_LAUNCHERS = ("settings.md", "starting.md")
SHOAL = {"SHOAL_PROCESS_ID": "1", "SHOAL_NUM_PROCESSES": "4", "SHOAL_COORDINATOR": "h:1"}
JAX = {"JAX_PROCESS_ID": "2", "JAX_NUM_PROCESSES": "5", "JAX_COORDINATOR_ADDRESS": "j:2"}
TORCH = {"RANK": "3", "WORLD_SIZE": "6", "MASTER_ADDR": "t", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}
# What `prterun` of Open MPI 5 sets; `mpirun` sets it too, and OMPI_* beside it.
PRRTE = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-h-71@1", "PRTE_LAUNCHED": "1"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[007-010,12]",
    "SLURM_NTASKS": "1",
}
# What `srun --mpi=pmix` adds to the step's own.
SLURM_PMIX = {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.77.0"}
# Shells and scripts in an allocation, which are no step of several processes.
SALLOC = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
SBATCH = {**SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
PAIRS = [SHOAL, JAX, TORCH, OPEN_MPI, MPICH, SLURM]  # from the first that wins
NUMBERS = [(1, 4), (2, 5), (3, 6), (1, 2), (0, 3), (5, 8)]


@pytest.mark.parametrize(
    ("arguments", "env", "process", "count", "address", "reason"),
    [
        ({}, {}, 0, 1, None, "a job of one process"),
        ({}, SHOAL, 1, 4, "h:1", "SHOAL_*"),
        ({}, JAX, 2, 5, "j:2", "JAX_*"),
        ({}, {**SHOAL, **JAX, **TORCH}, 1, 4, "h:1", "SHOAL_*"),
        ({}, {**TORCH, **SLURM}, 3, 6, None, "torchrun"),
        ({}, {**OPEN_MPI, "SHOAL_COORDINATOR": "h:1"}, 1, 2, "h:1", "Open MPI"),
        ({}, {**OPEN_MPI, **SLURM, "SHOAL_COORDINATOR": "h:1"}, 1, 2, "h:1", "Open MPI"),
        ({}, {**MPICH, "JAX_COORDINATOR_ADDRESS": "j:2"}, 0, 3, "j:2", "MPICH"),
        ({}, SLURM, 5, 8, None, "Slurm step"),
        ({"num_processes": 1}, SHOAL, 0, 1, None, "arguments"),
        ({"num_processes": 3, "process_id": 2}, SHOAL, 2, 3, "h:1", "arguments"),
        ({"coordinator_address": "a:9"}, SHOAL, 1, 4, "a:9", "SHOAL_*"),
        ({}, {"PMI_RANK": "0", "PMI_SIZE": "1"}, 0, 1, None, "MPICH"),
        # a batch script and a shell in an allocation: the job's variables are not the step's
        ({}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, 0, 1, None, "one"),
        ({}, SALLOC, 0, 1, None, "one process"),
        ({}, {**SLURM, **SLURM_PMIX}, 5, 8, None, "Slurm step"),
        ({}, {**MPICH, "PMIX_RANK": "0", "SHOAL_COORDINATOR": "h:1"}, 0, 3, "h:1", "MPICH"),
        ({}, {**OPEN_MPI, **PRRTE, "SHOAL_COORDINATOR": "h:1"}, 1, 2, "h:1", "Open MPI"),
        ({}, {**TORCH, **PRRTE}, 3, 6, None, "torchrun"),
        ({"num_processes": 1}, PRRTE, 0, 1, None, "arguments"),
        ({"cluster_detection_method": "slurm"}, {**TORCH, **SLURM}, 5, 8, None, "Slurm step"),
        ({"cluster_detection_method": "torchrun"}, {**JAX, **TORCH}, 3, 6, "j:2", "torchrun"),
        (
            {"cluster_detection_method": "mpi4py"},
            {**MPICH, "SHOAL_COORDINATOR": "h:1"},
            0,
            3,
            "h:1",
            "MPICH",
        ),
        (
            {
                "cluster_detection_method": "deactivate",
                "num_processes": 3,
                "process_id": 2,
                "coordinator_address": "a:9",
            },
            SHOAL,
            2,
            3,
            "a:9",
            "arguments",
        ),
        ({}, {"JAX_PROCESS_ID": " ", "JAX_NUM_PROCESSES": ""}, 0, 1, None, "one process"),
    ],
)
def test_which_rule_wins(arguments, env, process, count, address, reason):
    cluster = decide(Arguments(**arguments), env)
    assert (cluster.process, cluster.num_processes) == (process, count)
    assert reason in cluster.reason
    if address is not None:
        assert cluster.address == address
    assert (cluster.address is None) == (count == 1)


@given(st.lists(st.sampled_from(range(len(PAIRS))), min_size=1, unique=True))
def test_the_innermost_family_wins_whatever_else_is_set(chosen):
    env = {"SHOAL_COORDINATOR": "h:1"}
    for index in chosen:
        env |= PAIRS[index]
    cluster = decide(Arguments(), env)
    assert (cluster.process, cluster.num_processes) == NUMBERS[min(chosen)]


@given(st.integers(0, 40), st.integers(1, 40))
def test_an_index_must_be_below_the_count(process, count):
    env = {"SHOAL_PROCESS_ID": f"{process}", "SHOAL_NUM_PROCESSES": f"{count}"}
    arguments = Arguments(coordinator_address="h:1")
    if process < count:
        assert decide(arguments, env)[:2] == (process, count)
    else:
        with pytest.raises(UsageError, match=f"SHOAL_PROCESS_ID={process} is out of range"):
            decide(arguments, env)


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ({"process_id": 2}, {}, ["process_id=2 without num_processes"]),
        ({"num_processes": 2}, SHOAL, ["num_processes=2 without process_id"]),
        ({"num_processes": 2, "process_id": 2}, {}, ["process_id=2 is out of range"]),
        ({"num_processes": True, "process_id": 0}, {}, ["num_processes=True"]),
        ({"num_processes": 2.0, "process_id": 0}, {}, ["num_processes=2.0"]),
        ({"num_processes": 0, "process_id": 0}, {}, ["num_processes=0"]),
        ({"num_processes": 2, "process_id": 0}, {}, ["SHOAL_COORDINATOR=host:port"]),
        ({"num_processes": 2, "process_id": 0, "coordinator_address": "h"}, {}, ["pass host:port"]),
        ({}, {"SHOAL_PROCESS_ID": "0"}, ["without SHOAL_NUM_PROCESSES"]),
        ({}, {"JAX_NUM_PROCESSES": "2"}, ["without JAX_PROCESS_ID"]),
        ({}, {**OPEN_MPI, "PMIX_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=1 contradicts PMIX_RANK=0"]),
        ({}, OPEN_MPI, ["Open MPI gives no address", "SHOAL_COORDINATOR", "SHOAL_RENDEZVOUS"]),
        ({"virtual_devices": 0}, {}, ["virtual_devices=0"]),
        ({}, {"SHOAL_VIRTUAL_DEVICES": "many"}, ["SHOAL_VIRTUAL_DEVICES='many'"]),
        (
            {"virtual_devices": -1, "local_device_ids": [0, "x"], "coordinator_bind_address": "?"},
            {"RANK": "two", "WORLD_SIZE": "2"},
            ["4 problems", "virtual_devices=-1", "'x'", "'?'", "RANK='two'"],
        ),
    ],
)
def test_all_offenders_are_named_at_once(arguments, env, words):
    with pytest.raises(UsageError) as caught:
        decide(Arguments(**arguments), env)
    for part in words:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("virtual_devices", (0, -1, True, "2", 1.5, object(), [2])),
        ("host_devices", (0, -1, True, "2", 1.5, object(), [2])),
        ("local_device_ids", (-1, True, "0", 1.5, object(), [], [0, 0], [0, None], ["1"], {0, 1})),
        ("coordinator_address", (3, True, b"h:1", object(), ["h:1"])),
        ("coordinator_bind_address", (3, True, b"h", object(), ["h"], "a b")),
        ("num_processes", (0, -1, True, "2", 1.5, object(), [2])),
        ("process_id", (-1, 2, True, "0", 1.5, object(), [0])),
    ],
)
def test_wrong_arguments_are_refused(name, values):
    right = {"num_processes": 2, "process_id": 0, "coordinator_address": "h:1"}
    decide(Arguments(**right), {})
    for value in values:
        with pytest.raises(UsageError, match=name):
            decide(Arguments(**{**right, name: value}), {})


@pytest.mark.parametrize(
    ("given", "variable", "found"),
    [
        (None, None, False),
        (None, "", False),
        (None, "0", False),
        (None, "1", True),
        (None, "/x/y", "/x/y"),
        (True, "0", True),
        (False, "1", False),
        ("/x", "1", "/x"),
        (Path("/x"), None, "/x"),
        ("here", None, os.path.abspath("here")),
        ("file:///x", None, "/x"),
    ],
)
def test_the_directory_of_the_compile_cache(given, variable, found):
    env = {} if variable is None else {"SHOAL_COMPILE_CACHE": variable}
    assert decide(Arguments(compile_cache=given), env).compile_cache == found


@pytest.mark.parametrize("address", ["gs://bucket/cache", "s3://x", "hf://datasets/x"])
def test_an_address_is_no_directory_of_the_compile_cache(address):
    scheme = address.partition("//")[0]
    message = f"compile_cache={scheme}//… must be a directory of a file system, not an address"
    with pytest.raises(UsageError, match=message):
        decide(Arguments(compile_cache=address), {})
    with pytest.raises(UsageError, match=f"SHOAL_COMPILE_CACHE={scheme}"):
        decide(Arguments(), {"SHOAL_COMPILE_CACHE": address})


@pytest.mark.parametrize("wrong", [3, "", "a\0b", "~nobody-of-this-name/x", object(), ["/x"]])
def test_compile_cache_refuses_values_that_are_not_paths(wrong):
    with pytest.raises(UsageError, match="compile_cache="):
        decide(Arguments(compile_cache=wrong), {})


def test_wrong_settings_are_refused_at_one_process_too(monkeypatch):
    monkeypatch.setenv("SHOAL_LOST_AFTER_S", "-1")
    monkeypatch.setenv("SHOAL_GRACE_S", "soon")
    monkeypatch.setenv("SHOAL_SHARED_MEMORY", "2")
    with pytest.raises(UsageError) as caught:
        initialize()
    assert len(caught.value.problems) == 3
    for name in ("SHOAL_LOST_AFTER_S='-1'", "SHOAL_GRACE_S='soon'", "SHOAL_SHARED_MEMORY='2'"):
        assert name in str(caught.value)
    assert not is_initialized()


@pytest.mark.parametrize("around", [{}, SALLOC, SLURM, MPICH], ids=str)
def test_a_rank_without_a_count_is_no_job_of_one(around):
    with pytest.raises(InitializeError) as caught:
        decide(Arguments(), {**around, **PRRTE})
    for part in ("PMIX_RANK=1", "num_processes=", "process_id=", "SHOAL_NUM_PROCESSES"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("env", "words", "count"),
    [
        (SHOAL, "SHOAL_PROCESS_ID=1, SHOAL_NUM_PROCESSES=4", 4),
        ({"SHOAL_NUM_PROCESSES": "4"}, "SHOAL_NUM_PROCESSES=4", 4),
        ({"RANK": "3"}, "torchrun (RANK=3)", None),
        ({"WORLD_SIZE": "4"}, "torchrun (WORLD_SIZE=4)", 4),
        ({"JAX_PROCESS_ID": "1"}, "JAX_PROCESS_ID=1", None),
        (JAX, "JAX_PROCESS_ID=2, JAX_NUM_PROCESSES=5", 5),
        (TORCH, "torchrun (RANK=3, WORLD_SIZE=6)", 6),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK=1, PMIX_RANK=1, OMPI_COMM_WORLD_SIZE=2", 2),
        (PRRTE, "PMIX_RANK=1", None),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0", None),
        (MPICH, "PMI_RANK=0, PMI_SIZE=3", 3),
        (SLURM, "SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=8", 8),
        ({**SLURM, **SLURM_PMIX}, "SLURM_STEP_NUM_TASKS=8", 8),
        ({**TORCH, **SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "WORLD_SIZE=6", 6),
    ],
)
def test_a_job_is_shown_to_a_process_that_has_not_joined_it(env, words, count):
    shown = shown_job(env)
    assert shown is not None
    assert words in shown.words
    assert shown.num_processes == count


@pytest.mark.parametrize(
    "env",
    [
        {},
        SALLOC,
        SBATCH,
        {"WORLD_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"SHOAL_NUM_PROCESSES": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", **SLURM},  # torchrun of one in each task of a step
        {"SHOAL_PROCESS_ID": "0", "SHOAL_NUM_PROCESSES": "1", **OPEN_MPI},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
    ],
    ids=str,
)
def test_no_job_of_several_is_shown(env):
    assert shown_job(env) is None


def test_the_reason_names_the_launcher_and_the_address():
    cluster = decide(Arguments(), SBATCH)
    assert cluster.reason == "no launcher's variables: a job of one process"
    cluster = decide(Arguments(), {**MPICH, "SHOAL_COORDINATOR": "h:1"})
    assert cluster.reason == "MPICH (PMI_RANK=0, PMI_SIZE=3); address from SHOAL_COORDINATOR"


def test_addresses_that_launchers_imply():
    torch = decide(Arguments(), TORCH).address
    assert torch is not None
    host, _, port = torch.rpartition(":")
    assert host == "t"
    assert 61440 <= int(port) < 65536
    assert port != "29500"  # torch's own store has that one
    other_rank = decide(Arguments(), {**TORCH, "RANK": "0"})
    assert other_rank.address == torch
    slurm = decide(Arguments(), SLURM).address
    assert slurm is not None
    assert slurm.startswith("node007:")
    assert decide(Arguments(), {**SLURM, "SLURM_STEP_ID": "1"}).address != slurm
    jax = {**JAX, "JAX_COORDINATOR_ADDRESS": "j", "JAX_COORDINATOR_PORT": "8476"}
    assert decide(Arguments(), jax).address == "j:8476"
    assert decide(Arguments(), {**jax, "JAX_COORDINATOR_ADDRESS": "::1"}).address == "[::1]:8476"


def test_the_launchers_services_belong_to_its_own_address():
    env = {**SHOAL, "SHOAL_JAX_SERVICE": "h:2", "SHOAL_TOKEN": "secret"}
    assert decide(Arguments(), env).jax_service == "h:2"
    assert decide(Arguments(), env).token == "secret"
    assert decide(Arguments(coordinator_address="a:9"), env).jax_service is None


def test_devices_and_binding():
    env = {"JAX_LOCAL_DEVICE_IDS": "0, 3", "JAX_COORDINATOR_BIND_ADDRESS": "[::]:80"}
    cluster = decide(Arguments(), {**env, "SHOAL_VIRTUAL_DEVICES": "4"})
    assert cluster.local_device_ids == (0, 3)
    assert cluster.bind_host == "::"
    assert cluster.virtual_devices == 4
    arguments = Arguments(
        local_device_ids=2, coordinator_bind_address="10.0.0.7", virtual_devices=8
    )
    cluster = decide(arguments, env)
    assert (cluster.local_device_ids, cluster.bind_host) == ((2,), "10.0.0.7")
    assert cluster.virtual_devices == 8
    for address in ("::1", "fe80::1", "[::1]", "[::1]:8476"):
        bound = decide(Arguments(coordinator_bind_address=address), {}).bind_host
        assert bound == address.removesuffix(":8476").strip("[]")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("n[007-010,12],m1", "n007"),
        ("rack[2,4]-x", "rack2-x"),
        ("a-b[08]", "a-b08"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes, first):
    assert first_host(nodes) == first


def test_loopback():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.1.2.3", "::1"]))
    assert not any(map(is_loopback, ["10.0.0.1", "node1", "::", "0.0.0.0"]))


# What `shoal run` gives a process, within an allocation and a launcher's job around it.
OF_RUN = {
    "SHOAL_PROCESS_ID": "0", "SHOAL_NUM_PROCESSES": "2", "SHOAL_COORDINATOR": "h:1",
    "SHOAL_JAX_SERVICE": "h:2", "SHOAL_TOKEN": "secret", "SHOAL_JOB": "shoal-run-4711",
    "JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h:2",
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1",
}  # fmt: skip
ON_ONE_HOST = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INNER = {
    "nothing": ({}, (0, 2)),
    "mpirun": ({"PMI_RANK": "1", "PMI_SIZE": "2", **ON_ONE_HOST}, (1, 2)),
    "its first process": ({"PMI_RANK": "0", "PMI_SIZE": "2", **ON_ONE_HOST}, (0, 2)),
    "Open MPI": ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3)),
    "a step": ({"SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),
    "torchrun": ({"RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, (1, 2)),
    "its first rank": ({"TORCHELASTIC_RUN_ID": "none"}, (0, 2)),
    "by hand": ({"SHOAL_PROCESS_ID": "1", "SHOAL_NUM_PROCESSES": "3"}, (1, 3)),
    "an allocation": ({"SLURM_JOB_ID": "8"}, (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("inner", INNER)
def test_the_launcher_whose_variables_are_new_is_the_innermost(inner):
    new, numbers = INNER[inner]
    env = {**OF_RUN, "SHOAL_LAUNCHED": note_of(OF_RUN), **new}
    assert numbers_of(env) == numbers
    assert numbers_of({**env, "SHOAL_LAUNCHED": note_of(OF_RUN, os.getpid())}) == numbers_of(
        {**OF_RUN, **new}
    ), "a process that has changed its own"


def test_an_inner_job_does_not_meet_where_the_outer_one_does():
    new, _ = INNER["mpirun"]
    cluster = decide(Arguments(), {**OF_RUN, "SHOAL_LAUNCHED": note_of(OF_RUN), **new})
    assert (cluster.address, cluster.jax_service, cluster.job) == (None, None, "")
    assert cluster.rendezvous is not None
    own = {**new, "SHOAL_COORDINATOR": "g:1"}
    cluster = decide(Arguments(), {**OF_RUN, "SHOAL_LAUNCHED": note_of(OF_RUN), **own})
    assert cluster.address == "g:1"


def test_the_variables_of_all_launchers_are_noted():
    names = {name for launcher in LAUNCHERS for name in launcher.identity if " " not in name}
    noted = note_of(dict.fromkeys(names, "1")).split()[1:]
    assert {name.partition(":")[0] for name in noted} == names


def test_the_host_agent_knows_the_local_index_of_every_launcher():
    assert {*_LOCAL_INDICES} == {name for row in LAUNCHERS for name in row.local_indices}


def test_the_pages_and_the_suite_know_the_variables_of_every_launcher():
    names = {name for row in LAUNCHERS for name in (*row.indices, *row.counts) if " " not in name}
    pages = {page: (DOCS / page).read_text(encoding="utf-8") for page in OF_LAUNCHERS}
    assert [name for name in sorted(names) if f"`{name}`" not in pages["settings.md"]] == []
    by_others = {"PMIX_RANK"}  # of PMIx alone, which gives no count
    unsaid = [name for name in sorted(names - by_others) if f"`{name}`" not in pages["starting.md"]]
    assert unsaid == []
    removed = (DOCS.parent / "tests" / "conftest.py").read_text(encoding="utf-8")
    prefixes = {name: [f'"{name[:end]}"' for end in range(1, len(name) + 1)] for name in names}
    assert [name for name in sorted(names) if not any(p in removed for p in prefixes[name])] == []
