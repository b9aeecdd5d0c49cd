"""pack, unpack, relayout and the rest of `shoal.compat.dtensor`'s moves, in one process."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shoal
from shoal.compat import dtensor
from shoal.compat.dtensor import MATCH, UNSHARDED, DVariable, Layout

U = UNSHARDED
SPECS = ([U, U], ["x", U], [U, "x"], ["y", U], ["x", "y"], ["y", "x"])


@pytest.fixture(scope="module")
def mesh():
    return dtensor.create_mesh({"x": 2, "y": 2}, devices=[f"CPU:{n}" for n in range(4)])


@pytest.fixture
def rows(mesh):
    return Layout(["x", U], mesh)


def values(dtype=np.float32):
    return np.arange(8 * 4).reshape(8, 4).astype(dtype)


@pytest.mark.parametrize("value", [np.float32(3), values()[0], values()])
def test_an_array_on_one_device_has_the_layout_it_was_given(mesh, value):
    layout = Layout.from_device("CPU:5")
    x = dtensor.copy_to_mesh(value, layout)
    dtensor.check_layout(x, layout)
    dtensor.check_layout(dtensor.relayout_like(value, x), layout)
    for other in (Layout.from_device("CPU:4"), Layout.replicated(mesh, np.ndim(value))):
        with pytest.raises(ValueError, match="did not match"):
            dtensor.check_layout(x, other)


@pytest.mark.parametrize(("specs", "wanted"), [*itertools.product(SPECS, SPECS)])
def test_relayout_knows_all_pairs(mesh, specs, wanted):
    x = dtensor.copy_to_mesh(values(), Layout(specs, mesh))
    assert dtensor.fetch_layout(x) == Layout(specs, mesh)
    y = dtensor.relayout(x, Layout(wanted, mesh))
    dtensor.check_layout(y, Layout(wanted, mesh))
    np.testing.assert_array_equal(y, values())


def test_relayout_keeps_what_matches(mesh, rows):
    x = dtensor.copy_to_mesh(values(), rows)
    for given, wanted in [
        ([MATCH, "y"], ["x", "y"]),
        ([MATCH, MATCH], ["x", U]),  # two are an error there
        ([U, MATCH], [U, U]),
    ]:
        y = dtensor.relayout(x, Layout(given, mesh))
        dtensor.check_layout(y, Layout(wanted, mesh))
    plain = dtensor.relayout(values(), Layout([MATCH, "y"], mesh))
    dtensor.check_layout(plain, Layout([U, "y"], mesh))


def test_relayout_refuses_what_it_let_through(mesh, rows):
    x = dtensor.copy_to_mesh(values(), rows)
    for wrong in (Layout([U], mesh), Layout([MATCH], mesh)):
        with pytest.raises(ValueError, match=r"dtensor\.relayout: .*rank"):
            dtensor.relayout(x, wrong)
    with pytest.raises(ValueError, match="7"):
        dtensor.copy_to_mesh(np.zeros((7, 4), np.float32), rows)
    with pytest.raises(TypeError, match=r"must be a dtensor\.Layout"):
        dtensor.relayout(x, ("x", None))
    for call in (dtensor.relayout, dtensor.copy_to_mesh):
        with pytest.raises(ValueError, match="None is not a value"):
            call(None, Layout(["x", U], mesh))


def test_relayout_to_another_mesh(rows):
    x = dtensor.copy_to_mesh(values(), rows)
    line = dtensor.create_mesh({"z": 8})
    y = dtensor.relayout(x, Layout(["z", U], line))  # of another size, and sharded
    np.testing.assert_array_equal(y, values())
    one = dtensor.relayout(x, Layout.from_device("CPU:5"))
    assert {device.id for device in one.devices()} == {5}


def test_relayout_has_a_gradient_and_works_inside_jit(mesh, rows):
    columns = Layout([U, "y"], mesh)
    x = dtensor.copy_to_mesh(values(), rows)
    gradient = jax.grad(lambda v: (dtensor.relayout(v, columns) ** 2).sum())(x)
    np.testing.assert_array_equal(gradient, 2 * values())
    dtensor.check_layout(gradient, rows)
    y = jax.jit(lambda v: dtensor.relayout(v * 2, columns, name="moved"))(x)
    dtensor.check_layout(y, columns)
    with pytest.raises(RuntimeError, match="unknown inside jit"):
        jax.jit(lambda v: dtensor.relayout(v, Layout([MATCH, U], mesh)))(x)


def test_relayout_like(mesh, rows):
    like = dtensor.copy_to_mesh(values(np.int32), rows)
    for given in (values(), dtensor.copy_to_mesh(values(), Layout([U, "y"], mesh))):
        dtensor.check_layout(dtensor.relayout_like(given, like), rows)
    y = jax.jit(lambda a, b: dtensor.relayout_like(a, dtensor.relayout(b, rows)))(values(), like)
    dtensor.check_layout(y, rows)
    with pytest.raises(ValueError, match="array on a mesh"):
        dtensor.relayout_like(like, jnp.ones(3))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, np.float16, np.uint8]
)
def test_pack_and_unpack(mesh, dtype):
    for specs in SPECS:
        layout = Layout(specs, mesh)
        whole = values(dtype)
        shape = layout.local_shape_from_global_shape(whole.shape)
        begins = [np.multiply(one, shape) for one in layout.offset_to_shard()]
        pieces = [whole[b[0] : b[0] + shape[0], b[1] : b[1] + shape[1]] for b in begins]
        packed = dtensor.pack(pieces, layout)
        np.testing.assert_array_equal(np.asarray(packed), whole)
        back = dtensor.unpack(packed)
        assert [one.devices().pop().id for one in back] == [0, 1, 2, 3]
        for one, piece in zip(back, pieces, strict=True):
            np.testing.assert_array_equal(one, piece)
        dtensor.check_layout(dtensor.pack(back, layout), layout)


def test_pack_takes_numbers_and_lists(mesh):
    scalar = dtensor.pack([3.0] * 4, Layout([], mesh))
    assert scalar.shape == ()
    assert scalar.dtype == np.float32
    assert dtensor.pack([[1, 2]] * 4, Layout(["x"], mesh)).tolist() == [1, 2, 1, 2]
    one = dtensor.pack([np.ones(2, np.float32)], Layout.from_device("CPU:2"))
    assert {device.id for device in one.devices()} == {2}


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m, v: dtensor.pack([], Layout(["x"], m)), ValueError, "no pieces"),
        (lambda m, v: dtensor.pack([1.0] * 3, Layout([], m)), ValueError, "3 pieces for the 4"),
        (lambda m, v: dtensor.pack([1.0, 2.0] * 2, Layout([], m)), ValueError, "are replicas"),
        (lambda m, v: dtensor.pack([1.0] * 4, Layout(["x"], m)), ValueError, "rank"),
        (lambda m, v: dtensor.pack([1.0, 1, 1.0, 1.0], Layout([], m)), ValueError, "piece 1 is"),
        (lambda m, v: dtensor.pack([v] * 4, Layout([U, U], m)), ValueError, "several devices"),
        (lambda m, v: dtensor.pack([DVariable(v)] * 4, Layout([], m)), ValueError, "read_value"),
        (lambda m, v: dtensor.pack(v, Layout([U, U], m)), TypeError, "must be a list"),
        (lambda m, v: dtensor.pack([1.0] * 4, "x"), TypeError, r"must be a dtensor\.Layout"),
        (lambda m, v: dtensor.unpack(jnp.ones(2)), ValueError, "array on a mesh"),
        (lambda m, v: dtensor.unpack(np.ones(2)), TypeError, "Expecting an array"),
        (lambda m, v: dtensor.unpack([1.0]), TypeError, "Expecting an array"),
        (lambda m, v: dtensor.unpack(DVariable(v)), TypeError, "read_value"),
        (lambda m, v: dtensor.fetch_layout(jnp.ones(2)), ValueError, "array on a mesh"),
        (lambda m, v: dtensor.fetch_layout(np.ones(2)), TypeError, "Expecting an array"),
        (lambda m, v: dtensor.check_layout(v, Layout([U, "y"], m)), ValueError, "did not match"),
        (lambda m, v: dtensor.check_layout(3, Layout([], m)), ValueError, "did not match"),
    ],
)
def test_invalid_moves_are_refused(mesh, rows, call, kind, words):
    x = dtensor.copy_to_mesh(values(), rows)
    with pytest.raises(kind, match=words) as told:
        call(mesh, x)
    assert isinstance(told.value, shoal.UsageError)
    assert "dtensor." in str(told.value)


def test_what_must_be_eager(mesh, rows):
    x = dtensor.copy_to_mesh(values(), rows)
    variable = DVariable(x)
    for call in (
        lambda v: dtensor.pack([1.0] * 4, Layout([], mesh)),
        dtensor.unpack,
        dtensor.fetch_layout,
        dtensor.is_dtensor,
        lambda v: dtensor.check_layout(v, rows),
        lambda v: DVariable(x),
        variable.assign,
    ):
        with pytest.raises(RuntimeError, match="must be called eagerly"):
            jax.jit(lambda v, call=call: (call(v), v)[1])(x)
    with pytest.raises(RuntimeError, match="grad"):
        jax.grad(lambda v: (dtensor.fetch_layout(v), v.sum())[1])(x)


def test_is_dtensor_and_fetch_layout(mesh, rows):
    x = dtensor.copy_to_mesh(values(), rows)
    assert dtensor.is_dtensor(x)
    assert dtensor.is_dtensor(DVariable(x))
    for other in (jnp.ones(3), np.ones(3), 3, [1], {}, None, object()):
        assert not dtensor.is_dtensor(other)
    assert dtensor.fetch_layout(3) is None
    assert dtensor.fetch_layout(DVariable(x)) == rows
    named = dtensor.create_mesh({"only": 8}, "some name")
    y = dtensor.copy_to_mesh(values(), Layout(["only", U], named))
    assert dtensor.fetch_layout(y).mesh == named  # by what was made here: an array has no name
    both = shoal.put(values(), shoal.Layout(mesh.shoal_mesh, ("x", "y"), None))
    with pytest.raises(ValueError, match="there one mesh dim splits one dim"):
        dtensor.fetch_layout(both)
    dtensor.check_layout(y, Layout(["only", U], dtensor.create_mesh({"only": 8})))


def divided(mesh):
    assert dtensor.get_default_mesh() == mesh
    return 1 // 0


def test_default_mesh(mesh):
    other = dtensor.create_mesh({"z": 8})
    assert dtensor.get_default_mesh() is None
    with dtensor.default_mesh(mesh) as entered:
        assert entered == dtensor.get_default_mesh() == mesh
        with pytest.raises(ZeroDivisionError), dtensor.run_on(other):
            divided(other)
        assert dtensor.get_default_mesh() == mesh  # which stays `other` there
    assert dtensor.get_default_mesh() is None

    @dtensor.default_mesh(other)
    def inside():
        return dtensor.get_default_mesh(), shoal.layout_of(shoal.put(values(), ("z", None))).dims

    assert inside() == inside() == (other, ("z", None))
    for wrong in (None, "mesh", mesh.shoal_mesh):
        with pytest.raises(ValueError, match="Expect `mesh` to be `Mesh`"):
            dtensor.default_mesh(wrong).__enter__()


def test_device_name(mesh):
    assert dtensor.device_name() == "/job:localhost/replica:0/task:0/device:CUSTOM:0"


def test_call_with_layout(mesh, rows):
    x = dtensor.call_with_layout(jnp.ones, rows, shape=(8, 4))
    dtensor.check_layout(x, rows)
    noise = dtensor.call_with_layout(jax.random.uniform, rows, jax.random.key(0), (8, 4))
    np.testing.assert_array_equal(noise, jax.random.uniform(jax.random.key(0), (8, 4)))
    calls = []

    def scaled(array, *, by):
        calls.append(by)
        return array * by

    for by in (2.0, 2.0, 3.0):
        y = dtensor.call_with_layout(scaled, rows, DVariable(x), by=by)
        dtensor.check_layout(y, rows)
    assert calls == [2.0, 2.0, 3.0]  # what it closes over may have changed
    assert dtensor.call_with_layout(len, None, [1, 2]) == 2
    inner = jax.jit(lambda v: dtensor.call_with_layout(jnp.add, rows, v, v))(values())
    dtensor.check_layout(inner, rows)
    unhashed = dtensor.call_with_layout(lambda box: jnp.ones((8, 4)) * len(box.own), rows, Box())
    assert float(unhashed[0, 0]) == 1
    with pytest.raises(ValueError, match=r"dtensor\.call_with_layout: .*rank"):
        dtensor.call_with_layout(jnp.ones, rows, (8,))
    with pytest.raises(ValueError, match="7"):
        dtensor.call_with_layout(jnp.ones, rows, (7, 4))


class Box:
    """An argument that has no hash."""

    own = (1,)
    __hash__ = None


def test_a_variable(mesh, rows):
    v = DVariable(values(), layout=rows, name="w")
    assert (v.name, v.shape, v.ndim, v.dtype, v.trainable) == ("w", (8, 4), 2, np.float32, True)
    assert v.layout == rows
    v.assign(np.ones((8, 4), np.float32)).assign_add(1.0).assign_sub(v)
    v.assign_add(values())
    v.assign_sub(np.ones((8, 4), np.float32))
    np.testing.assert_array_equal(v.numpy(), values() - 1)
    v.assign(dtensor.copy_to_mesh(values(), Layout([U, "y"], mesh)))
    dtensor.check_layout(v, rows)
    np.testing.assert_array_equal(np.asarray(jnp.sum(v, axis=0)), values().sum(0))
    for result in (v @ np.ones((4, 1), np.float32), v + v, 2 * v, -v, v[0], v.value() / 2, v - v):
        assert dtensor.is_dtensor(result)
    doubled, gradient = jax.jit(jax.value_and_grad(lambda own: jnp.sum(own * 2)))(v)
    assert float(doubled) == 2 * values().sum()
    np.testing.assert_array_equal(gradient.read_value(), np.full((8, 4), 2))
    assert "DVariable 'w' float32[8, 4], layout (x, unsharded)" in repr(v)
    for wrong in (np.ones(4, np.float32), values(np.int32)):
        with pytest.raises(ValueError, match=r"DVariable\.assign: 'w' is float32\[8, 4\], the"):
            v.assign(wrong)


def test_where_a_variable_gets_its_layout(mesh, rows):
    x = dtensor.copy_to_mesh(values(), rows)
    assert DVariable(x).layout == DVariable(x, layout=rows).layout == rows
    born = DVariable(lambda: jnp.zeros((8, 4)), False, layout=rows, dtype=np.float32)
    assert (born.trainable, born.layout) == (False, rows)
    assert DVariable(lambda: x, shape=(8, 4)).layout == rows
    assert DVariable([[1.0] * 4] * 8, layout=rows).dtype == np.float32
    assert DVariable(values(), layout=rows, dtype=np.float16).dtype == np.float16
    for args, named, words in [
        ((values(),), {}, "Neither layout nor DTensor initial value"),
        ((x,), {"layout": Layout([U, "y"], mesh)}, "Conflicting layout are provided"),
        ((x,), {"dtype": np.float16}, "dtype"),
        ((x,), {"shape": (4, 8)}, "shape"),
        ((x,), {"caching_device": "CPU:0"}, "caching_device"),
    ]:
        with pytest.raises(ValueError, match=words):
            DVariable(*args, **named)


def test_save_as_bf16_sticks_to_float32(rows):
    many = [DVariable(values(dtype), layout=rows) for dtype in (np.float32, np.float16, np.int32)]
    dtensor.enable_save_as_bf16([*many, 3, np.ones(2)])
    assert [one.save_as_bf16 for one in many] == [True, False, False]
    many[0].save_as_bf16 = False
    assert not many[0].save_as_bf16
