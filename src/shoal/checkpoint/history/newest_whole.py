"""Restore the newest intact step: all processes skip a step that any of them finds damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shoal.arguments import check_flags
from shoal.checkpoint.disk import saved_steps
from shoal.checkpoint.disk.storage import Folder
from shoal.errors import CheckpointError, CorruptCheckpointError, NotCommittedError, NotSharedError

_LOG = logging.getLogger("shoal")
_SHOWN = 8


def restored(
    root: Folder,
    from_lead: Callable[[tuple[str, ...], Callable[[], Any]], Any],
    restore: Callable[[int], Any],
    step: int | None,
    damaged: set[int],
    *,
    skip_corrupt: bool,
) -> tuple[int, Any] | None:
    """Restore a step, or with None the newest; return it and the result of `restore`.

    None if there is no step. With `skip_corrupt`, a step with any damage, in COMMIT or in any byte
    read, is skipped: all processes warn, and take the one before. If the newest step is deleted
    while it is read, since another job has saved later ones, the newest of these is restored.

    Args:
      from_lead: as `result_of_lead`, from `spec` on.
      restore: restores a step; raises CorruptCheckpointError on all processes or on none.
      damaged: collects the skipped steps; a step that is restored after all is removed from it.

    Raises:
      CorruptCheckpointError: on all: the step is damaged, and was named or `skip_corrupt` is False.
      UsageError: `step` is not a step number. NotCommittedError: on all: it is not saved.
    """
    check_flags("restore", skip_corrupt=skip_corrupt)
    if step is not None:
        number = saved_steps.step_number("restore", step)
        from_lead((f"step={number}",), lambda: saved_steps.require(root, number).step)
        value = restore(number)
        damaged.discard(number)
        return number, value
    passed: set[int] = set()
    gone: tuple[int, CheckpointError] | None = None
    while True:
        spec = ("step=None", f"skip_corrupt={skip_corrupt}", f"skipped: {sorted(passed)}")
        step, found = from_lead(spec, partial(_look, root, skip_corrupt, passed))
        if gone is not None and step in (gone[0], None):  # it stands, or nothing else does
            raise gone[1]
        faults = dict(found)
        _warn(faults)
        try:
            found = None if step is None else (step, restore(step))
            damaged.discard(step)
            return found
        except (
            NotCommittedError,
            NotSharedError,
        ) as error:  # deleted before all processes had opened it
            gone = step, error
        except CorruptCheckpointError as error:
            if not skip_corrupt:
                saved_steps.add_remedy(error)
                raise
            _warn({step: str(error)})
            passed |= {step}
        finally:
            passed |= faults.keys()
            damaged |= passed


def _look(
    root: Folder, skip_corrupt: bool, passed: set[int]
) -> tuple[int | None, list[tuple[int, str]]]:
    """Return the newest step whose COMMIT is intact, and what is wrong with later ones."""
    faults: dict[int, str] = {}
    one = saved_steps.newest(root, skip_corrupt=skip_corrupt, passed=passed, faults=faults)
    return None if one is None else one.step, list(faults.items())


def none_left(root: Folder, damaged: set[int]) -> NotCommittedError:
    """Return the error for a history without a step to restore."""
    if not damaged:
        return saved_steps.none_saved(root)
    few = ", ".join(map(str, sorted(damaged)[-_SHOWN:]))
    detail = f"no intact step is saved: {few} are damaged"
    return NotCommittedError(f"{root.path}: {detail}", path=root.path)


def _warn(faults: Mapping[int, str]) -> None:
    for step, words in faults.items():
        _LOG.warning("step %d is damaged, and skipped: %s", step, words)
