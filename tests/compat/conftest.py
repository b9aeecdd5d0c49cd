"""The facades run in the process of the tests, which other tests share."""

from __future__ import annotations

import pytest

import shoal


@pytest.fixture(autouse=True)
def _no_notice() -> None:
    """End a preemption notice that another test has left open in this process."""
    if shoal.preemption.notice() is not None:
        shoal.preemption.clear()
