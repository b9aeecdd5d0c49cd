"""Moving arrays between layouts: bytes, memory and time, beside XLA's own way and `device_put`.

Bytes are counted in the HLO of the compiled programs, against the least that the device must
receive that lacks most; memory is what the compiler says of a program, against both shards.
Pairs of layouts are drawn from all of one rank over a mesh of 8 devices (2x2x2) and one of 24
(2x3x4). Times are of 64 MiB arrays on 8 devices of one process, and of two: a program inside
`jit`, and a call from outside, each call with an array that nothing was asked of before. Last, what
a call of four processes costs that first agrees: a small array, beside the same move without, and
beside a copy within each process, which sends nothing.

    python benchmarks/relayout.py [--pairs 260] [--timed 24]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

MESHES = {8: {"a": 2, "b": 2, "c": 2}, 24: {"a": 2, "b": 3, "c": 4}}
SHAPES = {8: {2: (64, 64), 3: (64, 64, 64)}, 24: {2: (48, 48), 3: (48, 48, 48)}}
TIMED = {2: (4096, 4096), 3: (256, 256, 256)}  # float32: 64 MiB
ROUNDS = 5
CALLS = 200  # of a small array


def layouts(mesh: Any, rank: int) -> list[Any]:
    """Return every layout of a rank."""
    from shoal import Layout

    found = {}
    for count in range(len(mesh.axis_names) + 1):
        for axes in itertools.permutations(mesh.axis_names, count):
            for places in itertools.combinations_with_replacement(range(rank), count):
                dims: list[list[str]] = [[] for _ in range(rank)]
                for axis, dim in zip(axes, places, strict=True):
                    dims[dim].append(axis)
                found[Layout(mesh, *map(tuple, dims))] = None
    return list(found)


def drawn(mesh: Any, rank: int, count: int) -> list[tuple[Any, Any]]:
    """Return pairs of layouts between which something must move on the way there."""
    every = layouts(mesh, rank)
    pairs = [(a, b) for a in every for b in every if a != b]
    return random.Random(rank).sample(pairs, min(count, len(pairs)))


def survey(devices: int, count: int) -> None:
    """Print how near the bound the programs are, by way, and XLA's own."""
    import jax
    import numpy as np

    import shoal

    mesh = shoal.make_mesh(MESHES[devices])
    for rank, shape in SHAPES[devices].items():
        rows: dict[str, list[tuple[float, float, float, float]]] = {}
        for source, target in drawn(mesh, rank, count):
            x = jax.ShapeDtypeStruct(shape, np.float32, sharding=shoal.named_sharding(source))
            plan = shoal.plan_relayout(x, target, way="collectives")
            if plan.bound_bytes:
                own = counted(plan.program(), devices)
                held = sum(plan.transfer.shard_bytes)
                rows.setdefault(plan.way, []).append((
                    own / plan.bound_bytes, plan.default_received_bytes / plan.bound_bytes,
                    plan.peak_bytes / held, plan.default_peak_bytes / held,
                ))  # fmt: skip
        for way, found in {**rows, "all": [*itertools.chain(*rows.values())]}.items():
            columns = list(zip(*found, strict=True))
            names = ("received", "xla_received", "peak", "xla_peak")
            case = {"benchmark": "relayout bytes", "mesh": MESHES[devices], "rank": rank}
            print_ratios({**case, "way": way, "pairs": len(found)}, names, columns)


def counted(program: Any, devices: int) -> int:
    """Return the bytes of the device that receives most."""
    from shoal.plan.compiled import received_bytes_of

    return received_bytes_of(program.as_text(), devices)


def print_ratios(
    case: dict[str, Any], names: Sequence[str], columns: Sequence[Sequence[float]]
) -> None:
    """Print mean, 90th percentile and the largest of each column."""
    for name, values in zip(names, columns, strict=True):
        ordered = sorted(values)
        case[name] = {
            "mean": round(statistics.mean(values), 3),
            "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 2),
            "worst": round(ordered[-1], 2),
        }
    print(json.dumps(case), flush=True)


def timed(count: int) -> None:
    """Print how long moves take, inside a program and as calls, and the ratios over all pairs."""
    import jax
    import numpy as np

    import shoal

    shoal.initialize()
    mesh = shoal.make_mesh(MESHES[8])
    is_first = shoal.process_index() == 0
    for rank, shape in TIMED.items():
        ratios: dict[str, list[float]] = {}
        for source, target in drawn(mesh, rank, count):
            fresh = jax.jit(
                lambda shape=shape: jax.numpy.ones(shape, np.float32),
                out_shardings=shoal.named_sharding(source),
            )
            contestants = ways(fresh(), source, target)
            times = taken(contestants, fresh)
            median = {name: statistics.median(each) for name, each in times.items()}
            for name, peers in {
                "inside": ("xla inside",), "outside": ("xla inside", "device_put"),
            }.items():  # fmt: skip
                best = min(median[peer] for peer in peers)
                ratios.setdefault(name, []).append(best / median[name])
            ratios.setdefault("outside, beside device_put", []).append(
                median["device_put"] / median["outside"]
            )
        if is_first:
            for name, values in ratios.items():
                print_speed(
                    {"case": name, "processes": shoal.process_count(), "rank": rank}, values
                )
    shoal.shutdown()


