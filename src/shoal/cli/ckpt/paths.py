"""Resolve a path given to `shoal ckpt`: a history of steps, or one checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from shoal.checkpoint.at import store_at
from shoal.checkpoint.bucket.address import is_address
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.opening import unfinished
from shoal.checkpoint.store.step_names import step_at
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StorageError,
    UsageError,
    raise_all,
)
from shoal.plan.patterns import Selection

LEAF_HELP = "Only these leaves: a name, 'params/**', 'opt/*/mu', or all but '!opt/**'."
_OWN = re.compile(r"COMMIT|(PENDING|DELETING|data|manifest|part|index)-[0-9a-f]{12}.*")


class FoundCheckpoint(NamedTuple):
    """One checkpoint at the path."""

    step: int | None  # None: not a step of a history
    store: Store

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.store.path if self.step is None else f"step {self.step}"


class FoundPath(NamedTuple):
    """The checkpoints at a path."""

    path: str
    is_history: bool
    entries: Sequence[FoundCheckpoint]  # in the order of their steps


def find_checkpoints(path: str, step: int | None = None) -> FoundPath:
    """Return the checkpoints at `path`; with `step`, only that step of the history.

    Raises:
      NotCommittedError: nothing is there.
      UsageError: `step` was given for a path that is not a history, or does not exist.
    """
    store = store_at(path, repr(path))
    path, names = store.path, store.names()
    is_one = any(_OWN.fullmatch(name) for name in names)
    steps = [] if is_one else [FoundCheckpoint(*pair) for pair in store.steps()]
    if not is_one and not steps:
        raise NotCommittedError(_nothing(store, names), path=path)
    if step is None:
        return FoundPath(path, not is_one, steps or [FoundCheckpoint(step_at(path), store)])
    if is_one:
        raise UsageError(f"{path} is one checkpoint, not a history: omit --step")
    chosen = [entry for entry in steps if entry.step == step]
    if not chosen:
        raise UsageError(f"{path} has no step {step}; it has {_listed(steps)}")
    return FoundPath(path, True, chosen)


def leaf_names(pattern: str, known: Collection[str]) -> frozenset[str]:
    """Return the names of leaves that `--leaf` takes; "": all.

    Raises:
      UsageError: it takes none.
    """
    chosen = Selection([pattern] if pattern else None, known)
    raise_all("--leaf", chosen.idle())
    return chosen.names


def one_of(place: FoundPath) -> FoundCheckpoint:
    """Return one checkpoint: the path itself, or the newest committed step of the history.

    Raises:
      NotCommittedError: there is none.
    """
    for entry in reversed(place.entries):
        if not place.is_history or entry.store.committed() is not None:
            return entry
    raise nothing_committed(place)


def nothing_committed(place: FoundPath) -> NotCommittedError:
    """Return the error for a path without any committed checkpoint: what is known of its saves."""
    known = [
        (entry, reason) for entry in reversed(place.entries) if (reason := unfinished(entry.store))
    ]
    if not known:
        detail = "no step is committed" if place.is_history else "nothing is committed there"
        return NotCommittedError(f"{place.path}: {detail}; see `shoal ckpt ls`", path=place.path)
    entry, reason = known[0]
    whose = "" if entry.step is None else f"step {entry.step} is not saved; "
    return NotCommittedError(
        f"{place.path}: {whose or 'nothing is saved; '}{reason}", path=place.path
    )


def unread(error: CheckpointError) -> str:
    """Return the state of a checkpoint that cannot be read."""
    if isinstance(error, StorageError):
        return "unreachable"
    return "damaged" if isinstance(error, CorruptCheckpointError) else "unsupported"


def _nothing(store: Store, names: Sequence[str]) -> str:
    why = store.why_absent()
    if why:
        return why
    if is_address(store.path):
        return f"nothing of a checkpoint is at {store.path}"
    if not os.path.exists(store.path):
        return f"there is no directory {store.path!r}"
    held = f"{len(names)} unrelated entries" if names else "nothing"
    return f"{store.path} is neither a checkpoint nor a history of steps: it holds {held}"


def _listed(entries: Sequence[FoundCheckpoint]) -> str:
    steps = [str(entry.step) for entry in entries]
    return ", ".join(steps if len(steps) <= 8 else [*steps[:3], "…", *steps[-3:]])
