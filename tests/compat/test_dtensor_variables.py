"""`dtensor.DVariable` where an array is expected: its operators, attributes and keys."""

from __future__ import annotations

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.compat import dtensor
from shoal.compat.dtensor import DVariable, Layout

VALUE = np.arange(1, 9, dtype=np.float32).reshape(4, 2)


def made(value):
    mesh = dtensor.create_mesh({"x": 2, "y": 4})
    specs = ["x", dtensor.UNSHARDED][: np.ndim(value)]
    return DVariable(value, layout=Layout(specs, mesh), name="w")


def test_all_operators_of_arrays_are_there():
    ours = dir(DVariable)
    theirs = {name for name in dir(jax.Array) if name.startswith("__")} - {*dir(object)}
    copies = {"__array_namespace__", "__copy__", "__deepcopy__", "__numpy_dtype__", "__setitem__"}
    assert theirs - {*ours} - copies - {"__slots__", "__weakref__"} == set()


BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge,
    divmod,
]  # fmt: skip


@pytest.mark.parametrize("call", BINARY, ids=lambda call: call.__name__)
def test_binary_operators(call):
    v, other = made(VALUE), made(VALUE[::-1].copy())
    for one, two in ((v, other), (v, 2), (2, v), (v, VALUE), (VALUE, v), (v, jnp.asarray(VALUE))):
        found = call(one, two)
        arrays = [x.numpy() if isinstance(x, DVariable) else x for x in (one, two)]
        np.testing.assert_allclose(found, call(*map(jnp.asarray, arrays)), rtol=1e-6)
        assert all(isinstance(part, jax.Array) for part in jax.tree.leaves(found))


def test_whole_numbers_and_truth():
    v = made(VALUE.astype(np.int32))
    for call in (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift):
        np.testing.assert_array_equal(call(v, 3), call(VALUE.astype(np.int32), 3))
        np.testing.assert_array_equal(call(3, v), call(3, VALUE.astype(np.int32)))
    for call in (operator.neg, operator.pos, operator.invert, abs):
        np.testing.assert_array_equal(call(v), call(VALUE.astype(np.int32)))
    whole = VALUE.astype(np.int32)
    np.testing.assert_array_equal(v @ whole.T, whole @ whole.T)
    np.testing.assert_array_equal(whole.T @ v, whole.T @ whole)
    one = made(np.int32(3))
    assert (int(one), float(one), complex(one), bool(one), [0, 1, 2, 3][one]) == (3, 3, 3, True, 3)
    assert f"{made(np.float32(0.25)):.1f}" == "0.2"
    assert f"{one}".startswith("<DVariable 'w'")
    assert math.sqrt(made(np.float32(9))) == 3
    np.testing.assert_allclose(round(made(VALUE / 4), 1), np.round(VALUE / 4, 1), rtol=1e-6)
    line = made(VALUE[:, 0].copy())
    assert 7 in line
    assert 8 not in line
    with pytest.raises(ValueError, match="truth value of an array with more than one"):
        bool(v)


def test_attributes_are_those_of_the_array():
    v = made(VALUE)
    np.testing.assert_array_equal(v.T, VALUE.T)
    assert (float(v.sum()), v.size, v.nbytes, v.reshape(-1).shape) == (36, 8, 32, (8,))
    assert v.sharding == v.read_value().sharding
    v.assign(v.at[np.array([0, 2])].add(1.0))
    np.testing.assert_array_equal(v.numpy()[:, 0], [2, 3, 6, 7])
    with pytest.raises(AttributeError, match=r"'scatter_add'; write v.assign\(v.at\["):
        v.scatter_add(None)
    with pytest.raises(AttributeError, match=r"neither DVariable nor jax.Array has .*'eval'$"):
        v.eval()
    assert not hasattr(v, "_no_such")


def test_its_text_has_the_values():
    v = made(VALUE)
    assert repr(v) in f"{str(v)[: len(repr(v)) - 1]}>"
    assert f"value={np.array2string(np.asarray(VALUE), threshold=100)}" in str(v)


def test_a_reference_is_a_key():
    v, w = made(VALUE), made(VALUE)
    slots = {v.ref(): "v", w.ref(): "w"}
    assert (slots[v.ref()], slots[w.ref()], len(slots)) == ("v", "w", 2)
    assert v.ref().deref() is v
    assert v.ref() != v
    with pytest.raises(TypeError, match=r"unhashable.*v.ref\(\)"):
        {v: 1}  # noqa: B018


def test_an_operator_does_not_put_an_array_in_a_variable_s_place():
    v = kept = made(VALUE)
    for change, words in (
        ("v += 1", "v.assign_add"),
        ("v -= 1", "v.assign_sub"),
        ("v *= 2", "v.assign"),
    ):
        with pytest.raises(RuntimeError, match=f"'w' cannot be changed .*; write {words}"):
            exec(change, {"v": v})
    assert v is kept
    np.testing.assert_array_equal(v.numpy(), VALUE)
