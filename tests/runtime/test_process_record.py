"""One process: what it says of itself before, between and after jobs, and how it ends."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap

import jax
import pytest

from forked_scripts import run_forked
from shoal.collectives.broadcast import broadcast
from shoal.collectives.same import assert_same
from shoal.errors import InitializeError, UsageError
from shoal.runtime import process
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.jax_service.certificates import CERT
from shoal.runtime.preemption import exit_code, notice
from shoal.runtime.process import (
    client,
    initialize,
    last_client,
    process_count,
    process_index,
    shutdown,
)
from shoal.runtime.system import local_devices
from shoal.runtime.system.local_devices import chosen_devices, cpu_threads, without_devices


@pytest.fixture
def run(child_env, tmp_path):
    """Return a function that runs a script in a fork."""
    return lambda script: run_forked(script, child_env, tmp_path)


def run_alone(script, env):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_process_without_a_job_is_alone():
    assert (process_index(), process_count()) == (0, 1)
    assert client().num_processes == 1
    assert client() is client()  # its points are counted
    shutdown()


ASKS = (client, process_index, process_count, notice, lambda: barrier("here"))
ASKS += (lambda: broadcast(1), lambda: assert_same(1))


@pytest.fixture
def begun(monkeypatch):
    """As in a process that has just begun."""
    for name in ("alone", "left", "joined"):
        monkeypatch.setattr(process._RECORD, name, None)
    return monkeypatch


@pytest.mark.parametrize(
    "env",
    [
        {"SHOAL_NUM_PROCESSES": "4"},
        {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "4"},
        {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"},
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "4"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_calls_before_joining_raise_initialize_error(begun, env):
    for name, value in env.items():
        begun.setenv(name, value)
    for ask in ASKS:
        with pytest.raises(InitializeError, match=r"one of 4.*call shoal.initialize\(\)") as caught:
            ask()
        name = "SLURM_STEP_NUM_TASKS" if "SLURM_PROCID" in env else next(iter(env))
        assert f"{name}={env[name]}" in str(caught.value)
    shutdown()  # of nothing


def test_calls_in_a_job_of_unknown_size_raise_initialize_error(begun):
    begun.setenv("PMIX_RANK", "1")
    for ask in (*ASKS, initialize):
        with pytest.raises(InitializeError, match=r"PMIX_RANK=1.*its number(.|\n)*num_processes="):
            ask()


def test_the_variables_are_read_when_first_asked_and_once(begun):
    begun.setenv("SLURM_NTASKS", "8")  # as in the shell that salloc gives
    assert (process_index(), process_count()) == (0, 1)
    begun.setenv("RANK", "0")
    begun.setenv("WORLD_SIZE", "2")
    assert process_count() == 1


def test_process_that_left_a_job_of_several_is_not_a_job_of_one(begun):
    left = LocalJob(3).clients[2]
    begun.setattr(process._RECORD, "left", left)
    assert (process_index(), process_count(), exit_code()) == (2, 3, 0)
    assert last_client() is left
    for ask in (client, notice, lambda: barrier("here"), lambda: broadcast(1)):
        with pytest.raises(InitializeError, match=r"left its job.*process 2 of 3(.|\n)*initialize"):
            ask()
    begun.setattr(process._RECORD, "left", LocalJob(1).clients[0])
    barrier("alone again")
    begun.setattr(jax_runtime, "attached", lambda: jax_runtime.Attached(1, 2, "h:1"))
    with pytest.raises(InitializeError, match="one of 2"):
        process_index()


AGAIN = """
    import os
    from shoal.runtime.process import client, initialize, process_count, shutdown
    initialize(virtual_devices=2)
    first = client()
    initialize(virtual_devices=2, timeout_s=5)
    initialize(virtual_devices=2, num_processes=1)
    initialize()  # as libraries do
    initialize(process_id=0)
    os.environ["SHOAL_VIRTUAL_DEVICES"] = "2"
    initialize()
    os.environ["SHOAL_VIRTUAL_DEVICES"] = "3"  # the argument overrides it
    initialize()
    del os.environ["SHOAL_VIRTUAL_DEVICES"]
    print(client() is first)
    import jax
    print(jax.device_count())
    os.environ["SHOAL_NUM_PROCESSES"], os.environ["SHOAL_PROCESS_ID"] = "2", "1"
    os.environ["SHOAL_COORDINATOR"] = "h:1"
    for options in ({}, {"virtual_devices": 3, "num_processes": 1}, {"virtual_devices": 0}):
        try:
            initialize(**options)
        except Exception as error:
            print(type(error).__name__, error)
    initialize(virtual_devices=2, num_processes=1)
    print(end="", flush=True)  # or the fork would write what is buffered, too
    if os.fork() == 0:
        try:
            initialize(virtual_devices=2, num_processes=1)
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0], flush=True)
        os._exit(0)
    os.wait()
    shutdown()
    initialize(virtual_devices=2, num_processes=1)
    print(client() is first)