def agreed() -> None:
    """Print how long small moves take with the round trip in which processes agree, and without."""
    import jax
    import numpy as np

    import shoal
    from shoal.arrays.moving.move import move
    from shoal.arrays.moving.planned_move import ArrayMove

    shoal.initialize()
    mesh = shoal.make_mesh({"x": -1})
    values = np.ones((64, 64), np.float32)
    rows, whole = (shoal.put(values, shoal.Layout(mesh, dim, None)) for dim in ("x", None))
    columns = shoal.Layout(mesh, None, "x")
    target = shoal.named_sharding(columns)
    contestants = {
        "sent": lambda: shoal.relayout(rows, columns),
        "sent, not agreed": lambda: move([ArrayMove(rows, rows, target)]),
        "copied": lambda: shoal.relayout(whole, columns),
        "copied, no call record": lambda: move([ArrayMove(whole, whole, target)]),
        "a barrier": lambda: shoal.barrier("alone"),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(CALLS + 1):
        for name, call in contestants.items():
            shoal.barrier("together")
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:  # the first compiles
                times[name].append(1e3 * (time.perf_counter() - began))
    if shoal.process_index() == 0:
        row: dict[str, Any] = {"benchmark": "relayout agrees", "processes": shoal.process_count()}
        for name, each in times.items():
            low, median, high = (round(q, 3) for q in statistics.quantiles(each, n=4))
            row[f"{name}, ms"] = {"median": median, "p25": low, "p75": high}
        medians = {name: statistics.median(each) for name, each in times.items()}
        row["added, ms"] = round(medians["sent"] - medians["sent, not agreed"], 3)
        row["added to a copy, ms"] = round(medians["copied"] - medians["copied, no call record"], 3)
        print(json.dumps(row), flush=True)
    shoal.shutdown()


def print_speed(case: dict[str, Any], values: Sequence[float]) -> None:
    """Print the spread of what a peer needs for each second of ours."""
    ordered = sorted(values)
    row = {"benchmark": "relayout time", **case, "pairs": len(values)}
    row["peer/shoal"] = {
        "geometric mean": round(statistics.geometric_mean(values), 2),
        "p10": round(ordered[int(0.1 * (len(ordered) - 1))], 2),
        "lowest": round(ordered[0], 2),
        "highest": round(ordered[-1], 2),
    }
    print(json.dumps(row), flush=True)


def ways(array: Any, source: Any, target: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the contestants, compiled."""
    import jax

    import shoal

    ends = shoal.named_sharding(source), shoal.named_sharding(target)
    plan = shoal.plan_relayout(array, target)
    same = jax.jit(lambda x: x, in_shardings=ends[0], out_shardings=ends[1])
    inside = plan.program() if plan.steps else same
    found = {
        "inside": inside,
        "xla inside": same,
        "outside": lambda x: shoal.relayout(x, target),
        "device_put": lambda x: jax.device_put(x, ends[1]),
    }
    for way in found.values():
        jax.block_until_ready(way(array))
    return found


def taken(
    contestants: dict[str, Callable[[Any], Any]], fresh: Callable[[], Any]
) -> dict[str, list[float]]:
    """Time each in turn, in another order each round; never the same array twice."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for turn in range(ROUNDS):
        random.Random(turn).shuffle(order)
        for name in order:
            array = jax.block_until_ready(fresh())
            began = time.perf_counter()
            jax.block_until_ready(contestants[name](array))
            times[name].append(time.perf_counter() - began)
    return times


def main() -> None:
    """Run each part in processes of its own: the number of devices is fixed once JAX has begun."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=260, help="of each rank and mesh, compiled")
    parser.add_argument("--timed", type=int, default=24, help="of each rank, timed")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part == "time":
        timed(asked.timed)
    elif asked.part == "agree":
        agreed()
    elif asked.part:
        survey(int(asked.part), asked.pairs)
    else:
        own = [__file__, "--pairs", str(asked.pairs), "--timed", str(asked.timed), "--part"]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        for devices in MESHES:
            few = {**env, "JAX_NUM_CPU_DEVICES": str(devices)}
            subprocess.run([sys.executable, *own, str(devices)], env=few, check=True)
        for processes in (1, 2):
            job = ["-m", "shoal", "run", "-n", str(processes), "--devices", str(8 // processes)]
            subprocess.run([sys.executable, *job, *own, "time"], env=env, check=True)
        job = ["-m", "shoal", "run", "-n", "4", "--devices", "2"]
        subprocess.run([sys.executable, *job, *own, "agree"], env=env, check=True)


if __name__ == "__main__":
    main()
