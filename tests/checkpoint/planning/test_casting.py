"""A cast that is called lossless is."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from shoal.checkpoint.planning.casting import is_lossless


def dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("pair", [
    "bool int8", "bool bfloat16", "int8 int16", "uint8 int16", "int4 int8", "uint4 uint8",
    "int8 bfloat16", "uint8 bfloat16", "int8 float16", "int16 float32", "int32 float64",
    "bfloat16 float32", "float16 float32", "float32 float64", "float8_e4m3fn bfloat16",
    "float8_e4m3fn float16", "float8_e5m2 float16", "float4_e2m1fn float8_e4m3fn",
    "bfloat16 complex64", "float32 complex64", "complex64 complex128", "int32 complex128",
    "S3 S5", "U2 U2", "int64 int64", "uint32 int64", "int2 float4_e2m1fn",
    "bool uint1", "uint1 bool", "bool int2",
])  # fmt: skip
def test_is_lossless_accepts_wider_dtypes(pair):
    one, other = map(dtype, pair.split())
    assert is_lossless(one, other)


@pytest.mark.parametrize("pair", [
    "int64 float64", "uint64 float64", "int32 float32", "int8 float8_e4m3fn", "int16 bfloat16",
    "int16 float16", "float32 bfloat16", "float32 float16", "float16 bfloat16",
    "bfloat16 float16", "float8_e4m3fn float8_e5m2", "float8_e5m2 float8_e4m3fn",
    "float32 int64", "int8 uint8", "uint8 int8", "int8 int4", "int8 bool", "int64 bool",
    "complex64 float64", "complex128 complex64", "float64 complex64", "S5 S3", "int64 S30",
    "float32 S30", "int64 int32", "float8_e4m3 float8_e8m0fnu",
    "bool int1", "int1 bool", "uint1 int1", "int1 uint1",
    "M8[s] M8[ns]", "M8[D] M8[us]", "m8[Y] m8[s]", "m8[s] m8", "M8[s] m8[s]",
])  # fmt: skip
def test_something_may_be_lost(pair):
    one, other = map(dtype, pair.split())
    assert not is_lossless(one, other)
