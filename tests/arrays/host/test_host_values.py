"""Host values in the dtypes of devices, against what NumPy and `jnp.asarray` make of each value."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import ModuleType

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shoal
from shoal import Layout, Mesh
from shoal.arrays.host.host_values import as_array, device_form, unfit
from shoal.errors import DtypeWarning, UsageError, UsageTypeError
from shoal.runtime.process import has_strict_dtypes

MESH = Mesh({"x": 8})
WIDE = ["i8", "u8", "f8", "c16"]


def fits(number, dtype):
    """Whether a value survives, by converting it alone."""
    if isinstance(number, np.complexfloating):
        return fits(number.real, np.dtype("f4")) and fits(number.imag, np.dtype("f4"))
    if dtype.kind in "iu":
        return np.iinfo(dtype).min <= int(number) <= np.iinfo(dtype).max
    with np.errstate(over="ignore"):
        return not np.isfinite(number) or bool(np.isfinite(np.float32(number)))


@st.composite
def wide_arrays(draw):
    order, kind = draw(st.sampled_from("<>")), draw(st.sampled_from(WIDE))
    array = draw(hnp.arrays(order + kind, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0)))
    return array[::-1] if array.ndim and draw(st.booleans()) else array


@given(wide_arrays())
@example(np.array([np.inf, 1e39, np.nan]))
@example(np.array([-np.inf, 1.0]))
@example(np.array([3.4028235677973366e38]))  # rounds to infinity; the number below does not
@example(np.array([3.4028235677973362e38, -1e-300]))
@example(np.array([complex(np.nan, -1e39)]))
@example(np.array(2**31 - 1))
def test_a_value_fits_if_each_of_its_numbers_does(array):
    kept = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")))
    odd = [number for number in array.ravel() if not fits(number, kept)]
    assert bool(unfit(array)) == bool(odd)
    if not odd:
        expected = np.asarray(jnp.asarray(array.astype(array.dtype.newbyteorder("="))))
        for made in (device_form(array), np.asarray(as_array(array))):
            assert made.dtype == expected.dtype
            np.testing.assert_array_equal(made, expected)


def test_64_bit_values_stay_where_they_are_on():
    with jax.enable_x64(True):
        assert unfit(np.array([1e300])) == ""
        assert as_array(np.array([2**40])).dtype == np.int64


@pytest.mark.parametrize("value", [np.float64(0.1), np.full(8, 0.1), np.full(8, 0.1j)])
def test_rounded_floats_warn_at_the_line_of_the_program(value):
    with pytest.warns(DtypeWarning, match=r"put: \['w'\]: \w+ becomes \w+ on devices") as said:
        shoal.put({"w": value, "n": 3}, lambda path, leaf: Layout.replicated(MESH, np.ndim(leaf)))
    assert said[0].filename == __file__


def test_rounding_warns_once_for_each_line_and_can_be_an_error():
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        for _ in range(3):
            shoal.put(np.ones(8), Layout(MESH, "x"))
        shoal.put(np.ones(8), Layout(MESH, "x"))
    assert len(said) == 2
    with pytest.raises(DtypeWarning):  # as the suite has it
        shoal.put(np.ones(8), Layout(MESH, "x"))


def test_a_mapped_file_is_checked_where_it_is_cut(tmp_path):
    values = np.arange(16.0)
    values[3] = 1e39
    np.save(tmp_path / "rows.npy", values)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    with pytest.warns(DtypeWarning), pytest.raises(UsageError, match=r"file holds 1e\+39, which"):
        shoal.put(mapped, Layout(MESH, "x"))
    with pytest.warns(DtypeWarning):
        assert shoal.put(mapped[4:12], Layout(MESH, "x")).dtype == np.float32


def test_host_values_that_reach_no_device_keep_their_dtype(tmp_path):
    value = {"f": np.float64([0.1]), "i": np.int64(2**40), "c": np.complex128(1e300)}
    shoal.save(tmp_path / "c", value)
    for values in (shoal.broadcast(value), shoal.restore(tmp_path / "c")):
        assert {name: (v.dtype, v.tobytes()) for name, v in values.items()} == {
            name: (v.dtype, v.tobytes()) for name, v in value.items()
        }


PROGRAM = """
import numpy as np, shoal
shoal.initialize(virtual_devices=2, strict_dtypes={strict})
try:
    print(shoal.put(np.arange(2), shoal.Layout(shoal.make_mesh({{"x": -1}}), "x")).dtype)
except shoal.UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "strict", "said"),
    [("", "None", "int32"), ("1", "None", "int64 would become"), ("1", "False", "int32"),
     ("0", "True", "int64 would become")],
)  # fmt: skip
def test_programs_choose_to_be_strict(child_env, variable, strict, said):
    program = [sys.executable, "-c", PROGRAM.format(strict=strict)]
    env = child_env | {"SHOAL_STRICT_DTYPES": variable}
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    assert said in done.stdout


def test_strict_dtypes_must_be_a_flag():
    with pytest.raises(UsageTypeError, match="strict_dtypes=1 must be True or False"):
        shoal.initialize(strict_dtypes=1)
    assert not has_strict_dtypes()


def test_of_a_program_with_equinox_its_partition_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", ModuleType("equinox"))
    whole, tree = Layout(MESH, None), {"w": jnp.ones(2), "act": len}
    for error, verb, call in (
        (UsageError, "pass", lambda: shoal.put(tree, whole)),
        (UsageError, "pass", lambda: shoal.relayout(tree, whole)),
        (UsageTypeError, "pass", lambda: shoal.plan_relayout(tree, whole)),
        (UsageTypeError, "return", lambda: shoal.create(lambda: tree, layouts=whole)),
    ):
        words = rf"\['act'\]: is a builtin.*; {verb} eqx\.partition\(tree, eqx\.is_array\)\[0\]"
        with pytest.raises(error, match=words):
            call()
