"""torchrun blames the process that failed, however it failed and however slowly it ended.

Real processes at a real coordinator, without JAX; under torchrun itself where torch is installed,
else under its agent as recorded.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from processes import recorded_torchrun

PATIENCE_S = 120.0  # a deadline of the test itself: reached only when something is broken
FAILED = 1  # the rank

HEAD = """
import atexit, json, os, signal, sys, time, traceback
from shoal.errors import PeerFailedError, ProcessLostError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.over_tcp import join
from shoal.runtime.exit.guard import ExitGuard

rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
job = join(sys.argv[1], process=rank, num_processes=count, timeout_s=60)
guard = ExitGuard()
guard.hook()
guard.watch(job, is_idle=lambda: True, issued_work=lambda: lambda: True, leave=job.close,
            compare=bool, parts_together=False)

def record(main):  # as torch's @record
    try:
        main()
    except Exception as error:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        record = {"message": {"message": f"mine: {error}", "extraInfo": extra}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump(record, file)
        raise

def at_the_end_of_a_second():  # torch's times are whole seconds
    time.sleep((0.95 - time.time()) % 1)

def meet():
    barrier.on(job, "after", timeout_s=60)

barrier.on(job, "before", timeout_s=60)
"""
RAISES = "raise ValueError('no data')"
KILLED = "at_the_end_of_a_second(); os.kill(os.getpid(), signal.SIGKILL)"
# What the failed process and the others do; its exit code, its words, and the others' code.
ENDS = {
    "raises": (RAISES, "meet()", 1, "ValueError: no data", 72),
    "raises and ends slowly": (
        f"atexit.register(time.sleep, 1.5)\nat_the_end_of_a_second()\n{RAISES}", "meet()",
        1, "ValueError: no data", 72,
    ),
    "is killed": (KILLED, "meet()", -9, "", 71),
    "is killed, with @record": (KILLED, "record(meet)", -9, "", 71),
    "raises, with @record": (
        f"def main():\n {RAISES}\nrecord(main)", "record(meet)", 1, "ValueError: no data", 72,
    ),
    "sys.exit": (
        "sys.exit(3)",
        "try:\n meet()\nexcept PeerFailedError:\n sys.exit(4)", 3, "exited with code 3", 4,
    ),
    "other errors about it": (
        KILLED, "try:\n meet()\nexcept ProcessLostError:\n raise RuntimeError('oh')", -9, "", 1,
    ),
}  # fmt: skip


# Recorded, all ends run with the suite; under torchrun itself two do, the others with the faults.
WITH_ITSELF = ("raises and ends slowly", "is killed, with @record")
ROWS = [
    pytest.param(way, end, marks=[pytest.mark.faults] if is_late else [])
    for way in ("itself", "recorded")
    for end in ENDS
    for is_late in [way == "itself" and end not in WITH_ITSELF]
]


@pytest.fixture(params=["itself", "recorded"])
def run(request, tmp_path, child_env):
    """Return a function that runs a program for each rank on each node; what each agent says."""
    if request.param == "itself" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (pip install torch)")
    paths = [str(Path(shoal.__file__).parents[1]), *(p for p in sys.path if "site-packages" in p)]
    env = {**child_env, "PYTHONPATH": ":".join([child_env["PYTHONPATH"], *paths])}
    torchrun, started = [sys.executable, recorded_torchrun.__file__], []
    if request.param == "itself":
        rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-id=it"
        torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous.split()]
        torchrun += ["--local-addr", "localhost"]

    def start(command, **more):
        popen = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **more)
        started.append(popen)
        return popen

    def agents(failed, others, nodes, per_node):
        count = str(nodes * per_node)
        place = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--until-empty"]
        address = json.loads(start([*place, "--processes", count]).stdout.readline())["address"]
        script, bodies = tmp_path / "train.py", {True: failed, False: others}
        script.write_text(HEAD + f"exec({bodies!r}[rank == {FAILED}])\n")
        # Polls are rare: hardly ever does one fall between two steps of the end of a process.
        options = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node)]
        options += ["--monitor-interval", "0.8"]
        rows = [
            start(
                [*torchrun, *options, "--node-rank", str(node), str(script), address],
                stderr=subprocess.STDOUT,
            )
            for node in range(nodes)
        ]
        said = [row.communicate(timeout=PATIENCE_S)[0] for row in rows]
        assert [row.returncode for row in rows] == [1] * nodes, said
        return said

    yield agents
    for popen in started:
        popen.kill()
        popen.communicate()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def failures_of(said):
    """Return {rank: (code, traceback)} of torchrun's report, the root cause last."""
    found = {}
    for block in re.split(r"\n\[\d+\]:\n", said.partition("Failures:")[2])[1:]:
        rank, code = re.findall(r"^  (?:rank|exitcode) +: (-?\d+) ", block, re.M)
        found[int(rank)] = int(code), block.partition("traceback : ")[2]
    return found


@pytest.mark.parametrize(("run", "end"), ROWS, indirect=["run"])
def test_the_failed_process_is_the_root_cause(end, run):
    failed, others, code, words, others_code = ENDS[end]
    (said,) = run(failed, others, 1, 3)
    found = failures_of(said)
    root = [*found][-1]
    assert (root, found[root][0]) == (FAILED, code), said
    assert words in found[root][1]
    ends = {
        (code, f"process {FAILED} (" in words)
        for rank, (code, words) in found.items()
        if rank != FAILED
    }
    # The agent's SIGTERM may come before a process has heard of the failure, or before its end.
    early = set() if "slowly" in end else {(-signal.SIGTERM, False), (-signal.SIGTERM, True)}
    assert ends <= {(others_code, True)} | early, said


def test_on_another_node_the_root_cause_names_the_failed_process(run):
    failed, others, *_ = ENDS["is killed"]
    found = [failures_of(said) for said in run(failed, others, 2, 2)]
    (here,) = (failures for failures in found if FAILED in failures)
    (there,) = (failures for failures in found if FAILED not in failures)
    assert [*here][-1] == FAILED, found
    code, words = [*there.values()][-1]
    assert (code, f"process {FAILED} (" in words) == (71, True), found
