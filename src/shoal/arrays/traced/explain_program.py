"""Explain what a compiled program moves implicitly, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shoal.colour import local
from shoal.errors import UsageTypeError
from shoal.plan.compiled import Collective, SourceLine, collectives_of, flow_of, frames_of
from shoal.runtime.jax_service import jax_runtime

# Collectives written by the user: JAX's names for them.
_WRITTEN = (
    "psum", "pmax", "pmin", "pmean", "all_gather", "all_to_all", "ppermute", "psum_scatter",
    "reduce_scatter", "pbroadcast", "psum_invariant", "all_gather_invariant", "all_gather_reduced",
    "ragged_all_to_all",
)  # fmt: skip
_OWN_FOLDER = str(Path(__file__).parents[2])
_ADVICE = {
    "gathered": "the compiler gathers the whole array and cuts it again; at this line "
    "constrain(x, layout, via=plan_relayout(x, layout)) moves no more than it must",
    "moved": "an operand is in another layout than needed; constrain it where it is made",
    "summed": "the operation sums over a split dim, which needs this",
    "written": "written so in the program",
}


class Movement(NamedTuple):
    """One collective of a program."""

    kind: str
    """"gathered" whole and cut again, "moved" between layouts, "summed", or "written" by hand."""
    opcode: str
    received_bytes: int
    """Bytes received by the device that receives most, over all executions."""
    operation: str
    """JAX's name of the operation that needs it; empty if XLA does not say."""
    source: str
    """The source line that caused it, as `file:line (function)`; empty if not known."""

    @property
    def is_hidden(self) -> bool:
        """True if the program does not ask for it, so that a constraint may avoid it."""
        return self.kind in ("gathered", "moved")

    @property
    def advice(self) -> str:
        """An explanation, and what to write instead."""
        return _ADVICE[self.kind]


@dataclass(frozen=True, repr=False)
class ProgramReport:
    """The collectives of a compiled program. `print` shows them, hidden ones first."""

    movements: tuple[Movement, ...]
    received_bytes: int
    """Bytes received by the device that receives most, over all collectives."""

    @property
    def hidden(self) -> tuple[Movement, ...]:
        """The collectives that the program does not ask for, the largest first."""
        hidden = [movement for movement in self.movements if movement.is_hidden]
        return tuple(sorted(hidden, key=lambda movement: -movement.received_bytes))

    def __repr__(self) -> str:
        return (
            f"ProgramReport({len(self.movements)} collectives, {len(self.hidden)} of them hidden; "
            f"a device receives {self.received_bytes:,} bytes at most)"
        )

    def __str__(self) -> str:
        others = [movement for movement in self.movements if not movement.is_hidden]
        lines = [repr(self)]
        for movement in [*self.hidden, *others]:
            place = f" for {movement.operation}" if movement.operation else ""
            place += f", {movement.source}" if movement.source else ""
            lines.append(f"{movement.opcode} of {movement.received_bytes:,} bytes{place}")
            lines.append(f"  {movement.advice}")
        return "\n".join(lines)


@local
def explain_program(jitted: Any, *args: Any, **kwargs: Any) -> ProgramReport:
    """Return what a jitted function moves between devices, and why. It is compiled, not run.

    Local.

    It finds what silently slows a program down: arrays that the compiler gathers whole and cuts
    again ("involuntary full rematerialization"), and operands that it moves because an operation
    needs them in another layout. Each with the source line, and what to write there. Communication
    that the arithmetic itself needs, or that the program writes, is listed, too.

    Args:
      jitted: what `jax.jit` returned.
      args, kwargs: its arguments, or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
      A `ProgramReport`.

    Raises:
      UsageError: `jitted` is not a jitted function.

    Example:
      >>> import jax, jax.numpy as jnp, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"x": -1})
      >>> rows = shoal.put(jnp.ones((8, 8)), NamedSharding(mesh, P("x")))
      >>> report = shoal.explain_program(jax.jit(lambda x: x + 1), rows)
      >>> report
      ProgramReport(0 collectives, 0 of them hidden; a device receives 0 bytes at most)
    """
    if not hasattr(jitted, "lower") or isinstance(jitted, str | bytes):
        raise UsageTypeError(
            f"explain_program: {jitted!r} is not a jitted function: pass jax.jit(function), "
            "and its arguments after it"
        )
    with jax_runtime.with_own_lines():
        compiled = jitted.lower(*args, **kwargs).compile()
    text = compiled.as_text()
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    num_devices = max([1, *(len(sharding.device_set) for sharding in shardings)])
    flow, frames = flow_of(text), frames_of(text)
    movements, total = [], np.zeros(num_devices, np.int64)
    for instruction in collectives_of(text):
        received = instruction.received_bytes(num_devices)
        total += received
        kind = _kind(instruction, flow.is_cut_again(instruction.name))
        operation = instruction.op_name.rsplit("/", 1)[-1]
        source = _source(frames.get(instruction.frame, ()))
        most = int(received.max())
        movements.append(Movement(kind, instruction.opcode, most, operation, source))
    return ProgramReport(tuple(movements), int(total.max()))


def _kind(collective: Collective, is_cut_again: bool) -> str:
    operation = collective.op_name.rsplit("/", 1)[-1]
    if operation in _WRITTEN:
        return "written"
    if collective.opcode == "all-gather" and is_cut_again:
        return "gathered"
    return "summed" if collective.opcode in ("all-reduce", "reduce-scatter") else "moved"


def _source(frames: Sequence[SourceLine]) -> str:
    """Return the innermost source line outside shoal."""
    return next((str(frame) for frame in frames if not frame.file.startswith(_OWN_FOLDER)), "")
