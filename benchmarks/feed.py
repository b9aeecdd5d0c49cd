"""Feeding a training loop: what `feed` adds to each batch, beside a loop that puts it itself.

Batches of several sizes from memory, on 8 devices of one process and of two. The loop computes for
about as long as a small step does, so that there is something to read ahead behind; and once not
at all, where nothing can be hidden.

    python benchmarks/feed.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BATCHES, ROUNDS = 40, 5
SIZES = {"8 x 8": (8, 8), "1024 x 1024": (1024, 1024)}
STEPS = {"a step of 20 ms": 0.02, "no step": 0.0}


def measure() -> None:
    """In a process of the job: time the loops in turn, and print a row for each case."""
    import jax
    import numpy as np

    import shoal

    shoal.initialize()
    layout = shoal.Layout(shoal.make_mesh({"data": -1}), "data", None)
    for size, shape in SIZES.items():
        rows = np.random.default_rng(0).random((BATCHES * shape[0], shape[1]), np.float32)
        for step, seconds in STEPS.items():

            def fed() -> None:
                with shoal.feed(rows, layout, batch=shape[0]) as batches:  # noqa: B023
                    loop(batches, seconds)  # noqa: B023

            def put() -> None:
                firsts = range(0, len(rows), shape[0])  # noqa: B023
                parts = (rows[n : n + shape[0]] for n in firsts)  # noqa: B023
                loop((shoal.put(part, layout) for part in parts), seconds)  # noqa: B023

            contestants = {"shoal": fed, "a loop of put": put}
            times = taken(contestants)
            if shoal.process_index() == 0:
                print_row({"batch": size, "loop": step, "processes": shoal.process_count()}, times)
    jax.effects_barrier()
    shoal.shutdown()


def loop(batches: Any, seconds: float) -> None:
    """Take all batches; each keeps the processor for a while, as a step on an accelerator does."""
    import jax

    for batch in batches:
        jax.block_until_ready(batch)
        time.sleep(seconds)


def taken(contestants: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Return milliseconds a batch, the contestants in turn."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(ROUNDS + 1):
        for name in sorted(contestants, reverse=turn % 2 == 1):
            began = time.perf_counter()
            contestants[name]()
            if turn:  # the first is to warm up
                times[name].append((time.perf_counter() - began) / BATCHES * 1e3)
    return times


def print_row(case: dict[str, Any], times: dict[str, list[float]]) -> None:
    """Print median and spread of each, in ms a batch, and what feed adds."""
    row: dict[str, Any] = {"benchmark": "feed", **case, "unit": "ms a batch"}
    for name, values in times.items():
        row[name] = {
            "median": round(statistics.median(values), 3),
            "low": round(min(values), 3),
            "high": round(max(values), 3),
        }
    medians = [statistics.median(times[name]) for name in ("a loop of put", "shoal")]
    row["a loop of put/shoal"] = round(medians[0] / medians[1], 2)
    print(json.dumps(row), flush=True)


def main() -> None:
    """Run the loops in jobs of one process and of two."""
    for processes in (1, 2):
        job = ["-m", "shoal", "run", "-n", str(processes), "--devices", str(8 // processes)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, *job, __file__, "measure"], env=env, check=True)


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["measure"] else main()