"""
AGAIN_SAID = """\
True
2
InitializeError initialize was called before, with other arguments (script.py:4)
before: initialize(virtual_devices=2)
now:    initialize()
process_id: 0 before, 1 now
num_processes: 1 before, 2 now
coordinator_address: not given before, h:1 now
this is process 0 of 1; call shutdown() first to join another job
InitializeError initialize was called before, with other arguments (script.py:4)
before: initialize(virtual_devices=2)
now:    initialize(num_processes=1, virtual_devices=3)
virtual_devices: 2 before, 3 now
this is process 0 of 1; call shutdown() first to join another job
UsageError initialize: virtual_devices=0 must be a whole number, at least 1
InitializeError this process is a fork of process 0 of 1, and not a member of the job
False
"""


def test_is_initialized_between_joining_and_leaving(run):
    script = """
    import os, shoal
    print(shoal.is_initialized(), shoal.process_count())
    shoal.initialize(virtual_devices=2)
    print(shoal.is_initialized(), flush=True)
    if os.fork() == 0:  # as it has its parent's index
        os._exit(shoal.is_initialized())
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    shoal.shutdown()
    print(shoal.is_initialized())
    """
    done = run(script)
    assert done.stdout.split() == ["False", "1", "True", "1", "False"], done.stderr


def test_initialize_again(run):
    """With what comes to the same it does nothing; with anything else both are shown."""
    done = run(AGAIN)
    assert (done.stdout, done.returncode) == (AGAIN_SAID, 0), done.stderr


def test_initialize_takes_what_jax_takes():
    """By position those before the rest; under another JAX, this shows what is new."""
    theirs = inspect.signature(jax.distributed.initialize).parameters
    ours = inspect.signature(initialize).parameters
    by_position = [
        name
        for name, parameter in ours.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert by_position == list(theirs)[:4]
    deprecated = {"slice_index"}
    assert theirs.keys() - ours.keys() == deprecated
    with pytest.raises(UsageError, match="did you mean 'partition_index'"):
        initialize(slice_index=0)


JAXS_NAMES = """
    import logging
    from shoal.runtime.process import _RECORD, initialize, shutdown
    logging.basicConfig(format="%(levelname)s %(message)s")
    given = {"initialization_timeout": 60, "shutdown_timeout_seconds": 7}
    initialize(None, 1, 0, None, heartbeat_timeout_seconds=100, partition_index=3, **given)
    initialize("h:1", 1, 0, partition_index=3, cluster_detection_method="deactivate")
    print(_RECORD.initialized.leaving_s)
    try:
        initialize(partition_index=2)
    except Exception as error:
        print(str(error).splitlines()[3])
    shutdown()
