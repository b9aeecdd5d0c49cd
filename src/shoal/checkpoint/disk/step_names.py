"""Names of step folders, and whether a checkpoint belongs in one."""

from __future__ import annotations

import os
import re

from shoal.errors import CorruptCheckpointError

_NAME = re.compile(r"step_(\d{12,19})")


def step_name(step: int) -> str:
    """Return the name of a step's directory.

    >>> step_name(1000)
    'step_000000001000'
    """
    return f"step_{step:012d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for; None if it is not a step directory.

    >>> step_of("step_000000001000"), step_of("step_0000000001000"), step_of("step_7")
    (1000, None, None)
    """
    match = _NAME.fullmatch(name)
    step = int(match[1]) if match is not None and name.isascii() else None
    return step if step is not None and step_name(step) == name else None


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
