"""Checkpoints beside orbax, torch DCP, safetensors, TensorFlow and the limits of the disk.

One process with 8 virtual CPU devices holds 1 GiB in 16 arrays, split by rows, or 10,000 arrays of
8 numbers on one device. A save is durable when the clock stops: files and folders are synced.
Files are read from a warm page cache. Peers that are not installed are left out. Who comes first
changes from round to round. Before each is timed, what others deleted is off the disk. A save finds
memory as it is; before all else, as much as is needed is the machine's own (a virtual machine gives
what is free back to its host, and gets it again at less than 1 GB/s).

    python benchmarks/checkpoint.py [--quick]      --quick: 256 MiB, 3 rounds
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import RawDescriptionHelpFormatter as Raw
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from checkpoint_peers import Orbax, Shoal, TorchDCP, peers
from jobs import run_job
from rows import ROUNDS, print_row

import shoal

MIB = 1 << 20
LEAVES, TINY, DEVICES, PROCESSES = 16, 10_000, 8, 4
Samples = dict[str, list[float]]
Tree = Mapping[str, jax.Array]


def large_leaves(num_bytes: int) -> Tree:
    """Return 16 square arrays of float32, split by rows over all devices."""
    side = int((num_bytes // LEAVES // 4) ** 0.5)
    draw = np.random.default_rng(0)
    values = {f"w{i:02}": draw.random((side, side), np.float32) for i in range(LEAVES)}
    return shoal.put(values, shoal.Layout(shoal.make_mesh({"data": -1}), "data", None))


def tiny_leaves() -> Tree:
    values = [np.arange(8, dtype=np.float32) + i for i in range(TINY)]
    return {f"w{i:05}": leaf for i, leaf in enumerate(jax.device_put(values))}


@contextmanager
def folder() -> Iterator[Path]:
    """A folder on the disk of the working directory."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as path:
        yield Path(path)