"""


def test_the_arguments_of_jax_have_their_effect(run):
    done = run(JAXS_NAMES)
    assert done.stdout.splitlines() == ["7", "partition_index: 3 before, 2 now"], done.stderr
    assert done.stderr.splitlines() == [
        "WARNING initialize(heartbeat_timeout_seconds=100) has no effect: a process is lost after "
        "SHOAL_LOST_AFTER_S (10 s)"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"timeout_s": 5, "initialization_timeout": 6},
            "timeout_s=5 and initialization_timeout=6 ",
        ),
        ({"initialization_timeout": 0}, "initialization_timeout=0 must be a positive"),
        ({"shutdown_timeout_seconds": "5"}, "shutdown_timeout_seconds='5' must be a number"),
        ({"cluster_detection_method": "slurn"}, "did you mean 'slurm'"),
        ({"cluster_detection_method": 3}, "cluster_detection_method=3 is not one of"),
        ({"cluster_detection_method": "deactivate"}, "finds no number of processes: pass num_"),
        ({"partition_index": -1}, "partition_index=-1 must be"),
        ({"mtls_key_file": 3}, "mtls_key_file=3 must be a string"),
        ({"verify_secure_credentials": "yes"}, "verify_secure_credentials='yes' must be True"),
    ],
)
def test_wrong_arguments_of_jax_are_refused(child_env, options, words):
    with pytest.raises(UsageError, match=words):
        initialize(**options)


@pytest.mark.skipif(hasattr(jax.config, CERT), reason="this JAX has mutual TLS")
def test_mutual_tls_needs_a_jax_that_has_it(child_env):
    with pytest.raises(InitializeError, match=r"mtls_cert_file= given.*install JAX 0.12"):
        initialize(mtls_cert_file="cert.pem")


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "5", True])
def test_a_timeout_must_be_positive_seconds(child_env, timeout_s):
    with pytest.raises(UsageError, match="timeout_s"):
        initialize(timeout_s=timeout_s)


@pytest.mark.parametrize("name", ["SHOAL_HANG_TIMEOUT_S", "SHOAL_TIMEOUT_S"])
def test_malformed_setting_raises_before_anything_starts(monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(UsageError, match=f"{name}='soon'"):
        initialize()


def test_importing_has_no_side_effects(child_env):
    script = """
    import signal, sys, threading
    state = lambda: (sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM))
    before = state()
    import shoal.runtime.process, shoal.runtime.startup.services
    import shoal.runtime.jax_service.jax_runtime
    assert state() == before
    assert threading.active_count() == 1
    assert not {"jax", "jaxlib"} & set(sys.modules)
    """
    done = run_alone(script, child_env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("end", "code", "last_line"),
    [
        ("raise DeadlineError('late')", 73, "shoal.errors.DeadlineError: late"),
        ("raise UsageError('wrong')", 2, "shoal.errors.UsageError: wrong"),
        ("raise ValueError('foreign')", 1, "ValueError: foreign"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('words')", 1, "words"),
        ("sys.exit()", 0, ""),
    ],
)
def test_exit_codes_of_a_job_of_one(run, end, code, last_line):
    script = f"""
    import sys
    from shoal.errors import *
    from shoal.runtime.process import initialize
    initialize()
    {end}
    """
    done = run(script)
    assert done.returncode == code
    assert (done.stderr.splitlines() or [""])[-1] == last_line


def test_another_excepthook_is_kept(child_env):
    script = """
    import sys
    sys.excepthook = lambda kind, error, trace: print("mine:", error)
    from shoal.errors import *
    from shoal.runtime.process import initialize
    initialize()
    raise DeadlineError("late")
    """
    done = run_alone(script, child_env)
    assert (done.returncode, done.stdout, done.stderr) == (73, "mine: late\n", "")


# JAX as it is once imported in another environment.
IMPORTED = """
    import os
    import jax
    given = {given!r}
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        os.environ.pop(name, None)
    os.environ.update(given)
    jax.config.update("jax_platforms", given.get("JAX_PLATFORMS"))
    jax.config.update("jax_num_cpu_devices", int(given.get("JAX_NUM_CPU_DEVICES", -1)))
