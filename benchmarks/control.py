"""A barrier beside its peers, and what the watcher and `step` cost a training loop.

Every row of barriers is one job of N processes on one device each, in which the contestants take
turns: `shoal.barrier`, `sync_global_devices`, the barrier of JAX's coordination service alone
(`service`), and, where `mpiexec` starts the job, mpi4py's. A sample is the mean of as many barriers
as take each contestant about SAMPLE_S, on process 0. MPI spins while it waits: with more processes
than cores it pays for that.

The row `step with notes` is a loop of steps of STEP_MS, each with a collective of XLA, where
compiled programs are noted, as evidence of a divergence, and where they are not. Both take turns in
a random order, in blocks of STEPS steps.

The row `barrier sockets` is the same barrier with its calls over the Unix socket, for processes on
the host of the coordinator, and over TCP, for all others.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import jobs

SAMPLE_S, ROUNDS, WARM_UP = 0.25, 11, 50
SERVICE_MS = 10_000
STEP_MS, STEPS = 10, 50


def barriers() -> dict[str, Callable[[int], object]]:
    """Return the contestants; each is called with a number that is new every time."""
    from jax._src import distributed  # what is measured is JAX's own
    from jax.experimental import multihost_utils

    import shoal

    client = distributed.global_state.client
    contestants: dict[str, Callable[[int], object]] = {
        "shoal": lambda i: shoal.barrier("b"),
        "sync_global_devices": lambda i: multihost_utils.sync_global_devices("b"),
        "service": lambda i: client.wait_at_barrier(f"b{i}", SERVICE_MS),
    }
    if "PMI_RANK" in os.environ:
        from mpi4py import MPI

        contestants["mpi4py"] = lambda i: MPI.COMM_WORLD.Barrier()
    return contestants


def sockets() -> dict[str, Callable[[int], object]]:
    """Return the barrier over each kind of connection."""
    import shoal
    from shoal.runtime.process import client

    calls = client()._calls  # type: ignore[attr-defined]  # the pool of its connections
    pools = {}
    for name in ("shoal", "tcp"):
        calls._free = []
        shoal.barrier("open a connection")
        pools[name] = calls._free
        calls._near = ""  # from here on over TCP

    def barrier_over(pool: list[object]) -> Callable[[int], object]:
        def call(i: int) -> None:
            calls._free = pool
            shoal.barrier("b")

        return call

    return {name: barrier_over(pool) for name, pool in pools.items()}


def measure_barriers(
    contestants: dict[str, Callable[[int], object]],
) -> dict[str, list[float]]:
    """In a process of the job: let the contestants take turns; return microseconds a call."""
    samples: dict[str, list[float]] = {}
    numbers = itertools.count()

    def mean_s(call: Callable[[int], object], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call(next(numbers))
        return (time.perf_counter() - began) / calls

    calls = {}
    for name, call in contestants.items():
        mean_s(call, WARM_UP)
        wanted = round(SAMPLE_S / mean_s(call, WARM_UP))
        calls[name] = int(agreed(wanted))
    for _ in range(ROUNDS):
        for name, call in contestants.items():
            samples.setdefault(name, []).append(mean_s(call, calls[name]) * 1e6)
    return samples


def agreed(value: int) -> int:
    """Return what process 0 says."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(value))


def measure_step() -> dict[str, list[float]]:
    """Return what the label adds to a step, and the watcher's share of a core, in percent."""
    import shoal

    label_us = []
    for turn in range(ROUNDS):
        began = time.perf_counter()
        for i in range(1000):
            with shoal.step(turn * 1000 + i):
                pass
        label_us.append((time.perf_counter() - began) * 1e3)
    watcher = []
    for _ in range(3):
        cpu, began = time.process_time(), time.perf_counter()
        time.sleep(8.0)  # nothing else runs: all that is used is the watcher's
        watcher.append((time.process_time() - cpu) / (time.perf_counter() - began) * 100)
    return {
        "label_percent_of_10_ms": [us / 1e4 * 100 for us in label_us],
        "watcher_percent_of_a_core": watcher,
    }


def measure_notes() -> dict[str, list[float]]:
    """Return milliseconds a step, where compiled programs are noted, and where they are not."""
    import jax
    import numpy as np
    from jax._src import compiler  # what is noted are its calls

    import shoal
    from shoal.runtime.process import client

    noting, notes = compiler.compile_or_get_cached, client().programs
    mesh = shoal.make_mesh({"data": -1})
    given = np.full((64 * shoal.process_count(), 64), 1 / 64, "float32")
    rows = shoal.put(given, shoal.Layout(mesh, "data"))

    @jax.jit
    def train(rows: jax.Array, turns: jax.Array) -> jax.Array:
        square = rows[:64]
        return jax.lax.fori_loop(0, turns, lambda _, x: x @ square, rows).sum()

    def block_ms(turns: int, *, is_noted: bool) -> float:
        compiler.compile_or_get_cached = noting if is_noted else noting.shoal_wraps
        notes.is_noting = is_noted
        shoal.barrier("block")
        began = time.perf_counter()
        for i in range(STEPS):
            with shoal.step(i):
                float(train(rows, turns))
        return (time.perf_counter() - began) / STEPS * 1e3

    block_ms(1, is_noted=True)  # compiles
    least_ms, more_ms = (block_ms(turns, is_noted=True) for turns in (1, 401))
    turns = agreed(max(1, round(400 * (STEP_MS - least_ms) / (more_ms - least_ms))))
    samples: dict[str, list[float]] = {"shoal": [], "without notes": []}
    for name in random.Random(0).sample([*samples] * ROUNDS, 2 * ROUNDS):
        samples[name].append(block_ms(turns, is_noted=name == "shoal"))
    return samples


def be_process(what: str, address: str, index: int, count: int) -> None:
    """Be one process of a job."""
    import shoal

    shoal.initialize(
        coordinator_address=address, num_processes=count, process_id=index, virtual_devices=1
    )
    if what == "step":
        samples = measure_step()
    elif what == "notes":
        samples = measure_notes()
    else:
        samples = measure_barriers(barriers() if what == "barrier" else sockets())
    shoal.barrier("measured")
    if index == 0:
        print(json.dumps(samples), flush=True)
    shoal.shutdown()


def run_job(what: str, count: int) -> dict[str, list[float]]:
    """Start a job, under mpiexec where there is one; return what process 0 measured."""
    return jobs.run_job([__file__, what], count, with_mpi=what == "barrier")


def rows() -> Iterator[tuple[str, dict[str, object], dict[str, list[float]], str]]:
    """Run everything; yield the rows."""
    for count in (2, 4, 8):
        case: dict[str, object] = {
            "processes": count,
            "cores": os.cpu_count(),
            "sample_s": SAMPLE_S,
        }
        yield "barrier", case, run_job("barrier", count), "us"
        yield "barrier sockets", case, run_job("sockets", count), "us"
    yield "step with notes", {"processes": 2, "cores": os.cpu_count()}, run_job("notes", 2), "ms"
    for name, values in run_job("step", 2).items():
        case = {"processes": 2, "limit_percent": 1, "mean": round(statistics.mean(values), 4)}
        yield name.replace("_", " "), case, {"shoal": values}, "%"


def main() -> None:
    """Print the rows, or be a process of a job that is measured."""
    if len(sys.argv) == 5:
        what, address, index, count = sys.argv[1:]
        index = os.environ["PMI_RANK"] if index == "mpi" else index
        be_process(what, address, int(index), int(count))
        return
    from rows import print_row

    for row in rows():
        print_row(*row)


if __name__ == "__main__":
    main()
