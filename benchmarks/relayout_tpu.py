"""Moving arrays between layouts on TPUs that are not here: bytes and memory, by XLA's compiler.

The programs of drawn pairs of layouts, 256 MiB on the device that holds most, are compiled for
slices of 8 chips that libtpu describes; nothing runs, and no TPU is needed, but the extra `tpu`.
Bytes are counted in the HLO, against the plan's and against the least that the device must receive
that lacks most; memory beside both shards is what the compiler says, in chunks of 64 MiB. XLA's
own program stands beside it.

    python benchmarks/relayout_tpu.py [--pairs 24] [--slice v5p:2x2x2]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from typing import Any

from relayout import counted, drawn, print_ratios

SLICES = ("v5p:2x2x2", "v5e:2x4")
HELD_BYTES = 256 << 20
FIRST_DIMS = {2: (8192,), 3: (512, 512)}  # the last one is as large as it must be


def survey(name: str, count: int) -> None:
    """Print what the plans of drawn pairs become on a slice, and XLA's own programs."""
    from jax.experimental import topologies

    from shoal.plan.placement import place
    from shoal.plan.topology import from_devices

    devices = topologies.get_topology_desc(name, "tpu").devices
    mesh = place(from_devices(devices), {"a": 2, "b": 2, "c": 2})
    for rank in FIRST_DIMS:
        rows: dict[str, list[tuple[float, ...]]] = {}
        for source, target in drawn(mesh, rank, count):
            way, row = measured(source, target, devices)
            if row:
                rows.setdefault(way, []).append(row)
        found = [row for each in rows.values() for row in each]
        for way, own in {**rows, "all": found}.items():
            case = {"benchmark": "relayout on tpu", "slice": name, "rank": rank, "way": way}
            names = ("received/plan", "received/bound", "xla received/bound",
                     "temp/chunk", "xla temp/chunk", "peak/shards", "xla peak/shards")  # fmt: skip
            print_ratios({**case, "pairs": len(own)}, names, [*zip(*own, strict=True)])


def measured(source: Any, target: Any, devices: Any) -> tuple[str, tuple[float, ...]]:
    """Return the way of a move and its row; an empty one where nothing must move."""
    import jax
    import numpy as np

    import shoal
    from shoal.plan.transfer.move_steps import CHUNK_BYTES

    lies = shoal.named_sharding(source, devices=devices)
    x = jax.ShapeDtypeStruct(shape_of(source, target), np.float32, sharding=lies)
    plan = shoal.plan_relayout(x, target)
    if not plan.bound_bytes:
        return plan.way, ()
    received, held = counted(plan.program(), len(devices)), sum(plan.transfer.shard_bytes)
    return plan.way, (
        received / plan.received_bytes,
        received / plan.bound_bytes,
        plan.default_received_bytes / plan.bound_bytes,
        (plan.peak_bytes - held) / CHUNK_BYTES,
        (plan.default_peak_bytes - held) / CHUNK_BYTES,
        plan.peak_bytes / held,
        plan.default_peak_bytes / held,
    )


def shape_of(source: Any, target: Any) -> tuple[int, ...]:
    """Return the shape of which the larger shard holds 256 MiB of float32."""
    fewest = min(
        math.prod(layout.num_shards(dim) for dim in range(layout.rank))
        for layout in (source, target)
    )
    first = FIRST_DIMS[source.rank]
    return (*first, fewest * HELD_BYTES // 4 // math.prod(first))


def main() -> None:
    """Compile for each slice, or say what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=24, help="of each rank and slice")
    parser.add_argument("--slice", nargs="*", default=SLICES, help="as libtpu names them")
    asked = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        why = "libtpu is not installed: pip install 'shoal[tpu]'"
        print(json.dumps({"benchmark": "relayout on tpu", "skipped": why}))
        return
    import libtpu

    for variable, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no machine of Google's is asked what TPUs it has
        "TPU_LIBRARY_PATH": libtpu.get_library_path(),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs: several processes may compile
    }.items():
        os.environ.setdefault(variable, value)
    for name in asked.slice:
        survey(name, asked.pairs)


if __name__ == "__main__":
    main()
