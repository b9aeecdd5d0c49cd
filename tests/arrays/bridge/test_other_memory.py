"""Arrays that should be, or are, in another memory: the error names the move, which works."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import shoal
from shoal.errors import UsageError

VALUE = np.arange(8, dtype=np.float32)


@pytest.fixture(scope="module")
def layout():
    return shoal.Layout(shoal.make_mesh({"x": 4}, devices=jax.devices()[:4]), "x")


@pytest.fixture(scope="module")
def pinned(layout):
    return shoal.named_sharding(layout).with_memory_kind("pinned_host")


CALLS = {
    "put": lambda layout: shoal.put({"a": VALUE}, layout)["a"],
    "create": lambda layout: shoal.create(lambda: jax.numpy.arange(8.0), layouts=layout),
    "relayout": lambda layout: shoal.relayout(jax.numpy.arange(8.0), layout),
    "from_host_local": lambda layout: shoal.from_host_local(VALUE, layout),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_layout_in_another_memory(call, layout, pinned):
    with pytest.raises(UsageError, match="pass the layout without it, and move the result by jax"):
        CALLS[call](pinned)
    moved = jax.device_put(CALLS[call](layout), pinned)
    assert moved.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(moved, VALUE)


def test_an_array_in_another_memory(layout, pinned):
    array = jax.device_put(VALUE, pinned)
    with pytest.raises(UsageError) as caught:
        shoal.to_host_local({"a": array}, layout)
    words = (
        "['a']: is in pinned_host memory; jax.device_put(…, shoal.named_sharding(layout)) moves it"
    )
    assert words in str(caught.value)
    part = shoal.to_host_local(jax.device_put(array, shoal.named_sharding(layout)), layout)
    np.testing.assert_array_equal(part, VALUE)


def test_a_piece_in_another_memory(layout):
    devices = [*layout.mesh.device_ids.ravel()]
    by_id = {device.id: device for device in jax.devices()}
    places = [
        jax.sharding.SingleDeviceSharding(by_id[number], memory_kind="pinned_host")
        for number in devices
    ]
    pieces = [jax.device_put(VALUE[:2], place) for place in places]
    words = "is in pinned_host memory; .* pass jax.device_put.…, its .sharding.with_memory_kind"
    with pytest.raises(UsageError, match=words):
        shoal.compat.pack(pieces, layout)
    moved = [jax.device_put(piece, piece.sharding.with_memory_kind("device")) for piece in pieces]
    np.testing.assert_array_equal(shoal.compat.pack(moved, layout), np.tile(VALUE[:2], 4))
