"""The plan of a move as a value: which way, what it says of itself, what it refuses."""

import pickle

import pytest

from shoal.errors import UsageError
from shoal.plan.hardware.links import links_of
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer.plan import plan_transfer

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
ROWS, COLUMNS = Layout(CUBE, ("a", "b", "c"), None), Layout(CUBE, None, ("a", "b", "c"))


def test_transfer_plans_are_cached_picklable_and_hashable():
    plan = plan_transfer(ROWS, COLUMNS, (64, 64), 4)
    assert plan is plan_transfer(ROWS, COLUMNS, [64, 64], 4)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) != hash(plan_transfer(ROWS, COLUMNS, (64, 64), 8))
    assert repr(plan).startswith("Transfer(collectives: 1,792 B of at least 1,792 B; Layout(a+b+c")


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        (ROWS, COLUMNS, 0.109375),
        (Layout(CUBE, "a", "b"), Layout(CUBE, "b", "a"), 0.25),
        (ROWS, Layout(CUBE, "a", ("b", "c")), 0.09375),
        (Layout(CUBE, "c", "b"), Layout(CUBE, ("c", "b", "a"), None), 0.0625),
    ],
)
def test_pairs_at_the_bound(source, target, share):
    plan = plan_transfer(source, target, (64, 64), 4)
    assert plan.way == "collectives"
    assert plan.received_bytes == plan.bound_bytes == share * 64 * 64 * 4


def test_the_devices_are_counted_by_id():
    """Where the order of devices changes on the way, each keeps its own account."""
    other = Mesh({"x": 3, "y": 2}, device_ids=[5, 3, 1, 4, 2, 0])
    plan = plan_transfer(Layout(Mesh({"x": 6}), "x", None), Layout(other, None, "x"), (6, 6), 4)
    assert plan.bound_bytes <= plan.received_bytes <= 2 * plan.bound_bytes


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        (Layout(Mesh({"x": 4}, device_ids=[8, 9, 10, 11]), "x", None), (8, 8)),
        (Layout(Mesh({"x": 4}), "x", None), (8, 8)),
        (COLUMNS, (9, 7)),
    ],
)
def test_other_devices_and_uneven_shards_are_sent_one_by_one(target, shape):
    plan = plan_transfer(ROWS, target, shape, 4)
    assert plan.way == "point to point"
    assert plan.steps == ()
    assert plan.received_bytes == plan.bound_bytes
    assert "round" in str(plan)


def test_equal_layouts_and_empty_arrays_move_no_bytes():
    plan = plan_transfer(ROWS, ROWS, (8, 8), 4)
    assert (plan.way, plan.received_bytes, plan.seconds(parse("v5e:2x4"))) == ("none", 0, 0.0)
    for shape in ((0, 8), (8, 0)):
        empty = plan_transfer(ROWS, COLUMNS, shape, 4)
        assert empty.received_bytes == empty.bound_bytes == 0


def test_seconds_add_up():
    pod = parse("v5e:2x4")
    plan = plan_transfer(ROWS, COLUMNS, (4096, 4096), 4)
    weighed = plan_transfer(ROWS, COLUMNS, (4096, 4096), 4, topology=pod)
    assert 0 < weighed.seconds(pod) <= plan.seconds(pod)
    assert weighed.seconds(pod) == weighed.seconds(pod, links_of(pod))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan_transfer(ROWS, Layout(CUBE, "a"), (8, 8), 4), "rank"),
        (lambda: plan_transfer(ROWS, COLUMNS, (8, 8), 0), "item_bytes=0"),
        (lambda: plan_transfer(ROWS, "rows", (8, 8), 4), "must be a Layout"),
        (
            lambda: plan_transfer(
                Layout(CUBE, "a", partial={"b": "max"}), Layout(CUBE, "a"), (8,), 4
            ),
            "only sums",
        ),
        (
            lambda: plan_transfer(ROWS, COLUMNS, (8, 8), 4, links=links_of(parse("v5e:2x4"))),
            "requires topology=",
        ),
    ],
)
def test_plan_transfer_refuses_invalid_requests(call, words):
    with pytest.raises(UsageError, match=words):
        call()
