"""Values between processes beside JAX's own, MPI's and gloo's: broadcast, allgather, assert_same.

Every row is one job of N processes with four virtual devices each, in which the contestants take
turns: shoal, `jax.experimental.multihost_utils`, mpi4py where `mpiexec` starts the job, and
`torch.distributed` over gloo where torch is importable. A sample is the mean of `calls` calls, one
after the other, on process 0. MPI spins while it waits: with more processes than cores it pays for
that. mpi4py and torch send one array of known size and check nothing; of the 1,000 leaves they
send one after the other.

All run on one host, where shoal moves large values through memory; `--devices` makes it move them
over the devices, as between hosts. "new shape": each call has a shape that was never sent before.
Peak memory: each contestant in a job of its own, the growth of the highest resident size of process
1 over one call, in MB.

`values.py --quick` leaves out four processes and what takes long.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np

ROUNDS, WARM_UP, DEVICES = 9, 2, 4
FEW_ROUNDS = 3  # of what takes seconds
LEAVES = 1000
CALLS = {"1 kB": 30, "4 MB": 3, "256 MB": 1, "1,000 leaves": 3}
NUMBERS = {"1 kB": 256, "4 MB": 1_000_000, "256 MB": 64_000_000}  # float32
Send = Callable[[Any], Any]


def tree_of(what: str, more: int = 0) -> Any:
    """Return the value that is sent; `more` makes its shape a new one."""
    if what == "1,000 leaves":
        return [np.full(4 + more, i, np.float32) for i in range(LEAVES)]
    return np.arange(NUMBERS[what] + more, dtype=np.float32)


def contestants(operation: str, peers: list[str]) -> dict[str, Send]:
    """Return who takes part; each is called with the value."""
    found: dict[str, Send] = {"shoal": _shoal(operation), "jax": _jax(operation)}
    if "mpi4py" in peers:
        found["mpi4py"] = _mpi(operation)
    if "gloo" in peers:
        found["gloo"] = _gloo(operation)
    return found


def _shoal(operation: str) -> Send:
    import shoal

    return {
        "broadcast": lambda tree: shoal.broadcast(tree),
        "allgather": lambda tree: shoal.allgather(tree),
        "assert_same": lambda tree: shoal.assert_same(tree),
    }[operation]


def _jax(operation: str) -> Send:
    from jax.experimental import multihost_utils

    return {
        "broadcast": multihost_utils.broadcast_one_to_all,
        "allgather": multihost_utils.process_allgather,
        "assert_same": multihost_utils.assert_equal,
    }[operation]


def _leaves(tree: Any) -> list[Any]:
    return tree if isinstance(tree, list) else [tree]


def _mpi(operation: str) -> Send:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def broadcast(tree: Any) -> None:
        for leaf in _leaves(tree):
            world.Bcast(leaf.copy() if world.rank else leaf)

    def allgather(tree: Any) -> None:
        for leaf in _leaves(tree):
            world.Allgather(leaf, np.empty((world.size, *leaf.shape), leaf.dtype))

    return {"broadcast": broadcast, "allgather": allgather}[operation]


def _gloo(operation: str) -> Send:
    import torch
    import torch.distributed as dist

    def broadcast(tree: Any) -> None:
        for leaf in _leaves(tree):
            dist.broadcast(torch.from_numpy(leaf.copy() if dist.get_rank() else leaf), 0)

    def allgather(tree: Any) -> None:
        for leaf in _leaves(tree):
            out = torch.empty((dist.get_world_size() * len(leaf),))
            dist.all_gather_into_tensor(out, torch.from_numpy(leaf))

    return {"broadcast": broadcast, "allgather": allgather}[operation]


def measure(operation: str, what: str, shapes: str, peers: list[str]) -> dict[str, list[float]]:
    """In a process of the job: let the contestants take turns; return milliseconds a call."""
    import shoal

    new = itertools.count(1)
    found = contestants(operation, peers)
    calls = 1 if shapes == "new" else CALLS[what]
    same = tree_of(what)
    samples: dict[str, list[float]] = {name: [] for name in found}
    for send in found.values():
        for _ in range(WARM_UP if what != "256 MB" else 1):
            send(same)
    rounds = FEW_ROUNDS if what == "256 MB" and operation != "assert_same" else ROUNDS
    for _ in range(rounds):
        for name, send in found.items():
            trees = [tree_of(what, next(new)) for _ in range(calls)] if shapes == "new" else []
            shoal.barrier("turn")
            began = time.perf_counter()
            for tree in trees or [same] * calls:
                send(tree)
            samples[name].append((time.perf_counter() - began) * 1e3 / calls)
    return samples


def measure_memory(operation: str, what: str, contestant: str) -> dict[str, list[float]]:
    """Return the growth of the highest resident size over one call, in MB; on process 1."""
    import shoal

    small, value = tree_of("1 kB"), tree_of(what)
    send = contestants(operation, [])[contestant]
    send(small)
    shoal.broadcast(np.zeros(1 << 20, np.uint8))  # programs are compiled, threads have stacks
    before = _status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest size is counted from now
    kept = send(value)
    grown = _status_mb("VmHWM") - before
    del kept
    return {contestant: [grown]}


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1e3


def measure_agreement(peers: list[str]) -> dict[str, list[float]]:
    """Return microseconds of a broadcast of one number, and of a bare barrier."""
    import shoal

    found: dict[str, Callable[[], object]] = {
        "shoal": lambda: shoal.broadcast(1),
        "barrier": lambda: shoal.barrier("b"),
    }
    samples: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, call in found.items():
            shoal.barrier("turn")
            began = time.perf_counter()
            for _ in range(300):
                call()
            samples[name].append((time.perf_counter() - began) / 300 * 1e6)
    return samples


def be_process(asked: list[str], address: str, index: int, count: int) -> None:
    """Be one process of a job."""
    import shoal

    shoal.initialize(
        coordinator_address=address, num_processes=count, process_id=index, virtual_devices=DEVICES
    )
    kind, *more = asked
    peers = ["mpi4py"] if "PMI_RANK" in os.environ else []
    with contextlib.suppress(ImportError):
        import torch.distributed as dist

        port = shoal.broadcast(jobs.free_port())
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=index, world_size=count)
        peers.append("gloo")
    if kind == "memory":
        samples = measure_memory(*more)
    elif kind == "agreement":
        samples = measure_agreement(peers)
    else:
        samples = measure(*more, peers if more[0] != "assert_same" else [])
    shoal.barrier("measured")
    if index == (1 if kind == "memory" else 0):
        print(json.dumps(samples), flush=True)
    shoal.shutdown()


def run_job(asked: list[str], count: int) -> dict[str, list[float]]:
    """Start a job, under mpiexec where there is one; return what was measured."""
    with_mpi = asked[0] == "time" and asked[1] != "assert_same"
    return jobs.run_job([__file__, "--process", json.dumps(asked)], count, with_mpi=with_mpi)


def rows(*, quick: bool) -> Iterator[tuple[str, dict[str, object], dict[str, list[float]], str]]:
    """Run everything; yield the rows."""
    for count in (2,) if quick else (2, 4):
        case: dict[str, object] = {"processes": count, "cores": os.cpu_count()}
        yield "agreement", case, run_job(["agreement"], count), "us"
        for operation in ("broadcast", "allgather"):
            for what in ("1 kB", "4 MB", "1,000 leaves") if quick else CALLS:
                for shapes in ("steady", "new"):
                    if what == "256 MB" and (shapes == "new" or operation == "allgather"):
                        continue
                    found = run_job(["time", operation, what, shapes], count)
                    yield operation, {**case, "value": what, "shape": shapes}, found, "ms"
        found = run_job(["time", "assert_same", "256 MB", "steady"], count)
        yield "assert_same", {**case, "value": "256 MB", "shape": "steady"}, found, "ms"
        for operation in ("broadcast", "allgather", "assert_same") if count == 2 else ():
            found = {}
            for contestant in ("shoal", "jax"):
                found |= run_job(["memory", operation, "256 MB", contestant], count)
            yield f"{operation} peak memory", {**case, "value": "256 MB"}, found, "MB"


def main() -> None:
    """Print the rows, or be a process of a job that is measured."""
    if "--devices" in sys.argv:
        os.environ["SHOAL_SHARED_MEMORY"] = "0"
    if sys.argv[1:2] == ["--process"]:
        asked, address, index, count = sys.argv[2:]
        index = os.environ["PMI_RANK"] if index == "mpi" else index
        be_process(json.loads(asked), address, int(index), int(count))
        return
    from rows import print_row

    for row in rows(quick="--quick" in sys.argv):
        print_row(*row)


if __name__ == "__main__":
    main()
