"""`shoal ckpt recover`, `gc`, `verify`, `cp` and `delete`: what keeps checkpoints whole."""

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

from shoal.checkpoint.at import store_at
from shoal.checkpoint.blocks import reader
from shoal.checkpoint.blocks.copying import Copied, copy_checkpoint
from shoal.checkpoint.store import opening
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.saved_steps import delete_saved
from shoal.checkpoint.store.step_names import COMMIT
from shoal.cli.ckpt.paths import (
    FoundCheckpoint,
    FoundPath,
    find_checkpoints,
    nothing_committed,
    unread,
)
from shoal.cli.tables import print_json, print_lines, safe
from shoal.draw.amounts import in_bytes, in_seconds
from shoal.errors import (
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
    counted,
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def recover(
    path: Annotated[str, typer.Argument(help="A history of steps, or one checkpoint.")],
    as_json: _Json = False,
) -> None:
    """Commit complete saves; finish interrupted deletions.

    A save for which all processes had written their parts is as good as saved. Programs do the same
    when they begin (`shoal.Checkpoints`).

    \b
    Example:
      shoal ckpt recover run/

    Exit code: 1 if nothing is committed there afterwards, 76 if something is damaged.
    """
    results, code = [], 0
    place = find_checkpoints(path)
    for entry in place.entries:
        result = {"step": entry.step, "path": entry.store.path}
        try:
            before = entry.store.committed()
            after = entry.store.recover()
        except (CorruptCheckpointError, UnsupportedCheckpointError, StorageError) as error:
            code = max(code, error.exit_code)
            results.append({**result, "state": unread(error), "problem": str(error)})
            continue
        if after is None:
            state = "absent"
        elif before is None:
            state = "recovered"
        else:
            state = "committed"
        results.append({**result, "state": state})
    if as_json:
        print_json(results)
    for entry, result in zip(place.entries, () if as_json else results, strict=False):
        print_lines(entry.name, str(result.get("problem") or _WORDS[str(result["state"])]))
    if code:
        raise typer.Exit(code)
    if not any(result["state"] in ("committed", "recovered") for result in results):
        raise typer.Exit(NotCommittedError.exit_code)


_WORDS = {
    "absent": "nothing complete is there",
    "recovered": "was complete, is committed now",
    "committed": "was committed already",
}


def gc(
    path: Annotated[str, typer.Argument(help="A history of steps, or one checkpoint.")],
    older: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Remove attempts idle for this long [SHOAL_SAVE_LEASE_S, 60; "
            "buckets: 5 times that].",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print; remove nothing.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove the remains of saves that never completed.

    Committed checkpoints stay, and so do saves that are still running, which renew their lease. A
    complete save is committed, as by `recover`.

    \b
    Examples:
      shoal ckpt gc run/ --dry-run
      shoal ckpt gc run/ --older 3600
    """
    if older is not None and not older >= 0:
        raise UsageError(f"--older {older} must be a number of seconds, not negative")
    results: list[dict[str, Any]] = []
    code = 0
    place = find_checkpoints(path)
    for entry in place.entries:
        result: dict[str, Any] = {"step": entry.step, "path": entry.store.path}
        results.append(result)
        try:
            if place.is_history and entry.store.is_link:
                result |= _behind_a_link(entry)
            else:
                idle_s = entry.store.pace.lease_s if older is None else older
                result |= _collected(entry, idle_s, is_dry=dry_run)
        except (CorruptCheckpointError, UnsupportedCheckpointError, StorageError) as error:
            code = max(code, error.exit_code)
            result["problem"] = str(error)
    if as_json:
        print_json(results)
    else:
        _print_results(results, "would be removed" if dry_run else "removed")
    if code:
        raise typer.Exit(code)


def _behind_a_link(entry: FoundCheckpoint) -> dict[str, Any]:
    """Return what to print of a step that is a link, which is cleaned up at its target."""
    entry.store.state()  # raises if it cannot be read
    return {"link": True, "removed": [], "bytes": 0, "spared": []}


def _collected(entry: FoundCheckpoint, idle_s: float, *, is_dry: bool) -> dict[str, Any]:
    """Remove the remains in one directory, unless `is_dry`; return them, as JSON."""
    state = entry.store.state()
    over = [
        attempt
        for attempt in state.attempts
        if attempt.idle_s >= idle_s
        and not (attempt.is_live and attempt.is_complete and state.commit is None)
    ]
    sizes = {name: _size(entry, name) for attempt in state.attempts for name in attempt.names}
    if is_dry:
        names = [name for attempt in over for name in attempt.names]
    else:
        names = entry.store.collect_garbage(idle_s=idle_s)
    spared = [attempt.id for attempt in state.attempts if attempt.idle_s < idle_s]
    ahead = {
        attempt.id: attempt.ahead_s
        for attempt in state.attempts
        if attempt.is_ahead and attempt.id in spared
    }
    return {
        "removed": names,
        "bytes": sum(sizes.get(name, 0) for name in names),
        "spared": spared,
        "ahead_s": ahead,
    }


def _size(entry: FoundCheckpoint, name: str) -> int:
    try:
        return entry.store.size(name)
    except FileNotFoundError:  # removed by another process meanwhile
        return 0


def _print_results(results: list[dict[str, Any]], done: str) -> None:
    for result in results:
        name = result["path"] if result["step"] is None else f"step {result['step']}"
        if "problem" in result:
            print_lines(name, result["problem"])
        elif "link" in result:
            print(f"{name}: is a link: clean up its target instead")
        elif result["removed"]:
            files = counted(len(result["removed"]), "file")
            print(f"{name}: {files} of {in_bytes(result['bytes'])} {done}")
        for attempt in result.get("spared", ()):
            why = "it was touched recently"
            if attempt in result.get("ahead_s", {}):
                ahead = in_seconds(result["ahead_s"][attempt])
                why = f"its timestamp is {ahead} in the future, and counts as now"
            print(f"{name}: attempt {attempt} is spared: {why}")
    if not any(
        result.get("removed") or result.get("spared") or {"problem", "link"} & result.keys()
        for result in results
    ):
        print("nothing to remove")


# ---- `shoal ckpt verify`: read every byte.


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
      1   nothing is committed there; or it cannot be read (a newer shoal's, no
          permission)
      76  bytes are damaged or missing
    """
    verified = [_verified(entry) for entry in _committed(find_checkpoints(path, step))]
    results = [facts for facts, _ in verified]
    if as_json:
        print_json(results)
    for result in [] if as_json else results:
        name = result["path"] if result["step"] is None else f"step {result['step']}"
        if result["deleted"]:
            print(f"{name}: was deleted or replaced while it was read")
        elif not result["problems"]:
            rate = in_bytes(result["bytes"] / max(result["took_s"], 1e-9))
            size = f"{in_bytes(result['bytes'])} in {counted(result['files'], 'file')}"
            print(f"{name}: every byte is as saved, {size}, {rate}/s")
        for problem in result["problems"]:
            print_lines(name, problem)
    if all(result["deleted"] for result in results):
        reason = "all that was listed is deleted or replaced by now"
        raise NotCommittedError(f"{path}: {reason}", path=path)
    code = max(code for _, code in verified)
    if code:
        raise typer.Exit(code)


def _committed(place: FoundPath) -> list[FoundCheckpoint]:
    """Return the checkpoints that have a COMMIT, valid or not, or cannot be read."""
    checkpoints = []
    for entry in place.entries:
        try:
            is_there = entry.store.committed() is not None
        except (CorruptCheckpointError, UnsupportedCheckpointError, StorageError):
            is_there = True
        checkpoints += [entry] if is_there else []
    if not checkpoints:
        raise nothing_committed(place)
    return checkpoints


def _verified(entry: FoundCheckpoint) -> tuple[dict[str, Any], int]:
    """Return the result, as JSON, and its exit code. A running job may delete steps meanwhile."""
    facts = {"step": entry.step, "path": entry.store.path, "bytes": 0, "files": 0, "took_s": 0.0}
    began, problems, code, is_deleted = time.monotonic(), list[str](), 0, False
    try:
        checkpoint = opening.open_checkpoint(entry.store)
        facts |= {"bytes": checkpoint.commit.data_bytes, "files": checkpoint.commit.num_files}
        with _bar(entry.name, checkpoint.commit.data_bytes) as advance:
            problems = reader.verify_files(checkpoint, advance)
        if problems:
            is_deleted = (
                opening.deleted_meanwhile(entry.store, checkpoint.commit.attempt) is not None
            )
            problems, code = ([], 0) if is_deleted else (problems, CorruptCheckpointError.exit_code)
    except NotCommittedError:
        is_deleted = True
    except (CorruptCheckpointError, UnsupportedCheckpointError, StorageError) as error:
        problems, code = [str(error)], error.exit_code
    took_s = time.monotonic() - began
    return {**facts, "took_s": took_s, "problems": problems, "deleted": is_deleted}, code


# ---- `shoal ckpt cp`: to another place. `shoal ckpt delete`.


def cp(
    source: Annotated[str, typer.Argument(help="A checkpoint, or a history: all of its steps.")],
    target: Annotated[str, typer.Argument(help="The place of the copy: of the same kind.")],
    step: Annotated[int | None, typer.Option(help="Only this step of a history.")] = None,
    as_json: _Json = False,
) -> None:
    """Copy checkpoints between directories and buckets.

    Every byte is verified. At the target, a step is committed or absent, as after a save. If a copy
    is interrupted, run it again: it skips steps, and in a bucket also files, that are there whole.

    \b
    Examples:
      shoal ckpt cp run/ s3://bucket/run
      shoal ckpt cp run/ s3://bucket/run --step 4000
      shoal ckpt cp gs://bucket/model /shared/model

    \b
    Exit code:
      0   all that is committed at SOURCE is at TARGET
      1   nothing is committed at SOURCE; another checkpoint is at TARGET; or one
          of them cannot be read or written
      76  bytes at SOURCE are damaged or missing
    """
    place, root = find_checkpoints(source, step), store_at(target, repr(target))
    if place.is_history and COMMIT in root.names():
        raise UsageError(f"{place.path} is a history of steps, and {root.path} is one checkpoint")
    if not place.is_history and root.steps():
        raise UsageError(f"{place.path} is one checkpoint, and {root.path} is a history of steps")
    results = []
    for entry in _committed(place):
        there = root
        if place.is_history and entry.step is not None:
            there = root.step(entry.step)
        copied = _copied(entry, there)
        results.append(
            {
                "step": entry.step,
                "path": there.path,
                "attempt": copied.commit.attempt,
                "bytes": copied.commit.data_bytes,
                "copied_bytes": copied.copied_bytes,
                "was_there": copied.was_there,
            }
        )
        if not as_json:
            amount = in_bytes(copied.commit.data_bytes)
            rest = copied.commit.data_bytes - copied.copied_bytes
            text = f"{amount} copied to {there.path}"
            if copied.was_there:
                text = f"is at {there.path} already"
            elif rest:
                text += f", of which {in_bytes(rest)} were there"
            print_lines(entry.name, text)
    if as_json:
        print_json(results)


def _copied(entry: FoundCheckpoint, target: Store) -> Copied:
    commit = entry.store.committed()
    with _bar(entry.name, commit.data_bytes if commit else 0) as advance:
        return copy_checkpoint(entry.store, target, advance)


_DECLINED = 1


def delete(
    path: Annotated[str, typer.Argument(help="One checkpoint; or a history, with --step.")],
    step: Annotated[
        list[int] | None, typer.Option(metavar="N", help="This step of a history; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_json: _Json = False,
) -> None:
    """Delete committed checkpoints for good.

    Damaged ones, too. If one is pinned, nothing is deleted. On a terminal, it asks first. `recover`
    finishes an interrupted deletion, and so does the next program that opens the run.

    \b
    Examples:
      shoal ckpt delete run/ --step 400 --step 800 --dry-run
      shoal ckpt delete s3://bucket/model --yes
    """
    place = find_checkpoints(path)
    if place.is_history and not step:
        raise UsageError(f"{place.path} is a history of steps: which? Pass --step N")
    if step and not place.is_history:
        raise UsageError(f"{place.path} is one checkpoint, not a history: omit --step")
    entries = list(place.entries)
    if step:
        entries = [find_checkpoints(path, number).entries[0] for number in step]
    for entry in entries:
        if entry.store.is_pinned:
            raise UsageError(f"{entry.name} is pinned, and stays: nothing was deleted")
    if sys.stdin.isatty() and not dry_run and not yes:
        steps = ", ".join(entry.name for entry in entries)
        what = f"{steps} of {place.path}" if place.is_history else place.path
        if not typer.confirm(f"Delete {safe(what)} for good?", err=True):
            raise typer.Exit(_DECLINED)
    done = "would be deleted" if dry_run else "deleted"
    for entry in entries:
        if not dry_run and not delete_saved(entry.store):
            raise UsageError(f"{entry.name} was pinned meanwhile, and stays")
        if not as_json:
            print(f"{entry.name}: {done}")
    if as_json:
        print_json([{"step": entry.step, "path": entry.store.path} for entry in entries])


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
