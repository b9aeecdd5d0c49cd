"""Let the devices finish before the process ends: the others may wait for its part of a program."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping

from shoal.runtime.client.interface import Coordinator
from shoal.runtime.exit.causes import gone_of, peers_of
from shoal.runtime.rules.point import Member

_LOOK_S = 0.002
_QUIET_S = 1.0  # most are done by then; and all processes of a large job end at once
_REPORT_S = 10.0
_ALONE_S = 5.0  # for what the last other process has sent before it left


def pause_s(coordinator: Coordinator) -> float:
    """Return the interval of such queries, which grows with the job as the answer does."""
    return 1.0 + coordinator.num_processes / 20


def await_devices(coordinator: Coordinator, is_done: Callable[[], bool]) -> Mapping[int, Member]:
    """Wait until the devices are done, or never will be, as far as anyone can know.

    Returns:
      The processes that are lost or have failed, if the devices are still busy. Otherwise nothing:
      they are done, or no other process is left that could need, or give, a part.
    """
    now = time.monotonic()
    query_at, report_at, alone_at = now + _QUIET_S, now + _REPORT_S, math.inf
    while not is_done():
        now = time.monotonic()
        if now >= alone_at:
            return {}
        if now >= query_at:
            peers = peers_of(coordinator)
            if gone := gone_of(peers):
                return gone
            if all(peer.state == "left" for peer in peers):
                alone_at = min(alone_at, now + _ALONE_S)
            query_at = time.monotonic() + pause_s(coordinator)
        if now >= report_at:
            report_at = math.inf
            print(
                f"shoal: process {coordinator.process} of {coordinator.num_processes} has ended "
                "its program, and waits for its devices: they still compute, most likely with "
                "processes that have not started the same computation yet",
                file=sys.stderr,
            )
        time.sleep(_LOOK_S)
    return {}
