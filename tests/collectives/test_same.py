"""`assert_same`: equal bits are equal, and a difference is found, shown and told to all."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.thread_jobs import PATIENCE_S, run_all
from collectives.trees import bits_of, trees
from shoal.collectives.hashes import FlatItems, digest_of
from shoal.collectives.leaves import leaf_of
from shoal.collectives.same import SharedPart, _judge, _Shared, assert_same
from shoal.collectives.versions import groups_of, version_rows
from shoal.errors import DeadlineError, DivergenceError, UsageError, UsageTypeError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.failures.comparison import ShownSide

ASSERT_SAME = "return run_all(job, lambda c: assert_same.on(c, trees[c.process], **more))"


def compare(*trees, **options):
    """Let each process compare its tree; return what each got or raised."""
    job = LocalJob(len(trees), hosts=[f"h{i}" for i in range(len(trees))])
    more = {"timeout_s": PATIENCE_S, **options}
    return run_all(job, lambda c: assert_same.on(c, trees[c.process], **more))


def told(*trees, **options):
    """Compare trees that differ; check that all are told the same; return it without who tells."""
    errors = compare(*trees, **options)
    bodies = set()
    for process, error in enumerate(errors):
        assert type(error) is DivergenceError, error
        assert error.sides == errors[0].sides
        me = f"process {process} of {len(errors)} (h{process}): assert_same"
        assert str(error).startswith(me)
        bodies.add(str(error).removeprefix(me))
    (body,) = bodies
    first, call, *rows, advice = body.splitlines()
    assert first.endswith(" found different values")
    assert "test_same.py:" in call
    assert call.endswith("   return run_all(job, lambda c: assert_same.on(c,…")
    assert advice == "It is the first leaf that differs; later ones were not compared."
    return [row.strip() for row in rows]


def test_alone():
    assert assert_same({"a": np.ones(3), "b": [None, "x", jax.random.key(0)]}) is None
    assert compare({"a": jnp.ones(3)}) == [None]


@given(trees(), st.integers(2, 3))
def test_equal_bits_are_equal(tree, num_processes):
    copies = [jax.tree.map(copied, tree) for _ in range(num_processes)]
    assert compare(*copies) == [None] * num_processes


def copied(leaf):
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@given(trees(), trees(), st.data())
def test_assert_same_passes_exactly_if_all_bits_are_equal(tree, other, data):
    if data.draw(st.booleans()):  # the same tree with one leaf changed, as far as it can be
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda value: value is None)
        if leaves:
            at = data.draw(st.integers(0, len(leaves) - 1))
            leaves[at] = changed(leaves[at])
        other = jax.tree.unflatten(treedef, leaves)
    is_equal = bits_of(tree) == bits_of(other) and jax.tree.structure(tree) == jax.tree.structure(
        other
    )
    results = compare(tree, other)
    if is_equal:
        assert results == [None, None]
    else:
        assert [type(result) for result in results] == [DivergenceError] * 2
        assert list(results[0].sides.values()) == [(0,), (1,)]


def changed(leaf):
    if isinstance(leaf, np.ndarray) and leaf.size and leaf.dtype != bool:
        leaf = leaf.copy()
        leaf.reshape(-1).view(np.uint8)[-1] ^= 1
    elif isinstance(leaf, str):
        return leaf + "x"
    elif isinstance(leaf, bytes):
        return b"x" + leaf
    elif isinstance(leaf, int) and not isinstance(leaf, bool):
        return leaf ^ (1 << 70)
    return leaf


def test_the_leaf_the_item_the_values_and_the_groups_are_shown():
    def tree(value, last=0.0):
        w = np.zeros((4, 8), np.float32)
        w[2, 3], w[3, 7] = value, last
        return {"params": {"b": np.zeros(3), "w": w}}

    assert told(tree(0.5), tree(0.25), tree(0.5), tree(0.125), tree(0.5, 1)) == [
        "first difference, in ['params']['w']: float32[4,8]:",
        "process 1: ['params']['w'][2, 3] = 0.25",
        "process 3: ['params']['w'][2, 3] = 0.125",
        "process 4: ['params']['w'][2, 3] = 0.5",
        "processes 0, 2: ['params']['w'][2, 3] = 0.5 (differs later)",
    ]
    assert told(tree(0.5), tree(0.25), name="start")[1:] == [
        "process 0: ['params']['w'][2, 3] = 0.5",
        "process 1: ['params']['w'][2, 3] = 0.25",
    ]


def nan(bits):
    return np.array([bits], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (nan(0x7FC00000), nan(0x7FC00001), ["[0] = nan (0x7fc00000)", "[0] = nan (0x7fc00001)"]),
        (np.float32([0.0]), np.float32([-0.0]), ["[0] = 0.0", "[0] = -0.0"]),
        (0.0, -0.0, ["the value = 0.0", "the value = -0.0"]),
        (np.int8(3), np.int8(4), ["the value = 3", "the value = 4"]),
        (np.array(3), np.array(4), ["the value = 3", "the value = 4"]),
        (1 << 300, 1 << 300 | 1, None),
        (7, 8, ["the value = 7", "the value = 8"]),
        (True, False, ["the value = True", "the value = False"]),
        ("abc", "abd", ["the value at character 2 = 'abc'", "the value at character 2 = 'abd'"]),
        ("\ud800", "\ud801", None),
        (b"ab", b"abc", ["the value at byte 2 = b'ab'", "the value at byte 2 = b'abc'"]),
        (
            np.array([1, 2], ml_dtypes.int4),
            np.array([1, -3], ml_dtypes.int4),
            ["[1] = 2", "[1] = -3"],
        ),
        (
            np.array([1, 2], ml_dtypes.float8_e4m3fn),
            np.array([1, 3], ml_dtypes.float8_e4m3fn),
            ["[1] = 2", "[1] = 3"],
        ),
        (np.array([1, 2], ">i4"), np.array([1, 3], "<i4"), ["[1] = 2", "[1] = 3"]),
        (np.arange(4.0)[::2], np.array([0.0, 3.0]), ["[1] = 2.0", "[1] = 3.0"]),
        (jnp.arange(3), jnp.array([0, 1, 5]), ["[2] = 2", "[2] = 5"]),
        (jax.random.key(3), jax.random.key(4), ["[1] = 3", "[1] = 4"]),
    ],
)
def test_each_kind_of_leaf_shows_what_differs(one, other, shown):
    _, *rows = told(one, other)
    if shown is None:
        assert len(set(rows)) == 2
    else:
        assert rows == [f"process {n}: {text}" for n, text in enumerate(shown)]
    assert compare(one, one, one) == [None] * 3


@pytest.mark.parametrize("shape", [(1 << 21,), (3, 1 << 19), (1 << 19, 3)])
@pytest.mark.parametrize("at", [0, 1 << 20, -1])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_first_difference_of_a_large_array_is_found(shape, at, order):
    one = np.asarray(np.arange(np.prod(shape), dtype="f4").reshape(shape), order=order)
    other = np.array(one, order="C")  # in C order: how it lies does not count
    assert compare(one, other) == [None, None]
    where = np.unravel_index(at % one.size, shape)
    other[where] = -1
    other.reshape(-1)[-1] = -2  # more differ later
    index = str([int(i) for i in where])
    shown = [row.partition(" = ")[0] for row in told(one, other)[1:]]
    assert shown == [f"process 0: {index}", f"process 1: {index}"]


def test_different_trees_shapes_and_dtypes_are_reported_as_such():
    pairs = [
        ({"a": 1}, {"b": 1}, "tree", ""),
        ({"a": np.ones(3)}, {"a": np.ones(4)}, "shape", "['a']"),
        ({"a": np.ones(3)}, {"a": np.ones(3, "f4")}, "dtype", "['a']"),
        ([1, None], [1, 2], "dtype", "[1]"),
        ((1,), [1], "tree", ""),
    ]
    for one, other, what, path in pairs:
        for error in compare(one, other):
            assert type(error) is DivergenceError
            assert f": assert_same found different {what}s" in str(error)
            assert (error.difference.what, error.difference.path) == (what, path)
            assert error.difference.sides[0].place.source == ASSERT_SAME


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        ([1] * 2, [1] * 3, ("no more leaves", "[2]: int")),
        ([1] * 900, [1] * 901, ("no more leaves", "[900]: int")),
        ({"a": 1, "b": 2}, {"a": 1}, ("['b']: int", "no more leaves")),
        ((1,), [1], ("tree: PyTreeDef((*,))", "tree: PyTreeDef([*])")),
    ],
    ids=["few leaves", "many leaves", "a key", "nodes"],
)
def test_a_leaf_that_one_side_lacks_is_shown_on_the_other(one, other, shown):
    for error in compare(one, other):
        assert ": assert_same found different trees" in str(error)
        assert [line[15:] for line in str(error).splitlines()[2:-1]] == [*shown]


def test_more_versions_than_a_message_shows_are_counted():
    lines = told(*(np.array([n // 2]) for n in range(24)))
    assert lines[1:] == [
        *(f"processes {2 * n}-{2 * n + 1}: [0] = {n}" for n in (0, 1)),
        "… 8 more groups, 16 processes",
        *(f"processes {2 * n}-{2 * n + 1}: [0] = {n}" for n in (10, 11)),
    ]


def test_the_next_call_works_after_a_difference():
    job = LocalJob(3)

    def go(client):
        for value in (1, client.process, 2):
            try:
                assert_same.on(client, value, timeout_s=PATIENCE_S)
                yield None
            except DivergenceError as error:
                yield error.sides

    expected = [None, {f"the value = {n}": (n,) for n in range(3)}, None]
    assert run_all(job, lambda c: list(go(c))) == [expected] * 3


def test_value_that_changes_during_the_comparison_raises_and_does_not_hang():
    class Restless:
        """A process whose value is put right after the digests have met."""

        def __init__(self, client, value):
            self.value, self.rounds, self._to = value, 0, client

        def __getattr__(self, name):
            return getattr(self._to, name)

        def arrive(self, point, payload=b"", *, timeout_s):
            self.rounds += 1
            if self.rounds == 4:  # the leaf is found, the item is not
                self.value[:] = 0
            return self._to.arrive(point, payload, timeout_s=timeout_s)

    def go(client):
        value = np.full((1000,), client.process)
        return assert_same.on(Restless(client, value), [value], timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(2), go):
        assert type(error) is DivergenceError
        assert "the values change while they are compared" in str(error)


def test_holders_are_known_by_jaxs_numbers_of_processes():
    """Where JAX counts the processes in another order, as on some pods."""
    leaf, whole = leaf_of("['w']", np.zeros(4)), ((0, 4),)
    call = Call("assert_same", None, "a.py:1 (f)")
    told = {p: {"process": 2 - p, "digests": ["a"] if p == 1 else [f"{p}", "a"]} for p in range(3)}

    def go(client):
        value = np.arange(4.0) * (client.process + 1)
        items = FlatItems((4,), value.dtype, [((0,), value)])
        part = SharedPart(leaf, whole, (1, 2), lambda: items)  # in JAX's numbers: our 0 and 1
        shared = [_Shared((1, 2), [part], (digest_of(items),))]

        def meet(payload):
            return agree(client, call, payload, timeout_s=PATIENCE_S)

        _judge(client, call, shared, told, meet)

    for error in run_all(LocalJob(3), go):
        assert error.sides == {"['w'][1] = 1.0": (0,), "['w'][1] = 2.0": (1,)}


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"a": object(), "b": np.array([None])}, r"2 problems(.|\n)*\['a'\](.|\n)*\['b'\]"),
        ({"a": jax.ShapeDtypeStruct((2,), "f4")}, r"\['a'\]: stands for an array"),
    ],
)
def test_assert_same_refuses_unsupported_leaves_at_once(tree, told):
    with pytest.raises(UsageError, match=told):
        assert_same.on(LocalJob(2).clients[0], tree, timeout_s=PATIENCE_S)


def test_wrong_arguments_are_refused_and_the_deadline_holds():
    first = LocalJob(2).clients[0]
    for arguments in ({"timeout_s": -1}, {"name": ""}, {"lane": ""}):
        with pytest.raises(UsageError):
            assert_same.on(first, 1, **arguments)
    for arguments in ({"timeout_s": "x"}, {"name": 3}, {"lane": None}):
        with pytest.raises(UsageTypeError):
            assert_same.on(first, 1, **arguments)
    with pytest.raises(DeadlineError):
        assert_same.on(first, 1, timeout_s=0.05)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_groups_are_those_of_brute_force(versions):
    groups = groups_of(dict(enumerate(versions)))
    assert sorted(itertools.chain(*groups)) == list(range(len(versions)))
    assert groups == sorted(groups, key=lambda group: (len(group), group))
    for one, other in itertools.product(range(len(versions)), repeat=2):
        together = any(one in group and other in group for group in groups)
        assert together == (versions[one] == versions[other])


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), st.integers(0, 3))
def test_version_rows_have_distinct_texts_and_keep_every_process(shown, more):
    groups = [[n] for n in range(len(shown) + more)]
    rows = version_rows(shown, groups, ShownSide(()))
    assert len({row.said for row in rows}) == len(rows)
    assert sorted(p for row in rows for p in row.processes) == list(range(len(groups)))
