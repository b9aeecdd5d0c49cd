"""Find the processes whose end led to an exception of this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from shoal.errors import DeadlineError, PeerFailedError, ProcessLostError, ShoalError, UsageError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.known_losses import PeerLoss
from shoal.runtime.client.outcomes import speakers
from shoal.runtime.failures.exception_text import fate_of, is_of_runtime, peers_named
from shoal.runtime.failures.last_record import LastRecord, record_of
from shoal.runtime.rules.messages import MOST_END
from shoal.runtime.rules.point import Departure, Member
from shoal.runtime.system.foreign_text import one_line

_NO_ANSWER = "the coordinator does not answer"
UNHEARD = "unheard"  # `Member.how` of a process of which nothing is known
_ASK_S = 2.0  # how long an ending process waits for news of the other processes
_BEHIND_S = 0.5


def departure_of_member(member: Member) -> Departure:
    """Return how a process has left the job; its words end with the time since."""
    return Departure(member.last_words, member.state, member.how, follows=member.follows)


def peers_of(client: JobClient) -> list[Member]:
    """Return the state of the other processes; all of them are lost if there is no answer, none if
    this process has left the job."""
    try:
        members: Iterable[Member] = client.members(timeout_s=_ASK_S)
    except UsageError:  # this process has left the job, in another thread
        members = ()
    except ShoalError:
        hosts = enumerate(client.hosts)
        members = [
            Member(process, host, "lost", _NO_ANSWER, how=UNHEARD) for process, host in hosts
        ]
    return [member for member in members if member.process != client.process]


def record_sent(
    client: JobClient, error: BaseException, because_of: Iterable[int] | None = None
) -> LastRecord | None:
    """Return the facts of an exception of this process, for the others."""
    here = client.progress
    return record_of(
        error,
        process=client.process,
        step=here.step,
        point=here.point,
        because_of=because_of,
        speakers=speakers(client.hosts),
        most_bytes=MOST_END,
    )


def gone_of(members: Iterable[Member]) -> dict[int, Member]:
    """Return those that are lost or have failed."""
    return {member.process: member for member in members if member.state in ("lost", "failed")}


def gone_members(client: JobClient) -> dict[int, Member]:
    """Return the other processes that are lost or have failed; all if there is no answer."""
    return gone_of(peers_of(client))


def gone_behind(client: JobClient, error: BaseException) -> dict[int, Member]:
    """Return the processes whose end may be the cause of an error of JAX's runtime.

    The coordinator may learn of them just after the transport. One that failed because of others
    is no cause: perhaps it followed this process, which closed a `feed` on its way here.
    """
    if not is_of_runtime(error):
        return {}
    causes = _leading(gone_members(client))
    if not causes:
        time.sleep(_BEHIND_S)
        causes = _leading(gone_members(client))
    return causes


def _leading(gone: Mapping[int, Member]) -> dict[int, Member]:
    return {p: m for p, m in gone.items() if not (m.follows or m.how == "found")}


def peers_behind(
    error: BaseException, gone: Mapping[int, Member]
) -> Mapping[int, Departure] | None:
    """Return the processes whose end led to `error`, and how they ended, the first one first.

    Empty if it was the end of a service; None: the failure is this process's own.

    Args:
      gone: as `gone_behind` found them.

    >>> peers_behind(ValueError("no data"), {}) is None
    True
    """
    if gone:
        heard = [member for member in gone.values() if member.how != UNHEARD]
        heard.sort(key=lambda member: -member.since_s)
        return {member.process: departure_of_member(member) for member in heard}
    return peers_named(error)


# ---- Explain an end that other processes led to: print which ones, and return the exit code.


_EXPLAINED = 8  # processes that a message names


def lost_services(client: JobClient) -> list[PeerLoss]:
    """Return the services that all processes need and that are lost."""
    return [loss for loss in client.peer_losses.open() if loss.process is None]


def explain(client: JobClient, gone: Mapping[int, Member]) -> tuple[int, list[str]]:
    """Return the exit code for an error of JAX's runtime, and a line for each loss behind it."""
    services = lost_services(client)  # the other processes may have died of these
    if gone and all(member.how == UNHEARD for member in gone.values()):
        try:
            client.check()
        except ShoalError as error:  # the coordinator is lost, or declared this process lost
            return error.exit_code, [str(error)]
    lines = [f"{service.name} is lost: {service.words}" for service in services]
    for member in list(gone.values())[:_EXPLAINED]:
        place = f"process {member.process} of {client.num_processes} ({member.host})"
        lines.append(f"{place} {one_line(fate_of(departure_of_member(member)))}")
    is_lost = bool(services) or any(member.state == "lost" for member in gone.values())
    return (ProcessLostError if is_lost else PeerFailedError).exit_code, lines


def report_stuck(client: JobClient) -> None:
    print(
        f"shoal: process {client.process} of {client.num_processes} did not exit "
        "by itself, most likely because of a collective with a lost process; ending it now",
        file=sys.stderr,
    )


def report_alone(client: JobClient) -> None:
    """Print that results were dropped that no process has waited for."""
    print(
        f"shoal: process {client.process} of {client.num_processes} ends while its "
        "devices wait for processes that will not start the same computation",
        file=sys.stderr,
    )


def report_cut(client: JobClient, gone: Mapping[int, Member]) -> int:
    """Print why this process ends without teardown; return the exit code."""
    if gone:
        why = "a process that is gone"
        code, lines = explain(client, gone)
    else:
        why = "work on its devices that continues past its deadline"
        code, lines = DeadlineError.exit_code, []
    print(
        f"shoal: process {client.process} of {client.num_processes} ends without JAX's "
        f"teardown, which would wait for {why}",
        *(f"shoal: {line}" for line in lines),
        sep="\n",
        file=sys.stderr,
    )
    return code
