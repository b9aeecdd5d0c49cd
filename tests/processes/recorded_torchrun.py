"""torchrun's agent as torch 2.13 was found to be: its variables, its poll, and whom it blames.

`recorded_torchrun.py --nproc-per-node 3 --monitor-interval 0.1 script.py args…`. A stand-in where
torch is not installed; the same tests run under torchrun itself where it is.
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

    def __init__(self, count: int, command: list[str], folder: str) -> None:
        self.files = [os.path.join(folder, str(rank), "error.json") for rank in range(count)]
        self.failures: dict[int, Failure] = {}  # in the order in which they were seen
        self.processes = []
        for rank, file in enumerate(self.files):
            os.mkdir(os.path.dirname(file))
            variables = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
                "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": file,
            }  # fmt: skip
            env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            self.processes.append(subprocess.Popen(command, env=env, start_new_session=True))

    def look(self) -> bool:
        """Poll each process; return whether all have ended."""
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code and rank not in self.failures:
                self.failures[rank] = self._failure(rank, process.pid, code)
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

    def _failure(self, rank: int, pid: int, code: int) -> Failure:
        if not os.path.isfile(self.files[rank]):
            return Failure(rank, pid, code, int(time.time()), "")
        with open(self.files[rank], encoding="utf-8") as file:
            extra = json.load(file)["message"]["extraInfo"]
        return Failure(rank, pid, code, int(extra["timestamp"]), extra["py_callstack"])


def main() -> int:
    """Run the job; print the root cause as torchrun does, with the others before it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--monitor-interval", type=float, default=0.1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(options.nproc_per_node, [sys.executable, *options.command], folder)
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
        print(f"[0]:\n  rank      : {failure.rank} (local_rank: {failure.rank})")
        print(f"  exitcode  : {failure.code} (pid: {failure.pid})")
        print(f"  traceback : {failure.words}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
