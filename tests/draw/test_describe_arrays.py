"""Arrays on devices as pictures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.placing.put import put
from shoal.draw.describe import describe
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})


@pytest.mark.parametrize(
    ("value", "dims", "first", "bytes_"),
    [
        (np.zeros((8, 6), np.float32), ("data", "model"), "float32[8, 6]", "24 B per device, 192"),
        (np.zeros((2, 4, 8), jnp.bfloat16), (None, "data", None), "bfloat16[2, 4, 8]", "32 B per"),
        (np.float32(3), (), "float32[] as Layout(()", "4 B in all; each block on 8"),
        (np.zeros((0, 8), np.int8), ("data", None), "int8[0, 8]", "0 B per device, 0 B in all"),
        (jax.random.split(jax.random.key(0), 8), ("data",), "key<fry>[8]", "16 B per device, 64 B"),
    ],
)  # fmt: skip
def test_arrays_show_dtype_shape_and_bytes(value, dims, first, bytes_):
    text = describe(put(value, Layout(MESH, *dims)))
    assert text.startswith(first)
    assert bytes_ in text.splitlines()[-1]


def test_nothing_is_read_or_moved():
    array = put(np.zeros((8, 6), np.float32), Layout(MESH, "data", None))
    array.delete()  # what is gone can still be described
    assert "each block on 2 devices" in describe(array)


def test_a_sharding_leaves_out_dims_as_in_jax():
    given = NamedSharding(sharding_of(Layout(MESH)).mesh, PartitionSpec("data"))
    assert describe(given, shape=(8, 6)) == describe(Layout(MESH, "data", None), shape=(8, 6))
    assert describe(given) == describe(Layout(MESH, "data"))


def test_describe_refuses_values_without_a_placement():
    with pytest.raises(UsageError, match="is a value inside jit: the compiler has not placed it"):
        jax.jit(lambda x: describe(x))(jnp.ones(3))
    with pytest.raises(UsageError, match=r"describe: float32\[99,99\] is a value inside jit"):
        jax.grad(lambda x: (describe(x), x.sum())[1])(jnp.ones((99, 99)))
    for value, shown in ((np.zeros((99, 99)), "an ndarray"), ("text", "'text'")):
        with pytest.raises(UsageError, match=f"not {shown}"):
            describe(value)
    with pytest.raises(UsageError, match=r"the array has shape \(3,\), not \(4,\)"):
        describe(jnp.ones(3), shape=(4,))
