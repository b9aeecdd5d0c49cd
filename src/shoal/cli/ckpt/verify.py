"""`shoal ckpt verify`: read every byte."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shoal.checkpoint.blocks import reader
from shoal.checkpoint.disk import opening
from shoal.checkpoint.disk.step_folder import committed
from shoal.cli.ckpt.paths import FoundCheckpoint, FoundPath, look_at, nothing_committed
from shoal.cli.tables import print_json, print_lines
from shoal.draw.amounts import in_bytes
from shoal.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
    UnsupportedCheckpointError,
)


def verify(
    path: Annotated[str, typer.Argument(help="A checkpoint, or a history: all of its steps.")],
    step: Annotated[int | None, typer.Option(help="Only this step of a history.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Read every byte of committed checkpoints, and report damage.

    \b
    Examples:
      shoal ckpt verify run/
      shoal ckpt verify run/ --step 40

    \b
    Exit code:
      0   every byte is as saved
      1   nothing is committed there; or unreadable: written by a newer shoal, no permission
      76  bytes are damaged or missing
    """
    found = [_verified(entry) for entry in _committed(look_at(path, step))]
    results = [facts for facts, _ in found]
    if as_json:
        print_json(results)
    for one in [] if as_json else results:
        name = one["path"] if one["step"] is None else f"step {one['step']}"
        if one["deleted"]:
            print(f"{name}: was deleted while it was read")
        elif not one["problems"]:
            rate = in_bytes(one["bytes"] / max(one["took_s"], 1e-9))
            print(f"{name}: {in_bytes(one['bytes'])} in {one['files']} files are whole, {rate}/s")
        for problem in one["problems"]:
            print_lines(name, problem)
    if all(one["deleted"] for one in results):
        raise NotCommittedError(f"{path}: all that was listed is deleted by now", path=path)
    if code := max(code for _, code in found):
        raise typer.Exit(code)


def _committed(place: FoundPath) -> list[FoundCheckpoint]:
    """Return the checkpoints that have a COMMIT, valid or not."""
    found = []
    for entry in place.entries:
        try:
            is_there = committed(entry.folder) is not None
        except (CorruptCheckpointError, UnsupportedCheckpointError):
            is_there = True
        found += [entry] if is_there else []
    if not found:
        raise nothing_committed(place)
    return found


def _verified(entry: FoundCheckpoint) -> tuple[dict[str, Any], int]:
    """Return the result, as JSON, and its exit code. A running job may delete steps meanwhile."""
    facts = {"step": entry.step, "path": entry.folder.path, "bytes": 0, "files": 0, "took_s": 0.0}
    began, problems, code, is_deleted = time.monotonic(), list[str](), 0, False
    try:
        checkpoint = opening.open_folder(entry.folder)
        facts |= {"bytes": checkpoint.commit.data_bytes, "files": checkpoint.commit.num_files}
        with _bar(entry.name, checkpoint.commit.data_bytes) as advance:
            problems = reader.verify_files(checkpoint, advance)
        if problems:
            is_deleted = (
                opening.deleted_meanwhile(entry.folder, checkpoint.commit.attempt) is not None
            )
            problems, code = ([], 0) if is_deleted else (problems, CorruptCheckpointError.exit_code)
    except NotCommittedError:
        is_deleted = True
    except (CorruptCheckpointError, UnsupportedCheckpointError, StorageError) as error:
        problems, code = [str(error)], error.exit_code
    took_s = time.monotonic() - began
    return {**facts, "took_s": took_s, "problems": problems, "deleted": is_deleted}, code


@contextmanager
def _bar(name: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Draw a progress bar, on a terminal; yield a function that advances it by bytes."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(name, total=num_bytes)
        yield lambda more: progress.advance(bar, more)
