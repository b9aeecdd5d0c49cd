"""The headline of a failure: who failed, and how; what to do; what other processes know of it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal import settings
from shoal.errors import CorruptCheckpointError, inflected, with_article
from shoal.runtime.failures.comparison import needs
from shoal.runtime.failures.facts import (
    CallPlace,
    Cause,
    Difference,
    JobFailure,
    Memory,
    ProcessSet,
)
from shoal.runtime.failures.process_text import listed
from shoal.runtime.failures.shortening import first_sentence, path_end, process_ranges, shortened

# Columns of names that may be long.
NAME_COLUMNS, HOST_COLUMNS, FILE_COLUMNS, TYPE_COLUMNS = 40, 24, 40, 120
MESSAGE_COLUMNS = 240  # of an exception that is a part of a sentence
_PLURALS = {
    "name": "names", "tree": "trees", "shape": "shapes", "dtype": "dtypes", "value": "values",
    "group": "groups", "layout": "layouts", "step": "steps", "replica": "replicas",
}  # fmt: skip


def job_headline(failure: JobFailure) -> str:
    """Return the headline of a failure, without time, from its causes: who and what.

    >>> cause = Cause(processes=ProcessSet([1]), kind="signal", signal="SIGKILL")
    >>> job_headline(JobFailure(kind="signal", headline="", exit_code=137, causes=(cause,)))
    'process 1 was killed by SIGKILL'
    """
    if failure.kind in ("interrupted", "preempted"):
        headline = failure.kind
        if failure.signal:
            headline += f" by {failure.signal}"
        if failure.step is not None:
            headline += f", in step {failure.step}"
        return headline
    if not failure.causes:
        return f"the job ended with exit code {failure.exit_code}"
    claim, count = _claim(failure.causes[0], failure), len(failure.causes)
    if count == 1:
        return claim
    return f"{claim} (1 of {count} errors)"


def _claim(cause: Cause, failure: JobFailure) -> str:
    """Return who failed, and how."""
    if cause.kind == "diverged" and cause.difference is not None:
        return _difference_claim(cause.difference, cause.step)
    if cause.kind == "stalled" and cause.wait is not None:
        claim = f"no process moved for {cause.wait.limit_s or 0.0:g} s"
        missing = ProcessSet(p for group in cause.wait.missing for p in group.processes)
        if not missing:
            return claim
        are = inflected(len(missing), "is", "are")
        return f"{claim}; {process_ranges(missing)} {are} elsewhere"
    if cause.kind == "checkpoint" and cause.checkpoint is not None:
        what = f"checkpoint {cause.checkpoint.path}"
        if cause.checkpoint.step is not None:
            what = f"step {cause.checkpoint.step} of {what}"
        return f"{what} is damaged"
    if cause.kind == "service_lost":
        return "a service of the job was lost"
    if cause.kind == "host_lost":
        nodes = [i for i, of in enumerate(failure.hosts.values()) if set(of) & set(cause.processes)]
        name = "a host"
        if len(nodes) == 1:
            name = f"node {nodes[0]}"
        lost = f", with {process_ranges(cause.processes)} of {failure.num_processes}"
        return f"{name}{on_host(cause.processes, failure)} was lost{lost}"
    if cause.kind == "not_joined" and len(cause.processes) == failure.num_processes > 1:
        if failure.num_processes == 2:
            return "neither process joined"
        return "no process joined"
    return f"{_who(cause.processes, failure)} {predicate(cause)}"


def _who(processes: ProcessSet, failure: JobFailure) -> str:
    if not processes:
        return "a process"
    if len(processes) == failure.num_processes > 1:
        return all_processes(failure.num_processes)
    subject = process_ranges(processes)
    if failure.num_processes > 1:
        subject += f" of {failure.num_processes}"
    return f"{subject}{on_host(processes, failure)}"


def on_host(processes: ProcessSet, failure: JobFailure, dots: str = "…") -> str:
    """Return ` (node3)` if one host of several runs all of the processes."""
    if len(failure.hosts) < 2 or not processes:
        return ""
    names = [name for name, of in failure.hosts.items() if set(processes) <= set(of)]
    if not names:
        return ""
    return f" ({shortened(names[0], HOST_COLUMNS, dots)})"


def predicate(cause: Cause) -> str:
    """Return how processes failed, as what they did."""
    was = inflected(len(cause.processes), "was", "were")
    if cause.kind == "deadline" and cause.wait is not None:
        phrase = f"did not reach {point(cause.wait.call, cause.wait.name)}"
        if cause.error is not None:
            phrase += "; a thread had raised"
        return phrase
    if cause.kind == "signal":
        phrase = f"{was} killed by {cause.signal or 'a signal'}"
        if is_out_of_memory(cause):
            phrase += " (out of memory)"
        return phrase
    if cause.kind == "exit":
        if cause.exit_code is None:
            return "ended"
        return f"ended with exit code {cause.exit_code}"
    if cause.kind == "not_joined":
        return "did not join"
    if cause.kind == "lost":
        return f"{was} lost"
    if cause.error is not None:
        return f"raised {shortened(cause.error.type, TYPE_COLUMNS)}"
    return "failed"


def _difference_claim(difference: Difference, step: int | None) -> str:
    """Return what differs, and the steps of the first call that differs and of the one that found
    it, as far as they are known.

    Args:
      step: of the call that found it.
    """
    what, call = difference.what, difference.call or "a call"
    at_steps = ""
    if step is not None and step != difference.step:
        at_steps = f", found{step_words(step)}"
    at_steps = f"{step_words(difference.step)}{at_steps}"
    if what == "call":
        return f"processes made different calls{at_steps}"
    if what == "program":
        return f"processes compiled different programs{at_steps}"
    where = point(call, difference.name)
    if call == "assert_same" or what == "replica":
        return f"{where} found different {_PLURALS.get(what, what)}{step_words(step)}"
    if what == "name":
        where = with_article(call)
    return f"processes gave {where} different {_PLURALS.get(what, what)}{at_steps}"


def is_out_of_memory(cause: Cause) -> bool:
    """Return whether the cgroup counted a kill, and the signal was the kernel's."""
    memory = cause.memory or Memory()
    kills = memory.cgroup_oom_kills or 0
    return kills > 0 and cause.signal == "SIGKILL" and not cause.sent_by_launcher


