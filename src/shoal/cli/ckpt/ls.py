"""`shoal ckpt ls`: the committed checkpoints and unfinished saves."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Annotated, Any

import typer

from shoal.checkpoint.disk import step_folder
from shoal.checkpoint.disk.step_folder import KEEP
from shoal.checkpoint.format.json_files import decode_manifest
from shoal.checkpoint.format.records import manifest_name, part_name
from shoal.cli.ckpt.paths import FoundCheckpoint, look_at
from shoal.cli.tables import print_json, print_lines, print_table, safe
from shoal.draw.amounts import in_bytes, in_seconds
from shoal.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError

_MOST_SHOWN = 6
_SLACK_S = 1.0


def ls(
    path: Annotated[str, typer.Argument(help="A history of steps, or one checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the steps: committed ones, and unfinished saves with what they wait for.

    \b
    Example:
      shoal ckpt ls run/
    """
    found = [_facts(entry) for entry in look_at(path).entries]
    if as_json:
        print_json(found)
    else:
        _show(found)
    if any(one["state"] == "damaged" for one in found):
        raise typer.Exit(CorruptCheckpointError.exit_code)


def _facts(entry: FoundCheckpoint) -> dict[str, Any]:
    """Return the facts of one checkpoint, as JSON."""
    facts: dict[str, Any] = {
        "step": entry.step,
        "path": entry.folder.path,
        "state": "damaged",
        "pinned": KEEP in entry.folder.names(),
    }
    try:
        state = step_folder.folder_state(entry.folder)
    except CorruptCheckpointError as error:
        return {**facts, "problem": str(error)}
    except UnsupportedCheckpointError as error:
        return {**facts, "state": "unsupported", "problem": str(error)}
    begun = [_begun(entry, attempt) for attempt in state.attempts]
    facts["attempts"] = begun
    if (commit := state.commit) is None:
        facts["state"] = "deleting" if state.tombstones else "incomplete" if begun else "empty"
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


def _begun(entry: FoundCheckpoint, attempt: step_folder.Attempt) -> dict[str, Any]:
    """Return the facts of an uncommitted attempt, and what it waits for, as JSON."""
    missing, count = None, None
    name = manifest_name(attempt.id)
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        count = decode_manifest(entry.folder.read(name), name).num_processes
        there = set(attempt.names)
        missing = [p for p in range(count) if part_name(attempt.id, p) not in there]
    return {
        "attempt": attempt.id,
        "live": attempt.is_live,
        "complete": attempt.is_complete,
        "idle_s": None if math.isinf(attempt.idle_s) or attempt.is_ahead else attempt.idle_s,
        "ahead_s": attempt.ahead_s if attempt.is_ahead else None,
        "owner": dict(attempt.owner),
        "processes": count,
        "missing": missing,
    }


def _show(found: list[dict[str, Any]]) -> None:
    rows = []
    for one in found:
        is_saved = one["state"] == "committed"
        rows.append(
            [
                "-" if one["step"] is None else str(one["step"]),
                one["state"] + (", pinned" if one["pinned"] else ""),
                in_bytes(one["bytes"]) if is_saved else "",
                str(one["files"]) if is_saved else "",
                _age(one["age_s"]) if is_saved else "",
                " ".join(f"{name}={value:.6g}" for name, value in one["metrics"].items())
                if is_saved
                else "",
            ]
        )
    print_table(("step", "state", "size", "files", "age", "metrics"), rows, "step size files age")
    for one in found:
        name = one["path"] if one["step"] is None else f"step {one['step']}"
        for attempt in one.get("attempts", ()):
            print(safe(f"{name}: attempt {attempt['attempt']} {_words(attempt)}"))
        if "problem" in one:
            print_lines(name, one["problem"])


def _age(age_s: float) -> str:
    """Return the age of a step as text; clocks may have been set since."""
    return f"{in_seconds(-age_s)} ahead" if age_s < -_SLACK_S else in_seconds(max(0.0, age_s))


def _words(attempt: dict[str, Any]) -> str:
    """Return what an attempt waits for, as text."""
    if not attempt["live"]:
        return "was aborted, or never started: `shoal ckpt gc` removes its files"
    owner = attempt["owner"]
    by = f"by {owner.get('host', '?')} (pid {owner.get('pid', '?')}), "
    idle = f"touched {in_seconds(attempt['idle_s'] or 0.0)} ago"
    if attempt["ahead_s"] is not None:
        idle = f"its time lies {in_seconds(attempt['ahead_s'])} in the future"
    if attempt["complete"]:
        return f"{by}{idle}, is complete: `shoal ckpt recover` commits it"
    if attempt["missing"] is None:
        return f"{by}{idle}, has no manifest yet"
    missing = attempt["missing"]
    listed = ", ".join(map(str, missing[:_MOST_SHOWN])) + (
        f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
    )
    return f"{by}{idle}, waits for {len(missing)} of {attempt['processes']} parts: of {listed}"
