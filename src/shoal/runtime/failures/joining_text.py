"""Why a job cannot be joined, as sentences: see `rules.joining`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shoal.runtime.failures.process_text import listed
from shoal.runtime.rules.joining import OTHER_VERSION, Refusal, Stranger, WrongHello

# The indented lines are printed as they are, for people to paste.
REMEDY = """\
set SHOAL_TOKEN to one secret for all processes; make it once, and use it on every host:
  (umask 077; openssl rand -hex 16 > token)   # once; copy it to all hosts
  export SHOAL_TOKEN=$(cat token)             # on every host
  sbatch --export=ALL train.sbatch            # Slurm; Open MPI: mpirun -x SHOAL_TOKEN …
  kubectl create secret generic job \\
    --from-literal=SHOAL_TOKEN=$(openssl rand -hex 16)
pods take it by envFrom (docs/clusters/kubernetes.md); to let anyone join, set SHOAL_INSECURE=1 on \
all processes"""


class NotJoined(NamedTuple):
    """Why a job cannot be joined, as facts: see `InitializeError.refusal`."""

    # That of a `Refusal`; or "unreachable": nothing answers at the address. Empty: as the message
    # says.
    reason: str = ""
    strangers: str = ""  # a clause: the processes that were refused for their tokens
    remedy: str = ""  # the last lines of the message, to be printed as they are


def not_joined_of(error: BaseException) -> NotJoined:
    """Return why a job cannot be joined, as far as it is known."""
    refusal = getattr(error, "refusal", None)
    return refusal if isinstance(refusal, NotJoined) else NotJoined()


def strangers_text(strangers: Iterable[Stranger]) -> str:
    """Return a clause about processes that were refused for their token; "" if there are none.

    >>> strangers_text([Stranger(1, "10.0.0.7"), Stranger(-1, "10.0.0.8")])
    'refused because its token is wrong: process 1 from 10.0.0.7, a process without an index from \
10.0.0.8'
    """
    claims = [f"{_claim(stranger.process)} from {stranger.origin}" for stranger in strangers]
    return f"refused because its token is wrong: {', '.join(claims)}" if claims else ""


def _claim(process: int) -> str:
    return f"process {process}" if process >= 0 else "a process without an index"


def refusal_text(refusal: Refusal) -> str:
    """Return why a process cannot join."""
    match refusal.reason:
        case "late":
            return _late_text(refusal)
        case "died":
            return f"{refusal.who} died or gave up before all had joined"
        case "abandoned":
            gone = refusal.who or "the process that started the coordinator died or gave up"
            return f"{gone} before all had joined; {listed(refusal.missing)} never joined"
        case "complete":
            return _complete_text(refusal)
        case "wrong":
            return "; ".join(map(_problem_text, refusal.problems))
    return refusal.words or OTHER_VERSION


def _late_text(refusal: Refusal) -> str:
    text = (
        f"{listed(refusal.missing)} of {refusal.num_processes} did not join within "
        f"{refusal.timeout_s:g} s (the deadline of process {refusal.process}); here: "
        f"{listed(refusal.here)}"
    )
    strangers = strangers_text(refusal.strangers)
    return f"{text}; {strangers}" if strangers else text


def _complete_text(refusal: Refusal) -> str:
    if not refusal.who:
        return "the job is complete"
    text = f"the job is complete: {refusal.who} is process {refusal.process}"
    if refusal.is_child:
        text += (
            "; if this is a child of it, put initialize() below `if __name__ == '__main__':`, "
            "or pass num_processes=1"
        )
    return text


def _problem_text(problem: WrongHello) -> str:
    what, process, given, other, wanted = problem
    match what:
        case "protocol":
            return (
                f"{process} speaks protocol {given}, the coordinator {wanted}: install the same "
                "shoal everywhere"
            )
        case "count":
            return (
                f"{process} says that the job has {given} processes, the coordinator was started "
                f"for {wanted}"
            )
        case "index":
            return f"{process} does not exist: the job has processes 0..{wanted}"
        case "twice":
            return f"two processes have the index {given}: {other} and {process}"
        case "versions":
            return (
                f"{other} runs {wanted}, but {process} runs {given}: install the same versions "
                "everywhere"
            )
    return f"{process} is refused"
