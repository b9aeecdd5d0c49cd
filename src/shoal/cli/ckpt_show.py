"""`shoal ckpt show`: what a checkpoint holds."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import numpy as np
import typer

from shoal.checkpoint.blocks.reader import Checkpoint, open_folder
from shoal.checkpoint.disk.step_folder import KEEP
from shoal.checkpoint.format.values import value_of
from shoal.cli.ckpt_paths import look_at, one_of
from shoal.cli.ckpt_tables import print_json, print_table, safe, short
from shoal.draw.amounts import in_bytes
from shoal.errors import UsageError, nearest
from shoal.plan.patterns import matches

__all__ = ["show"]


def show(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a history: its newest step.")],
    leaf: Annotated[
        str, typer.Option(metavar="GLOB", help="Only these leaves: 'params/**', 'opt/*/mu'.")
    ] = "",
    step: Annotated[int | None, typer.Option(help="This step of a history.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show the leaves of a checkpoint: shapes, dtypes, layouts, bytes; and the user's metadata.

    \b
    Examples:
      shoal ckpt show run/
      shoal ckpt show run/ --step 40 --leaf 'params/**'
    """
    checkpoint = open_folder(one_of(look_at(path, step)).folder)
    leaves = _chosen(checkpoint, leaf)
    if as_json:
        print_json({**_facts(checkpoint), "leaves": [_row(checkpoint, n) for n in leaves]})
        return
    for name, value in _facts(checkpoint).items():
        if value not in ({}, "", None):
            print(f"{name.removesuffix('_ns')}: {safe(_shown(name, value))}")
    print()
    rows = []
    for number in leaves:
        row = _row(checkpoint, number)
        shape = "x".join(map(str, row["shape"])) or "-"
        shape = "of each process" if row["kind"] == "per_process" else shape
        what = f"key of {row['impl']}" if row["impl"] else row["dtype"] or row["kind"]
        size = in_bytes(row["bytes"]) if row["dtype"] else ""
        told = row["layout"] if row["dtype"] else short(value_of(row["kind"], row["value"]))
        rows.append([row["name"], what, shape, size, str(row["chunks"]), told])
    print_table(
        ("leaf", "dtype", "shape", "size", "chunks", "layout or value"), rows, "size chunks"
    )


def _chosen(checkpoint: Checkpoint, pattern: str) -> list[int]:
    """Return the numbers of the leaves that a pattern names; without one, all.

    Raises:
      UsageError: it names none.
    """
    names = [leaf.name for leaf in checkpoint.manifest.leaves]
    chosen = [n for n, name in enumerate(names) if not pattern or matches(pattern, name)]
    if not chosen and pattern:
        raise UsageError(f"--leaf {pattern!r} names no leaf{nearest(pattern, names)}")
    return chosen


def _row(checkpoint: Checkpoint, number: int) -> dict[str, Any]:
    leaf = checkpoint.manifest.leaves[number]
    chunks = checkpoint.index.chunks
    begin, end = np.searchsorted(chunks.leaf, [number, number + 1])
    return {
        "name": leaf.name,
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "bytes": int((chunks.end[begin:end] - chunks.begin[begin:end]).sum()),
        "chunks": int(end - begin),
        "layout": leaf.layout,
        "impl": leaf.impl,
        "value": leaf.value,
    }


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    commit, manifest = checkpoint.commit, checkpoint.manifest
    return {
        "path": checkpoint.folder.path,
        "step": commit.step,
        "attempt": commit.attempt,
        "saved_ns": commit.created_ns,
        "by": dict(manifest.writer),
        "processes": manifest.num_processes,
        "mesh": manifest.mesh,
        "bytes": commit.data_bytes,
        "files": commit.num_files,
        "pinned": KEEP in checkpoint.folder.names(),
        "metrics": dict(commit.metrics),
        "user": dict(manifest.user),
    }


def _shown(name: str, value: Any) -> str:
    if name == "saved_ns":
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value / 1e9))
    if name == "bytes":
        return in_bytes(value)
    if name == "pinned":
        return "yes" if value else "no"
    return json.dumps(value) if isinstance(value, dict) else str(value)
