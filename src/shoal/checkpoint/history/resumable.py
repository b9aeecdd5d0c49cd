"""Check that an initial state could be restored later, before the job is preempted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shoal.checkpoint.format.records import Manifest
from shoal.checkpoint.restoring import target as targets
from shoal.errors import RestoreMismatch, UsageError


def check_resumable(state: Any, target: Any, options: Mapping[str, Any], processes: int) -> None:
    """Compare a target with the initial state of a run, as if that had been saved.

    States that are restored in part or under other names, and states that cannot be saved as they
    are, are not checked.

    Raises:
      RestoreMismatch: leaves are missing, unexpected, or of another shape or dtype; names all.
    """
    if target is None or "jax" not in sys.modules or {"only", "rename"} & options.keys():
        return
    from shoal.checkpoint.restoring.wanted import fit, target_of
    from shoal.checkpoint.saving.state import read_state

    leaves, _, _ = target_of(target)
    try:
        read = read_state(state, processes, "resume")
    except UsageError:
        return
    records = tuple(leaf.record for leaf in read.leaves)
    manifest = Manifest("0" * 12, None, 0, processes, read.structure, records)
    wanted = targets.TargetOptions(dtype=options.get("dtype", "exact"))
    try:
        targets.match(manifest, leaves, wanted, fit)
    except RestoreMismatch as error:
        detail = "resume: what `init` made could not be restored by this target once it is saved"
        error.args = (f"{detail}\n{error}",)
        raise