def settle(num_bytes: int = 0) -> None:
    """Leave no work to the next contestant: deletions are done, twice the memory is to be had."""
    gc.collect()
    os.sync()
    if not num_bytes:
        return
    with mmap.mmap(-1, 2 * num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1


def turns(names: Iterable[str], number: int) -> list[str]:
    """Return the names, each round with another of them first."""
    names = list(names)
    first = number % len(names)
    return names[first:] + names[:first]


def clock(run: Callable[[], object]) -> float:
    """Return how many ms it takes; what it returns is given up after that."""
    began = time.perf_counter()
    result = run()
    elapsed_ms = (time.perf_counter() - began) * 1e3
    del result
    return elapsed_ms


def save_and_restore(tree: Tree, case: Mapping[str, object], rounds: int) -> None:
    """Rows: durable save; restore in the same layout. The first round is a warm-up."""
    contestants = peers(tree)
    saves: Samples = {name: [] for name in contestants}
    restores: Samples = {name: [] for name in contestants}
    num_bytes = size_of(tree)
    with folder() as root:
        for number in range(rounds + 1):
            for name in turns(contestants, number):
                peer, path = contestants[name], root / f"{name}-{number}"
                settle()
                saves[name].append(clock(lambda peer=peer, path=path: peer.save(path)))
                if number:
                    shutil.rmtree(path)
        for number in range(rounds + 1):
            for name in turns(contestants, number):
                peer, path = contestants[name], root / f"{name}-0"
                settle(num_bytes)
                restores[name].append(clock(lambda peer=peer, path=path: peer.restore(path)))
    print_row("durable save", case, without_first(saves), "ms")
    print_row("restore, same layout", case, without_first(restores), "ms")


def size_of(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.values())


def without_first(samples: Samples) -> Samples:
    return {name: values[1:] for name, values in samples.items()}


def tiny(rounds: int) -> None:
    """Row: save and restore many small leaves."""
    contestants = peers(tiny_leaves(), tiny=True)
    samples: Samples = {name: [] for name in contestants}
    with folder() as root:
        for number in range(rounds):
            for name in turns(contestants, number):
                peer, path = contestants[name], root / f"{name}-{number}"
                settle()
                both = [clock(lambda p=peer, at=path: p.save(at))]
                both.append(clock(lambda p=peer, at=path: p.restore(at)))
                samples[name].append(sum(both))
                shutil.rmtree(path)
    print_row("save and restore", {"leaves": TINY, "bytes_each": 32}, samples, "ms")


def stall(tree: Tree, case: Mapping[str, object], rounds: int) -> None:
    """Rows: how long an asynchronous save keeps the program; the first one apart."""
    source = [np.asarray(shard.data) for leaf in tree.values() for shard in leaf.addressable_shards]
    copies = [np.array(piece) for piece in source]
    samples: Samples = {"shoal": [], "memcpy": []}
    contestants = peers(tree)
    others = {n: p for n, p in contestants.items() if isinstance(p, Orbax | TorchDCP)}
    samples |= {name: [] for name in others}
    with folder() as root, shoal.Checkpoints(root / "shoal", keep=1) as history:
        for number in range(rounds + 1):
            settle(size_of(tree))
            samples["shoal"].append(clock(lambda n=number: history.save(n, tree, force=True)))
            history.wait()
            pairs = list(zip(copies, source, strict=True))
            samples["memcpy"].append(clock(lambda p=pairs: [np.copyto(to, of) for to, of in p]))
            for name, peer in others.items():
                path = root / f"{name}-{number}"
                settle(size_of(tree))
                samples[name].append(clock(lambda peer=peer, path=path: peer.start(path)))
                peer.finish()
                shutil.rmtree(path)
    first = {name: values[:1] for name, values in samples.items()}
    print_row("stall of an asynchronous save, the first", case, first, "ms")
    print_row("stall of an asynchronous save", case, without_first(samples), "ms")


def to_columns(tree: Tree, case: Mapping[str, object], rounds: int) -> None:
    """Row: saved by rows, restored by columns, in one process."""
    mesh = shoal.make_mesh({"data": -1})
    columns = jax.device_put(tree, shoal.named_sharding(shoal.Layout(mesh, None, "data")))
    kinds = {"shoal": Shoal, "orbax": Orbax}
    found = [name for name in peers(tree) if name in kinds]
    samples: Samples = {name: [] for name in found}
    with folder() as root:
        for name in found:
            kinds[name](tree).save(root / name)
        for number in range(rounds + 1):
            for name in turns(found, number):
                peer = kinds[name](columns)
                settle(size_of(tree))
                samples[name].append(clock(lambda p=peer, at=root / name: p.restore(at)))
    print_row("restore, rows to columns", case, without_first(samples), "ms")


def to_columns_in_a_job(num_bytes: int) -> None:
    """Rows: the same over 4 processes of 2 devices: time, and bytes read by all ÷ bytes needed."""
    with folder() as root:
        program = [__file__, "job", str(root), str(num_bytes)]
        samples = run_job(program, PROCESSES, with_mpi=False)
    case = {"processes": PROCESSES, "mib": num_bytes // MIB}
    times = {"shoal": samples.pop("ms")}
    print_row("restore, rows to columns", case, times, "ms")
    print_row("restore, rows to columns, bytes read / needed", case, samples, "1")


def in_a_job(root: str, num_bytes: str, address: str, index: str, count: str) -> None:
    """In a process of that job: save by rows, restore by columns, count what was read."""
    shoal.initialize(
        coordinator_address=address,
        num_processes=int(count),
        process_id=int(index),
        virtual_devices=2,
    )
    tree = large_leaves(int(num_bytes))
    mesh = shoal.make_mesh({"data": -1})
    columns = jax.tree.map(lambda _: shoal.Layout(mesh, None, "data"), tree)
    path = Path(root) / "one"
    shoal.save(path, tree)
    ratios: list[float] = []
    times: list[float] = []
    for number in range(4):
        settle(size_of(tree) // shoal.process_count())
        shoal.barrier("ready")
        before = bytes_read()
        elapsed_ms = clock(lambda: jax.block_until_ready(shoal.restore(path, columns)))
        everybodys = sum(shoal.allgather(bytes_read() - before).tolist())
        if number:
            ratios.append(everybodys / size_of(tree))
            times.append(elapsed_ms)
    if index == "0":
        print(json.dumps({"shoal": ratios, "ms": times}), flush=True)
    shoal.shutdown()


def bytes_read() -> int:
    """Return what this process has read from files so far (man 5 proc)."""
    rows = dict(row.split(": ") for row in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


def memory(num_bytes: int) -> None:
    """Rows: what a save and a restore need above what stood before, in a process of their own."""
    names = [name for name in peers({"w": jax.numpy.zeros(1)}) if name != "raw"]
    for what in ("save", "restore"):
        samples: Samples = {}
        with folder() as root:
            for name in names:
                for kind in ("save", "restore") if what == "restore" else ("save",):
                    command = [sys.executable, __file__, "memory", name, kind, str(root / name)]
                    done = subprocess.run(
                        [*command, str(num_bytes)], capture_output=True, text=True, check=False
                    )
                    if done.returncode:
                        raise SystemExit(done.stderr)
                samples[name] = [float(done.stdout.split()[-1])]
        case = {"leaves": LEAVES, "mib": num_bytes // MIB}
        print_row(f"peak memory added by a {what}", case, samples, "MiB")


def memory_of(name: str, kind: str, path: str, num_bytes: str) -> None:
    """In a process of its own: save or restore once, and print what it took at most."""
    shoal.initialize(virtual_devices=DEVICES)
    contestant = peers(large_leaves(int(num_bytes)))[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: man 5 proc
    before = resident_mib("VmRSS")
    result = getattr(contestant, kind)(Path(path))
    print(resident_mib("VmHWM") - before)
    del result


def resident_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


def main(quick: bool) -> None:
    rounds, num_bytes = (3, 256 * MIB) if quick else (ROUNDS, 1024 * MIB)
    shoal.initialize(virtual_devices=DEVICES)
    case = {"leaves": LEAVES, "mib": num_bytes // MIB}
    tree = large_leaves(num_bytes)
    save_and_restore(tree, case, rounds)
    stall(tree, case, rounds)
    to_columns(tree, case, rounds)
    del tree
    tiny(2 if quick else 3)
    to_columns_in_a_job(num_bytes // 4)
    memory(num_bytes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        in_a_job(*sys.argv[2:])
    elif sys.argv[1:2] == ["memory"]:
        memory_of(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
        parser.add_argument("--quick", action="store_true", help="256 MiB, 3 rounds")
        main(parser.parse_args().quick)
