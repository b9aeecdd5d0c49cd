"""Find values that vary between the devices of a manual region although JAX's types say otherwise.

The types (`check_vma` of `jax.shard_map`) follow the operands of each operation, but not its
predicate (jax 0.10 to 0.12): which branch a `cond` takes, how often a `while` runs, how a `sort`
permutes its other operands, what a callback received, and of which of several groups of devices
a maximum is (`axis_index_groups`). Here these are added, operation by operation,
and removed again where a collective makes a value equal on all devices. Where predicates differ, a
collective would deadlock, and a gradient of a shared value would be wrong: each device would take
its own branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from shoal.arrays.host.program_lines import program_of, programs_in

Hidden = dict[str, str]
"""Axes along which a value may vary, beyond those of its type → the operation that causes it."""

_ONE_BY_ONE = ("optimization_barrier", "tie", "device_put", "pvary")  # each result is one operand
_SILENT = ("axis_index", "pvary", "pcast", "vary_unreduced_cast")  # name axes without communicating


class Hunt:
    """A walk through a program; problems are collected in `problems`."""

    def __init__(self) -> None:
        self.problems: dict[str, None] = {}
        self._constants: set[int] = set()  # variables that depend on no argument

    def results(self, jaxpr: Any, given: Sequence[Hidden] | None = None) -> list[Hidden]:
        """Return the axes along which each result may vary, beyond those of its type.

        Args:
          jaxpr: the program, such as `jit(f).trace(…).jaxpr`.
          given: the same for its arguments; None: as their types say.
        """
        consts = getattr(jaxpr, "consts", ())
        jaxpr = program_of(jaxpr)
        for var, value in zip(jaxpr.constvars, consts, strict=False):
            if not isinstance(value, jax.core.Tracer):
                self._constants.add(id(var))
        found: dict[int, Hidden] = {}
        for var, hidden in zip(jaxpr.invars, given or [{}] * len(jaxpr.invars), strict=True):
            found[id(var)] = hidden
        for eqn in jaxpr.eqns:
            if all(map(self._is_constant, eqn.invars)):
                self._constants.update(map(id, eqn.outvars))
            operands = [found.get(id(var), {}) for var in eqn.invars]
            for var, hidden in zip(eqn.outvars, self._of(eqn, operands), strict=True):
                typed = _typed(var)
                found[id(var)] = {axis: why for axis, why in hidden.items() if axis not in typed}
        return [found.get(id(var), {}) for var in jaxpr.outvars]

    def _of(self, eqn: Any, operands: list[Hidden]) -> list[Hidden]:
        """Return the same for the results of one operation."""
        name, results = eqn.primitive.name, len(eqn.outvars)
        inner = programs_in(eqn)
        if name == "cond":
            return self._of_cond(eqn, operands, inner)
        if name == "while":
            return self._of_while(eqn, operands)
        if len(inner) == 1 and len(inner[0].invars) == len(operands):
            found = self.results(inner[0], operands)
            if name != "scan" or not any(found):
                return found
            anything = _union([*found, *operands])  # from one round to the next
            return [
                _union([anything, *self.results(inner[0], [anything] * len(operands))])
            ] * results
        if inner:
            return [_union(operands)] * results
        axes = _axes(eqn)
        if axes and _is_by_groups(eqn):  # equal within each, whatever the types say
            pairs = zip(eqn.invars, operands, strict=True)
            if results == len(operands):
                return [_all([var], [hidden], f"{name} by groups") for var, hidden in pairs]
            return [_all(eqn.invars, operands, f"{name} by groups")] * results
        if results == len(operands) > 1 and (axes or name in _ONE_BY_ONE):
            found = operands
        else:
            found = [_all(eqn.invars, operands, name)] * results
        return [{axis: why for axis, why in one.items() if axis not in axes} for one in found]

    def _of_cond(self, eqn: Any, operands: list[Hidden], branches: list[Any]) -> list[Hidden]:
        chosen_by = _all(eqn.invars[:1], operands[:1], "cond")
        self._must_not_wait(branches, chosen_by, "a cond")
        self._compare(eqn.invars[1:], chosen_by)
        each = [self.results(branch, operands[1:]) for branch in branches]
        return [_union([chosen_by, *of_one]) for of_one in zip(*each, strict=True)]

    def _of_while(self, eqn: Any, operands: list[Hidden]) -> list[Hidden]:
        condition, body = (program_of(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        predicate, used = operands[:first], operands[first : first + second]
        carried = operands[first + second :]
        while True:
            going_on = _all(
                condition.outvars, self.results(condition, [*predicate, *carried]), "while"
            )
            rounds = self.results(body, [*used, *carried])
            after = [_union([*both, going_on]) for both in zip(carried, rounds, strict=True)]
            if [set(one) for one in after] == [set(one) for one in carried]:
                break
            carried = after
        self._must_not_wait([condition, body], going_on, "a while loop")
        return after

    def _must_not_wait(self, programs: Iterable[Any], chosen_by: Hidden, what: str) -> None:
        """Reject collectives that only some of their devices reach."""
        for program in programs:
            for name, axes in _collectives(program):
                if differ := ", ".join(sorted(axes & {*chosen_by})):
                    self.problems[
                        f"{name} over {differ} inside {what} whose predicate differs along "
                        f"{differ}: devices that skip it leave the others waiting for ever; make "
                        "the predicate equal on all devices (jax.lax.pmax), or communicate before "
                        "or after"
                    ] = None

    def _is_constant(self, var: Any) -> bool:
        return isinstance(var, Literal) or id(var) in self._constants

    def _compare(self, operands: Sequence[Any], chosen_by: Hidden) -> None:
        """Reject gradients of shared values under predicates that vary."""
        for var in operands:
            if self._is_constant(var) or not jnp.issubdtype(var.aval.dtype, jnp.inexact):
                continue
            if differ := ", ".join(repr(axis) for axis in sorted({*chosen_by} - _typed(var))):
                self.problems[
                    f"a cond whose predicate differs along {differ} uses a "
                    f"{var.aval.dtype}{list(var.aval.shape)} that does not: its gradient would be "
                    f"wrong; pass it as jax.lax.pcast(value, ({differ},), to='varying')"
                ] = None


def has_regions(program: Any) -> bool:
    """Return whether there are manual regions in a program."""
    return any(
        eqn.primitive.name == "shard_map" or any(map(has_regions, programs_in(eqn)))
        for eqn in program_of(program).eqns
    )


def _all(variables: Iterable[Any], hidden: Iterable[Hidden], name: str) -> Hidden:
    """Return the axes along which any of some values may vary, by type or otherwise."""
    typed = {axis: name for var in variables for axis in sorted(_typed(var))}
    return _union([*hidden, typed])


def _union(several: Iterable[Hidden]) -> Hidden:
    found: Hidden = {}
    for one in several:
        found = {**one, **found}
    return found


def _typed(var: Any) -> frozenset[str]:
    """Return the axes along which a value varies by its type."""
    kind = getattr(var.aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def _collectives(program: Any) -> Iterable[tuple[str, frozenset[str]]]:
    """Yield the collectives of a program, nested ones included: name and axes."""
    for eqn in program.eqns:
        if (axes := _axes(eqn)) and eqn.primitive.name not in _SILENT:
            yield eqn.primitive.name.removesuffix("_invariant"), axes
        for inner in programs_in(eqn):
            yield from _collectives(inner)


def _axes(eqn: Any) -> frozenset[str]:
    """Return the axes that an operation names."""
    found: set[str] = set()
    for key in ("axes", "axis_name"):
        given = eqn.params.get(key)
        listed = given if isinstance(given, tuple | list | frozenset | set) else (given,)
        found.update(axis for axis in listed if isinstance(axis, str))
    return frozenset(found)


def _is_by_groups(eqn: Any) -> bool:
    """Return whether a collective is one of several groups of devices, each by itself."""
    return len(eqn.params.get("axis_index_groups") or ()) > 1
