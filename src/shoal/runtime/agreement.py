"""One point where processes say what they are about to do, and go on only if all say the same.

Whatever must be equal (the operation, where it is called, its options, the tree, shapes, dtypes)
is one text, the *fingerprint*. The meeting place compares it in the round trip in which the
payloads travel, so no payload reaches anybody if one process differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from shoal.runtime.coordinator import Coordinator, Point

__all__ = ["Call", "agree"]

_SHOWN = 300  # characters of a specification that a message shows


class Call(NamedTuple):
    """One call of a collective, as one process makes it."""

    operation: str  # "broadcast"
    name: str | None  # declares calls at different places to be the same one
    site: str  # where the caller stands: compared unless there is a name
    spec: tuple[str, ...] = ()  # what else must be equal, a line each: options, then leaves


def agree(
    coordinator: Coordinator,
    call: Call,
    payload: bytes = b"",
    *,
    timeout_s: float,
    group: tuple[int, ...] | None = None,
    lane: str = "main",
) -> Mapping[int, bytes]:
    """Meet where all make the same `call`; return everybody's payload by process.

    Raises, on all that arrived or on none:
      DivergenceError: the calls differ. Else as `Coordinator.arrive`.
    """
    point = Point(call.name or call.operation, group, lane, _fingerprint(call), call.site)
    return coordinator.arrive(point, payload, timeout_s=timeout_s)


@lru_cache(maxsize=256)
def _fingerprint(call: Call) -> str:
    place = "" if call.name else f" at {call.site}"
    spec = "; ".join(call.spec)
    if len(spec) > _SHOWN:
        digest = hashlib.blake2b(spec.encode(errors="replace"), digest_size=16).hexdigest()
        spec = f"{spec[:_SHOWN]}... ({len(call.spec)} lines, {digest})"
    return f"{call.operation}{place}: {spec}"
