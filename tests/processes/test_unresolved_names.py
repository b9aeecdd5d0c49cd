"""Names that do not resolve: that of this host, as in containers, and that of the coordinator."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys

import pytest

from few import few
from processes.run.launchers import Launchers, codes, said
from quiet_ports import quiet_row
from shoal.runtime.wire.frames import split_address
from shoal.testing.network import why_no_cuts
from shoal.testing.warding import Warden

NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or not (shutil.which("unshare") and shutil.which("ip")),
    reason="only root may make namespaces, with unshare of util-linux and ip of iproute2",
)
NAME = "no-such-host-xyz"
NAMELESS = ["unshare", "--uts", "sh", "-c", f'hostname {NAME}; exec "$@"', "sh"]
# Nor is there a way to any other host.
UNCONNECTED = ["unshare", "--uts", "--net", "sh", "-c",
               f'ip link set lo up; hostname {NAME}; exec "$@"', "sh"]  # fmt: skip
RUN = [sys.executable, "-m", "shoal", "run", "-n", "2", "--devices", "1"]
SUM = """
import jax, numpy as np, os, shoal
{start}
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
x = jax.make_array_from_callback((2,), rows, lambda at: np.arange(2.0)[at])
os.write(1, f"sum {{jax.jit(lambda x: x.sum())(x)}}\\n".encode())
"""
JAXS = "jax.distributed.initialize()"
SHOALS = "shoal.initialize()"


def run(command, env, folder, script=SUM, start="shoal.initialize()"):
    (folder / "script.py").write_text(script.format(start=start))
    done = subprocess.run(
        [*command, "script.py"], env=env, cwd=folder, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done
    return done.stdout


@NEEDS_ROOT
@pytest.mark.parametrize("start", [SHOALS, JAXS, f"{JAXS}; {SHOALS}"])
def test_on_one_host_the_loopback_needs_no_name(child_env, tmp_path, start):
    out = run([*NAMELESS, *RUN], child_env, tmp_path, start=start)
    assert out.count("sum 1.0") == 2, out


@NEEDS_ROOT
@pytest.mark.parametrize("around", [NAMELESS, UNCONNECTED], ids=["connected", "unconnected"])
def test_nor_do_processes_that_meet_in_a_directory(child_env, tmp_path, around):
    """Process 0 publishes an address of this host, the loopback's if it has no other."""
    env = {**child_env, "SHOAL_NUM_PROCESSES": "2", "SHOAL_RENDEZVOUS": str(tmp_path)}
    env["SHOAL_INITIALIZE_TIMEOUT_S"] = "30"
    both = 'SHOAL_PROCESS_ID=1 "$@" & SHOAL_PROCESS_ID=0 "$@" && wait $!'
    command = [*around, "sh", "-c", both, "sh", sys.executable]
    out = run(command, env, tmp_path, start="shoal.initialize(virtual_devices=1)")
    assert out.count("sum 1.0") == 2, out


SLURM = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_STEP_NODELIST": NAME, "SLURM_STEP_TASKS_PER_NODE": "2",
         "SLURM_NODEID": "0"}  # fmt: skip
TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": NAME, "MASTER_PORT": "1"}
EXPLICIT = {"SHOAL_NUM_PROCESSES": "2", "SHOAL_COORDINATOR": f"{NAME}:1"}
NUMBERS = {"Slurm": ("SLURM_PROCID", "SLURM_LOCALID"), "torchrun": ("RANK", "LOCAL_RANK"),
           "explicit": ("SHOAL_PROCESS_ID",)}  # fmt: skip


def start_both(kind, around, more):
    """Return the command that starts two processes, and its variables."""
    settings = {"Slurm": SLURM, "torchrun": TORCHRUN, "explicit": EXPLICIT}[kind]
    one, zero = (" ".join(f"{name}={index}" for name in NUMBERS[kind]) for index in (1, 0))
    both = f'{one} "$@" & {zero} "$@"; code=$?; wait $! && exit $code'
    return [*around, "sh", "-c", both, "sh", sys.executable], {**more, **settings}


@NEEDS_ROOT
@pytest.mark.parametrize("kind", few(["Slurm", "torchrun"], ["torchrun"]))
def test_the_own_name_of_the_only_host_is_no_address_but_the_loopback_is(child_env, tmp_path, kind):
    command, env = start_both(kind, NAMELESS, child_env)
    out = run(command, env, tmp_path, start="shoal.initialize(virtual_devices=1, timeout_s=30)")
    assert out.count("sum 1.0") == 2, out


