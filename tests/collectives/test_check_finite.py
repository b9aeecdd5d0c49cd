"""`check_finite`: it finds exactly the values that NumPy finds, wherever they are."""

import math
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.device_trees import (
    CHECKS,
    SHAPE,
    SPECS,
    Shared,
    bits,
    device_dtypes,
    mesh,
    on_devices,
    placed,
    replicas,
    sharding,
)
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives import check_finite as module
from shoal.collectives import same
from shoal.collectives.check_finite import check_finite
from shoal.collectives.check_replicas import check_replicas
from shoal.collectives.same import assert_same
from shoal.errors import DivergenceError, NonFiniteError, UsageError
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.step import step

DTYPES = device_dtypes()


def not_finite(value):
    """Which items are not finite, by NumPy alone."""
    value = np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return np.zeros(value.shape, bool)
    wide = np.complex128 if value.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        return ~np.isfinite(value.astype(wide))


def found(tree, **options):
    try:
        check_finite(tree, **options)
    except NonFiniteError as error:
        return error
    return None


@pytest.fixture(params=["host", "devices"])
def where(request, monkeypatch):
    if request.param == "devices":
        on_devices(monkeypatch)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_finite_agrees_with_numpy_in_every_dtype(dtype, where):
    is_float = jnp.issubdtype(dtype, jnp.inexact)

    @settings(max_examples=5)
    @given(bits(dtype), st.sampled_from(SPECS), st.booleans(), st.booleans())
    def try_it(value, spec, is_host, is_rare):
        if is_float and is_rare:
            value = np.where(not_finite(value), np.zeros((), dtype), value)
            value[5, 1:] = np.full(3, np.nan).astype(dtype)
        with jax.enable_x64(True):
            array = value if is_host else jax.device_put(value, sharding(spec))
            error = found({"a": jnp.ones(3), "w": array})
        mask = not_finite(value)
        if not mask.any():
            assert error is None
            return
        assert error.path == "['w']"
        assert error.index == tuple(map(int, np.argwhere(mask)[0]))
        assert sum(error.counts.values()) == mask.sum()
        assert (error.device is None) == is_host

    try_it()


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.itemsize < 4], ids=str)
def test_a_mask_describes_the_values_of_narrow_floats(dtype):
    words = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    expected = not_finite(words.view(dtype)) if jnp.issubdtype(dtype, jnp.inexact) else words < 0
    assert module._has_non_finite(dtype) == expected.any()
    if expected.any():
        np.testing.assert_array_equal(module._bad(words.view(dtype)), expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (complex(0, np.nan), "nan"),
        (complex(-np.inf, 0), "-inf"), (complex(0, np.inf), "inf"), (np.float32("nan"), "nan"),
        (np.array([0, -np.inf]), "-inf"), (np.array(["x"]), ""), (True, ""), (1 << 2000, ""),
        (np.array([np.nan], ml_dtypes.bfloat16), "nan"), (1e308, ""), ("nan", ""), (None, ""),
        (np.full((2, 3), np.nan)[:, ::2], "nan"),
        (np.array([1.0, np.nan], ">f8"), "nan"), (np.datetime64("NaT", "s"), ""), (b"", ""),
        (np.zeros((0, 3)), ""), (jax.random.key(0), ""), (jnp.float32(np.inf), "inf"),
    ],
    ids=repr,
)  # fmt: skip
def test_values_of_every_kind(value, kind, where):
    error = found([value])
    assert (error is not None) == bool(kind)
    if error is not None:
        assert error.counts[kind] >= 1
        assert sum(error.counts.values()) == error.counts[kind]
        assert error.path == "[0]"


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 3 << 20])
@pytest.mark.parametrize("dtype", ["f4", "c8", "bfloat16", "float8_e4m3fn"])
def test_blocks_cover_every_item(size, dtype):
    value = np.zeros(size, dtype)
    assert found(value) is None
    for at in {0, size // 2, size - 1}:
        value[at] = np.nan
        assert found(value).index == (at,)
        value[at] = 0


def test_a_nan_at_a_random_place_is_found_200_times_of_200(where, monkeypatch):
    chance = np.random.default_rng(7)
    shared = Shared(monkeypatch, [0, 0, 1, 1, 1, 2, 3, 3])
    job = LocalJob(4)
    for number in range(200):
        leaf, spec = chance.integers(3), SPECS[chance.integers(len(SPECS))]
        values = [np.zeros(SHAPE, np.float32) for _ in range(3)]
        place = tuple(int(chance.integers(size)) for size in SHAPE)
        bad = [np.nan, np.inf, -np.inf][chance.integers(3)]
        if number % 2:  # on one device alone
            device = int(chance.integers(8))
            local = tuple(int(chance.integers(size)) for size in sharding(spec).shard_shape(SHAPE))
            index = sharding(spec).devices_indices_map(SHAPE)[jax.devices()[device]]
            place = tuple((cut.start or 0) + at for cut, at in zip(index, local, strict=True))
            change = (device, lambda piece, at=local, bad=bad: piece.__setitem__(at, bad))
        else:
            values[leaf][place], change = bad, None
        tree = [placed(value, spec) for value in values]
        tree[leaf] = replicas(values[leaf], spec, change)

        def go(client, tree=tree, number=number):
            shared.own(client.process)
            with step.on(client, number):
                check_finite.on(client, tree, timeout_s=PATIENCE_S)

        errors = run_all(job, go)
        assert len({str(error).partition("): ")[2] for error in errors}) == 1
        for error in errors:
            assert isinstance(error, NonFiniteError), error
            assert (error.path, error.index, error.step) == (f"[{leaf}]", place, number)
            assert error.value == str(bad)
            assert sum(error.counts.values()) == 1
            assert error.process == [0, 0, 1, 1, 1, 2, 3, 3][error.device]
            if change is not None:
                assert error.device == device
            else:
                index = sharding(spec).devices_indices_map(SHAPE)[jax.devices()[error.device]]
                assert all(
                    (cut.start or 0) <= at < (cut.stop or size)
                    for cut, at, size in zip(index, place, SHAPE, strict=True)
                )


def test_the_message_says_where_and_what_else():
    value = np.zeros(SHAPE, np.float32)
    value[2, 3], value[5, 0] = np.nan, -np.inf
    tree = {"b": jax.device_put(value, sharding(("a",))), "z": np.inf, "a": jnp.ones(2)}
    with step(17), pytest.raises(NonFiniteError) as caught:
        check_finite(tree, name="gradients")
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("process 0 of 1 (")
    assert ": check_finite 'gradients': ['b'][2, 3] is nan on device 2 of process 0 (" in first
    assert first.endswith("), in step 17")
    assert second == "  ['b']: float32[8,4]: 1 nan, 1 -inf in 32 values; on 2 of 2 replicas"
    assert third == "  also not finite: ['z']."
    again = pickle.loads(pickle.dumps(caught.value))
    assert vars(again) == vars(caught.value)
    assert str(again) == str(caught.value)
    assert isinstance(again, FloatingPointError)


def test_one_replica_that_is_not_finite_is_counted_and_named():
    bad = replicas(np.zeros(SHAPE, np.float32), (), (5, lambda piece: piece.fill(np.nan)))
    error = found(bad)
    assert (error.device, error.index, error.counts["nan"]) == (5, (0, 0), 32)
    assert str(error).endswith("; on 1 of 8 replicas")


def test_values_of_each_process_name_the_first_process():
    def go(client):
        value = np.array([0.0, np.nan if client.process else 0.0])
        check_finite.on(client, {"x": value}, timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(3), go):
        assert (error.process, error.device, error.counts["nan"]) == (1, None, 1)


def test_the_processes_must_make_the_same_call():
    def go(client):
        me = client.process
        check_finite.on(client, np.zeros(3 + me), name="x", timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(2), go):
        assert isinstance(error, DivergenceError)
        assert "processes gave check_finite 'x' different shapes" in str(error)


def test_many_leaves_are_not_all_named():
    error = found({f"{n:02}": math.inf for n in range(30)})
    assert str(error).splitlines()[-1].endswith("['08'] and others.")
    assert len(error.also) < 30


def test_a_shape_has_no_values():
    with pytest.raises(UsageError, match=r"\['w'\]: stands for an array, but its value is needed"):
        check_finite({"w": jax.ShapeDtypeStruct((2,), "f4")})


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.set_mesh(mesh()), lambda: jax.transfer_guard("disallow"), jax.disable_jit,
        lambda: jax.debug_nans(True), lambda: jax.debug_infs(True), lambda: jax.enable_x64(True),
    ],
)  # fmt: skip
def test_the_context_does_not_matter(context, where):
    good = placed(np.ones(SHAPE, np.float32), ("a",))
    bad = replicas(np.ones(SHAPE, np.float32), ("a",), (3, lambda piece: piece.fill(np.nan)))
    with context():
        check_finite(good)
        check_replicas(good)
        assert found(bad).device == 3
        with pytest.raises(DivergenceError):
            check_replicas(bad)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
