"""The facades run in the process of the tests, which other tests share."""

from __future__ import annotations

import pytest

import shoal
from shoal.compat import dtensor


@pytest.fixture(scope="module")
def line():
    return dtensor.create_mesh({"x": 2}, devices=["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def wide():
    return dtensor.create_mesh({"x": 2, "y": 4})


@pytest.fixture(autouse=True)
def _no_notice() -> None:
    """End a preemption notice that another test has left open in this process."""
    if shoal.preemption.notice() is not None:
        shoal.preemption.clear()
