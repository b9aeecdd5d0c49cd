"""`allgather`: what all gave, bit for bit, side by side; or an error on every process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.thread_jobs import PATIENCE_S, run_all
from collectives.trees import DTYPES, arrays, bits_of
from shoal.collectives import wire
from shoal.collectives.allgather import Parts, allgather, column_of
from shoal.errors import DivergenceError, ShoalError, UsageError, UsageTypeError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.failures.comparison import shown_line

LARGE = 3 << 20


def in_job(trees, tiled=False, **options):
    """What each process gets that gives one of `trees`."""

    def go(client):
        tree = trees[client.process]
        return allgather.on(client, tree, tiled=tiled, timeout_s=PATIENCE_S, **options)

    return run_all(LocalJob(len(trees)), go)


def keys_of(shape):
    return st.integers(0, 99).map(
        lambda seed: jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(3)
    )


@st.composite
def columns(draw, count, tiled):
    """One leaf for each process, such as may stand side by side, and what becomes of them."""
    kind = draw(st.sampled_from(["array", "array", "scalar", "key", "plain", "listed"]))
    if kind == "key":
        keys = [draw(keys_of((2,))) for _ in range(count)]
        words = [np.asarray(jax.random.key_data(key)) for key in keys]
        words = np.concatenate(words) if tiled else np.stack(words)
        return keys, jax.random.wrap_key_data(words)
    if kind == "plain":
        values = st.sampled_from([st.booleans(), st.floats(), st.complex_numbers()])
        given = draw(values.flatmap(lambda v: st.lists(v, min_size=count, max_size=count)))
        return given, np.array(given)
    if kind == "listed":
        values = st.sampled_from([st.none(), st.text(max_size=5), st.binary(), st.integers()])
        given = draw(values.flatmap(lambda v: st.lists(v, min_size=count, max_size=count)))
        fits = type(given[0]) is int and all(-(2**63) <= value < 2**63 for value in given)
        return given, np.array(given, "i8") if fits else given
    dtype = draw(st.sampled_from(DTYPES))
    rest = draw(st.lists(st.integers(0, 3), max_size=2).map(tuple))
    if kind == "scalar" or not rest:
        given = [draw(arrays(st.just(dtype), st.just(()))) for _ in range(count)]
        expected = np.stack(given)
        return [array[()] for array in given] if kind == "scalar" else given, expected
    shapes = st.integers(0, 3).map(lambda rows: (rows, *rest[1:])) if tiled else st.just(rest)
    given = []
    while len(given) < count:
        array = draw(arrays(st.just(dtype), shapes))
        array = array if array.shape[1:] == rest[1:] else array.T  # it may come transposed
        if array.shape[1:] == rest[1:] and (tiled or array.shape == rest):
            given.append(array)
    return given, np.concatenate(given) if tiled else np.stack(given)


@given(st.integers(1, 4), st.booleans(), st.data())
def test_against_numpy(count, tiled, data):
    found = data.draw(st.lists(columns(count, tiled), max_size=4))
    trees = [{"leaves": [given[p] for given, _ in found], "nothing": ()} for p in range(count)]
    to = data.draw(st.none() | st.integers(0, count - 1))
    expected = bits_of({"leaves": [becomes for _, becomes in found], "nothing": ()})
    for process, result in enumerate(in_job(trees, tiled, to=to)):
        if to in (None, process):
            assert bits_of(result) == expected
        else:
            assert result is None


def test_zero_dims_stack_also_when_tiled_at_one_process_as_at_many():
    for tiled in (False, True):
        for count in (1, 2):
            for leaf in (np.zeros(()), jnp.zeros(()), 0.0, np.float64(0), 0, False):
                for result in in_job([leaf] * count, tiled):
                    assert result.shape == (count,)
            (key, *_) = in_job([jax.random.key(1)] * count, tiled)
            assert key.shape == (count,)


def test_integers_beyond_64_bits_are_gathered_as_a_list():
    assert in_job([1, 1 << 63])[0] == [1, 1 << 63]
    assert in_job([-(1 << 63), (1 << 63) - 1])[0].dtype == np.int64
    (alone,) = in_job([1 << 63])
    assert alone == [1 << 63]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("rows", [(1, 1, 1), (1 << 17,) * 3, (0, 1, 1 << 18)])
@pytest.mark.parametrize("to", [None, 1])
def test_small_and_large_together(tiled, rows, to):
    if not tiled:
        rows = (rows[2],) * 3
    trees = [
        {"x": np.full((count, 3), p, "f8"), "y": "y" * count, "z": [p, 0.5]}
        for p, count in enumerate(rows)
    ]
    for process, result in enumerate(in_job(trees, tiled, to=to)):
        if to not in (None, process):
            assert result is None
            continue
        join = np.concatenate if tiled else np.stack
        assert (result["x"] == join([tree["x"] for tree in trees])).all()
        assert result["y"] == [tree["y"] for tree in trees]
        assert result["z"][0].tolist() == [0, 1, 2]
        for other in trees:
            assert not np.shares_memory(result["x"], other["x"])
        result["x"][:] = -1


@pytest.mark.parametrize(
    ("one", "other", "tiled"),
    [
        (np.zeros(2), np.zeros(3), False),
        (np.zeros((2, 3)), np.zeros((2, 4)), True),
        (np.zeros(2, "f4"), np.zeros(2, "i4"), True),
        ([1], (1,), False),
        (1, 1.0, False),
        (1.0, np.zeros(()), False),
        ("a", b"a", False),
        (None, 0, False),
        (np.zeros(1), np.zeros(()), True),
    ],
)
def test_different_trees_are_an_error_on_every_process(one, other, tiled):
    results = in_job([one, other, one], tiled)
    assert [type(result) for result in results] == [DivergenceError] * 3


def test_different_options_are_an_error_on_every_process():
    def go(client):
        option = [{"tiled": True}, {"to": 0}, {"to": 1}][client.process]
        return allgather.on(client, np.zeros(2), timeout_s=PATIENCE_S, **option)

    assert [type(result) for result in run_all(LocalJob(3), go)] == [DivergenceError] * 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tiled": 1}, UsageTypeError),
        ({"to": True}, UsageTypeError),
        ({"to": 1}, UsageError),
        ({"name": ""}, UsageError),
        ({"timeout_s": -1}, UsageError),
    ],
)
def test_wrong_arguments_are_refused(options, error):
    with pytest.raises(error):
        allgather(1, **options)


def test_abstract_shapes_are_refused_all_at_once():
    with pytest.raises(UsageError, match=r"allgather: 2 problems\n.*'a'.*stands for an array"):
        allgather({"a": jax.ShapeDtypeStruct((), "f4"), "b": jax.ShapeDtypeStruct((2,), "i4")})


@pytest.mark.parametrize("spec", [("x", "y"), (None, "x"), ("y",), (), (("x", "y"),)])
def test_the_shards_of_an_array_in_parts(spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placement = jax.NamedSharding(mesh, jax.P(*spec))
    keys = jax.random.split(jax.random.key(0), (8, 4))
    for value in (np.arange(32, dtype="c8").reshape(8, 4), np.zeros((0, 8), "u1"), keys):
        placed = jax.device_put(value, placement)
        (leaf,) = wire.spec_of(placed).leaves
        column = Parts(leaf)
        numbers, buffers = column.packed(placed)
        length = column.read(iter(numbers))
        sent = np.frombuffer(b"".join(buffers), np.uint8)
        assert len(sent) == leaf.num_bytes() == column.num_bytes(length)  # each region once
        column.check([length])
        (places,) = column.places([length])
        fill(places, sent)
        assert bits_of(column.result()) == bits_of(value)
        if np.size(value):
            with pytest.raises(ShoalError, match="no process gave"):
                column.check([length[1:], []])


def fill(places, sent):
    for place in places:
        place[:], sent = sent[: place.size], sent[place.size :]


def test_long_runs_go_into_the_result_at_once():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    value = np.arange(1 << 20, dtype="f4").reshape(16, 8, 1 << 13)
    short = value.reshape(1 << 13, 128)
    for array, spec, runs in (
        (value, ("x",), 4),
        (value, ("x", "y"), 2 * 16),
        (value, ("y", None, "x"), 4 * 16 * 8),  # of 8 KiB
        (value, (None, "x"), 4 * 16),
        (short, (None, "x"), 4),
    ):
        placed = jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))
        (leaf,) = wire.spec_of(placed).leaves
        column = Parts(leaf)
        numbers, buffers = column.packed(placed)
        (places,) = column.places([column.read(iter(numbers))])
        assert len(places) == runs
        assert np.shares_memory(places[0], column._words) == (array is value)
        fill(places, np.frombuffer(b"".join(buffers), np.uint8))
        assert column.result().tobytes() == value.tobytes()


def test_an_array_over_devices_of_this_process_is_its_value():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(np.arange(8), jax.NamedSharding(mesh, jax.P("x")))
    (leaf,) = wire.spec_of(placed).leaves
    line = column_of(leaf, placed, tiled=True).leaf.line
    assert shown_line(line) == "the value: int32[*]"
    assert allgather(placed).shape == (1, 8)
    assert allgather(placed, tiled=True).shape == (8,)


def test_nothing_is_compiled_under_any_mesh_or_guard():
    tree = {"key": jax.random.key(0), "x": np.arange(5), "y": jnp.arange(5), "z": "text"}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    told = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: told.append(name))
    try:
        jax.jit(lambda x: x + 5)(np.zeros(len(told) + 7))
        assert any("compile" in name for name in told)  # it would be seen
        with jax.set_mesh(mesh), jax.transfer_guard("disallow_explicit"):
            del told[:]
            results = in_job([tree, tree], tiled=True)
            events = list(told)
    finally:
        jax.monitoring.clear_event_listeners()
    assert [result["y"].tolist() for result in results] == [[0, 1, 2, 3, 4] * 2] * 2
    assert results[0]["key"].shape == (2,)
    assert not [name for name in events if "compile" in name]
