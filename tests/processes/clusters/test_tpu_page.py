"""docs/clusters/tpu.md with recorded variables of a slice of two hosts, on CPU devices."""

from __future__ import annotations

import os
import signal

import pytest

from processes.clusters.pages import STEPS_WITH_NOTICE, check_went_on

# Starts the command on each host of the slice, as `gcloud … ssh --worker=all`; GKE's variables, by
# which JAX knows the hosts without a metadata server.
GCLOUD = """\
import os, subprocess, sys
if "ssh" not in sys.argv:
    assert sys.argv[1:5] == ["compute", "tpus", "tpu-vm", "scp"], sys.argv
    sys.exit(0)
command = sys.argv[sys.argv.index("--command") + 1]
slice_ = {
    "JAX_FORCE_TPU_INIT": "1", "MEGASCALE_NUM_SLICES": "", "MEGASCALE_SLICE_ID": "",
    "MEGASCALE_COORDINATOR_ADDRESS": "", "TPU_WORKER_HOSTNAMES": "localhost,localhost",
    "SHOAL_VIRTUAL_DEVICES": "2",
}
env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
rows = [
    subprocess.Popen(["sh", "-c", command], env={**env, **slice_, "TPU_WORKER_ID": str(index)})
    for index in range(2)
]
sys.exit(max([row.wait() for row in rows]))
"""


@pytest.mark.pages
def test_tpu_page_runs_and_restarts_after_code_75(folder):
    """One test, because JAX's port for TPU hosts is one for all."""
    folder.stand_in_python("gcloud", GCLOUD)
    folder.add("tpu.md", "start.sh")
    variables = {"TPU": "my-slice", "ZONE": "us-central2-b", "STEPS": str(STEPS_WITH_NOTICE)}
    job = folder.start("sh", "start.sh", **variables)
    job.until("from step 0")
    os.kill(job.pids("python3 train.py")[-1], signal.SIGTERM)
    job.until("from step ", times=2)
    assert job.code() == 0, job.said
    check_went_on(job.said, 2, devices=4)
