"""What `put` and `pack` leave in the call record, and of which processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.host.record_call import _few_as_text, record_call, record_call_of_parts
from shoal.arrays.placing.pack import pack
from shoal.arrays.placing.put import put
from shoal.errors import InitializeError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime import process
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.failures.comparison import shown_line
from shoal.runtime.rules.point import Point

# As two of three processes would see it.
BOTH = Mesh({"x": 4}, device_ids=[0, 1, 2, 3], processes=[0, 0, 1, 1])
ALL = Mesh({"x": 3}, device_ids=[0, 2, 4], processes=[0, 1, 2])
ONE = Mesh({"x": 2}, device_ids=[0, 1], processes=[0, 0])


@pytest.fixture
def left(monkeypatch):
    """Return a function: what a process leaves, as one of three; None if it leaves nothing."""

    def leave(*leaves, here=0, group=(0, 1), lane="main", **options):
        client = LocalJob(3).clients[here]
        monkeypatch.setattr(process, "client", lambda: client)
        record_call("put", leaves, lane=lane, **options)
        return client.call_records.start_anew(Point("x", group, lane), "").entry(0)

    return leave


def leaf(value, mesh=BOTH, *dims, path="['w']"):
    return Leaf(path, value, Layout(mesh, *(dims or [None] * np.ndim(value))))


def test_the_call_its_place_its_leaves_and_their_values(left):
    rows = np.zeros((8, 4), np.float32)
    entry = left(leaf(rows, BOTH, "x", None), leaf(3, path="['n']"),
                 options=("check_values=True",), values=True)  # fmt: skip
    assert entry.place.startswith("put at ")
    assert "arrays/host/test_record_call.py:" in entry.site
    assert tuple(map(shown_line, entry.spec)) == (
        "check_values=True",
        f"mesh: {BOTH.text}",
        "['w']: float32[8,4] as (x, -)",
        "['n']: int32[] as ()",
    )
    lines = [*map(shown_line, entry.lines)]
    assert lines[2].startswith("['w']: float32[8,4] as (x, -): values ")
    assert lines[3] == "['n']: int32[] as () = 3"
    again = left(leaf(rows.copy(), BOTH, "x", None), leaf(np.int32(3), path="['n']"), here=1,
                 options=("check_values=True",), values=True)  # fmt: skip
    assert again[2:] == entry[2:]


def test_only_the_processes_of_the_meshes_are_asked(left):
    value = leaf(np.zeros(4), BOTH)
    assert left(value, here=1) is not None
    assert left(value, here=2) is None
    assert left(value, here=2, group=None) is None
    assert left(leaf(np.zeros(3), ALL), here=2, group=None) is not None
    assert left(value, leaf(np.zeros(3), ALL), here=2, group=None) is not None
    assert left(leaf(np.zeros(4), ONE), group=(0,)) is None
    assert left(group=None) is None


def test_several_meshes_are_distinguished_in_a_recorded_call(left):
    entry = left(leaf(np.zeros(4, "f4")), leaf(np.zeros(4, "f4"), ONE), group=(0, 1), values=True)
    lines = [*map(shown_line, entry.spec)]
    assert lines[:2] == [f"mesh: {BOTH.text}", f"mesh: {ONE.text}"]
    assert [line.rpartition(" on ")[2] for line in lines[2:]] == ["mesh 0", "mesh 1"]
    first, second = entry.values.split("\n")
    assert first
    assert second == ""  # one process owns it all: no value of another can get in


def test_values_of_every_kind_count_as_what_they_become(left):
    def value_of(value):
        return left(leaf(value), values=True).values

    assert value_of(jnp.arange(5)) == value_of(np.arange(5, dtype=np.int32))
    assert value_of(jax.device_put(jnp.arange(4), jax.devices()[3])) == value_of(
        np.arange(4, dtype="i4")
    )
    assert value_of(2.5) == value_of(np.float32(2.5))
    assert value_of(jax.random.key(1)) != value_of(jax.random.key(2))
    spread = put(np.arange(8, dtype="f4"), Layout(Mesh({"x": 8}), "x"))
    assert value_of(spread) == value_of(np.arange(8, dtype="f4"))


def test_call_is_not_recorded_if_its_participants_are_unknown(left, monkeypatch):
    pod = Mesh({"x": 2}, device_ids=[0, 1], processes=[0, 1], kind="tpu")
    assert left(leaf(np.zeros(4), pod)) is None
    whole = Mesh({"x": 3}, device_ids=[0, 1, 2], processes=[0, 1, 2], kind="tpu")
    assert left(leaf(np.zeros(4), whole), group=None) is not None

    def not_joined():
        raise InitializeError("not yet")

    monkeypatch.setattr(process, "client", not_joined)
    record_call("put", [leaf(np.zeros(4))], lane=None)


def test_an_alone_process_pays_nothing(monkeypatch):
    monkeypatch.setattr(process, "client", lambda: pytest.fail("it was asked"))
    put(np.zeros(8, np.float32), Layout(Mesh({"x": 8}), "x"))
    pack([np.zeros(1, np.float32)] * 8, Layout(Mesh({"x": 8}), "x"))


@pytest.mark.parametrize(
    "wrong", [{"lane": 3}, {"check_values": 1}, {"lane": b"x", "check_values": "no"}]
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(UsageTypeError) as error:
        put(np.zeros(8, np.float32), Layout(Mesh({"x": 8}), "x"), **wrong)
    assert len(error.value.problems) == len(wrong)
    with pytest.raises(UsageTypeError):
        pack([np.zeros(1, np.float32)] * 8, Layout(Mesh({"x": 8}), "x"), lane=wrong.get("lane", 1))


def test_of_parts_only_what_others_hold_is_compared_by_those_that_hold_it(monkeypatch):
    client = LocalJob(4).clients[0]
    monkeypatch.setattr(process, "client", lambda: client)
    mesh = Mesh({"x": 2, "y": 2}, device_ids=[0, 1, 2, 3], processes=[0, 1, 2, 3])
    part = np.zeros((2, 2), np.float32)
    leaves = [
        leaf(part, mesh, "x", "y", path="own"),
        leaf(part, mesh, "x", None, path="some"),
        leaf(part, mesh, None, None, path="all"),
    ]

    def left(**options):
        for lane in ("data", None):
            record_call_of_parts("from_host_local", leaves, lane=lane, site="a.py:1", **options)
        return {
            lane: client.call_records.start_anew(Point("x", None, lane), "").entry(0)
            for lane in ("main", "data", "replicas on processes 0-1",
                         "data, replicas on processes 0-1")
        }  # fmt: skip

    entries = left(values=True, options=("check_values=True",))
    for lane in ("main", "data"):
        assert entries[lane].place == "from_host_local at a.py:1"
        assert [" = " in shown_line(line) for line in entries[lane].lines] == [False] * 4 + [True]
        beside = entries[f"{lane}, replicas on processes 0-1".removeprefix("main, ")]
        (line,) = map(shown_line, beside.lines[1:])
        assert line.partition(" as ")[0] == "some: float32[2,2]"
        assert line.endswith(" = [0.0, 0.0, 0.0, 0.0]")
    entries = left()
    assert [" = " in shown_line(line) for line in entries["main"].lines] == [False] * 4
    assert entries["replicas on processes 0-1"] is None


def test_many_replicas_have_a_lane_of_a_short_name(monkeypatch):
    client = LocalJob(400).clients[0]
    monkeypatch.setattr(process, "client", lambda: client)
    mesh = Mesh({"x": 200, "y": 2}, device_ids=range(400), processes=range(400))
    record_call_of_parts(
        "from_host_local", [leaf(np.zeros(2, "f4"), mesh, "y")], lane=None, values=True
    )
    lanes = [name for _, name in client.call_records._call_records if name != "main"]
    assert [len(name) < 300 for name in lanes] == [True]
    assert lanes[0].startswith("replicas on processes 0, 2, 4")


@given(
    arrays(
        st.sampled_from(["float16", "float32", "float64", "int8", "uint64", "bool"]),
        st.sampled_from([(), (1,), (3,), (2, 2)]),
    ),
    st.data(),
)
def test_few_numbers_are_equal_as_text_only_if_their_bits_are(values, data):
    other = data.draw(st.just(values.copy()) | arrays(values.dtype, values.shape))
    with np.printoptions(legacy=data.draw(st.sampled_from([False, "1.13"])), precision=2):
        texts = _few_as_text(values), _few_as_text(other)
    assert texts == (_few_as_text(values), _few_as_text(other))
    if "" in texts:
        assert np.isnan(values if texts[0] == "" else other).any()
    else:
        assert (texts[0] == texts[1]) == (values.tobytes() == other.tobytes())
