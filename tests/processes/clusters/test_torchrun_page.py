"""docs/clusters/torchrun.md: under torchrun itself where torch is installed, else as recorded."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket

import pytest

from processes.clusters.pages import STEPS_WITH_NOTICE, check_went_on

# What torchrun of torch 2.9 set for its processes, and no more; one node.
RECORDED = """\
import os, signal, subprocess, sys
program = sys.argv[sys.argv.index("--no-python") + 1:]
count = int(sys.argv[sys.argv.index("--nproc-per-node") + 1])
job = {
    "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}", "WORLD_SIZE": str(count),
    "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "train", "TORCHELASTIC_RESTART_COUNT": "0",
}
rows = [
    subprocess.Popen(program, env={**os.environ, **job, "RANK": str(i), "LOCAL_RANK": str(i)})
    for i in range(count)
]
def pass_on(number, frame):
    for row in rows:
        with open(f"/proc/{row.pid}/task/{row.pid}/children") as children:
            for pid in children.read().split():
                os.kill(int(pid), signal.SIGTERM)
signal.signal(signal.SIGTERM, pass_on)
sys.exit(1 if any([row.wait() for row in rows]) else 0)
"""
ITSELF = """\
import os, sys
torchrun = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "localhost"]
os.execv(sys.executable, [*torchrun, *sys.argv[1:]])
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(params=["itself", "recorded"])
def start(folder, request):
    """Return a function that starts the file."""
    if request.param == "itself" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (pip install torch)")
    text = ITSELF if request.param == "itself" else RECORDED
    folder.stand_in_python("torchrun", text.replace("{port}", str(free_port())))
    folder.add("torchrun.md", "start.sh")
    script = folder.path / "start.sh"
    script.write_text(script.read_text().replace("29400", str(free_port())))

    def run(**env):
        job = {"NODES": "1", "PER_NODE": "2", "HEAD": "localhost", "OMP_NUM_THREADS": "1"}
        return folder.start("sh", "start.sh", **job, **env)

    return run


@pytest.mark.pages
def test_torchrun_page_runs_and_restarts_after_code_75(start):
    job = start(STEPS=str(STEPS_WITH_NOTICE))
    job.until("from step 0")
    os.kill(job.pids("--rdzv-id train")[0], signal.SIGTERM)
    job.until("from step ", times=2)
    assert job.code() == 0, job.said
    check_went_on(job.said, 2)
