"""The pair of calls: whole arrays → shards → whole arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from arrays.device_grids import placements
from shoal.arrays.bridge.sharding import layout_of
from shoal.arrays.placing.put import put
from shoal.arrays.traced.enter_manual import enter_manual, leave_manual
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region

AUTO = Mesh({"data": 4, "model": 2})
ROWS, ALL = Layout(AUTO, "data", None), Layout(AUTO, None, None)


def values(shape=(8, 6)):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@settings(max_examples=25)
@given(placements())
def test_each_device_has_its_region_and_back_it_is_the_array(placement):
    layout, shape = placement
    if layout.partial or 0 in shape:  # XLA (jax 0.10) lays out no empty array rightly
        return
    whole = put(values(shape), Layout.replicated(layout.mesh, len(shape)))
    shards = enter_manual(whole, layout)
    devices = [device.id for shard in shards for device in shard.devices()]
    assert devices == layout.mesh.device_ids.ravel().tolist()
    for device, shard in zip(devices, shards, strict=True):
        np.testing.assert_array_equal(shard, values(shape)[region(layout, shape, device)])
    back = leave_manual([-shard for shard in shards], layout, shape)
    assert layout_of(back) == layout
    np.testing.assert_array_equal(back, -values(shape))


def test_trees():
    tree = {"w": put(values(), ALL), "b": put(values((4,)), Layout(AUTO, None)), "n": None}
    layouts = {"w": ROWS, "b": Layout(AUTO, "data"), "n": None}
    shards = enter_manual(tree, layouts)
    assert [shard["b"].tolist() for shard in shards[::2]] == [[0], [1], [2], [3]]
    back = leave_manual(shards, layouts, {"w": (8, 6), "b": (4,), "n": None})
    assert jax.tree.map(layout_of, back) == {"w": ROWS, "b": Layout(AUTO, "data"), "n": None}
    with pytest.raises(
        UsageError, match=r"\['b'\]: shards of \(1,\) in .* make \(4,\), not \(5,\)"
    ):
        leave_manual(shards, layouts, {"w": (8, 6), "b": [5], "n": None})
    with pytest.raises(UsageError, match="not have one shape for each leaf"):
        leave_manual(shards, layouts, (8, 6))


def test_inside_jit_the_error_names_manual():
    x = put(values(), ROWS)
    for wrap in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(UsageError, match=r"enter_manual: .*manual\(fn, in_layouts"):
            wrap(lambda x: enter_manual(x, ROWS)[0].sum())(x)
    shards = enter_manual(x, ROWS)
    with pytest.raises(UsageError, match=r"leave_manual: .*manual\(fn, in_layouts"):
        jax.jit(lambda: leave_manual(shards, ROWS, (8, 6)))()


def test_enter_and_leave_manual_refuse_invalid_arguments():
    with pytest.raises(UsageError, match="size 7, which 4 shards"):
        enter_manual(put(values((7, 2)), ALL), ROWS)
    with pytest.raises(UsageError, match="put places host values"):
        enter_manual(values(), ROWS)
    shards = enter_manual(put(values(), ROWS), ROWS)
    with pytest.raises(UsageError, match=r"shape \(8,\) has rank 1"):
        leave_manual(shards, ROWS, (8,))
    with pytest.raises(
        UsageError, match="shard 0 is on device 7, in the place of the shard of device 0"
    ):
        leave_manual(shards[::-1], ROWS, (8, 6))
    host = [np.asarray(shard) for shard in shards]
    np.testing.assert_array_equal(leave_manual(host, ROWS, (8, 6)), values())
    with pytest.raises(UsageError, match="7"):
        leave_manual(shards[:7], ROWS, (8, 6))
    with pytest.raises(UsageTypeError, match="must be a list, not an ArrayImpl"):
        leave_manual(jnp.ones((8, 6)), ROWS, (8, 6))
    with pytest.raises(UsageTypeError, match="sequence of integers"):
        leave_manual(shards, ROWS, "ab")
    with pytest.raises(UsageError, match="no pieces for the 8 devices"):
        leave_manual([], ROWS, (8, 6))


def test_deleted_shards_are_named():
    shards = [{"a": shard, "b": -shard} for shard in enter_manual(put(values(), ROWS), ROWS)]
    for number in (2, 5):
        shards[number]["b"].delete()
    with pytest.raises(UsageError, match=r"^leave_manual: ") as told:
        leave_manual(shards, ROWS, {"a": (8, 6), "b": (8, 6)})
    assert [problem[:16] for problem in told.value.problems] == [
        "shard 2: ['b']: ", "shard 5: ['b']: "
    ]  # fmt: skip
    assert "was deleted" in str(told.value)
