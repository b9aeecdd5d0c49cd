"""Nothing that DTensor's names take changes in silence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.compat import dtensor
from shoal.compat.dtensor.numbers import array_from
from shoal.errors import UsageError


@pytest.fixture(scope="module")
def layout():
    mesh = dtensor.create_mesh([("x", 4), ("y", 2)], devices=[f"CPU:{n}" for n in range(8)])
    return dtensor.Layout(["x"], mesh)


@pytest.mark.parametrize("value", [[2**40] * 8, [1e300] * 8])
def test_numbers_that_do_not_fit_are_refused(layout, value):
    for take in (
        lambda: dtensor.copy_to_mesh(value, layout),
        lambda: dtensor.DVariable(value, layout=layout),
        lambda: dtensor.pack([value] * 8, layout),
    ):
        with pytest.raises(UsageError):
            take()


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        ([1.7], "int32", "float64 is not int32"),
        ([300], "int8", "300 does not fit int8"),
        ([-1], "uint8", "-1 does not fit uint8"),
        ([1e39], "float32", "1e[+]39 does not fit"),
        ([1j], "float32", "is not float32"),
    ],
)
def test_numbers_that_do_not_fit_a_dtype_are_refused(value, dtype, words):
    with pytest.raises(UsageError, match=words):
        array_from("relayout", value, dtype)


def test_what_fits_comes_through():
    assert array_from("relayout", [0.1, np.inf, np.nan]).dtype == np.float32
    assert array_from("relayout", [1, 2], "float32").tolist() == [1, 2]
    assert array_from("relayout", [True, 3], "bfloat16").dtype == jnp.bfloat16
    assert array_from("relayout", -128, "int8") == -128


def test_a_variable_keeps_its_kind_of_numbers(layout):
    whole = dtensor.DVariable([1] * 8, layout=layout)
    for change in (
        lambda: whole.assign([1.7] * 8),
        lambda: whole.assign_add(np.full(8, 0.9)),
        lambda: whole.assign_sub(0.5),
        lambda: dtensor.DVariable([1.5] * 8, dtype=np.int32, layout=layout),
    ):
        with pytest.raises(UsageError, match="is not int32"):
            change()
    small = dtensor.DVariable(np.ones(8, np.int8), layout=layout)
    with pytest.raises(UsageError, match="300 does not fit int8"):
        small.assign_add(np.full(8, 300))
    whole.assign_add(2).assign_sub([1] * 8)
    assert whole.numpy().tolist() == [2] * 8


def test_what_is_added_has_the_variables_shape(layout):
    mesh = layout.mesh
    table = dtensor.DVariable(np.ones((8, 4), np.float32), layout=dtensor.Layout(["x", "y"], mesh))
    row = dtensor.copy_to_mesh(np.ones(4, np.float32), dtensor.Layout(["y"], mesh))
    with pytest.raises(UsageError, match=r"has shape \[8, 4\], the operand \[4\]"):
        table.assign_add(row)


def test_a_variable_is_as_long_as_its_first_dim(layout):
    variable = dtensor.DVariable(np.arange(8, dtype=np.float32), layout=layout)
    assert len(variable) == 8
    assert [float(row) for row in variable] == list(range(8))
    assert 99.0 not in variable


def test_a_variable_holds_no_value_of_a_transformation(layout):
    variable = dtensor.DVariable(np.ones(8, np.float32), layout=layout)
    with pytest.raises(RuntimeError, match="must not outlive its transformation"):
        jax.vjp(lambda x: variable.assign(x).read_value(), jnp.ones(8))
    assert variable.numpy().tolist() == [1] * 8


def test_a_function_is_called_each_time(layout):
    scale = [1]

    def made():
        return jnp.ones(8) * scale[0]

    first = dtensor.call_with_layout(made, layout)
    scale[0] = 2
    second = dtensor.call_with_layout(made, layout)
    assert (np.asarray(first).tolist(), np.asarray(second).tolist()) == ([1] * 8, [2] * 8)
    signed = [dtensor.call_with_layout(jnp.full, layout, (8,), zero) for zero in (0.0, -0.0)]
    assert [bool(np.signbit(np.asarray(each)).all()) for each in signed] == [False, True]


def test_slices_of_64_bits_are_saved_whole(layout, tmp_path):
    pieces = [np.array([2**40, 1]), np.array([2, 3])]
    slices = ["4 0,2", "4 2,2"]
    dtensor.sharded_save(layout.mesh, str(tmp_path / "ckpt"), ["a", "a"], slices, pieces)
    from shoal.compat.dtensor.saving import part_of, whole_of

    whole = whole_of("a", [part_of(text, (2,)) for text in slices], pieces)
    assert (whole.dtype, whole.tolist()) == (np.int64, [2**40, 1, 2, 3])
