"""Names of steps and of the files in their places, and whether a checkpoint belongs in one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shoal.errors import CorruptCheckpointError

COMMIT, KEEP = "COMMIT", "KEEP"
STEPS = "step_"  # the names of all steps begin so

_NAME = re.compile(r"step_(\d{12,19})")
_ATTEMPT = "[0-9a-f]{12}"
_OWNED = re.compile(
    rf"(?:PENDING-|manifest-|part-|index-|data-|tmp-)({_ATTEMPT})"
    r"(?:\.json|\.safetensors|-[0-9a-z-]+(?:\.safetensors)?)?"
)
_TOMBSTONE = re.compile(f"DELETING-({_ATTEMPT})")


def step_name(step: int) -> str:
    """Return the name of a step's directory.

    >>> step_name(1000)
    'step_000000001000'
    """
    return f"{STEPS}{step:012d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for; None if it is not a step directory.

    >>> step_of("step_000000001000"), step_of("step_0000000001000"), step_of("step_7")
    (1000, None, None)
    """
    match = _NAME.fullmatch(name)
    if match is None or not name.isascii():
        return None
    step = int(match[1])
    return step if step_name(step) == name else None


def step_at(path: str) -> int | None:
    """Return the step that the directory at a path is named after; None if it is not a step
    directory."""
    return step_of(os.path.basename(os.path.abspath(path)))


def check_place(path: str, step: int | None, file: str) -> None:
    """Reject a directory named after another step than the one saved in it.

    A checkpoint saved without a step may lie anywhere, and any checkpoint may lie in a directory
    that is not a step directory.

    Raises:
      CorruptCheckpointError: `file` says `step`, and the directory is named after another.
    """
    named = step_at(path)
    if step is None or named is None or named == step:
        return
    raise CorruptCheckpointError(
        f"{path}: {file} is of step {step}, and the directory is named after step {named}: it was "
        "copied, renamed or linked\n"
        f"name it {step_name(step)}, or remove it: the saved step counts",
        path=path,
        file=file,
    )


# ---- Files


def new_attempt() -> str:
    """Return a unique attempt id of 12 hex digits."""
    return secrets.token_hex(6)


def pending_name(attempt: str) -> str:
    """Return the name of an attempt's PENDING file, its fence and lease."""
    return f"PENDING-{attempt}"


def tombstone_name(attempt: str) -> str:
    """Return the name that COMMIT is renamed to when the step is deleted."""
    return f"DELETING-{attempt}"


def temporary_name(attempt: str) -> str:
    """Return a unique name for a file that is renamed once complete."""
    return f"tmp-{attempt}-{secrets.token_hex(4)}"


class Listing(NamedTuple):
    """The names in the place of a checkpoint, grouped by attempt."""

    attempts: Mapping[str, tuple[str, ...]]
    tombstones: tuple[str, ...]  # attempt ids, not names
    is_pinned: bool
    others: tuple[str, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> Listing:
        """Group names."""
        attempts: dict[str, list[str]] = {}
        tombstones, others, is_pinned = [], [], False
        for name in names:
            match = _OWNED.fullmatch(name)
            if match:
                attempts.setdefault(match[1], []).append(name)
            elif match := _TOMBSTONE.fullmatch(name):
                tombstones.append(match[1])
            elif name == KEEP:
                is_pinned = True
            elif name != COMMIT:
                others.append(name)
        owned = {attempt: tuple(names) for attempt, names in attempts.items()}
        return cls(owned, tuple(tombstones), is_pinned, tuple(others))
