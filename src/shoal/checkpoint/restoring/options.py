"""Check the options of a history and of its calls."""

from __future__ import annotations

from collections.abc import Iterable

from shoal import settings
from shoal.arguments import not_flags
from shoal.checkpoint.restoring.target import check_names
from shoal.errors import raise_all


def check_history_options(flags: dict[str, object], waits: dict[str, object]) -> None:
    """Raise if an argument of `Checkpoints` is not a flag or not a duration.

    Raises:
      UsageError: it is not.
    """
    raise_all("Checkpoints", not_flags(**flags))
    for name, value in waits.items():
        check_seconds("Checkpoints", name, value)


def check_restore(operation: str, options: Iterable[str], timeout_s: object) -> None:
    """Raise if an argument of `restore` or `resume` is wrong regardless of the checkpoint.

    Raises:
      UsageError: it is.
    """
    check_names(operation, options)
    check_seconds(operation, "timeout_s", timeout_s)


def check_seconds(operation: str, name: str, value: object) -> None:
    """Raise unless it is None or a positive number of seconds."""
    if value is not None:
        settings.timeout(operation, value, "", name)
