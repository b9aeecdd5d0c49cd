"""A number that was saved and an array that is wanted: an option, which the error names."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from checkpoint import hand_written
from shoal.arrays.bridge.sharding import sharding_of
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.planning.casting import as_array, is_lossless, policy_for
from shoal.errors import RestoreMismatchError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.client.in_process import LocalJob

MESH = Mesh({"x": 4, "y": 2}, kind="cpu")
TREE = {
    "step": 7,
    "rate": 0.1,
    "big": 1 << 80,
    "on": True,
    "z": 1j,
    "np": np.float32(0.5),
    "text": "a",
    "none": None,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("numbers") / "saved"
    hand_written.write(where, TREE)
    return where


def restored(path, name, like, dtype):
    return shoal.restore(path, {name: like}, only=name, dtype=dtype)[name]


def test_the_step_of_a_train_state(path):
    shape = jax.ShapeDtypeStruct((), np.int32, sharding=sharding_of(Layout(MESH)))
    told = "step: was saved as int, which is not an array; dtype='safe' makes one of it"
    for like in (np.zeros((), np.int32), jnp.zeros((), jnp.int32), shape):
        with pytest.raises(RestoreMismatchError, match=told) as caught:
            restored(path, "step", like, "exact")
        assert caught.value.wrong_dtype == ("step",)
        back = restored(path, "step", like, "safe")
        assert type(back) is (np.ndarray if type(like) is np.ndarray else type(jnp.zeros(())))
        assert (back.dtype, back.shape, int(back)) == (np.dtype(np.int32), (), 7)
    assert back.sharding == sharding_of(Layout(MESH))
    plan = shoal.plan_restore(path, {"step": shape}, only="step", dtype="safe")
    assert plan.read_bytes == 0


@pytest.mark.parametrize(
    ("name", "dtype", "policy"),
    [
        ("step", np.int8, "safe"),
        ("step", np.float32, "safe"),
        ("step", ml_dtypes.bfloat16, "safe"),
        ("on", np.bool_, "safe"),
        ("on", np.int32, "safe"),
        ("rate", np.float64, "safe"),
        ("rate", np.float32, "any"),
        ("rate", np.int32, "any"),
        ("big", np.float64, "safe"),
        ("big", np.int64, ""),
        ("np", np.float32, "safe"),
        ("np", np.float64, "safe"),
        ("np", np.float16, "any"),
        ("z", np.complex128, "safe"),
        ("z", np.complex64, "any"),
        ("step", "S3", ""),
        ("step", object, ""),
        ("text", np.float32, ""),
        ("none", np.float32, ""),
    ],
)
def test_as_casts_of_arrays(path, name, dtype, policy):
    like: Any = np.zeros((), dtype)
    policies = ["exact", "safe", "any"]
    for one in policies:
        if policy and policies.index(one) >= policies.index(policy):
            back = restored(path, name, like, one)
            assert (back.dtype, back.shape) == (like.dtype, ())
            assert back == np.asarray(TREE[name]).astype(dtype)
            continue
        with pytest.raises(RestoreMismatchError, match=f"{name}: was saved as ") as caught:
            restored(path, name, like, one)
        assert (f"dtype={policy!r}" in str(caught.value)) == bool(policy)


def test_a_number_has_no_dims(path):
    with pytest.raises(
        RestoreMismatchError, match=r"step: was saved as int, of shape \(\), not \(1,\)"
    ):
        restored(path, "step", np.zeros(1, np.int32), "safe")


def test_keys_are_not_made_of_numbers(path):
    with pytest.raises(RestoreMismatchError, match="step: was saved as int, which is not an array"):
        restored(path, "step", jax.random.key(0), "any")


def test_resume_a_train_state(tmp_path):
    one = LocalJob(1).clients[0]
    target = {"step": jax.ShapeDtypeStruct((), np.int32), "w": np.zeros(3)}
    with Checkpoints(tmp_path, client=one) as ckpts:
        with pytest.raises(RestoreMismatchError, match="dtype='safe' makes one of it"):
            ckpts.resume(target, {"step": 0, "w": np.ones(3)})
        state, first = ckpts.resume(target, {"step": 0, "w": np.ones(3)}, dtype="safe")
        ckpts.save(first, state)
        ckpts.wait()
        state, _ = ckpts.resume(target, None, dtype="safe")
    assert state["step"].dtype == np.int32


DTYPES = ["bool", "int4", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16"]
DTYPES += ["bfloat16", "float32", "float64", "float8_e4m3fn", "complex64", "complex128"]
INTS = st.integers(-300, 300) | st.integers(-(1 << 70), 1 << 70) | st.sampled_from([10**400])


@given(INTS, st.sampled_from(DTYPES))
def test_policy_for_an_int_matches_whether_the_dtype_can_represent_it(value, name):
    """Against the number that the array holds, as Python has it."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    policy = policy_for(value, dtype)
    if not policy:
        assert abs(value) > 1e308 or not ml_dtypes.iinfo(dtype).min <= value <= _most(dtype)
        return
    with np.errstate(over="ignore"):  # as of arrays, NumPy warns
        array = as_array(value, dtype)
    assert (array.dtype, array.shape) == (dtype, ())
    if name == "bool":
        assert (policy, bool(array)) == ("any", bool(value))
        return
    back = complex(array.astype(np.complex128)).real if dtype.kind not in "iu" else int(array)
    assert (policy == "safe") == (math.isfinite(back) and int(back) == value)


def _most(dtype):
    return ml_dtypes.iinfo(dtype).max


@given(st.booleans() | st.floats() | st.complex_numbers(), st.sampled_from(DTYPES))
def test_other_numbers_are_cast_as_arrays_of_them_are(value, name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    is_safe = is_lossless(np.asarray(value).dtype, dtype)
    assert policy_for(value, dtype) == ("safe" if is_safe else "any")
    if is_safe:
        assert as_array(value, dtype).tobytes() == np.asarray(value).astype(dtype).tobytes()
