"""Placing a tree of 1,000 small host arrays on 8 virtual devices of one process, beside JAX.

JAX's own `device_put` checks nothing here and may share the memory of a host array, so that a later
change of the host array changes the result; shoal's `put` never does.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from rows import compare

import shoal

LEAVES = 1000


def main() -> None:
    shoal.initialize(virtual_devices=8)
    mesh = shoal.make_mesh({"data": 4, "model": 2})
    rng = np.random.default_rng(0)
    tree = {f"leaf {n}": rng.random((8, 16), np.float32) for n in range(LEAVES)}
    for name, layout in (
        ("split", shoal.Layout(mesh, "data", None)),
        ("replicated", shoal.Layout(mesh, None, None)),
    ):
        target = shoal.named_sharding(layout)
        contestants = {
            "shoal": lambda to=layout: jax.block_until_ready(shoal.put(tree, to)),
            "jax": lambda to=target: jax.block_until_ready(jax.device_put(tree, to)),
        }
        compare(f"put {LEAVES} leaves, {name}", {"devices": 8}, contestants)


if __name__ == "__main__":
    main()
