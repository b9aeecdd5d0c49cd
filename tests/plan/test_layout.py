"""Layouts: normal form, strict rank, exact text, and errors in the caller's own names."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.testing.strategies import layouts

MESH = Mesh({"data": 4, "model": 2, "seq": 2})


@given(layouts(partial=True))
def test_text_and_pickle_round_trip(layout):
    for again in (Layout.parse(layout.text), pickle.loads(pickle.dumps(layout))):
        assert again == layout
        assert hash(again) == hash(layout)
    assert "\n" not in repr(layout)


@given(layouts(partial=True))
def test_every_axis_is_used_once_or_unused(layout):
    used = [axis for dim in layout.axes_of_dims for axis in dim]
    everything = [*used, *layout.partial, *layout.unused_axes]
    assert sorted(everything) == sorted(layout.mesh.axis_names)


@given(layouts(), st.data())
def test_shapes_go_there_and_back(layout, data):
    shard = tuple(data.draw(st.integers(0, 5)) for _ in range(layout.rank))
    whole = layout.global_shape(shard)
    assert layout.shard_shape(whole) == shard
    for dim in range(layout.rank):
        assert whole[dim] == shard[dim] * layout.num_shards(dim)
        assert layout.num_shards(dim - layout.rank) == layout.num_shards(dim)


def test_normal_form():
    assert Layout(MESH, ("data",), ()) == Layout(MESH, "data", None)
    assert Layout(MESH, ("data", "seq")).dims == (("data", "seq"),)
    assert Layout(MESH, "data") != Layout(MESH, "data", None)
    assert Layout(MESH, ("data", "seq")) != Layout(MESH, ("seq", "data"))
    assert Layout(MESH, None, partial={"seq": "sum", "data": "max"}) == Layout(
        MESH, None, partial={"data": "max", "seq": "sum"}
    )
    assert (Layout(MESH) == 1) is False


def test_shorthands():
    assert Layout.replicated(MESH, 2) == Layout(MESH, None, None)
    assert Layout.batch_sharded(MESH, "data", 3) == Layout(MESH, "data", None, None)
    assert Layout.inner_sharded(MESH, ("data", "seq"), 2) == Layout(MESH, None, ("data", "seq"))
    assert Layout.replicated(MESH, 0).rank == 0
    assert Layout.replicated(MESH, np.int64(2)) == Layout(MESH, None, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout.replicated(MESH, -1),
        lambda: Layout.batch_sharded(MESH, "data", 0),
        lambda: Layout.inner_sharded(MESH, "data", 0),
        lambda: Layout.inner_sharded(MESH, "data", 1.5),
        lambda: Layout.replicated(MESH, True),
        lambda: Layout.batch_sharded(MESH, "dat", 1),
    ],
)
def test_shorthands_refuse(make):
    with pytest.raises(UsageError):
        make()


def test_replicated_means_that_every_device_holds_all():
    ones = Mesh({"a": 1, "b": 4})
    assert Layout(ones, "a", None).is_replicated
    assert not Layout(ones, "b", None).is_replicated
    assert not Layout(ones, None, partial={"b": "sum"}).is_replicated
    assert Layout(ones, None, partial={"a": "sum"}).is_replicated


def test_text_reads_well():
    layout = Layout(MESH, "data", ("model", "seq"), None)
    assert layout.text == "data, model+seq, - @ data=4 model=2 seq=2"
    assert repr(layout) == f"Layout({layout.text})"
    pending = Layout(MESH, None, partial={"seq": "sum", "model": "max"})
    assert pending.text == "- | max over model, sum over seq @ data=4 model=2 seq=2"
    assert Layout(MESH).text == "() @ data=4 model=2 seq=2"
    assert len(repr(Layout(Mesh({"x": 4096}, device_ids=range(1, 4097)), "x"))) < 120
    assert len(repr(Layout(Mesh({"x": 4096}, processes=np.arange(4096) % 7), "x"))) < 120


BAD = [
    (lambda: Layout(MESH, "dat"), ["dim 0: no axis 'dat'", "did you mean 'data'?"]),
    (lambda: Layout(MESH, "data", "data"), ["axis 'data' is used 2 times: dim 0, dim 1"]),
    (lambda: Layout(MESH, ("data", "data")), ["axis 'data' is used 2 times"]),
    (lambda: Layout(MESH, 0), ["dim 0: 0 must be None, an axis name or a tuple"]),
    (lambda: Layout(MESH, ["data"]), ["dim 0: ['data'] must be"]),
    (lambda: Layout(MESH, (("data",), "seq")), ["dim 0", "nests tuples"]),
    (
        lambda: Layout(MESH, ("data", None)),
        ["dim 0: ('data', None): write Layout(mesh, 'data', "],
    ),
    (lambda: Layout(MESH, 0.0, "z", "seq", "seq"), ["0.0", "'z'", "'seq' is used 2 times"]),
    (lambda: Layout(MESH, "data", partial={"data": "sum"}), ["dim 0, partial"]),
    (lambda: Layout(MESH, partial={"data": "avg"}), ["must be one of sum, prod, min, max, mean"]),
    (lambda: Layout(MESH, partial={"q": "sum"}), ["partial: no axis 'q'"]),
    (lambda: Layout(MESH, partial=["data"]), ["must be a dict"]),
    (lambda: Layout(MESH, partial={"data": np.array(["sum", "max"])}), ["must be one of"]),
    (lambda: Layout(MESH, *[f"d{i}" for i in range(5000)]), ["dim 0: no axis 'd0'", "4900 more"]),
    (lambda: Layout({"x": 2}, "x"), ["must be a jax.sharding.Mesh or a shoal.Mesh"]),
    (lambda: Layout(MESH, "data").shard_shape((2, 3)), ["rank 2", "rank 1"]),
    (lambda: Layout(MESH, "data").shard_shape((-2,)), ["negative"]),
    (lambda: Layout(MESH, "data").shard_shape((2.0,)), ["sequence of integers"]),
    (lambda: Layout(MESH, "data").global_shape(()), ["rank 0", "rank 1"]),
    (lambda: Layout(MESH, "data").num_shards(1), ["rank 1"]),
    (lambda: Layout(MESH, "data").num_shards(-2), ["rank 1"]),
    (lambda: Layout(MESH, "data").with_mesh(Mesh({"x": 2})), ["no axis 'data'"]),
]


@pytest.mark.parametrize(("make", "parts"), BAD)
def test_layout_error_names_every_problem(make, parts):
    with pytest.raises(UsageError) as caught:
        make()
    for part in parts:
        assert part in str(caught.value)


def test_wrong_types_are_type_errors_too():
    with pytest.raises(UsageTypeError):
        Layout(MESH, 0)


def test_layout_error_has_its_problems_as_an_attribute():
    with pytest.raises(UsageError) as caught:
        Layout(MESH, "dat", "seq", "seq")
    assert len(caught.value.problems) == 2
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_with_mesh_keeps_the_split():
    grid = Mesh({"seq": 8, "data": 1, "model": 2})
    assert Layout(MESH, ("model", "data")).with_mesh(grid) == Layout(grid, ("model", "data"))


@pytest.mark.parametrize(
    "text",
    [
        "", "data", "data @", "data, @ data=2", "data + @ data=2", "@ data=2", "data @ data=2 |",
        "data | sum data @ data=2", "data | avg over data @ data=2", "data @ data=2 @ data=2",
        "data; - @ data=2", "(), - @ data=2", "- - @ data=2",
        "- | sum over x, max over x @ x=2", '"\\ud800" @ x=2',
    ],
)  # fmt: skip
def test_parse_refuses(text):
    with pytest.raises(UsageError):
        Layout.parse(text)


def test_a_layout_cannot_be_changed():
    layout = Layout(MESH, "data")
    with pytest.raises(AttributeError, match="immutable"):
        layout.mesh = MESH
    with pytest.raises(TypeError):
        layout.partial["data"] = "sum"
