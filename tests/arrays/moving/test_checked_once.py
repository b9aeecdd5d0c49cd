"""A move is checked and planned once, where the call enters."""

from __future__ import annotations

import inspect
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from shoal.arrays.bridge import sharding
from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.moving.relayout import relayout
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.transfer import checks, plan

COUNTED = {
    "shape checks": Layout.check_shape,
    "layouts": Layout.__init__,
    "shardings": sharding.sharding_of,
    "checked moves": checks.checked_move,
    "plans": plan.transfer_of,
}
WIDE, TALL = Mesh({"a": 2, "b": 4}), Mesh({"a": 4, "b": 2})
FIRST = Mesh({"x": 2}, device_ids=[0, 1])
OTHER = Mesh({"x": 2}, device_ids=[2, 3])


def counted(run):
    """Count the calls of each of these functions."""
    names = {inspect.unwrap(function).__code__: name for name, function in COUNTED.items()}
    calls = Counter()

    def see(frame, event, _):
        if event == "call" and frame.f_code in names:
            calls[names[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(WIDE, "a", "b"), Layout(TALL, "b", "a")),
        (Layout(FIRST, "x", None), Layout(OTHER, None, "x")),
    ],
    ids=["the same devices", "other devices"],
)
def test_a_move_is_checked_once_and_planned_once(source, target):
    host = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    array = jax.device_put(host, sharding_of(source))
    relayout(array, target, way="collectives")  # compiles
    plan.transfer_of.cache_clear()
    sharding._layout_of.cache_clear()
    calls = counted(lambda: relayout(array, target, way="collectives"))
    assert calls["shape checks"] <= 2, calls
    assert calls["checked moves"] == 1, calls
    assert calls["plans"] == 1, calls
    assert calls["layouts"] <= 6, calls
    assert calls["shardings"] <= 2, calls
