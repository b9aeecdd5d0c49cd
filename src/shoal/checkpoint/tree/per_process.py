"""A leaf that every process has a value of its own for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.colour import local


@local
@dataclass(frozen=True)
class PerProcess:
    """Marks a leaf whose value is this process's own: where its data loader stands, its seed.

    Local.

    `shoal.save` stores the value of every process; each gets its own back where the process count
    is the same. The value is a tree of plain values and NumPy arrays: dicts, lists, tuples,
    numbers, str, bytes, None.

    >>> PerProcess({"row": 17}).value
    {'row': 17}
    """

    value: Any