"""


def test_virtual_devices_and_twins(run):
    script = """
    from shoal.runtime.jax_service import jax_runtime
    from shoal.runtime.process import initialize, shutdown
    jax_runtime.count_accelerators = lambda env: 4
    initialize(%s)
    print(len(jax.devices("cpu")), jax.default_backend())
    """
    asked = [("", {}), ("virtual_devices=3", {}), ("local_device_ids=[0, 1]", {})]
    asked += [("", {"JAX_PLATFORMS": "cpu"}), ("", {"JAX_NUM_CPU_DEVICES": "5"})]
    asked += [("host_devices=6", {"JAX_PLATFORMS": "cpu"})]
    no_gpus = {"CUDA_VISIBLE_DEVICES": ""}  # on a machine that has some
    rows = [
        run(IMPORTED.format(given=no_gpus | given) + script % options) for options, given in asked
    ]
    said = ["4 cpu\n", "3 cpu\n", "2 cpu\n", "1 cpu\n", "5 cpu\n", "6 cpu\n"]
    assert [row.stdout for row in rows] == said, rows


def test_cpu_devices_beside_accelerators(run):
    script = """
    from shoal.runtime.process import initialize, shutdown
    initialize(host_devices=3)
    print(jax.config.jax_platforms, jax.config.jax_num_cpu_devices)
    jax.config.update("jax_platforms", "cpu")
    print(len(jax.devices()))
    shutdown()
    initialize(host_devices=3)
    shutdown()
    for options in ({"host_devices": 4}, {"host_devices": 2, "virtual_devices": 2},
                    {"host_devices": 0}):
        try:
            initialize(**options)
        except Exception as error:
            print(type(error).__name__, error)
    """
    lines = run(IMPORTED.format(given={"JAX_PLATFORMS": "tpu"}) + script).stdout.splitlines()
    assert lines[:2] == ["tpu,cpu 3", "3"]
    assert lines[2].startswith("InitializeError too late for host_devices=4")
    assert any("pass one of them" in line for line in lines)
    assert lines[-1].endswith("host_devices=0 must be a whole number, at least 1")


def test_how_accelerators_are_counted(monkeypatch, tmp_path):
    for index in range(3):
        (tmp_path / f"chip{index}").touch()
    kind = local_devices._Accelerators(("numpy",), ("CHIPS_VISIBLE",), (f"{tmp_path}/chip[0-9]*",))
    monkeypatch.setattr(local_devices, "_ACCELERATORS", (kind,))
    assert local_devices.count_accelerators({}) == 3
    assert local_devices.count_accelerators({"CHIPS_VISIBLE": "0,2"}) == 2
    assert local_devices.count_accelerators({"CHIPS_VISIBLE": "-1"}) == 0
    assert local_devices.count_accelerators({"CHIPS_VISIBLE": ""}) == 0
    absent = kind._replace(plugins=("no_such_plugin",))
    monkeypatch.setattr(local_devices, "_ACCELERATORS", (absent,))
    assert local_devices.count_accelerators({}) == 0


def test_threads_of_the_cpu_client(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert cpu_threads(4, {}) == {"PJRT_NPROC": "8"}
    assert cpu_threads(2, {}) == cpu_threads(-1, {}) == {}
    assert cpu_threads(4, {"PJRT_NPROC": "5"}) == {}  # yours stands
    given = {"PJRT_NPROC": "6", "JAX_NUM_CPU_DEVICES": "3"}
    assert cpu_threads(8, given) == {"PJRT_NPROC": "16"}  # that was ours, for other devices
    assert cpu_threads(8, {**given, "JAX_NUM_CPU_DEVICES": "2"}) == {}


FLAG = "--xla_force_host_platform_device_count"


def test_how_many_devices_an_environment_asks_jax_for():
    assert chosen_devices({"XLA_FLAGS": f"-a {FLAG}=2 {FLAG}=3"}) == 3
    assert chosen_devices({"JAX_NUM_CPU_DEVICES": "5", "XLA_FLAGS": f"{FLAG}=3"}) == 5
    assert chosen_devices({"JAX_NUM_CPU_DEVICES": " 4 "}) == 4  # as JAX reads it
    assert chosen_devices({"XLA_FLAGS": "-a"}) == -1
    assert without_devices(f"-a {FLAG}=2 -b  {FLAG}=3") == "-a -b"


# What the environment says of 8 devices, and what the one line of it is that is not so.
OVERRULED = {
    "": "",
    "SHOAL_VIRTUAL_DEVICES=8 JAX_NUM_CPU_DEVICES=8 PJRT_NPROC=16": "",
    "JAX_NUM_CPU_DEVICES=2 PJRT_NPROC=4": "JAX_NUM_CPU_DEVICES=2",
    f"XLA_FLAGS={FLAG}=3": f"XLA_FLAGS={FLAG}=3",
    f"SHOAL_VIRTUAL_DEVICES=2 JAX_NUM_CPU_DEVICES=8 XLA_FLAGS={FLAG}=3": (
        f"SHOAL_VIRTUAL_DEVICES=2 and XLA_FLAGS={FLAG}=3"
    ),
}


def test_an_explicit_number_of_devices_wins_and_says_so(run):
    script = f"""
    import os
    import jax
    from shoal.runtime.system import local_devices
    from shoal.runtime.jax_service import jax_runtime
    local_devices.num_cores = lambda: 4
    for words in {list(OVERRULED)!r}:
        for name in ("SHOAL_VIRTUAL_DEVICES", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "PJRT_NPROC"):
            os.environ.pop(name, None)
        os.environ.update(word.split("=", 1) for word in words.split())
        configured = int(os.environ.get("JAX_NUM_CPU_DEVICES", -1))  # as JAX does when imported
        jax.config.update("jax_num_cpu_devices", configured)
        said = jax_runtime.configure_devices(8, None)
        print(jax.config.jax_num_cpu_devices, os.environ["PJRT_NPROC"], said)
    os.environ.clear()
    jax.config.update("jax_num_cpu_devices", 5)
    os.environ["SHOAL_VIRTUAL_DEVICES"] = "8"
    print(jax_runtime.configure_devices(8, None))
    print(len(jax.devices()), jax_runtime.configure_devices(None, None))
    """
    done = run(script)
    assert done.returncode == 0, done.stderr
    end = ": 8 CPU devices per process"
    lines = [f"initialize(virtual_devices=8) overrides {said}{end}" for said in OVERRULED.values()]
    lines = [
        f"8 16 {line if said else ''}" for line, said in zip(lines, OVERRULED.values(), strict=True)
    ]
    assert done.stdout.splitlines() == [
        *lines,
        f"SHOAL_VIRTUAL_DEVICES=8 overrides jax_num_cpu_devices=5{end}",
        "8 ",
    ]