def point(call: str, name: str) -> str:
    """Return a call and the name of its point: `barrier 'step'`."""
    if not name or name == call:  # `shutdown` has no other
        return shortened(call, NAME_COLUMNS)
    return f"{shortened(call, NAME_COLUMNS)} '{shortened(name, NAME_COLUMNS)}'"


def place_words(place: CallPlace) -> str:
    """Return a place as in a sentence: `barrier 'step' (train.py:6)`, `train.py:6`."""
    where = ""
    if place.file:
        where = f"{path_end(place.file, FILE_COLUMNS)}:{place.line}"
    if not place.call:
        return where or place.name or "an unknown place"
    call = point(place.call, place.name)
    if not where:
        return call
    return f"{call} ({where})"


def at_place(place: CallPlace | None) -> str:
    """Return ` at train.py:6`; "" if the place is unknown."""
    if place is None:
        return ""
    return f" at {place_words(place)}"


def step_words(step: int | None) -> str:
    """Return ` in step 3`; "" if the step is unknown."""
    if step is None:
        return ""
    return f" in step {step}"


def all_processes(count: int) -> str:
    """Return the processes of a job as the subject of a sentence: `all 3 processes`."""
    if count == 2:
        return "both processes"
    return f"all {count} processes"


def raised_words(cause: Cause) -> str:
    """Return an exception and its place on one line: `raised KeyError (train.py:3): 'x'`.

    Of the message it is the first sentence, without the process that it may begin with: the caller
    names it. The log has the rest.
    """
    error, frames = cause.error, cause.frames
    if error is None:
        return "failed"
    place = ""
    if frames:
        place = f" ({frames[-1].file}:{frames[-1].line})"
    message = first_sentence(error.message.removeprefix(error.speaker))
    return f"raised {error.type}{place}: {shortened(message, MESSAGE_COLUMNS)}"


def seconds(duration_s: float) -> str:
    """Return a duration: `1.1 s`, `812 s`."""
    if duration_s < 99.95:
        return f"{duration_s:.1f} s"
    return f"{duration_s:.0f} s"


# ---- What to do about a failure, where that follows from the facts.


_LIMITS = {  # of a stall: by whether SHOAL_STALLED_AFTER_S is set, and a process has left
    (True, False): "The limit is that of --stalled-after or SHOAL_STALLED_AFTER_S.",
    (False, True): "The limit is SHOAL_HANG_TIMEOUT_S, since a process has left the job.",
    (False, False): "The limit is within_s of shoal.step.",
    (True, True): (
        "The limit is that of --stalled-after or SHOAL_STALLED_AFTER_S, or SHOAL_HANG_TIMEOUT_S, "
        "since a process has left the job."
    ),
}


def advice_of(causes: Sequence[Cause]) -> tuple[str, ...]:
    """Return sentences of advice about causes, the first one first; none if nothing follows."""
    if not causes:
        return ()
    first = causes[0]
    are = inflected(len(first.processes), "is", "are")
    is_slow = f"If {listed(first.processes)} {are} only slow, raise timeout_s"
    if first.kind == "not_joined":
        if first.wait is None:
            return ()
        by = "shoal.initialize or jax.distributed.initialize"
        return (f"Every process must call {by}. {is_slow}.",)
    if first.kind == "deadline":
        return (f"{is_slow} of this call, or SHOAL_TIMEOUT_S where it has none.",)
    if first.kind == "stalled":
        has_left = False
        if first.wait is not None:
            waits = (*first.wait.missing, *first.wait.arrived)
            has_left = any(wait.waits_for == "left" for wait in waits)
        return (_LIMITS[settings.is_set("SHOAL_STALLED_AFTER_S"), has_left],)
    if first.kind == "checkpoint" and first.exit_code == CorruptCheckpointError.exit_code:
        return ("No value of it was returned. Restore another step, or put back a good copy.",)
    difference = first.difference
    if difference is not None:
        return tuple(
            needs(
                difference.call, difference.what, is_silent=difference.found_at is not None
            ).splitlines()
        )
    return ()
