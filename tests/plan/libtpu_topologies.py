"""The slices that libtpu describes for compiling without devices, kept as a file.

python tests/plan/libtpu_topologies.py      (needs the extra `tpu`; prints the file's lines)
"""

from __future__ import annotations

import json
from pathlib import Path

GOLDEN = Path(__file__).parent / "cases" / "libtpu_topologies.jsonl"
MEGACORE = {"chip_config_name": "megacore"}
SLICES = [
    ("v2:2x2", {}),
    ("v2:4x4", {}),
    ("v3:4x4", {}),
    ("v4:2x2x1", {}),
    ("v4:2x2x1", MEGACORE),
    ("v4:2x2x4", MEGACORE),
    ("v4:4x4x4", MEGACORE),
    ("v5e:1x1", {}),
    ("v5e:2x2", {}),
    ("v5e:2x4", {}),
    ("v5e:2x4", {"chips_per_host_bounds": [2, 4, 1]}),
    ("v5e:4x4", {}),
    ("v5e:4x8", {}),
    ("v5e:2x4", {"num_slices": 2}),
    ("v5p:2x2x1", {}),
    ("v5p:2x2x2", {}),
    ("v5p:4x2x2", {}),
    ("v5p:2x4x4", {}),
    ("v5p:4x4x4", {}),
    ("v5p:2x2x2", {"num_slices": 3}),
    ("v6e:1x1", {}),
    ("v6e:2x4", {}),
    ("v6e:8x8", {}),
    ("tpu7x:2x2x1", {}),
    ("tpu7x:2x2x2", {}),
]


def described() -> list[str]:
    """Return a line for each slice: what libtpu says of its devices."""
    from jax.experimental import topologies

    lines = []
    for name, options in SLICES:
        devices = topologies.get_topology_desc(name, "tpu", **options).devices
        rows = [
            [d.id, d.process_index, *d.coords, d.core_on_chip, getattr(d, "slice_index", None)]
            for d in devices
        ]
        said = {"name": name, "options": options, "kind": devices[0].device_kind, "devices": rows}
        lines.append(json.dumps(said))
    return lines


if __name__ == "__main__":
    print("\n".join(described()))
