"""The request of a save: the state, its path, and time limits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any, NamedTuple

from shoal import settings
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format.records import Manifest
from shoal.checkpoint.saving.lines import json_digest
from shoal.checkpoint.saving.state import State
from shoal.runtime.rules.deadline import Allowance


class Waits(NamedTuple):
    """Time limits: a time-out per wait, or a deadline on the monotonic clock."""

    each_s: float
    until: float | None

    @classmethod
    def of(cls, operation: str, timeout_s: float | None) -> Waits:
        """Without a time-out, each wait of a save may take SHOAL_TIMEOUT_S."""
        limit_s = settings.timeout(operation, timeout_s, "SHOAL_TIMEOUT_S")
        return cls(limit_s, None if timeout_s is None else time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """Time left; always positive."""
        if self.until is None:
            return self.each_s
        return Allowance(max(self.until - time.monotonic(), 0.001), self.each_s)


class Request(NamedTuple):
    """A state to save, and its path."""

    folder: Folder
    step: int | None
    user: Mapping[str, Any]
    metrics: Mapping[str, float]
    name: str | None
    site: str
    waits: Waits
    lease_s: float  # after which other processes may end this save as stale

    @property
    def operation(self) -> str:
        """The call as named in messages."""
        return f"save({self.folder.path!r})"

    @property
    def lines(self) -> tuple[str, ...]:
        """The options that must be equal on all processes."""
        options = {"step": self.step, "user": self.user, "metrics": self.metrics}
        return tuple(f"{key}={json_digest(value)}" for key, value in options.items())


def manifest_of(request: Request, state: State, attempt: str, num_processes: int) -> Manifest:
    """Return the manifest, without its data, which the lead writes first."""
    return Manifest(
        attempt=attempt,
        step=request.step,
        created_ns=time.time_ns(),
        num_processes=num_processes,
        tree=state.structure,
        leaves=tuple(leaf.record for leaf in state.leaves),
        writer=dict(_versions()),
        mesh=state.mesh,
        user=request.user,
        metrics=request.metrics,
    )


@lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that save."""
    found = []
    for name in ("shoal", "numpy", "jax"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    return tuple(found)
