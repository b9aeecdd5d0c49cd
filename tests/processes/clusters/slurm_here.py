"""Slurm on this machine, as one node: its own daemons, where they are installed.

Debian has them in slurm-wlm. And an `srun` for where they are not: it sets the variables that Slurm
22.05 set for `srun -n 2`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobRequeue=1
{plugins}
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES State=UP
"""
SRUN = """\
import os, signal, subprocess, sys
step = {  # with a number of its own, of which the port is made: tests run side by side
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
}
both = [
    subprocess.Popen(
        sys.argv[1:],
        env={**os.environ, **step, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)},
    )
    for index in range(2)
]
sys.exit(max(one.wait() for one in both))
"""
START_S = 60.0


def recorded(folder):
    """Put an `srun` with recorded variables, and an `scontrol` that notes its orders, there."""
    folder.stand_in_python("srun", SRUN)
    folder.stand_in("scontrol", f'#!/bin/sh\necho "$@" >> {folder.path}/scontrol.said\n')
    return {"SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(folder.path)}


def why_no_slurm():
    """Return why Slurm cannot run here; "" if it can."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed (apt install slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """A cluster of one node."""

    def __init__(self, folder):
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(), user="root", ports=ports, folder=folder,
                plugins=_plugins(),
            )
        )  # fmt: skip
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        whole = {**os.environ, **self.env}
        stepd = shutil.which("slurmstepd")
        daemons = [["slurmctld", "-D", "-i"], ["slurmd", "-D", *(["-d", stepd] if stepd else [])]]
        self._daemons = []
        for daemon in daemons:
            with open(folder / f"{daemon[0]}.log", "w") as log:
                self._daemons.append(
                    subprocess.Popen(
                        daemon, env=whole, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                    )
                )
        self._await(["sinfo", "-h", "-o", "%T"], "idle")

    def close(self):
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(START_S)

    def order(self, *command):
        """Run a command of Slurm; return what it printed."""
        env = {**os.environ, **self.env}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def start_again(self, job):
        """Wait until a job that runs is queued again, and have it start now, not in two minutes."""
        self._await(["scontrol", "show", "job", job], "JobState=PENDING")
        self.order("scontrol", "update", f"JobId={job}", "StartTime=now")

    def _await(self, command, words):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            said = self.order(*command)
            if words in said:
                return
        raise TimeoutError(f"{command} does not say {words}: {said}")


def _plugins():
    """Return where its plugins are, if Slurm is not installed where it was built for."""
    prefix = Path(shutil.which("slurmctld")).parents[1]
    found = sorted(prefix.glob("lib/*/slurm-wlm"))
    return f"PluginDir={found[0]}" if found else ""
