"""Placing one 64 MiB host array on a mesh of many processes: peak memory and time, beside JAX.

Every measurement is a job of its own (`shoal run -n N --devices 2`), so that no allocator has kept
anything from the one before; the contestants take turns. Memory is the highest resident set
during the call less the resident set before it, on the process that needs most; the source array
(64 MiB) stands before the call and is not in it. The floor is what the process's own two devices
must hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROUNDS, MIB = 5, 1 << 20
SHAPE = (4096, 4096)  # float32: 64 MiB
CONTESTANTS, KINDS = ("shoal", "jax"), ("replicated", "sharded")


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
        "jax": lambda x: jax.device_put(x, shoal.sharding(layout)),
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


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def run_job(processes: int, contestant: str, kind: str) -> dict[str, float]:
    """Start a job and return the worst of its processes."""
    command = [sys.executable, "-m", "shoal", "run", "-n", str(processes), "--devices", "2"]
    command += [__file__, contestant, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    said = [line.partition("| ")[2] for line in done.stdout.splitlines()]
    results = [json.loads(line) for line in said if line.startswith('{"added_mib"')]
    if len(results) != processes:
        raise SystemExit(f"{len(results)} of {processes} processes answered\n{done.stdout}")
    return {key: max(result[key] for result in results) for key in ("added_mib", "ms")}


def main() -> None:
    from rows import print_row

    for processes in (2, 4):
        for kind in KINDS:
            results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
            for _ in range(ROUNDS):
                for name in CONTESTANTS:
                    results[name].append(run_job(processes, name, kind))
            floor = 128 if kind == "replicated" else 64 // processes
            case = {"processes": processes, "floor_mib": floor}
            for key, unit in (("added_mib", "MiB"), ("ms", "ms")):
                samples = {name: [row[key] for row in rows] for name, rows in results.items()}
                what = "peak memory added" if unit == "MiB" else "time"
                print_row(f"put {kind} 64 MiB, {what}", case, samples, unit)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:
        main()
