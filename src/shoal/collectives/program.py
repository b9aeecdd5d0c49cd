"""Check that every process compiles the same program, or show the first line that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from shoal.collectives.arguments import Deadline, deadline_of
from shoal.collectives.versions import groups_of, representatives_of, version_rows
from shoal.colour import collective
from shoal.errors import DivergenceError, UsageTypeError
from shoal.hashing import content_digest
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.client.programs import without_addresses
from shoal.runtime.failures.comparison import Kind, ShownSide, divergence_error, headline, needs
from shoal.runtime.rules.first_difference import find_line
from shoal.runtime.system.callsite import callsite
from shoal.runtime.uses_client import uses_client

_WIDTH = 120  # characters shown of the line before the difference


@collective("processes")
@uses_client
@collective_scope("assert_same_program")
def assert_same_program(
    client: JobClient,
    /,
    jitted: Any,
    *args: Any,
    name: str | None = None,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> None:
    """Check that all processes lower `jitted` to the same program; else raise on all of them.

    Collective over processes.

    JAX runs what each process compiled, without comparing: a constant that differs, or a branch
    taken on one process alone, gives wrong results. The program is lowered (neither compiled nor
    run) to its text; its digest is compared in one round trip. The call either returns on all
    processes or raises on all, except on one that the answer could not reach.

    Compiler options (XLA_FLAGS) and the order of devices in a mesh are not part of the
    program. Addresses left in it by Python callbacks are: such programs differ.

    Args:
      jitted: the result of `jax.jit`, or of its `lower`.
      args, kwargs: its arguments; `jax.ShapeDtypeStruct`s may stand for arrays. Arguments
        named `name` or `timeout_s` cannot be passed here; lower it first.
      name: identifies the call if it is made at several call sites; None: the call site identifies
        it.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.

    Raises:
      DivergenceError: on all that arrived: the programs differ; `sides` maps each version of the
        first differing line to the processes that have it. Or the calls differ.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      UsageError: on the caller: an argument is wrong. The others get PeerFailedError. The same
        holds for what lowering raises.

    >>> import jax
    >>> assert_same_program(jax.jit(lambda x: x + 1), 2.0, name="train step")
    """
    deadline = deadline_of("assert_same_program", name, timeout_s, "main")
    text = without_addresses(_text(jitted, args, kwargs).encode()).decode()
    call = Call("assert_same_program", name, callsite())
    digest = content_digest(text.encode())
    answers = agree(client, call, digest, timeout_s=deadline.left_s)
    groups = groups_of(answers)
    if len(groups) > 1:
        raise _difference(client, call, deadline, lines=text.split("\n"), groups=groups)


def _text(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    if isinstance(jitted, jax.stages.Lowered):
        if args or kwargs:
            detail = "a lowered program takes no arguments"
            raise UsageTypeError(f"assert_same_program: {detail}")
        return str(jitted.as_text())
    if not isinstance(jitted, jax.stages.Wrapped):
        detail = f"{jitted!r} cannot be lowered; pass what jax.jit returns"
        raise UsageTypeError(f"assert_same_program: {detail}")
    return str(jitted.lower(*args, **kwargs).as_text())


def _difference(
    client: JobClient,
    call: Call,
    deadline: Deadline,
    lines: list[str],
    groups: list[list[int]],
) -> DivergenceError:
    """Find the first differing line, together with all processes; return the error."""
    representatives = representatives_of(groups)
    compare_call = call._replace(spec=("where the programs differ",))

    def meet(payload: bytes) -> Mapping[int, bytes]:
        return agree(client, compare_call, payload, timeout_s=deadline.left_s)

    me = ThisProcess(client.process, client.hosts)
    kind = Kind("program")
    here = ShownSide((), call=call.operation, name=call.name or "", site=call.site)
    heading = f"{me}: {headline(kind, call.operation)}"
    difference = find_line(
        meet, lines if client.process in representatives else None, representatives
    )
    if difference is None:
        rows = version_rows(["a version"] * len(representatives), groups, here)
        return divergence_error(heading, rows, kind=kind)
    index, shown = difference
    before = lines[index - 1].strip()[:_WIDTH].encode() if 0 < index <= len(lines) else b""
    previous = meet(before if client.process == representatives[0] else b"")[representatives[0]]
    after = f", after: {previous.decode(errors='replace')}" if index else ""
    place = f"line {index + 1} of the StableHLO text"
    texts = [shown[process].strip() for process in representatives]
    return divergence_error(
        heading,
        version_rows(texts, groups, here),
        kind=Kind("program", place),
        intro=f"first difference, {place}{after}:",
        advice=needs(call.operation, kind.what),
    )
