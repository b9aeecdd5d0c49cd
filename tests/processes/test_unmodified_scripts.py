"""Scripts that only know `jax.distributed.initialize()` run in a job whose services run already."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

# What the launcher's child runner does before it runs the user's script.
SERVED = """
import jax._src.clusters
from shoal.runtime.jax_service.jax_runtime import serve_unmodified_scripts
serve_unmodified_scripts()
import os, jax
jax.config.update("jax_num_cpu_devices", 2)
"""


@contextlib.contextmanager
def service(module, env):
    """Run a service as the launcher does, its life tied to a pipe; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--processes", "2", "--until-stdin-closes"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.stdin.close()
        code = process.wait(timeout=20)
        process.stdout.close()
    assert code == 0


@pytest.fixture
def launched(child_env):
    """Return the variables that a launcher sets for both processes."""
    child_env = {**child_env, "SHOAL_TOKEN": "a secret"}
    with (
        service("shoal.runtime.jax_service.jax_runtime", child_env) as jax_service,
        service("shoal.runtime.server.coordinator", child_env) as place,
    ):
        yield {
            "SHOAL_COORDINATOR": place,
            "SHOAL_JAX_SERVICE": jax_service,
            "SHOAL_NUM_PROCESSES": "2",
            "JAX_COORDINATOR_ADDRESS": jax_service,
            "SHOAL_TOKEN": "a secret",
        }


def start_both(job, script, launched, **more):
    for index in range(2):
        job.start(index, 2, script, SHOAL_PROCESS_ID=str(index), **launched, **more)
    return job.wait()


@pytest.mark.parametrize("slurm", [{}, {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1"}])
def test_initialize_without_arguments(job, said, launched, slurm):
    script = SERVED + (
        "jax.distributed.initialize()\n"
        "say(jax.process_index(), jax.process_count(), global_sum(), jax.local_device_count())\n"
        "initialize = process.initialize\n"
        "initialize(timeout_s=30)\n"  # attaches, at the launcher's coordinator
        "initialize()\n"  # again, to no effect
        "barrier('both')\n"
        "say(process.process_index(), process.process_count())\n"
    )
    for index, one in enumerate(start_both(job, script, launched, **slurm)):
        assert one.code == 0, one
        assert said(one).splitlines() == [f"{index} 2 6.0 2", f"{index} 2"]


def test_an_address_of_the_scripts_own_gets_no_decoy(launched, job, said):
    # the job's port is looked for while the services hold theirs: it is another one
    script = SERVED + (
        "jax.distributed.initialize(address)\n"
        "say(jax.process_index(), global_sum(), os.environ.get('JAX_COORDINATOR_BIND_ADDRESS'))\n"
    )
    for index, one in enumerate(start_both(job, script, launched)):
        assert one.code == 0, one
        assert said(one).splitlines() == [f"{index} 6.0 None"]


def test_initialize_of_shoal_takes_the_launchers_numbers(job, said, launched):
    script = (
        "process.initialize(timeout_s=30)\n"
        "say(process.process_index(), process.process_count(), global_sum())\n"
    )
    for index, one in enumerate(start_both(job, script, launched, SHOAL_VIRTUAL_DEVICES="2")):
        assert (one.code, one.err) == (0, ""), one
        assert said(one).splitlines() == [f"{index} 2 6.0"]
