"""torchrun's agent as torch 2.13 was found to be: its variables, its poll, and whom it blames.

`recorded_torchrun.py --nnodes 2 --node-rank 1 --nproc-per-node 3 --monitor-interval 0.1 script.py
args…`; nodes do not meet, as their processes do that. A stand-in where torch is not installed; the
same tests run under torchrun itself where it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

CLOSE_S = 30.0


class Failure(NamedTuple):
    """A process that ended with another code than 0, as the agent saw it."""

    rank: int
    pid: int
    code: int
    time_s: int
    words: str


class Agent:
    """The processes of one node."""

    def __init__(self, nodes: int, node: int, count: int, command: list[str], folder: str) -> None:
        self.first = node * count  # the rank of its first process
        self.files = [os.path.join(folder, str(local), "error.json") for local in range(count)]
        self.failures: dict[int, Failure] = {}  # in the order in which they were seen
        self.processes = []
        for local, file in enumerate(self.files):
            os.mkdir(os.path.dirname(file))
            variables = {
                "RANK": self.first + local, "WORLD_SIZE": nodes * count, "GROUP_RANK": node,
                "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count,
                "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": file,
            }  # fmt: skip
            env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            self.processes.append(subprocess.Popen(command, env=env, start_new_session=True))

    def look(self) -> bool:
        """Poll each process; return whether all have ended."""
        for local, process in enumerate(self.processes):
            code = process.poll()
            if code and local not in self.failures:
                self.failures[local] = self._failure(local, process.pid, code)
        return all(process.returncode is not None for process in self.processes)

    def close(self) -> None:
        """Send SIGTERM to the processes that live, and wait for them."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + CLOSE_S
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _failure(self, local: int, pid: int, code: int) -> Failure:
        rank = self.first + local
        if not os.path.isfile(self.files[local]):
            return Failure(rank, pid, code, int(time.time()), "")
        with open(self.files[local], encoding="utf-8") as file:
            extra = json.load(file)["message"]["extraInfo"]
        return Failure(rank, pid, code, int(extra["timestamp"]), extra["py_callstack"])


def main() -> int:
    """Run the job; print the root cause as torchrun does, with the others before it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--monitor-interval", type=float, default=0.1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *options.command]
        agent = Agent(options.nnodes, options.node_rank, options.nproc_per_node, command, folder)
        while not agent.look() and not agent.failures:
            time.sleep(options.monitor_interval)
        agent.close()
        agent.look()
    if not agent.failures:
        return 0
    root = min(agent.failures.values(), key=lambda failure: failure.time_s)
    print("Failures:")
    for failure in [*(f for f in agent.failures.values() if f is not root), root]:
        if failure is root:
            print("Root Cause (first observed failure):")
        print(f"[0]:\n  rank      : {failure.rank} (local_rank: {failure.rank - agent.first})")
        print(f"  exitcode  : {failure.code} (pid: {failure.pid})")
        print(f"  traceback : {failure.words}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
