"""The notation of a mesh: its exact text form and its one-line `repr`.

::

    data=4 model=2
    x=4 | ids 3,1..0,2 | processes 0x2,1x2 | kind tpu | name "my mesh" | explicit x
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import counted
from shoal.plan.notation.words import Words, quote, repeats_to_text, runs_to_text

IntArray = NDArray[np.int64]


def write(
    axes: Mapping[str, int],
    ids: IntArray | None,
    processes: IntArray | int,
    kind: str,
    name: str,
    explicit: Set[str],
) -> str:
    """Return the text form; `ids` None means 0..n-1; `processes` may be one for all."""
    parts = [" ".join(f"{quote(axis)}={size}" for axis, size in axes.items()) or "()"]
    if ids is not None:
        parts.append(f"ids {runs_to_text(ids)}")
    if not isinstance(processes, int):
        parts.append(f"processes {repeats_to_text(processes)}")
    elif processes:
        size = math.prod(axes.values())
        parts.append(f"processes {processes}x{size}" if size > 1 else f"processes {processes}")
    if kind != "cpu":
        parts.append(f"kind {quote(kind)}")
    if name:
        parts.append(f"name {quote(name)}")
    if explicit:
        parts.append("explicit " + ",".join(quote(axis) for axis in axes if axis in explicit))
    return " | ".join(parts)


_ARGUMENTS = {"ids": "device_ids", "name": "label"}  # of `Mesh`, where they differ from the fields


def read_mesh(tokens: Words) -> dict[str, Any]:
    """Parse a mesh, and return the arguments of `Mesh`. The caller checks that nothing follows."""
    axes: list[tuple[str, int]] = []
    if tokens.skip("("):
        tokens.expect(")")
    else:
        while tokens.peek() not in ("", "|"):
            axis = tokens.name()
            tokens.expect("=")
            axes.append((axis, tokens.integer()))
            tokens.skip(",")  # `data=4, model=2` is also accepted
        if not axes:
            raise tokens.error("axes, such as data=4 model=2, expected")
    count = math.prod(size for _, size in axes)
    fields: dict[str, Any] = {}
    while tokens.skip("|"):
        field = tokens.peek()
        if field in fields:
            raise tokens.error(f"{field} occurs twice,")
        fields[field] = _read_field(tokens, count)
    explicit = fields.pop("explicit", ())
    arguments = {_ARGUMENTS.get(field, field): value for field, value in fields.items()}
    return {**arguments, "axes": axes, "axis_types": dict.fromkeys(explicit, "explicit")}


def _read_field(tokens: Words, size: int) -> Any:
    if tokens.skip("ids"):
        return tokens.runs(size)
    if tokens.skip("processes"):
        values, counts = tokens.repeats(size)
        return values[0] if counts == [size] else np.repeat(values, counts)
    if tokens.skip("kind") or tokens.skip("name"):
        return tokens.name()
    if tokens.skip("explicit"):
        names = [tokens.name()]
        while tokens.skip(","):
            names.append(tokens.name())
        return names
    raise tokens.error("ids, processes, kind, name or explicit expected")


def show_mesh(
    axes: Mapping[str, int],
    ids: IntArray | None,
    num_processes: int,
    kind: str,
    name: str,
    explicit: Set[str],
) -> str:
    """Return the one-line `repr`."""
    size = math.prod(axes.values())
    facts = [
        counted(size, f"{quote(kind)} device"),
        counted(num_processes, "process", "processes"),
    ]
    if ids is not None:
        facts.append(f"ids {short_runs(ids)}")
    facts.append(_show_axis_types(axes, explicit))
    label = f"{name!r}: " if name else ""
    listed = ", ".join(f"{quote(axis)}={size}" for axis, size in axes.items()) or "no axes"
    return f"Mesh({label}{listed}; {', '.join(facts)})"


def short_runs(ids: IntArray) -> str:
    """Return ids as runs, cut to what fits in a line."""
    text = runs_to_text(ids.ravel()[:64])
    if ids.size <= 64 and len(text) <= 32:
        return text
    return text[:31].rsplit(",", 1)[0] + ",…"


def _show_axis_types(axes: Mapping[str, int], explicit: Set[str]) -> str:
    if not explicit:
        return "auto axes"
    if len(explicit) == len(axes):
        return "explicit axes"
    return "explicit axes: " + ", ".join(quote(axis) for axis in axes if axis in explicit)
