"""A leaf with a different value on every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.colour import local


@local
@dataclass(frozen=True)
class PerProcess:
    """Mark a leaf whose value is this process's own, such as a data loader's position or a seed.

    Local.

    `shoal.save` stores the value of every process; each gets its own back if the process count
    is the same. The value is a tree of plain values and NumPy arrays: dicts, lists, tuples,
    numbers, str, bytes, None.

    >>> PerProcess({"row": 17}).value
    {'row': 17}
    """

    value: Any
