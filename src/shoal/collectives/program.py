"""Every process compiles the same program, or an error shows the first line that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from shoal.collectives.arguments import Deadline, deadline_of
from shoal.collectives.versions import groups_of, rows_of, speakers_of
from shoal.colour import collective
from shoal.errors import DivergenceError, UsageTypeError
from shoal.hashing import content_digest
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.lanes import one_call
from shoal.runtime.rules.first_difference import find_line
from shoal.runtime.rules.outcomes import ThisProcess, disagreement
from shoal.runtime.system.callsite import callsite

_WIDTH = 120  # characters of the line before the first that differs


@collective("processes")
def assert_same_program(
    jitted: Any,
    *args: Any,
    name: str | None = None,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> None:
    """Return if all processes lower `jitted` to the same program, else raise on all of them.

    Collective over processes.

    JAX runs what each process compiled, and compares nothing: a constant that differs, a branch
    taken on one process alone, gives wrong numbers. The program is lowered (neither compiled nor
    run) to its text; a digest of it travels in one round trip. It is impossible that it returns on
    one process and raises on another, unless the answer could not reach that one.

    Options of the compiler (XLA_FLAGS) and the order of the devices in a mesh are not part of the
    program. An address that a callback of Python may leave in it is: such programs differ.

    Args:
      jitted: what `jax.jit` returned, or what its `lower` returned.
      args, kwargs: what it is called with; `jax.ShapeDtypeStruct`s may stand for arrays. Arguments
        called `name` or `timeout_s` it cannot get here; lower it first.
      name: declares that calls at different places are one and the same; None: the place counts.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest of all ends the
        wait for all.

    Raises:
      DivergenceError: on all that came: the programs differ; `sides` maps each version of the
        first line that does to the processes that have it. Or the calls differ.
      DeadlineError: on all that came: somebody did not come in time.
      ProcessLostError: on all that came: a process is dead or unreachable.
      PeerFailedError: on all that came: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError. What lowering
        raises, likewise.

    >>> import jax
    >>> assert_same_program(jax.jit(lambda x: x + 1), 2.0, name="train step")
    """
    from shoal.runtime.process import coordinator

    assert_same_program_with(coordinator(), jitted, *args, name=name, timeout_s=timeout_s, **kwargs)


@one_call("assert_same_program")
def assert_same_program_with(
    coordinator: Coordinator,
    jitted: Any,
    *args: Any,
    name: str | None = None,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> None:
    """Do what `assert_same_program` does, with the coordinator given."""
    deadline = deadline_of("assert_same_program", name, timeout_s, "main")
    text = _text(jitted, args, kwargs)
    call = Call("assert_same_program", name, callsite())
    digest = content_digest(text.encode())
    answers = agree(coordinator, call, digest, timeout_s=deadline.left_s)
    groups = groups_of(answers)
    if len(groups) > 1:
        raise _difference(coordinator, call, deadline, text.split("\n"), groups)


def _text(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    if isinstance(jitted, jax.stages.Lowered):
        if args or kwargs:
            told = "a program that is lowered takes no arguments"
            raise UsageTypeError(f"assert_same_program: {told}")
        return str(jitted.as_text())
    if not isinstance(jitted, jax.stages.Wrapped):
        told = f"{jitted!r} cannot be lowered; give what jax.jit returns"
        raise UsageTypeError(f"assert_same_program: {told}")
    return str(jitted.lower(*args, **kwargs).as_text())


def _difference(
    coordinator: Coordinator,
    call: Call,
    deadline: Deadline,
    lines: list[str],
    groups: list[list[int]],
) -> DivergenceError:
    """Find the first line that differs, together with all others; return the error."""
    speakers = speakers_of(groups)
    again = call._replace(spec=("where the programs differ",))

    def meet(payload: bytes) -> Mapping[int, bytes]:
        return agree(coordinator, again, payload, timeout_s=deadline.left_s)

    me = ThisProcess(coordinator.process, coordinator.hosts)
    asked = "assert_same_program" + (f" {call.name!r}" if call.name else "")
    heading = f"{me}: {asked} ({call.site}): programs differ"
    found = find_line(meet, lines if coordinator.process in speakers else None, speakers)
    if found is None:
        return disagreement(heading, rows_of(["a version"] * len(speakers), groups))
    index, shown = found
    before = lines[index - 1].strip()[:_WIDTH].encode() if index <= len(lines) else b""
    told = meet(before if coordinator.process == speakers[0] else b"")[speakers[0]]
    after = f", after: {told.decode(errors='replace')}" if index else ""
    texts = [shown[speaker].strip() for speaker in speakers]
    return disagreement(f"{heading}, first at line {index + 1}{after}", rows_of(texts, groups))
