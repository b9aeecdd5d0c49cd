"""Check that all processes make the same call before any of them proceeds.

Everything that must be equal besides the operation and its name (the call site, the options, the
tree, shapes, dtypes) makes up the *fingerprint*. The coordinator compares it in the round trip
that carries the payloads, so no payload reaches any process if one of them differs.

A long specification is sent as a digest. If digests differ, the processes that received that answer
meet once more and find the first line that differs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.errors import DivergenceError
from shoal.hashing import call_digest
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import HiddenDifference
from shoal.runtime.client.record_search import find_together, key_of
from shoal.runtime.rules.first_difference import Meet, find_line
from shoal.runtime.rules.point import Fingerprint, Point

_SHORT_LINES = 50
_SENT = 300  # characters of the lines that are sent; longer ones become a digest
_SEARCH_S = 10.0  # time limit of the search for the first difference


class Call(NamedTuple):
    """One call of a collective, as one process makes it."""

    operation: str  # "broadcast"
    name: str | None  # calls of one name may have different call sites
    site: str  # call site: compared unless there is a name
    spec: tuple[str, ...] = ()  # one line for each option, then for each leaf


def agree(
    client: JobClient,
    call: Call,
    payload: bytes = b"",
    *,
    timeout_s: float,
    group: tuple[int, ...] | None = None,
    lane: str = "main",
) -> Mapping[int, bytes]:
    """Meet where all processes make the same `call`; return each process's payload.

    Raises, on all that arrived or on none:
      DivergenceError: the calls differ; says what differs first. Otherwise as `JobClient.arrive`.
    """
    point = Point(
        name=call.name or call.operation,
        group=group,
        lane=lane,
        operation=call.operation,
        site=call.site,
        fingerprint=fingerprint_of(call),
    )
    deadline = time.monotonic() + timeout_s
    try:
        return client.arrive(point, payload, timeout_s=timeout_s)
    except HiddenDifference as error:
        known = error
    left_s = min(deadline - time.monotonic(), _SEARCH_S)
    raise _explained(client, call, point, known, left_s)


def fingerprint_of(call: Call) -> Fingerprint:
    """Return what else must be equal of a call."""
    return (_of_short if len(call.spec) <= _SHORT_LINES else _of_long)(call)


def _computed(call: Call) -> Fingerprint:
    site, text, digest = "" if call.name else call.site, "\n".join(call.spec), ""
    if len(text) > _SENT:
        digest = call_digest(text.encode(errors="surrogatepass")).hex()
        digest = f"{len(call.spec)} lines, {digest}"
    return Fingerprint(site, digest, text[:_SENT])


_of_short = lru_cache(maxsize=256)(_computed)
# A spec of many lines takes megabytes, and each save has a different one.
_of_long = lru_cache(maxsize=4)(_computed)


def _explained(
    client: JobClient, call: Call, point: Point, known: HiddenDifference, limit_s: float
) -> DivergenceError:
    """Return the error with the first line that differs, or without it if it cannot be found.

    A process that arrives later, and is on no side, is not waited for: it fetches what was found.
    """

    def search(meet: Meet, representatives: Sequence[int]) -> dict[str, str] | None:
        mine = call.spec if client.process in representatives else None
        difference = find_line(meet, mine, representatives)
        return None if difference is None else {str(p): line for p, line in difference[1].items()}

    lane = f"{point.lane}: the first difference"
    here = Point(point.name, lane=lane, operation=point.operation, site=call.site)
    key = key_of(known.calls)
    result = find_together(client, point, here, known.calls, search, key=key, limit_s=limit_s)
    lines = result if isinstance(result, dict) else {}
    group = [process for side in known.calls for process in side.processes]
    shown = {p: lines[str(p)] for p in group if isinstance(lines.get(str(p)), str)}
    return known.explained(shown)
