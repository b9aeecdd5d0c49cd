"""`broadcast`: what the source gave, bit for bit, on every process; or an error on every one."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from collectives.thread_jobs import PATIENCE_S, run_all
from collectives.trees import bits_of, trees
from shoal.collectives.broadcast import broadcast
from shoal.errors import DivergenceError, PeerFailedError, UsageError, UsageTypeError
from shoal.runtime.client.in_process import LocalJob

LARGE = 3 << 20  # bytes, of which a part lies in a second chunk


def in_job(num_processes, tree_of, sources=(0,) * 8, **options):
    def go(client):
        process = client.process
        return broadcast.on(
            client, tree_of(process), sources[process], timeout_s=PATIENCE_S, **options
        )

    return run_all(LocalJob(num_processes), go)


def abstract(tree):
    """The tree with shapes for arrays, and other values for the rest."""

    def other(leaf):
        if isinstance(leaf, np.ndarray | jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if leaf is None or isinstance(leaf, np.generic):
            return leaf
        return type(leaf)()

    return jax.tree.map(other, tree, is_leaf=lambda value: value is None)


@given(trees(), st.integers(1, 4), st.data())
def test_every_process_gets_the_bits_of_the_source(tree, num_processes, data):
    source = data.draw(st.integers(0, num_processes - 1))
    others = abstract(tree)

    def tree_of(process):
        return tree if process == source else others

    for result in in_job(num_processes, tree_of, (source,) * 4):
        assert bits_of(result) == bits_of(tree)
        assert jax.tree.structure(result) == jax.tree.structure(tree)


@pytest.mark.parametrize("num_processes", [1, 3])
@pytest.mark.parametrize("rows", [1, LARGE // 8])
def test_results_are_new_memory(num_processes, rows):
    given = {"a": np.arange(rows, dtype="f8"), "b": jnp.ones(3), "c": "x" * rows}
    results = in_job(num_processes, lambda _: given)
    for result in results:
        assert bits_of(result) == bits_of({**given, "b": np.ones(3, "f4")})
        assert type(result["b"]) is np.ndarray
        for other in [given, *(other for other in results if other is not result)]:
            assert not np.shares_memory(result["a"], other["a"])
        result["a"][:] = -1
        result["b"][:] = -1
    assert given["a"][-1] == rows - 1


def test_values_of_all_sizes_around_what_travels_inline():
    for num_bytes in (0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 256 << 10, LARGE):
        value = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, "u1").tobytes()
        for result in in_job(2, lambda p, v=value: [v, p], (1, 1)):
            assert result == [value, 1]


def test_a_replica_of_each_device_count_is_read():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    value = np.arange(16.0, dtype="f4")
    for spec in (jax.P(), jax.P("x")):
        placed = jax.device_put(value, jax.NamedSharding(mesh, spec))
        for result in in_job(2, lambda _, a=placed: a):
            assert result.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2), np.zeros(3)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2, "f4"), np.zeros(2, "f8")),
        (np.zeros(2, "f4"), np.zeros(2, "i4")),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"b": 1}),
        (1, 1.0),
        (1, True),
        ("1", b"1"),
        (np.float32(1), np.zeros((), "f4")),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        ([np.zeros(2)] * 300, [np.zeros(2)] * 299 + [np.zeros(3)]),
    ],
)
def test_different_trees_are_an_error_on_every_process(one, other):
    for source in (0, 1):
        results = in_job(3, lambda p: one if p != 1 else other, (source,) * 3)
        assert [type(result) for result in results] == [DivergenceError] * 3


def of_source(process, source, tree):
    return tree if process == source else None


@given(trees(), st.integers(1, 4), st.data())
def test_none_on_receivers_takes_the_tree_of_the_source(tree, num_processes, data):
    """On some of the others; the rest give a tree."""
    source = data.draw(st.integers(0, num_processes - 1))
    receiving = data.draw(st.sets(st.integers(0, num_processes - 1))) - {source}
    others = abstract(tree)

    def tree_of(process):
        return None if process in receiving else tree if process == source else others

    for result in in_job(num_processes, tree_of, (source,) * 4):
        assert bits_of(result) == bits_of(tree)
        assert jax.tree.structure(result) == jax.tree.structure(tree)


@pytest.mark.parametrize("size", [3, LARGE])
def test_none_among_a_group_and_where_only_the_source_knows(size):
    tree = {"a": jnp.arange(size), "key": jax.random.key(5), "text": ("é" * size, b"", [])}

    def go(client):
        if client.process == 0:
            return "not in the group"
        is_mine = client.process == 2
        options = {"processes": [1, 2, 3], "timeout_s": PATIENCE_S}
        mine = tree if is_mine else None
        first = broadcast.on(client, mine, source=2, **options)
        second = broadcast.on(client, mine, is_source=is_mine, name="again", **options)
        assert bits_of(first) == bits_of(second)
        return first

    wanted = bits_of({**tree, "a": np.arange(size, dtype="i4")})
    outside, *inside = run_all(LocalJob(4), go)
    assert outside == "not in the group"
    assert [bits_of(result) for result in inside] == [wanted] * 3


def test_none_on_all_is_none():
    assert in_job(3, lambda _: None, (1, 1, 1)) == [None] * 3


def test_none_on_the_source_is_a_value():
    results = in_job(2, lambda p: of_source(p, 1, 5))
    assert [type(result) for result in results] == [DivergenceError] * 2


def test_none_does_not_hide_trees_that_differ():
    trees = {0: {"w": np.zeros(2)}, 1: None, 2: {"w": np.zeros(3)}}
    for result in in_job(3, lambda p: trees[p]):
        assert isinstance(result, DivergenceError)
        assert result.sides.keys() == {"['w']: float64[2]", "['w']: float64[3]"}
        assert result.sides["['w']: float64[3]"] == (2,)
        assert str(result).endswith(
            "Receivers can pass None: broadcast(x if process_index() == 0 else None)."
        )


class Pair(NamedTuple):
    first: object


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"a": [Pair(1)]}, "['a'][0]: is a Pair"),
        (collections.OrderedDict(a=1), "the value: is an OrderedDict"),
        ({"a": {(1, 2): 3}}, "['a'][(1, 2)]: the key is a tuple"),
    ],
)
def test_none_is_refused_for_a_tree_with_classes(tree, problem):
    source, *others = in_job(3, lambda p: of_source(p, 0, tree))
    assert type(source) is UsageError
    assert problem in str(source)
    assert "processes 1-2 gave None" in str(source)
    assert [type(other) for other in others] == [PeerFailedError] * 2
    assert "gave None" in str(others[0])


def test_two_sources_are_an_error_on_every_process():
    results = in_job(2, lambda p: p, (0, 1))
    assert [type(result) for result in results] == [DivergenceError] * 2
    assert "source=0" in str(results[0])
    assert "source=1" in str(results[0])


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.sampled_from([1, LARGE]))
@example([False, True, False], 1)
@example([True, False], LARGE)
def test_the_source_need_not_be_known_to_the_others(flags, size):
    def go(client):
        process = client.process
        tree = {"a": np.full(size, process, np.uint8), "b": str(process)}
        return broadcast.on(client, tree, is_source=flags[process], timeout_s=PATIENCE_S)

    sources = tuple(process for process, flag in enumerate(flags) if flag)
    others = tuple(process for process, flag in enumerate(flags) if not flag)
    for result in run_all(LocalJob(len(flags)), go):
        if len(sources) == 1:
            assert result["b"] == str(sources[0])
            assert (result["a"] == sources[0]).all()
            continue
        assert isinstance(result, DivergenceError)
        sides = {"is_source=True": sources, "is_source=False": others}
        assert result.sides == {words: held for words, held in sides.items() if held}
        assert ("several processes are" if sources else "no process is") in str(result)


def test_after_wrong_sources_the_next_call_is_one_call_again():
    def go(client):
        with pytest.raises(DivergenceError, match=r"processes 0-1: is_source=True"):
            broadcast.on(client, 1, is_source=True, timeout_s=PATIENCE_S)
        mine = client.process == 1
        return broadcast.on(client, client.process, is_source=mine, timeout_s=PATIENCE_S)

    assert run_all(LocalJob(2), go) == [1, 1]


def test_is_source_is_given_on_all_and_is_true_or_false():
    with pytest.raises(UsageTypeError, match="is_source=1 must be True or False"):
        broadcast(1, is_source=1)
    assert broadcast(1, is_source=True) == 1

    def go(client):
        flag = None if client.process else True
        return broadcast.on(client, 1, is_source=flag, timeout_s=PATIENCE_S)

    assert [type(result) for result in run_all(LocalJob(2), go)] == [DivergenceError] * 2


def test_two_places_are_an_error_unless_a_name_says_that_they_are_one():
    def go(name):
        def at(client):
            options = {"name": name, "timeout_s": PATIENCE_S}
            if client.process:
                return broadcast.on(client, 1, **options)
            return broadcast.on(client, 2, **options)

        return run_all(LocalJob(2), at)

    assert [type(result) for result in go(None)] == [DivergenceError] * 2
    assert go("seed") == [2, 2]


def test_the_source_must_be_a_process():
    for wrong, error in ((2, UsageError), (-1, UsageError), (True, UsageTypeError)):
        with pytest.raises(error, match=f"broadcast: source={wrong}"):
            broadcast.on(LocalJob(2).clients[0], 1, wrong)
    for wrong in (1.0, "0", None):
        with pytest.raises(UsageTypeError, match="must be the index of a process"):
            broadcast(1, wrong)
    assert broadcast(1, np.int8(0)) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, UsageError),
        ({"name": 3}, UsageTypeError),
        ({"lane": ""}, UsageError),
        ({"timeout_s": 0}, UsageError),
        ({"timeout_s": "1"}, UsageTypeError),
    ],
)
def test_wrong_arguments_are_refused(options, error):
    with pytest.raises(error):
        broadcast(1, **options)


def test_unsupported_value_raises_on_its_process_before_anything_is_sent():
    def go(client):
        tree = object() if client.process else 1
        try:
            return broadcast.on(client, tree, timeout_s=PATIENCE_S)
        except UsageError:
            client.report("failed", "a traceback")
            raise

    results = run_all(LocalJob(2), go)
    assert [type(result) for result in results] == [PeerFailedError, UsageTypeError]


def test_nothing_is_compiled_under_any_mesh_or_guard():
    key = jax.random.split(jax.random.key(7, impl="rbg"), 3)
    tree = {"key": key, "x": np.arange(5), "y": jnp.arange(5), "z": "text"}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    told = []
    broadcast(tree)  # JAX traces its own functions of keys once
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: told.append(name))
    try:
        jax.jit(lambda x: x + key.size)(np.zeros(len(told) + 3))
        assert any("compile" in name for name in told)  # it would be seen
        with jax.set_mesh(mesh), jax.transfer_guard("disallow_explicit"):
            del told[:]
            results = in_job(2, lambda _: tree)
            alone = broadcast(tree)
            events = list(told)
    finally:
        jax.monitoring.clear_event_listeners()
    assert [bits_of(result) for result in results] == [bits_of(alone)] * 2
    assert bits_of(alone["key"]) == bits_of(key)
    assert not [name for name in events if "compile" in name]
