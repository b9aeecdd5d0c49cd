"""Single sends as permutes of blocks, run on arrays of element numbers."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given

from plan.transfer.moves import moves
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.shards import region
from shoal.plan.topology import parse
from shoal.plan.transfer.permutes import num_permutes, permutes_of, side_of
from shoal.plan.transfer.plan import plan_transfer
from shoal.plan.transfer.point_to_point import point_to_point

NOTHING = -1


def even(layout, shape):
    return tuple(
        size * layout.num_shards(dim) // math.gcd(size, layout.num_shards(dim))
        for dim, size in enumerate(shape)
    )


def shards(layout, array, devices):
    """Return the shard of each device; of one that has none, nothing."""
    own = set(layout.mesh.device_ids.ravel().tolist())
    empty = np.full(layout.shard_shape(array.shape), NOTHING)
    return [array[region(layout, array.shape, d)] if d in own else empty for d in devices]


def at(place, side):
    return tuple(slice(first, first + size) for first, size in zip(place, side, strict=True))


def run(moved, source, target, array):
    """Carry the permutes out; return what each device holds in the end and how much it received."""
    old = shards(source, array, moved.devices)
    new = [np.full(target.shard_shape(array.shape), NOTHING) for _ in moved.devices]
    holds = [d in target.mesh.device_ids for d in moved.devices]
    received = Counter()
    for each in moved.rounds:
        senders, receivers = zip(*each.sends, strict=True) if each.sends else ((), ())
        assert len({*senders}) == len(senders)
        assert len({*receivers}) == len(receivers)
        carried = {}
        for sender, receiver in each.sends:
            shard = (new if each.passes_on[sender] else old)[sender]
            carried[receiver] = shard[at(each.reads[sender], moved.side)]
            assert (carried[receiver] != NOTHING).all(), "sends what it has not"
        for device, is_target in enumerate(holds):
            writes = at(each.writes[device], moved.side)
            if device in carried:
                assert not each.copies[device]
                assert (new[device][writes] == NOTHING).all(), "receives what it has"
                new[device][writes] = carried[device]
                received[moved.devices[device]] += carried[device].size
            elif each.copies[device]:
                new[device][writes] = old[device][at(each.keeps[device], moved.side)]
            assert each.is_idle[device] == (
                is_target and device not in carried and not each.copies[device]
            )
    return dict(zip(moved.devices, new, strict=True)), received


@given(moves())
def test_all_come_to_their_places_and_nothing_is_sent_to_fill_up(move):
    source, target, shape = move
    shape = even(target, even(source, [size + 1 for size in shape]))
    assume(shape and math.prod(shape) < 1 << 14)
    sends = point_to_point(source, target, shape, 1)
    moved = permutes_of(sends, source, target, shape)
    array = np.arange(math.prod(shape)).reshape(shape)
    placed, received = run(moved, source, target, array)
    for device in target.mesh.device_ids.ravel().tolist():
        np.testing.assert_array_equal(placed[device], array[region(target, shape, device)])
    assert {**dict.fromkeys(sends.received_bytes, 0), **received} == sends.received_bytes
    count = num_permutes(sends, side_of(source, target, shape))
    assert count == sum(bool(each.sends) for each in moved.rounds)


def test_where_tiles_divide_each_other_a_send_is_a_permute():
    rows = Layout(Mesh({"x": 4}), "x", None)
    columns = Layout(Mesh({"x": 4}, device_ids=[4, 5, 6, 7]), None, "x")
    sends = point_to_point(rows, columns, (8, 8), 4)
    assert len(permutes_of(sends, rows, columns, (8, 8)).rounds) == sends.num_rounds == 4


def test_seconds_are_those_of_the_permutes():
    half, whole = Layout(Mesh({"x": 4}), "x", None), Layout(Mesh({"x": 8}), None, "x")
    plan, twice = (plan_transfer(half, whole, (size, 64), 4) for size in (64, 128))
    pod = parse("v5e:2x4")
    assert 0 < plan.seconds(pod) < twice.seconds(pod)
    uneven = plan_transfer(half, whole, (63, 64), 4)
    with pytest.raises(UsageError, match="uneven shards, whose time is not modeled"):
        uneven.seconds(pod)
