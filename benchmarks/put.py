"""Placing one 64 MiB host array on a mesh of many processes: peak memory and time, beside JAX.

Every measurement is a job of its own (`shoal run -n N --devices 2`), so that no allocator has kept
anything from the one before; the contestants take turns. Memory is the highest resident set
during the call less the resident set before it, on the process that needs most; the source array
(64 MiB) stands before the call and is not in it. The floor is what the process's own two devices
must hold.

A last row for each kind, `the call record`, says what it costs to digest and record a call that is
compared where processes meet next: puts with it and without it take turns in one job, and the time
inside it is taken as well, for it is smaller than the spread of both. It may take 3 % of a put.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS, MIB = 5, 1 << 20
SHAPE = (4096, 4096)  # float32: 64 MiB
CONTESTANTS, KINDS = ("shoal", "jax"), ("replicated", "sharded")
RECORD_ROUNDS = 15


def measure(contestant: str, kind: str) -> None:
    """In a process of the job: place the array once, and print what it took."""
    import jax
    import numpy as np

    import shoal

    shoal.initialize()
    mesh = shoal.make_mesh({"data": -1})
    layout = shoal.Layout(mesh, "data" if kind == "sharded" else None, None)
    placements = {
        "shoal": lambda x: shoal.put(x, layout),
        "jax": lambda x: jax.device_put(x, shoal.named_sharding(layout)),
    }
    place = placements[contestant]
    jax.block_until_ready(place(np.zeros((64, 64), np.float32)))  # connect, compile
    source = np.random.default_rng(0).random(SHAPE, np.float32)
    shoal.barrier("ready")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: man 5 proc
    before, began = resident_bytes("VmRSS"), time.perf_counter()
    placed = jax.block_until_ready(place(source))
    elapsed_ms = (time.perf_counter() - began) * 1e3
    added = resident_bytes("VmHWM") - before
    shoal.barrier("measured")
    for shard in placed.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), source[shard.index]):
            raise SystemExit(f"{contestant} placed wrong values on {shard.device}")
    print(json.dumps({"added_mib": added / MIB, "ms": elapsed_ms}))
    shoal.shutdown()


def measure_record(kind: str) -> None:
    """In a process of the job: place the array again and again, recording the call and not."""
    import numpy as np

    import shoal
    from shoal.arrays.host.record_call import record_call
    from shoal.arrays.placing import put

    shoal.initialize()
    layout = shoal.Layout(
        shoal.make_mesh({"data": -1}), "data" if kind == "sharded" else None, None
    )
    source = np.random.default_rng(0).random(SHAPE, np.float32)
    times: dict[str, list[float]] = {"shoal": [], "without": [], "call": []}

    def timed(*given: object, **options: object) -> None:
        began = time.perf_counter()
        record_call(*given, **options)
        times["call"].append((time.perf_counter() - began) * 1e3)

    for _ in range(RECORD_ROUNDS + 1):  # the first is a warm-up
        for name, record in (("shoal", timed), ("without", lambda *given, **options: None)):
            put.record_call = record
            shoal.barrier("next")
            began = time.perf_counter()
            shoal.put(source, layout)
            times[name].append((time.perf_counter() - began) * 1e3)
    print(json.dumps({name: samples[1:] for name, samples in times.items()}))
    shoal.shutdown()


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def run_job(processes: int, contestant: str, kind: str) -> list[dict[str, Any]]:
    """Start a job and return what each process said."""
    command = [sys.executable, "-m", "shoal", "run", "-n", str(processes), "--devices", "2"]
    command += [__file__, contestant, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    said = [line.partition("| ")[2] for line in done.stdout.splitlines()]
    results = [json.loads(line) for line in said if line.startswith("{")]
    if len(results) != processes:
        raise SystemExit(f"{len(results)} of {processes} processes answered\n{done.stdout}")
    return results


def worst(results: list[dict[str, float]]) -> dict[str, float]:
    """Return the most that any process needed."""
    return {key: max(result[key] for result in results) for key in ("added_mib", "ms")}


def print_record(processes: int, kind: str) -> None:
    """Print what the call record costs, on the process where it costs most."""
    from rows import print_row

    times = max(run_job(processes, "call", kind), key=lambda row: statistics.median(row["call"]))
    share = statistics.median(times["call"]) / statistics.median(times["without"])
    case = {"processes": processes, "record_percent": round(100 * share, 2)}
    print_row(f"put {kind} 64 MiB, the call record", case, times, "ms")


def main() -> None:
    from rows import print_row

    for processes in (2, 4):
        for kind in KINDS:
            results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
            for _ in range(ROUNDS):
                for name in CONTESTANTS:
                    results[name].append(worst(run_job(processes, name, kind)))
            floor = 128 if kind == "replicated" else 64 // processes
            case = {"processes": processes, "floor_mib": floor}
            for key, unit in (("added_mib", "MiB"), ("ms", "ms")):
                samples = {name: [row[key] for row in rows] for name, rows in results.items()}
                what = "peak memory added" if unit == "MiB" else "time"
                print_row(f"put {kind} 64 MiB, {what}", case, samples, unit)
            print_record(processes, kind)


if __name__ == "__main__":
    if sys.argv[1:2] == ["call"]:
        measure_record(*sys.argv[2:])
    elif len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:
        main()
