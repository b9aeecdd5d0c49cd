"""Side by side: contestants take turns, so that what the machine does meanwhile hits all of them.

Each row is one JSON line: median, lowest and highest of the rounds for each contestant, and last
the ratio of each peer's median to shoal's (above 1: shoal needs less).
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping

ROUNDS = 7


def compare(
    benchmark: str,
    case: Mapping[str, object],
    contestants: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
) -> dict[str, list[float]]:
    """Time the contestants in turn, `rounds` times after a warm-up, and print a row in ms."""
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) * 1e3)
    gc.enable()
    print_row(benchmark, case, times, "ms")
    return times


def print_row(
    benchmark: str, case: Mapping[str, object], samples: Mapping[str, list[float]], unit: str
) -> None:
    """Print one row of samples that were taken elsewhere."""
    row: dict[str, object] = {"benchmark": benchmark, **case, "unit": unit}
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, values in samples.items():
        row["rounds"] = len(values)
        row[name] = {
            "median": round(medians[name], 4),
            "low": round(min(values), 4),
            "high": round(max(values), 4),
        }
    for name in samples:
        if name != "shoal" and medians.get("shoal"):
            row[f"{name}/shoal"] = round(medians[name] / medians["shoal"], 2)
    print(json.dumps(row), flush=True)
