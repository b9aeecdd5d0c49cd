"""Explain an end that other processes led to: print which ones, and return the exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from shoal.errors import DeadlineError, PeerFailedError, ProcessLostError, ShoalError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.known_losses import Trouble
from shoal.runtime.exit.causes import UNHEARD
from shoal.runtime.rules.point import Member
from shoal.runtime.system.failure_words import fate_of, one_line

_EXPLAINED = 8  # processes that a message names


def lost_services(coordinator: Coordinator) -> list[Trouble]:
    """Return the services that all processes need and that are lost."""
    return [trouble for trouble in coordinator.troubles.open() if trouble.process is None]


def explain(coordinator: Coordinator, gone: Mapping[int, Member]) -> tuple[int, list[str]]:
    """Return the exit code for an error of JAX's runtime, and a line for each loss behind it."""
    services = lost_services(coordinator)  # the other processes may have died of these
    if gone and all(member.last_words == UNHEARD for member in gone.values()):
        try:
            coordinator.check()
        except ShoalError as error:  # the meeting place is lost, or declared this process lost
            return error.exit_code, [str(error)]
    lines = [f"{service.name} is lost: {service.words}" for service in services]
    for member in list(gone.values())[:_EXPLAINED]:
        place = f"process {member.process} of {coordinator.num_processes} ({member.host})"
        fate = (
            f"is lost: {member.last_words}"
            if member.state == "lost"
            else fate_of(member.last_words)
        )
        lines.append(f"{place} {one_line(fate)}")
    is_lost = bool(services) or any(member.state == "lost" for member in gone.values())
    return (ProcessLostError if is_lost else PeerFailedError).exit_code, lines


def report_stuck(coordinator: Coordinator) -> None:
    print(
        f"shoal: process {coordinator.process} of {coordinator.num_processes} did not exit "
        "by itself, most likely because of a collective with a lost process; ending it now",
        file=sys.stderr,
    )


def report_cut(coordinator: Coordinator, gone: Mapping[int, Member]) -> int:
    """Print why this process ends without teardown; return the exit code."""
    if gone:
        why = "a process that is gone"
        code, lines = explain(coordinator, gone)
    else:
        why = "work on its devices that continues past its deadline"
        code, lines = DeadlineError.exit_code, []
    print(
        f"shoal: process {coordinator.process} of {coordinator.num_processes} ends without JAX's "
        f"teardown, which would wait for {why}",
        *(f"shoal: {line}" for line in lines),
        sep="\n",
        file=sys.stderr,
    )
    return code
