"""Give processes that arrive later the difference that the others have found.

The processes that are compared search for the first difference together, in a few rounds. The
lowest of them leaves the result with the meeting place, and processes that arrive later, which take
no part in the search, fetch it there. Nothing is sent unless there is a difference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

from shoal.errors import ShoalError
from shoal.hashing import short_digest
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.point import Point

_PAUSES_S = (0.002, 0.1)  # between two queries: the first, and the longest


def key_of(sides: Any) -> str:
    """Return the key of a difference, from its sides: equal on all processes."""
    return short_digest(json.dumps(sides).encode()).hex()


def publish(
    coordinator: Coordinator, key: str, point: Point, group: Collection[int], found: Any
) -> None:
    """Leave what `group` has found, if this is its lowest process and others have yet to arrive.

    Args:
      point: where the processes met.
      found: what was found, for JSON; None: nothing.
    """
    members = coordinator.num_processes if point.group is None else len({*point.group})
    if coordinator.process == min(group) and len(group) < members:
        coordinator.explain(key, "" if found is None else json.dumps(found))


def fetch(coordinator: Coordinator, key: str, group: Collection[int], limit_s: float) -> Any:
    """Return what the lowest of `group` has found, or None if it is not there in time."""
    deadline = time.monotonic() + limit_s
    pause_s, longest_s = _PAUSES_S
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            text = coordinator.explanation(key, min(group), timeout_s=left_s)
            if text is not None:
                return json.loads(text) if text else None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, longest_s)
    except (ShoalError, ValueError):  # that they differ is known anyway
        pass
    return None
