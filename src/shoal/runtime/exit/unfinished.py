"""Let the devices finish before the process ends: the others may wait for its part of a program."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from shoal import settings
from shoal.errors import DeadlineError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.exit.causes import gone_of, peers_of
from shoal.runtime.rules.endings import AT_END
from shoal.runtime.rules.point import Member

HAS_ENDED = "has ended its program, and waits for its devices"
_LOOK_S = 0.002
_QUIET_S = 1.0  # most are done by then; and all processes of a large job end at once
_REPORT_S = 10.0
_MOST_NAMED = 8
_ALONE_S = 5.0  # for what the last other process has sent before it left


def pause_s(client: JobClient) -> float:
    """Return the interval of such queries, which grows with the job as the answer does."""
    return 1.0 + client.num_processes / 20


def await_devices(client: JobClient, is_done: Callable[[], bool]) -> Mapping[int, Member] | None:
    """Wait until the devices are done, or never will be, as far as anyone can know.

    Returns:
      The processes that are lost or have failed, if the devices are still busy; none if they are
      done. None: no other process will start anything of which they compute a part.

    Raises:
      DeadlineError: for SHOAL_TIMEOUT_S they were not done, and no process called shoal.
    """
    me = ThisProcess(client.process, client.hosts)
    began = now = time.monotonic()
    query_at, report_at, leave_at = now + _QUIET_S, now + _REPORT_S, math.inf
    is_known = False
    while not is_done():
        now = time.monotonic()
        if now >= leave_at:
            return None
        if now >= query_at:
            if not is_known:  # to processes that wait for this one
                client.report("ending", HAS_ENDED)
                is_known = True
            peers = peers_of(client)
            gone, now = gone_of(peers), time.monotonic()
            if gone and not _may_go_on(client, gone, now - began):
                return gone
            here = [peer for peer in peers if peer.state != "left" and peer.process not in gone]
            _check_progress(me, here, now - began)
            leave_at = min(leave_at, now + _ALONE_S) if not here else math.inf
            if any(_is_stuck(peer) for peer in here) and not any(_runs(peer) for peer in here):
                return None
            query_at = now + pause_s(client)
        if now >= report_at:
            report_at = math.inf
            print(
                f"shoal: {me} {HAS_ENDED}: they still compute, most likely with processes that "
                "have not started the same computation yet",
                file=sys.stderr,
            )
        time.sleep(_LOOK_S)
    return {}


def _may_go_on(client: JobClient, gone: Collection[int], waited_s: float) -> bool:
    """Return whether the survivors have agreed to continue without these processes, so that the
    devices most likely compute without them, too."""
    is_soon = waited_s < settings.seconds("SHOAL_HANG_TIMEOUT_S")
    return is_soon and client.peer_losses.are_acknowledged(gone)


def _is_stuck(peer: Member) -> bool:
    """Return whether its main thread has waited for others for a while, where processes meet."""
    return peer.is_waiting and peer.since_s >= _ALONE_S and not peer.lane


def _runs(peer: Member) -> bool:
    """Return whether it may start something yet."""
    return not (_is_stuck(peer) or peer.is_ending)


def _check_progress(me: ThisProcess, here: Sequence[Member], waited_s: float) -> None:
    limit_s = settings.seconds("SHOAL_TIMEOUT_S")
    quiet_s = min([waited_s, *(peer.since_s for peer in here)])
    if quiet_s < limit_s:
        return
    last_words = {peer.process: peer.last_words for peer in here}
    lines = [f"{me.name(process)}: {said}" for process, said in [*last_words.items()][:_MOST_NAMED]]
    late = f"{me} {HAS_ENDED}: they did not finish within {limit_s:g} s"
    raise DeadlineError(
        "\n  ".join([late, *lines]),
        name=AT_END,
        waited_s=waited_s,
        missing=[*last_words],
        last_words=last_words,
    )
