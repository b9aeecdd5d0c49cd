"""What may differ between the devices of a manual region, though JAX's types do not say so.

The types (`check_vma` of `jax.shard_map`) follow the operands of each operation, but not what an
operation decides by (jax 0.10 to 0.12): which branch a `cond` takes, how often a `while` runs, where
a `sort` puts the other operands, what a callback was given. Here this is added, operation by
operation, and taken away again where a collective makes a value one for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Hidden", "hidden_axes"]

Hidden = dict[str, str]
"""Axes along which a value may differ, beside those of its type → the operation that is why."""

_ONE_BY_ONE = ("optimization_barrier", "tie", "device_put", "pvary")  # each result is one operand


def hidden_axes(jaxpr: Any, given: Sequence[Hidden] | None = None) -> list[Hidden]:
    """Return of each result of a program along which axes it may differ, beside its type's.

    Args:
      jaxpr: the program, as `jit(f).trace(…).jaxpr` has it.
      given: the same of its arguments; None: as their types say.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found: dict[int, Hidden] = {}
    for var, hidden in zip(jaxpr.invars, given or [{}] * len(jaxpr.invars), strict=True):
        found[id(var)] = hidden
    for eqn in jaxpr.eqns:
        operands = [found.get(id(var), {}) for var in eqn.invars]
        for var, hidden in zip(eqn.outvars, _of_results(eqn, operands), strict=True):
            typed = _typed(var)
            found[id(var)] = {axis: why for axis, why in hidden.items() if axis not in typed}
    return [found.get(id(var), {}) for var in jaxpr.outvars]


def _of_results(eqn: Any, operands: list[Hidden]) -> list[Hidden]:
    name, results = eqn.primitive.name, len(eqn.outvars)
    inner = [part for value in eqn.params.values() for part in _programs(value)]
    if name == "cond":
        chosen_by = _all(eqn.invars[:1], operands[:1], name)
        each = [hidden_axes(branch, operands[1:]) for branch in inner]
        return [_union([chosen_by, *of_one]) for of_one in zip(*each, strict=True)]
    if name == "while":
        return _of_while(eqn, operands)
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        found = hidden_axes(inner[0], operands)
        if name != "scan" or not any(found):
            return found
        return [
            _union([*found, *hidden_axes(inner[0], [_union([*found, *operands])] * len(operands))])
        ] * results
    if inner:
        return [_union(operands)] * results
    named = {axis for key in ("axes", "axis_name") for axis in _names(eqn.params.get(key))}
    if results == len(operands) > 1 and (named or name in _ONE_BY_ONE):
        found = operands
    else:
        found = [_all(eqn.invars, operands, name)] * results
    return [{axis: why for axis, why in one.items() if axis not in named} for one in found]


def _of_while(eqn: Any, operands: list[Hidden]) -> list[Hidden]:
    condition, body = (_program(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked, used = operands[:first], operands[first : first + second]
    carried = operands[first + second :]
    while True:
        going_on = _all(condition.outvars, hidden_axes(condition, [*asked, *carried]), "while")
        rounds = hidden_axes(body, [*used, *carried])
        after = [_union([*both, going_on]) for both in zip(carried, rounds, strict=True)]
        if [set(one) for one in after] == [set(one) for one in carried]:
            return after
        carried = after


def _all(variables: Iterable[Any], hidden: Iterable[Hidden], name: str) -> Hidden:
    """Return along which axes any of some values may differ, by their types or otherwise."""
    typed = {axis: name for var in variables for axis in sorted(_typed(var))}
    return _union([*hidden, typed])


def _union(several: Iterable[Hidden]) -> Hidden:
    found: Hidden = {}
    for one in several:
        found = {**one, **found}
    return found


def _typed(var: Any) -> frozenset[str]:
    """Return the axes along which a value differs by its type."""
    kind = getattr(var.aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def _programs(value: Any) -> list[Any]:
    """Return the programs that a parameter of an operation is or lists."""
    parts = value if isinstance(value, tuple | list) else [value]
    return [_program(part) for part in parts if hasattr(_program(part), "eqns")]


def _program(value: Any) -> Any:
    return getattr(value, "jaxpr", value)


def _names(axes: Any) -> tuple[str, ...]:
    listed = axes if isinstance(axes, tuple | list | frozenset | set) else (axes,)
    return tuple(axis for axis in listed if isinstance(axis, str))
