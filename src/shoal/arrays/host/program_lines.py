"""A traced program as lines that differ between processes where their programs do."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from shoal.arrays.host.digest import digest
from shoal.arrays.host.host_values import is_key
from shoal.hashing import short_digest
from shoal.runtime.rules.spec_lines import SpecLine


def program_lines(program: Any, what: str) -> list[str]:
    """Return lines that differ where programs, or the arrays that they close over, do.

    Args:
      what: what was traced, for the lines: "the initializer".
    """
    constants: list[Any] = []
    text = "\n".join(_words_of(program, constants))
    digest_of_it = short_digest(text.encode()).hex()
    lines = [SpecLine(path=f"{what}'s program", digest=digest_of_it).packed]
    for index, constant in enumerate(constants):
        if isinstance(constant, jax.Array) and not constant.is_fully_addressable:
            continue
        value = np.asarray(jax.random.key_data(constant) if is_key(constant) else constant)
        shape = ",".join(map(str, value.shape))
        name = f"array {index} of those that {what} closes over"
        line = SpecLine(path=name, dtype=str(value.dtype), shape=f"[{shape}]", digest=digest(value))
        lines.append(line.packed)
    return lines


def _words_of(program: Any, constants: list[Any]) -> Iterator[str]:
    """Yield a line for each operation, those of nested programs included; collect the constants.

    Functions and other objects among the parameters are left out: their texts have addresses.
    """
    constants += getattr(program, "consts", ())
    program = program_of(program)
    numbers: dict[int, int] = {}

    def name(var: Any) -> str:
        if isinstance(var, Literal):
            return repr(var.val)
        return f"{numbers.setdefault(id(var), len(numbers))}:{var.aval.str_short()}"

    for eqn in program.eqns:
        plain = {key: value for key, value in sorted(eqn.params.items()) if _is_plain(value)}
        results, operands = ([*map(name, some)] for some in (eqn.outvars, eqn.invars))
        yield f"{results} = {eqn.primitive.name} {operands} {plain}"
        for inner in programs_in(eqn, closed=True):
            yield from _words_of(inner, constants)
    yield f"{[*map(name, program.outvars)]}"


def _is_plain(value: Any) -> bool:
    """Return whether the text of a parameter is the same in every process, tuples' items included.

    >>> _is_plain((((1,), (0,)), None)), _is_plain((print, 1))
    (True, False)
    """
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | enum.Enum | np.dtype)


def programs_in(eqn: Any, *, closed: bool = False) -> list[Any]:
    """Return the programs nested in an operation; `closed`: with their constants."""
    programs: list[Any] = []
    for value in eqn.params.values():
        parts = value if isinstance(value, tuple | list) else [value]
        nested = [part for part in parts if hasattr(program_of(part), "eqns")]
        programs += nested if closed else map(program_of, nested)
    return programs


def program_of(value: Any) -> Any:
    """Return a program without its constants, if it has some."""
    return getattr(value, "jaxpr", value)
