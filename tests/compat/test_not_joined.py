"""The predecessors' programs in a job that they never join: an error, never one program for each.

The processes of torch_xla find each other without a call; those of shoal join by `initialize`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "here", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip
IMPORTS = """
import jax, numpy as np
import shoal.compat.torch_xla as xs
import shoal.compat.torch_xla.runtime as xr
from shoal.compat import multihost_utils
mesh = jax.sharding.Mesh(jax.devices(), "x")
P = jax.sharding.PartitionSpec
"""
CALLS = [
    "xs.get_1d_mesh('data')",
    "xs.mark_sharding(np.ones(8, 'f4'), xs.Mesh(np.arange(1), (1,), ('x',)), ('x',))",
    "xs.HybridMesh(ici_mesh_shape=(1,))",
    "xr.global_runtime_device_count()",
    "xr.addressable_runtime_device_count()",
    "multihost_utils.host_local_array_to_global_array(np.ones(8, 'f4'), mesh, P())",
    "multihost_utils.global_array_to_host_local_array(np.ones(8, 'f4'), mesh, P())",
    "multihost_utils.process_allgather(np.ones(8, 'f4'))",
]


@pytest.mark.parametrize("env", [TORCHRUN, SLURM], ids=["torchrun", "Slurm"])
def test_each_of_their_first_calls_says_that_the_job_was_not_joined(env, child_env):
    attempts = "\n".join(
        f"try:\n  {call}\nexcept shoal.InitializeError: pass\nelse: print({call!r})"
        for call in CALLS
    )
    program = f"import shoal\n{IMPORTS}\n{attempts}\n{CALLS[0]}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_env | env, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("", 1), done
    assert "shoal.initialize()" in done.stderr