@NEEDS_ROOT
def test_the_own_name_of_one_host_of_several_is_refused_at_once(child_env, tmp_path):
    command, env = start_both("explicit", NAMELESS, child_env)
    (tmp_path / "script.py").write_text("import shoal; shoal.initialize()")
    done = subprocess.run(
        [*command, "script.py"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 74, done
    said = " ".join(done.stderr.split())
    assert said.count(f"this host's own name '{NAME}' does not resolve: ") == 2, done
    assert said.count("add it to /etc/hosts; if all processes are on this host, pass 127.") == 2


def test_the_next_job_of_a_process_may_be_on_several_hosts(job, said):
    """The loopback is for the job whose processes are all here."""
    script = """
    from jaxlib import _jax
    before = _jax.make_gloo_tcp_collectives
    initialize()
    say(_jax.make_gloo_tcp_collectives is before)
    process.shutdown()
    say(_jax.make_gloo_tcp_collectives is before)
    """
    for one in job.run(2, script):
        assert one.code == 0, one
        assert said(one).split() == ["False", "True"]


@NEEDS_ROOT
@pytest.mark.skipif(bool(why_no_cuts()), reason=why_no_cuts() or "-")
def test_on_several_hosts_the_error_says_what_to_do(child_env, tmp_path):
    warden = Warden(2)
    launchers = Launchers(tmp_path, child_env, warden)
    launchers.write(SUM.format(start="shoal.initialize(); shoal.make_mesh({'x': -1})"))
    try:
        both = [launchers.start(node, before=NAMELESS, JAX_PLATFORMS="cpu") for node in range(2)]
        assert codes(both) == [74, 74], said(both)
    finally:
        launchers.close()
        warden.close()
    words = f"this host's own name '{NAME}' does not resolve: "
    advice = "CPU devices of processes on several hosts connect by it: add it to /etc/hosts"
    report = both[0].said[both[0].said.index("shoal run: failed") :]
    assert words in report
    assert advice in report
    assert "hardware fault" not in report


@NEEDS_ROOT
def test_where_jax_itself_starts_the_devices_of_several_hosts_too(child_env, tmp_path):
    """Such as jax.devices() or jax.distributed; gloo's own words were `enforce fail at …`."""
    host, port = quiet_row(1)
    script = f"""
from shoal.runtime.jax_service.jax_runtime import use_loopback
use_loopback(False)
import jax; jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("{host}:{port}", 1, 0)
jax.devices()
"""
    command = [*NAMELESS, sys.executable, "-c", script]
    env = {**child_env, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    words = f"this host's own name '{NAME}' does not resolve: "
    assert words in done.stderr, done
    assert "add it to /etc/hosts" in done.stderr
    assert "enforce fail" not in done.stderr


HOSTS = ["no-such-host.invalid", "a" * 70 + ".b"]


@pytest.mark.parametrize("host", few(HOSTS, HOSTS[:1]))
@pytest.mark.parametrize("index", [0, 1])
def test_a_coordinator_whose_name_does_not_resolve(job, host, index):
    script = f"process.initialize(coordinator_address='{host}:1234', num_processes=2,"
    # Process 0 starts the coordinator within this time, too.
    job.start(index, 2, script + " process_id=index, timeout_s=4)")
    (one,) = job.wait()
    assert one.code == 74, one
    assert f"the name {host!r} does not resolve; tried for 4 s (" in " ".join(one.err.split())
    assert "nothing listens" not in one.err


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".b"])
def test_a_launcher_and_an_observer_name_it(child_env, tmp_path, host):
    (tmp_path / "script.py").touch()
    env = {**child_env, "SHOAL_INITIALIZE_TIMEOUT_S": "1", "TMPDIR": str(tmp_path)}
    node = ["run", "--nnodes", "2", "--node-rank", "1", "--coordinator", f"{host}:1", "script.py"]
    for command in (node, ["watch", f"{host}:1"]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "shoal", *command], env=env, cwd=tmp_path,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 74, done
        assert f"the name {host!r} does not resolve: " in " ".join(done.stderr.split())


@NEEDS_ROOT
def test_shoal_coordinator_prints_an_address_that_resolves(child_env):
    """For the processes on other hosts it is the name of its host, or else an address."""
    command = [*NAMELESS, sys.executable, "-m", "shoal", "coordinator", "-n", "2"]
    with subprocess.Popen(
        [*command, "--bind", "0.0.0.0"], env=child_env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as coordinator:  # fmt: skip
        record = json.loads(coordinator.stdout.readline())
        coordinator.terminate()
    host, _ = split_address(record["coordinator"])
    assert ipaddress.ip_address(host)
