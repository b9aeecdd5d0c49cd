"""Rows of a parametrized test of which `make test` tries a few, and `make test-faults` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(rows: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the rows; those that are not `kept` run with `make test-faults` alone."""
    found = [*rows]
    assert {*kept} <= {*found}
    return [row if row in kept else _later(row) for row in found]


def _later(row: Any) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.faults)
