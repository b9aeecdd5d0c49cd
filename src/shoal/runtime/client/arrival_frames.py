"""Encode arrivals and decode their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache

from shoal.runtime.rules.deadline import given_s
from shoal.runtime.rules.meeting_answers import AllMet, Outcome, outcome_of
from shoal.runtime.rules.point import Point
from shoal.runtime.wire.frames import Frame, split_payloads, text_field


def arrival_header(point: Point, timeout_s: float, step: int | None, after: int) -> bytes:
    """Return the header of an arrival. It has no ticket, because the answer is the next frame; so
    a loop sends equal headers, which both sides can cache.

    Args:
      after: the number of calls of the lane that were abandoned before.
    """
    label = b"null" if step is None else b"%d" % step
    if after:
        label += b',"after":%d' % after
    return b'{"step":%b,%b' % (label, _place_and_limit(point, timeout_s, given_s(timeout_s)))


@lru_cache(maxsize=256)
def _place_and_limit(point: Point, timeout_s: float, given: float) -> bytes:
    limit_s = None if timeout_s == math.inf else timeout_s
    arrival = {"do": "arrive", "timeout_s": limit_s, "point": point}
    if given != timeout_s:
        arrival["given_s"] = given
    return json.dumps(arrival)[1:].encode()


def answer_of(frame: Frame, group: Sequence[int]) -> Outcome:
    """Return the answer to an arrival of this group."""
    kind = text_field(frame.header, "is")
    if kind == "ok":
        if not frame.body:
            return AllMet(dict.fromkeys(group, b""))
        payloads = split_payloads(frame.body, len(group))
        return AllMet(dict(zip(group, payloads, strict=True)))
    return outcome_of(kind, json.loads(frame.body))
