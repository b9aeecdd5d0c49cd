"""docs/clusters/slurm.md and gpu.md: under Slurm itself, and with recorded variables."""

from __future__ import annotations

import os
import signal

import pytest

from processes.clusters.pages import STEPS_WITH_NOTICE, check_went_on, is_done
from processes.clusters.slurm_here import Slurm, recorded, why_no_slurm
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.options import Arguments
from shoal.runtime.system import local_devices

TWO_TASKS = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0")


@pytest.mark.parametrize("page", ["slurm.md", "gpu.md"])
def test_recorded(folder, page):
    variables = recorded(folder)
    folder.add(page, "train.sbatch")
    job = folder.start("bash", "train.sbatch", **variables)
    assert job.code() == 0, job.said
    assert is_done(job.said, 2), job.said
    assert not (folder.path / "scontrol.said").exists()


def test_recorded_requeue(folder):
    variables = recorded(folder)
    folder.add("slurm.md", "train.sbatch")
    job = folder.start("bash", "train.sbatch", STEPS=str(STEPS_WITH_NOTICE), **variables)
    job.until("from step 0")
    for pid in job.pids("python train.py")[-2:]:
        os.kill(pid, signal.SIGUSR1)
    assert job.code() == 75, job.said
    assert (folder.path / "scontrol.said").read_text() == "requeue 77\n"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if why := why_no_slurm():
        pytest.skip(why)
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.close()


def submit(folder, slurm, page, **env):
    """Submit the file of a page; return the job, and its log as it grows."""
    folder.add(page, "train.sbatch")
    log = folder.path / "train.log"
    log.touch()
    options = [*TWO_TASKS, "--wait", "--signal=USR1@30", f"--output={log}"]
    job = folder.start("sbatch", *options, "train.sbatch", **slurm.env, **env)
    return job, folder.start("tail", "-n", "+1", "-f", str(log))


def test_slurm_itself_runs_and_requeues_it(folder, slurm):
    job, log = submit(folder, slurm, "slurm.md", STEPS=str(STEPS_WITH_NOTICE))
    log.until("from step 0")
    number = job.said.split()[-1]
    slurm.order("scancel", "--signal=USR1", number)
    slurm.start_again(number)
    log.until("from step ", times=2)
    log.until("done after")
    assert job.code() == 0, job.said
    check_went_on(log.said, 2)


@pytest.mark.parametrize(
    ("tasks", "more", "devices"),
    [
        (8, {}, [(index,) for index in range(8)]),
        (2, {}, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (1, {}, [None]),
        (8, {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "5"}, [None] * 8),
    ],
)
def test_the_table_of_gpus(tasks, more, devices, monkeypatch):
    assert [of_gpu_node(index, tasks, more, monkeypatch) for index in range(tasks)] == devices


def test_gpus_that_cannot_be_shared(monkeypatch):
    with pytest.raises(ValueError, match=r"this process sees 8 GPUs .* cannot have equal shares"):
        of_gpu_node(0, 3, {}, monkeypatch)


def of_gpu_node(index, tasks, more, monkeypatch):
    """Return the GPUs of one of several processes on a node with eight."""

    def seen(platform, env):
        listed = env.get("CUDA_VISIBLE_DEVICES")
        return (8, False) if listed is None else (len(listed.split(",")), True)

    monkeypatch.setattr(local_devices, "devices_seen", seen)
    env = {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(index),
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "n1",
        "SLURM_LOCALID": str(index), "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(tasks), **more,
    }  # fmt: skip
    return decide(Arguments(), env).local_device_ids
