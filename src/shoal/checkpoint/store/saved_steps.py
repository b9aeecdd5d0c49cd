"""The steps of a history on disk: `<root>/step_000000001000/`. Always listed from storage.

Local: any process may call these alone, without JAX.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from shoal.arguments import check_flags, integer
from shoal.checkpoint.format.records import Commit
from shoal.checkpoint.planning.policies import Keep, Saved, doomed
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.opening import unfinished
from shoal.checkpoint.store.step_names import COMMIT, check_place, step_at
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
    counted,
)
from shoal.runtime.system import fault_points
from shoal.runtime.system.threads import in_threads

MOST_STEPS = 1 << 62

_LOG = logging.getLogger("shoal")
_CORRUPT = (CorruptCheckpointError,)


class CommittedStep(NamedTuple):
    """A committed step."""

    step: int
    store: Store
    commit: Commit


def step_number(operation: str, step: object, *, wanted: str = "a whole number") -> int:
    """Return a step number.

    Raises:
      UsageError: it is negative or not an integer.
    """
    number = integer(operation, "step", step, wanted=wanted)
    if not 0 <= number < MOST_STEPS:
        raise UsageError(f"{operation}: step {number} must be between 0 and {MOST_STEPS - 1}")
    return number


def check_history(root: Store) -> None:
    """Reject a directory that is itself a checkpoint: as a history it would look empty.

    Raises:
      UsageError: it is one.
    """
    if COMMIT in root.names():
        raise UsageError(
            f"Checkpoints({root.path!r}): that is one checkpoint, not a history of steps\n"
            "pass the directory above it, or another one; `shoal.restore` takes one checkpoint"
        )


def check_single(store: Store) -> None:
    """Refuse to save a single checkpoint into a history: it would hide the steps.

    Raises:
      UsageError: the directory holds steps.
    """
    count = len(store.steps())
    if count:
        raise UsageError(
            f"save({store.path!r}): that is a history of {counted(count, 'step')}\n"
            "save to another directory, or a step by `Checkpoints.save`"
        )


def commits(root: Store, *, skip_corrupt: bool = False) -> list[CommittedStep]:
    """Return the committed steps, in order.

    Raises:
      CorruptCheckpointError: a COMMIT contradicts itself or its files, unless `skip_corrupt`.
    """
    check_flags("all_steps", skip_corrupt=skip_corrupt)
    return list(_committed(root.steps(), _CORRUPT if skip_corrupt else (), root.pace.looks))


def newest(
    root: Store,
    *,
    skip_corrupt: bool = False,
    passed: Collection[int] = (),
    faults: dict[int, str] | None = None,
) -> CommittedStep | None:
    """Return the newest committed step; None if there is none. Raises as `commits`.

    Args:
      passed: steps to ignore.
      faults: receives the error of each step that is skipped; None: log a warning.
    """
    skipped = _CORRUPT if skip_corrupt else ()
    pairs = (pair for pair in reversed(root.steps()) if pair[0] not in passed)
    return next(
        (committed for pair in pairs for committed in _committed([pair], skipped, 1, faults)), None
    )


def require(root: Store, step: int) -> CommittedStep:
    """Return a committed step.

    Raises:
      NotCommittedError: it is not; the error names the nearest steps.
    """
    store = root.step(step)
    commit = store.committed()
    if commit is None:
        attempts = unfinished(store)
        commit = store.committed()
        if commit is None:  # not committed meanwhile either
            there = [committed.step for committed in commits(root, skip_corrupt=True)]
            detail = f"saved are {_listed(there, step)}" if there else "no step is"
            detail = f"{attempts}\n{detail}" if attempts else detail
            raise NotCommittedError(
                f"{root.path}: step {step} is not saved; {detail}", path=store.path
            )
    return CommittedStep(step, store, commit)


def none_saved(root: Store) -> NotCommittedError:
    """Return the error for a history without any committed step."""
    link = root.why_absent()
    if link:
        return NotCommittedError(f"{root.path}: no step is saved; {link}", path=root.path)
    steps = reversed(root.steps())
    begun = (unfinished(store, f"the save of step {step}") for step, store in steps)
    attempts = next(filter(None, begun), "")
    detail = f"; {attempts}" if attempts else ""
    return NotCommittedError(f"{root.path}: no step is saved{detail}", path=root.path)


def _listed(there: list[int], step: int) -> str:
    near = sorted(sorted(there, key=lambda saved: abs(saved - step))[:5])
    return ", ".join(map(str, near)) + (f" and {len(there) - 5} more" if len(there) > 5 else "")


def chosen(root: Store, step: int | None = None, *, skip_corrupt: bool) -> int | None:
    """Return a committed step, or the newest for None; None if there is none.

    Raises:
      NotCommittedError: the step is not. Otherwise as `commits`.
    """
    check_flags("latest", skip_corrupt=skip_corrupt)
    if step is not None:
        return require(root, step).step
    chosen_step = newest(root, skip_corrupt=skip_corrupt)
    return None if chosen_step is None else chosen_step.step


def pin(root: Store, step: int) -> None:
    """Protect a step from retention. Raises as `require`, also if it is deleted concurrently."""
    while not require(root, step).store.pin():  # deleted concurrently, and perhaps saved again
        pass


def unpin(root: Store, step: int) -> None:
    """Return a step to retention."""
    root.step(step).unpin()


def delete_step(root: Store, step: int) -> None:
    """Delete a step that is not pinned, damaged or not.

    Raises:
      NotCommittedError: it is not there; the error names the nearest steps.
    """
    with contextlib.suppress(CorruptCheckpointError):
        require(root, step)
    if not delete_saved(root.step(step)):
        raise _pinned(step)


def delete_saved(store: Store) -> bool:
    """Delete what is saved in a place, damaged or not; return False if it is pinned: it stays.

    Raises:
      StorageError: it stays, although the storage reported no error.
    """
    if not store.delete_damaged():
        return False
    if store.state().commit is not None:  # which lists: one answer alone may be wrong
        raise StorageError(
            f"{store.path}: it is still there after `delete`, or was saved again meanwhile",
            path=store.path,
        )
    return True


def _pinned(step: int) -> UsageError:
    return UsageError(f"delete: step {step} is pinned; unpin it first")


def make_room(root: Store, step: int) -> str:
    """Make room for a damaged step to be saved again.

    Returns the attempt that the new one is to replace. "": it is deleted, since it is a link, or
    what it says is unreadable.

    Raises:
      CorruptCheckpointError: the directory holds another step, which may be intact.
      UsageError: the step is pinned.
    """
    store = root.step(step)
    standing = None
    with contextlib.suppress(CorruptCheckpointError):
        standing = store.standing()
    if standing and not store.is_link:
        check_place(store.path, standing.step, COMMIT)
        if store.is_pinned:
            raise _pinned(step)
        return standing.attempt
    with contextlib.suppress(NotCommittedError):  # another process was faster
        delete_step(root, step)
    return ""


def make_way(store: Store, *, idle_s: float) -> str:
    """Clean up a single checkpoint that is to be overwritten, and return its attempt; "": none.

    Damaged or not: its COMMIT must be readable, or this may be no checkpoint.

    Raises:
      CorruptCheckpointError, UnsupportedCheckpointError: its COMMIT cannot be read.
      UsageError: it is pinned, a step of a history, or a link to a checkpoint, which may be one.
    """
    operation = f"save({store.path!r}, overwrite=True)"
    try:
        standing = store.standing()
    except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
        error.args = (f"{error}\n{operation} replaces what it can read: delete that first",)
        raise
    if standing is not None and store.is_link:
        raise UsageError(
            f"{operation}: that is a symbolic link to a checkpoint; pass the path of the checkpoint"
        )
    if standing is not None and step_at(store.path) is not None:
        raise UsageError(
            f"{operation}: that is a step of a history, and steps are not overwritten; "
            "save another step, or delete this one first"
        )
    if standing is not None and store.is_pinned:
        detail = "the checkpoint there is pinned: unpin it, or remove its file KEEP"
        raise UsageError(f"{operation}: {detail}")
    if not store.is_link:
        try:
            store.collect_garbage(idle_s=idle_s)
        except CheckpointError as error:  # what is committed may be damaged
            _LOG.warning("%s could not be cleaned up: %s", store.path, error)
    standing = store.standing()
    return "" if standing is None else standing.attempt


def _committed(
    pairs: Sequence[tuple[int, Store]],
    skipped: tuple[type[CheckpointError], ...],
    at_once: int,
    faults: dict[int, str] | None = None,
) -> Iterator[CommittedStep]:
    outcomes: dict[int, Commit | CheckpointError | None] = {}
    failed: list[int] = []

    def is_skipped(error: Commit | CheckpointError | None, store: Store) -> bool:
        if isinstance(error, StorageError):  # a link to a volume that is not mounted, for example
            return bool(skipped) and store.is_link and bool(store.why_absent())
        return isinstance(error, skipped)

    def look(own: Iterator[tuple[int, Store]]) -> None:
        for step, store in own:
            try:
                outcomes[step] = store.committed()
            except CheckpointError as error:
                outcomes[step] = error
                if not is_skipped(error, store):
                    failed.append(step)
            if failed:  # steps are taken in order: all before the first of these are read
                return

    in_threads(look, pairs, at_once)
    try:
        for step, store in pairs:
            commit = outcomes[step]
            if isinstance(commit, Commit):
                yield CommittedStep(step, store, commit)
            elif is_skipped(commit, store):
                if faults is None:
                    _LOG.warning("step %d is left out: %s", step, commit)
                else:
                    faults[step] = str(commit)
            elif commit is not None:
                if isinstance(commit, CorruptCheckpointError):
                    add_remedy(commit)
                raise commit
    finally:  # an error refers to frames, which would refer to it
        outcomes.clear()
        commit = None


def add_remedy(error: CorruptCheckpointError) -> None:
    """Add to the error about a damaged step what the user can do."""
    detail = "delete that step, or repair its directory, or skip it with skip_corrupt=True"
    error.args = (f"{error}\n{detail}",)


def open_history(root: Store, *, idle_s: float | None) -> int | None:
    """Prepare a history for a run: `tend` it, and return its newest step.

    Args:
      idle_s: seconds after which an attempt is stale; None: change nothing.

    Raises:
      UsageError: it is a single checkpoint.
    """
    check_history(root)
    if idle_s is not None:
        tend(root, idle_s=idle_s)
    return chosen(root, skip_corrupt=True)


def tend(root: Store, *, idle_s: float) -> None:
    """Clean up after crashes: commit complete attempts, end stale ones, spare live ones.

    Failures are logged as warnings: they must not make committed steps unreachable. Attempts behind
    a symbolic link are not ended: they are not part of this history.
    """
    for step, store in root.unsettled():
        with _warning(step):
            store.recover()
        with _warning(step):
            if not store.is_link:
                store.collect_garbage(idle_s=idle_s)


@contextlib.contextmanager
def _warning(step: int) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        _LOG.warning("step %d could not be cleaned up: %s", step, error)


class Retained(NamedTuple):
    """What retention has done."""

    deleted: list[int]
    oldest: int  # no step below it is there
    judged: list[Saved]  # the steps that the policy was asked about


def retain(
    root: Store,
    keep: Keep,
    *,
    saved: int,
    idle_s: float,
    process: int,
    damaged: Collection[int] = (),
    first: int = 0,
) -> Retained:
    """Delete the steps that `keep` does not keep. Clean up after crashes elsewhere.

    The step that was `saved` just now stays, even if later ones exist. A step whose COMMIT is
    damaged or of a newer format, or that is in `damaged`, is left alone, and counts for no policy.
    If some steps cannot be deleted, the others still are, and the first error is raised.

    Args:
      first: steps below it are left alone: in a bucket, to list what is left of all deleted steps
        of a long run costs more than the save.
    """
    fault_points.reach("retain.before", process)
    skipped = (CorruptCheckpointError, UnsupportedCheckpointError)
    pairs = [pair for pair in root.steps(first) if pair[0] not in damaged]
    at_once = root.pace.looks
    steps = {committed.step: committed for committed in _committed(pairs, skipped, at_once)}
    last = max(steps, default=saved)
    if last > saved:
        _LOG.warning(
            "step %d is saved, but a run would resume the later step %d: delete later steps if "
            "this run went back",
            saved,
            last,
        )
    judged: list[Saved] = []
    in_threads(lambda own: judged.extend(map(_saved, own)), steps.values(), at_once)
    errors, gone = [], []
    for step in doomed(judged, keep):
        try:
            if step != saved and steps[step].store.delete(steps[step].commit.attempt):
                gone.append(step)
        except CheckpointError as error:
            errors.append(error)
    left = root.steps(first)
    for step, store in left:
        if step not in steps and not store.is_link:
            with _warning(step), contextlib.suppress(*skipped):  # already reported
                store.collect_garbage(idle_s=idle_s)
    if errors:
        raise errors[0]
    return Retained(gone, min((step for step, _ in left), default=saved), judged)


def _saved(committed: CommittedStep) -> Saved:
    commit = committed.commit
    return Saved(committed.step, commit.created_ns / 1e9, commit.metrics, committed.store.is_pinned)
