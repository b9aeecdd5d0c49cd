"""`shoal save`: have a running job save now, and go on."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from shoal.cli.observer import Observer, ServerAddress, find
from shoal.cli.watch import Token, Where
from shoal.errors import CheckpointError, DeadlineError, ProcessLostError, UsageError
from shoal.runtime.failures.process_text import listed

_HELP = """\
Have a running job save its state now, and continue.

WHERE is host:port of the job's coordinator, or the log directory of shoal run (with its
job.json). Default: SHOAL_COORDINATOR, else your only running job on this host.

\b
Examples:
  shoal save                request a save of the job on this host
  shoal save --wait         also wait until it is committed; print its step
  shoal save logs           the job of shoal run --log-dir logs
  shoal save --then-stop    as a preemption notice: save, and exit with 75

\b
The job must have two processes or more, and save with shoal.Checkpoints. All
processes save the same step, the first that no process has passed yet,
whether or not every= selects it. A loop that itself decides when to call save
asks again at its next save. If a preemption notice arrives before the step is
agreed, the save of the notice takes the place of this one. A second request
joins the first until its step is agreed, and is a save of its own afterwards.

\b
Exit code:
  0      requested; with --wait: committed
  1      the save failed: the output of the job has the error
  2      wrong usage, no such job, or the job has no shoal.Checkpoints
  71     the job ended before it saved
  73     the coordinator, or a process of the job, does not answer
  74     nothing listens there, or the token is wrong
  130    ended by Ctrl-C; the request remains
"""

_Wait = Annotated[bool, typer.Option("--wait", help="Wait for the commit, and print its step.")]
_ThenStop = Annotated[
    bool, typer.Option("--then-stop", help="The job also stops, as for a preemption notice.")
]


def save(
    where: Where = None,
    token: Token = None,
    wait: _Wait = False,
    then_stop: _ThenStop = False,
) -> None:
    """Have a running job save its state now, and continue."""
    try:
        with contextlib.closing(Observer("save", find("save", where, token))) as observer:
            observer.request_save(then_stops=then_stop)
            print(f"shoal save: {_job(observer.place)}", file=sys.stderr, flush=True)
            print(_committed_step(observer) if wait else _requested(observer))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


save.__doc__ = _HELP


def _job(place: ServerAddress) -> str:
    """Return which job is asked: its address, and its logs if they are known."""
    return f"the job at {place.address}" + (f", logs in {place.logs}" if place.logs else "")


def _requested(observer: Observer) -> str:
    """Return what the job answers to the request.

    Raises:
      DeadlineError: a process does not answer.
    """
    answer = observer.save_state(observer.answer_s)
    if answer is None:
        missing = observer.awaited()
        detail = f"{listed(missing)} of the job: frozen or disconnected" if missing else "the job"
        raise DeadlineError(
            f"save: requested, but no answer within {observer.answer_s:g} s from {detail}\n"
            "the job saves once it answers; shoal watch shows its processes"
        )
    _refuse(answer)
    match answer["state"]:
        case "agreed" if answer["is_by_steps"]:
            return f"requested: the job saves step {answer['step']}, or the first one after it"
        case "agreed":
            return "requested: the job asks again at its next save"
        case "preempted":
            return "requested: the job saves and stops for a preemption notice"
    return f"step {answer['step']} is saved"


def _committed_step(observer: Observer) -> int:
    """Wait for the commit; return its step."""
    try:
        while (answer := observer.save_state(math.inf)) is None or answer["state"] != "committed":
            _refuse(answer or {})
    except ProcessLostError as error:  # its coordinator, too, has closed
        raise ProcessLostError("save: the job ended before it saved") from error
    return int(answer["step"])


def _refuse(answer: Mapping[str, Any]) -> None:
    """Raise the error that an answer is, if it is one."""
    match answer.get("state"):
        case "no checkpoints":
            reason = "no process has opened shoal.Checkpoints, so none can save for it"
            raise UsageError(f"save: the job has nothing to save with: {reason}")
        case "not joined":
            reason = "a job of one process never does, one of several at shoal.initialize()"
            raise UsageError(f"save: not all processes have joined the job: {reason}")
        case "over":
            raise ProcessLostError("save: the job ended before it saved")
        case "failed":
            step = answer.get("step")
            raise CheckpointError(
                f"save: the save of step {step} failed: the output of the job has the error"
            )
