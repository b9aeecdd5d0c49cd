"""`shoal ckpt`: inspect checkpoints, verify them, and clean up after a crash. Needs no JAX."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Annotated, Any

import typer

from shoal.checkpoint.blocks.compare import Pair, compare, shape_of
from shoal.checkpoint.format.json_files import decode_manifest
from shoal.checkpoint.format.records import in_memory, manifest_name, part_name
from shoal.checkpoint.history.checkpoint_info import SavedLeaf, info_of
from shoal.checkpoint.store.interface import Attempt
from shoal.checkpoint.store.opening import Checkpoint, open_checkpoint
from shoal.checkpoint.tree.plain_values import decode_value
from shoal.cli.ckpt.paths import (
    LEAF_HELP,
    FoundCheckpoint,
    find_checkpoints,
    leaf_names,
    one_of,
    unread,
)
from shoal.cli.ckpt.tend import cp, delete, gc, recover, verify
from shoal.cli.tables import print_json, print_lines, print_table, safe, short
from shoal.draw.amounts import in_bytes, in_seconds
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    counted,
)


def ckpt() -> typer.Typer:
    """Inspect, verify, copy and clean up checkpoints.

    PATH is a run or a single checkpoint: a directory, or the address of a bucket (s3://bucket/run,
    gs://…, az://…).

    \b
    Exit code:
      0   success: committed, whole, equal
      1   nothing is committed there; diff: they differ
      2   wrong usage
      76  bytes on disk differ from those saved
    """
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.callback(help=ckpt.__doc__)(_about)
    for command in (ls, show, verify, diff, cp, recover, gc, delete):
        app.command()(command)
    app.command("rm", hidden=True)(delete)
    return app


def _about() -> None:
    """The group itself does nothing."""


# ---- `shoal ckpt ls`: the committed checkpoints and unfinished saves.


_MOST_SHOWN = 6
_SLACK_S = 1.0


def ls(
    path: Annotated[str, typer.Argument(help="A history of steps, or one checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the committed steps, and what unfinished saves wait for.

    \b
    Example:
      shoal ckpt ls run/
    """
    rows = [_facts(entry) for entry in find_checkpoints(path).entries]
    if as_json:
        print_json(rows)
    else:
        _show(rows)
    if any(row["state"] == "damaged" for row in rows):
        raise typer.Exit(CorruptCheckpointError.exit_code)


def _facts(entry: FoundCheckpoint) -> dict[str, Any]:
    """Return the facts of one checkpoint, as JSON."""
    facts: dict[str, Any] = {"step": entry.step, "path": entry.store.path, "pinned": False}
    try:
        facts["pinned"] = entry.store.is_pinned
        state = entry.store.state()
    except (CorruptCheckpointError, UnsupportedCheckpointError, StorageError) as error:
        return {**facts, "state": unread(error), "problem": str(error)}
    begun = [_begun(entry, attempt) for attempt in state.attempts]
    facts["attempts"] = begun
    commit = state.commit
    if commit is None:
        if state.deleting:
            facts["state"] = "deleting"
        elif begun:
            facts["state"] = "incomplete"
        else:
            facts["state"] = "empty"
        return facts
    return {
        **facts,
        "state": "committed",
        "attempt": commit.attempt,
        "bytes": commit.data_bytes,
        "files": commit.num_files,
        "saved_ns": commit.created_ns,
        "age_s": time.time() - commit.created_ns / 1e9,
        "metrics": dict(commit.metrics),
    }


def _begun(entry: FoundCheckpoint, attempt: Attempt) -> dict[str, Any]:
    """Return the facts of an uncommitted attempt, and what it waits for, as JSON."""
    missing, count = None, None
    name = manifest_name(attempt.id)
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        count = decode_manifest(entry.store.read(name), name).num_processes
        there = set(attempt.names)
        missing = [p for p in range(count) if part_name(attempt.id, p) not in there]
    is_idle_unknown = attempt.is_ahead or math.isinf(attempt.idle_s)
    return {
        "attempt": attempt.id,
        "live": attempt.is_live,
        "complete": attempt.is_complete,
        "idle_s": None if is_idle_unknown else attempt.idle_s,
        "ahead_s": attempt.ahead_s if attempt.is_ahead else None,
        "owner": dict(attempt.owner),
        "processes": count,
        "missing": missing,
    }


def _show(entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        step = "-" if entry["step"] is None else str(entry["step"])
        state = entry["state"] + (", pinned" if entry["pinned"] else "")
        saved = ["", "", "", ""]
        if entry["state"] == "committed":
            metrics = " ".join(f"{name}={value:.6g}" for name, value in entry["metrics"].items())
            saved = [in_bytes(entry["bytes"]), str(entry["files"]), _age(entry["age_s"]), metrics]
        rows.append([step, state, *saved])
    print_table(("step", "state", "size", "files", "age", "metrics"), rows, "step size files age")
    for entry in entries:
        name = entry["path"] if entry["step"] is None else f"step {entry['step']}"
        for attempt in entry.get("attempts", ()):
            print(safe(f"{name}: attempt {attempt['attempt']} {_words(attempt)}"))
        if "problem" in entry:
            print_lines(name, entry["problem"])


def _age(age_s: float) -> str:
    """Return the age of a step as text; clocks may have been set since."""
    return f"{in_seconds(-age_s)} ahead" if age_s < -_SLACK_S else in_seconds(max(0.0, age_s))


def _words(attempt: dict[str, Any]) -> str:
    """Return what an attempt waits for, as text."""
    if not attempt["live"]:
        return "was aborted, or never started: `shoal ckpt gc` removes its files"
    owner = attempt["owner"]
    by = f"by {owner.get('host', '?')} (pid {owner.get('pid', '?')}), "
    if attempt["ahead_s"] is not None:
        idle = f"its timestamp is {in_seconds(attempt['ahead_s'])} in the future"
    else:
        idle = f"touched {in_seconds(attempt['idle_s'] or 0.0)} ago"
    if attempt["complete"]:
        return f"{by}{idle}, is complete: `shoal ckpt recover` commits it"
    if attempt["missing"] is None:
        return f"{by}{idle}, has no readable manifest yet"
    missing = attempt["missing"]
    listed = ", ".join(map(str, missing[:_MOST_SHOWN])) + (
        f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
    )
    return f"{by}{idle}, waits for {len(missing)} of {attempt['processes']} parts: of {listed}"


# ---- `shoal ckpt show`: the contents of a checkpoint.


def show(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a history: its newest step.")],
    leaf: Annotated[str, typer.Option(metavar="GLOB", help=LEAF_HELP)] = "",
    step: Annotated[int | None, typer.Option(help="This step of a history.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show the leaves of a checkpoint, and the user's metadata.

    \b
    Examples:
      shoal ckpt show run/
      shoal ckpt show run/ --step 40 --leaf 'params/**'
    """
    info = info_of(one_of(find_checkpoints(path, step)).store)
    names = leaf_names(leaf, info.leaves)
    chosen = [entry for name, entry in info.leaves.items() if name in names]
    facts = info.to_json()
    if as_json:
        print_json({**facts, "leaves": [entry.to_json() for entry in chosen]})
        return
    del facts["leaves"]
    for name, value in facts.items():
        if value not in ({}, "", None):
            print(f"{name.removesuffix('_ns')}: {safe(_shown(name, value))}")
    print()
    print_table(
        ("leaf", "dtype", "shape", "size", "chunks", "layout or value"),
        [_row(entry) for entry in chosen],
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


# ---- `shoal ckpt diff`: the differences between two checkpoints.


_SHOWN = 50


def diff(
    first: Annotated[str, typer.Argument(help="A checkpoint, or a history: its newest step.")],
    second: Annotated[str, typer.Argument(help="Another.")],
    leaf: Annotated[str, typer.Option(metavar="GLOB", help=LEAF_HELP)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Compare two checkpoints, bit by bit.

    Names of leaves, shapes, dtypes and every value are compared. Where and how they are stored
    (layouts, processes, files) makes no difference.

    \b
    Examples:
      shoal ckpt diff run/step_000000000010 run/step_000000000020
      shoal ckpt diff before/ after/ --leaf 'params/**'

    \b
    Exit code:
      0   they are equal
      1   they differ; or one of them is not committed
    """
    pair = [open_checkpoint(one_of(find_checkpoints(path)).store) for path in (first, second)]
    differences = _differences(pair[0], pair[1], leaf)
    if as_json:
        print_json({"equal": not differences, "differences": differences})
    else:
        for difference in differences[:_SHOWN]:
            print(safe(f"{difference['leaf']}: {difference['words']}"))
        if len(differences) > _SHOWN:
            print(f"and {counted(len(differences) - _SHOWN, 'more leaf', 'more leaves')}")
        print(f"{len(differences)} differ" if differences else "equal, bit by bit")
    if differences:
        raise typer.Exit(1)


def _differences(first: Checkpoint, second: Checkpoint, leaf: str) -> list[dict[str, Any]]:
    both = (first, second)
    numbers = [
        {entry.name: n for n, entry in enumerate(checkpoint.manifest.leaves)} for checkpoint in both
    ]
    known = list(dict.fromkeys([*numbers[0], *numbers[1]]))
    names = leaf_names(leaf, known)
    wanted = [name for name in known if name in names]
    differences: dict[str, dict[str, Any]] = {}
    pairs: dict[str, Pair] = {}
    for name in wanted:
        where = [known[name] for known in numbers if name in known]
        if len(where) < 2:
            text = f"only in {both[name not in numbers[0]].store.path}"
            differences[name] = {"kind": "missing", "words": text}
        elif facts := _described(both, where):
            differences[name] = facts
        elif first.manifest.leaves[where[0]].has_data:
            dtype = first.manifest.leaves[where[0]].dtype
            pairs[name] = Pair((where[0], where[1]), shape_of(first, where[0]), dtype)
    compared = zip(pairs, compare(both, list(pairs.values())), strict=True)
    differences |= {name: facts for name, facts in compared if facts is not None}
    return [{"leaf": name, **differences[name]} for name in wanted if name in differences]


def _described(both: tuple[Checkpoint, Checkpoint], where: list[int]) -> dict[str, Any] | None:
    """Return how two leaves differ before their data is compared."""
    mine, theirs = (c.manifest.leaves[n] for c, n in zip(both, where, strict=True))
    sizes: list[Any] = [None, None]
    if mine.kind == theirs.kind == "per_process":
        sizes = [c.values_of(n) for c, n in zip(both, where, strict=True)]
    for kind, left, right in (
        ("kind", mine.kind, theirs.kind),
        ("dtype", mine.impl or mine.dtype, theirs.impl or theirs.dtype),
        ("shape", list(mine.shape), list(theirs.shape)),
        ("value", mine.value, theirs.value),
        ("processes", *(size and {p: n for p, (_, n) in size.items()} for size in sizes)),
    ):
        if left != right:
            text = f"{left} | {right}"
            if kind == "value":
                text = " | ".join(short(decode_value(mine.kind, value)) for value in (left, right))
            return {"kind": kind, "first": left, "second": right, "words": text}
    return None
