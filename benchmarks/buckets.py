"""Checkpoints in a bucket: 1 GiB saved and restored, beside obstore's own put and get.

    python benchmarks/buckets.py [--server seaweedfs|moto] [--mib 1024] [--rounds 5]

The server runs on the loopback of this machine, and so shares its cores. Each run is a process of
its own, in turn; it times the last three of four equal saves or restores. Rows: seconds; CPU
seconds of the process; MiB of memory at its peak beyond the arrays. `obstore` puts and gets the
same bytes, with parts, requests and concurrency of the same sizes; `orbax` saves to the local
disk. Needs the servers of `make test-buckets`; orbax if it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
from rows import print_row

LEAVES = 8
TIMES = 3
PART_BYTES, PARTS, REQUESTS = 8 << 20, 8, 12


def arrays(mib):
    import jax

    size = (mib << 20) // LEAVES // 4
    values = np.random.default_rng(0).random(size, np.float32)
    return {f"w{n}": jax.device_put(values + n) for n in range(LEAVES)}


def store_of(url):
    import obstore

    return obstore.store.from_url(
        url, client_options={"allow_http": True, "timeout": timedelta(days=1)}
    )


class Shoal:
    def __init__(self, url, tree):
        self.url, self.tree = url, tree

    def save(self):
        import shoal

        shoal.save(f"{self.url}/{secrets.token_hex(4)}", self.tree)

    def prepare(self):
        import shoal

        self.there = f"{self.url}/there"
        shoal.save(self.there, self.tree)
        self.wanted = {name: leaf.sharding for name, leaf in self.tree.items()}

    def restore(self):
        import jax

        import shoal

        jax.block_until_ready(shoal.restore(self.there, self.wanted))


class Obstore:
    """One object of the same bytes."""

    def __init__(self, url, tree):
        import obstore

        self.obstore = obstore
        scheme, _, rest = url.partition("://")
        bucket, _, self.prefix = rest.partition("/")
        self.store = store_of(f"{scheme}://{bucket}")
        self.data = memoryview(np.concatenate([np.asarray(one) for one in tree.values()])).cast("B")

    def save(self, name=""):
        async def put():
            await self.obstore.put_async(
                self.store, f"{self.prefix}/{name or secrets.token_hex(4)}", self.data,
                chunk_size=PART_BYTES, max_concurrency=PARTS,
            )  # fmt: skip

        asyncio.run(put())

    def prepare(self):
        self.save("there")

    def restore(self):
        fresh = np.empty(len(self.data), np.uint8)

        async def get():
            turns = asyncio.Semaphore(REQUESTS)

            async def one(at):
                async with turns:
                    end = min(at + PART_BYTES, len(self.data))
                    key = f"{self.prefix}/there"
                    part = await self.obstore.get_range_async(self.store, key, start=at, end=end)
                    fresh[at:end] = np.frombuffer(part, np.uint8)

            await asyncio.gather(*map(one, range(0, len(self.data), PART_BYTES)))

        asyncio.run(get())


class Orbax:
    def __init__(self, url, tree):
        from checkpoint_peers import Orbax as Peer

        self.folder = Path(tempfile.mkdtemp())
        self.peer = Peer(tree)

    def save(self):
        self.peer.save(self.folder / secrets.token_hex(4))

    def prepare(self):
        self.peer.save(self.folder / "there")

    def restore(self):
        self.peer.restore(self.folder / "there")


KINDS = {"shoal": Shoal, "obstore": Obstore, "orbax": Orbax}


def run_one(what, kind, url, mib):
    """Do it a few times in this process, and print the medians of all but the first."""
    one = KINDS[kind](url, arrays(mib))
    if what == "restore":
        one.prepare()
    act = getattr(one, what)
    act()
    rows = [_timed(act, mib << 20 if what == "restore" else 0) for _ in range(TIMES)]
    print(json.dumps({unit: statistics.median(row[unit] for row in rows) for unit in rows[0]}))
    if kind == "orbax":
        shutil.rmtree(one.folder)


def _timed(act, result_bytes):
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    held, began = _peak_bytes(), time.perf_counter()
    act()
    took_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    beyond = max(0, _peak_bytes() - held - result_bytes) / (1 << 20)
    return {"seconds": took_s, "cpu_seconds": cpu_s, "beyond_mib": beyond}


def _peak_bytes():
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file if ":" in line)
    return int(rows["VmHWM"].split()[0]) << 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", default="seaweedfs", choices=["seaweedfs", "moto"])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        run_one(*chosen.one, chosen.mib)
        return
    # Here `checkpoint` is another benchmark.
    sys.path[0] = str(Path(__file__).parents[1] / "tests")
    from checkpoint.bucket import servers

    start = {"seaweedfs": servers.seaweedfs, "moto": servers.moto}[chosen.server]
    try:
        import orbax.checkpoint  # noqa: F401

        kinds = [*KINDS]
    except ImportError:
        kinds = ["shoal", "obstore"]
    for what in ("save", "restore"):
        found = {unit: {kind: [] for kind in kinds} for unit in
                 ("seconds", "cpu_seconds", "beyond_mib")}  # fmt: skip
        for turn in range(chosen.rounds):
            with start() as address:
                for kind in kinds if turn % 2 else kinds[::-1]:
                    name = f"bench-{secrets.token_hex(4)}"
                    servers.make_bucket(address, name)
                    command = [sys.executable, __file__, "--mib", str(chosen.mib)]
                    command += ["--one", what, kind, f"s3://{name}/run"]
                    env = {**os.environ, **servers.variables(address)}
                    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
                    for unit, value in json.loads(done.stdout).items():
                        found[unit][kind].append(value)
        case = {"what": what, "mib": chosen.mib, "server": chosen.server}
        for unit, samples in found.items():
            print_row("buckets", case, samples, unit)


if __name__ == "__main__":
    main()
