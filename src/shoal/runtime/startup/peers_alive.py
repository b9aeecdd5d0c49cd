"""Check that the peers are alive, while this process waits for native code."""

from __future__ import annotations

import socket
import time

from shoal.errors import DeadlineError, ProcessLostError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.exit.causes import gone_members
from shoal.runtime.rules.deadline import given_s
from shoal.runtime.rules.point import Member
from shoal.runtime.system.failure_words import fate_of

TIMEOUT_HINT = "raise timeout_s= if it is merely slow"


def check_living(joined: Coordinator, deadline: float, doing: str) -> None:
    """Raise if a process that this one needs is gone, or the deadline has passed.

    Args:
      joined: the coordinator.
      deadline: on the monotonic clock.
      doing: the operation of this process, for the message.

    Raises:
      ProcessLostError: a process is lost or failed, or a service of the job is lost.
      DeadlineError: the deadline has passed.
    """
    me = f"process {joined.process} of {joined.num_processes} ({socket.gethostname()})"
    if gone := gone_members(joined):
        joined.troubles.mark_all_reported()
        joined.troubles.mark_reported(gone)  # perhaps before the watcher hears of them
        lost = {p: member.last_words for p, member in gone.items()}
        names = "; ".join(f"process {p} ({m.host}) {_fate(m)}" for p, m in gone.items())
        raise ProcessLostError(f"{me} cannot continue {doing}: {names}", lost=lost)
    joined.check(doing)  # JAX's service may be lost
    if time.monotonic() >= deadline:
        state = f"is still {doing} at its deadline ({given_s(deadline):g} s)"
        raise DeadlineError(f"{me} {state}\n{TIMEOUT_HINT}", name=doing)


def _fate(member: Member) -> str:
    return f"is lost: {member.last_words}" if member.state == "lost" else fate_of(member.last_words)
