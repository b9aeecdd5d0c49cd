"""`shoal ckpt show`: the contents of a checkpoint."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from shoal.checkpoint.disk.checkpoint_info import SavedLeaf, info_of
from shoal.checkpoint.format.records import in_memory
from shoal.cli.ckpt.paths import LEAF_HELP, leaf_names, look_at, one_of
from shoal.cli.tables import print_json, print_table, safe, short
from shoal.draw.amounts import in_bytes


def show(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a history: its newest step.")],
    leaf: Annotated[str, typer.Option(metavar="GLOB", help=LEAF_HELP)] = "",
    step: Annotated[int | None, typer.Option(help="This step of a history.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show the leaves of a checkpoint: shapes, dtypes, layouts, bytes; and the user's metadata.

    \b
    Examples:
      shoal ckpt show run/
      shoal ckpt show run/ --step 40 --leaf 'params/**'
    """
    found = info_of(one_of(look_at(path, step)).folder)
    names = leaf_names(leaf, found.leaves)
    chosen = [one for name, one in found.leaves.items() if name in names]
    facts = found.to_json()
    if as_json:
        print_json({**facts, "leaves": [one.to_json() for one in chosen]})
        return
    del facts["leaves"]
    for name, value in facts.items():
        if value not in ({}, "", None):
            print(f"{name.removesuffix('_ns')}: {safe(_shown(name, value))}")
    print()
    print_table(
        ("leaf", "dtype", "shape", "size", "chunks", "layout or value"),
        [_row(one) for one in chosen],
        "size chunks",
    )


def _row(leaf: SavedLeaf) -> list[str]:
    shape = "x".join(map(str, leaf.shape)) or "-"
    shape = "of each process" if leaf.kind == "per_process" else shape
    what = f"key of {leaf.impl}" if leaf.impl else leaf.dtype or leaf.kind
    size = in_bytes(leaf.bytes) if leaf.dtype else ""
    value = in_memory(leaf.layout, leaf.memory) if leaf.dtype else short(leaf.value)
    return [leaf.name, what, shape, size, str(leaf.chunks), value]


def _shown(name: str, value: Any) -> str:
    if name == "saved_ns":
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value / 1e9))
    if name == "bytes":
        return in_bytes(value)
    if name == "pinned":
        return "yes" if value else "no"
    return json.dumps(value) if isinstance(value, dict) else str(value)
