"""`check_finite` and `check_replicas` beside a read of the same bytes, in one process.

Four virtual devices hold 256 MiB, each half of it twice. "read" sums the bytes of every device with
NumPy. "300 leaves" are small arrays on all devices: there each shard costs, not its bytes.

    python benchmarks/checks.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rows import compare

MIB, DEVICES = 256, 4


def read(tree: Any) -> None:
    """Read what every device of this process holds."""
    for array in tree:
        for shard in array.addressable_shards:
            np.asarray(shard.data).reshape(-1).view(np.uint64).sum()


def main() -> None:
    """Print a row for each dtype, and one for many leaves."""
    import jax
    from jax import NamedSharding, P

    import shoal

    shoal.initialize(virtual_devices=DEVICES)
    mesh = shoal.make_mesh({"half": 2, "copy": 2})
    halves = NamedSharding(mesh, P("half"))
    values = np.random.default_rng(0).standard_normal((16, MIB << 11), np.float32)
    trees: dict[str, list[Any]] = {}
    for name in ("float32", "bfloat16", "float8_e4m3fn"):
        columns = (MIB << 20) // 2 // 16 // np.dtype(name).itemsize
        rows = np.resize(values, (16, columns)).astype(name)
        trees[f"{MIB} MiB of {name}"] = [jax.device_put(rows, halves)]
    small = np.ones((8, 16), np.float32)
    trees["300 leaves"] = [jax.device_put(small, halves) for _ in range(300)]
    for what, tree in trees.items():
        contestants = {
            "read": lambda tree=tree: read(tree),
            "check_finite": lambda tree=tree: shoal.check_finite(tree, name="finite"),
            "check_replicas": lambda tree=tree: shoal.check_replicas(tree, name="replicas"),
        }
        compare("checks", {"value": what}, contestants)


if __name__ == "__main__":
    main()