@pytest.mark.parametrize("check", [check_finite, check_replicas])
def test_devices_cannot_check_while_a_function_is_traced(check, transform, monkeypatch):
    """Neither values of the function nor any others; NumPy can check those."""
    good = placed(np.ones(SHAPE, np.float32), ("a",))

    def traced(x, tree=None):
        check(x if tree is None else tree)
        return x.sum()

    def run(tree=None):
        return transform(lambda x: traced(x, tree))(np.ones(4, np.float32))

    with pytest.raises(UsageError, match="is a value inside jit or grad"):
        run()
    run(good)
    on_devices(monkeypatch)
    with pytest.raises(UsageError, match="while JAX traces a function"):
        run(good)


def test_good_values_send_nothing(monkeypatch):
    sent = []
    real = module.meet_callers
    monkeypatch.setattr(
        module, "meet_callers", lambda *given: sent.append(given[2]) or real(*given)
    )
    check_finite({"w": np.zeros(8), "n": 3})
    assert sent == [b""]


@pytest.mark.parametrize("check", [check_finite, check_replicas, assert_same])
@pytest.mark.parametrize("layouts", [("P('a',)", "P()"), ("P('a',)", "")])
def test_layouts_that_differ_are_named_as_such(check, layouts, monkeypatch):
    """Also where an array of several processes stands beside one of the host."""
    value = placed(np.zeros(SHAPE, np.float32), ("a",))
    shared = Shared(monkeypatch, [0] * 4 + [1] * 4)
    for checked in CHECKS:
        monkeypatch.setattr(checked, "layout_text", lambda *_: layouts[shared._here.process])
    monkeypatch.setattr(
        same, "parts_of", lambda *_: [same.Compared(layouts[shared._here.process], [], "")]
    )

    def go(client):
        shared.own(client.process)
        check.on(client, {"w": value}, name="x", timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(2), go):
        assert (error.difference.what, error.difference.path) == ("layout", "['w']")
        assert " different layouts\n" in str(error)
        assert str(error).endswith(f"{check.__name__} needs the same layouts on every process.")
        sides = {side.layout: side.shape for side in error.difference.sides}
        assert sides == dict.fromkeys(layouts, SHAPE)
