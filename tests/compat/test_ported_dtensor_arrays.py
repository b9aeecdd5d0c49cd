"""What TensorFlow's own tests of DTensor say of arrays: moves, pack, unpack, several meshes."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shoal.compat import dtensor
from shoal.compat.dtensor import (
    MATCH,
    UNSHARDED,
    DTensorDevice,
    DVariable,
    Layout,
    Mesh,
)

U = UNSHARDED


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).uniform(1, 9, shape).astype(dtype)


def check(found, wanted, layout):
    """Check values, layout, and the piece on each device."""
    np.testing.assert_array_equal(found, wanted)
    assert dtensor.fetch_layout(found) == layout
    shape = layout.local_shape_from_global_shape(np.shape(wanted))
    for piece, place in zip(dtensor.unpack(found), layout.offset_to_shard(), strict=True):
        part = tuple(slice(p * n, p * n + n) for p, n in zip(place, shape, strict=True))
        np.testing.assert_array_equal(piece, np.asarray(wanted)[part])


@pytest.fixture(scope="module")
def grid():
    return dtensor.create_mesh({"x": 2, "y": 2}, devices=[f"CPU:{n}" for n in range(4)])


# ---- Layouts of arrays.


@pytest.mark.parametrize("specs", [[U, U], ["x", U]])
def test_a_host_array_is_laid_out(grid, specs):
    layout = Layout(specs, grid)
    check(dtensor.relayout(numbers(4, 6), layout), numbers(4, 6), layout)


def test_an_array_is_laid_out_as_parted(grid):
    layout = Layout(["y"], grid)
    x = dtensor.relayout(numbers(4), layout)
    for call in (dtensor.relayout, jax.jit(dtensor.relayout, static_argnums=1)):
        with dtensor.default_mesh(grid):
            found = call(x, layout.to_parted())
        np.testing.assert_array_equal(found, numbers(4))
        dtensor.check_layout(found, layout.to_parted())


@pytest.mark.differs("`to_parted`, in `fetch_layout`")
def test_a_parted_layout_is_fetched_as_one_that_is_not(grid):
    layout = Layout(["y"], grid)
    assert dtensor.fetch_layout(dtensor.relayout(numbers(4), layout.to_parted())) == layout


def test_an_array_is_laid_out_like_another(grid):
    like = dtensor.relayout(numbers(4), Layout(["x"], grid))
    x = dtensor.relayout(numbers(4), Layout(["y"], grid))
    with dtensor.default_mesh(grid):
        check(dtensor.relayout_like(x, like), numbers(4), Layout(["x"], grid))


@pytest.mark.differs("`relayout_like` inside `jit`")
def test_inside_jit_two_arrays_are_laid_out_in_one_way(grid):
    like = dtensor.relayout(numbers(4), Layout(["x"], grid))
    x = dtensor.relayout(numbers(4), Layout(["y"], grid))
    found = jax.jit(dtensor.relayout_like)(x, like)
    assert dtensor.fetch_layout(found).sharding_specs in (["x"], ["y"])
    np.testing.assert_array_equal(found, numbers(4))


def test_an_array_is_laid_out_like_one_of_another_dtype(grid):
    like = dtensor.relayout(np.arange(4), Layout(["x"], grid))
    x = dtensor.relayout(numbers(4), Layout([U], grid))
    found = jax.jit(lambda a, b: dtensor.relayout_like(jnp.sqrt(a), b))(x, like)
    dtensor.check_layout(found, Layout(["x"], grid))


def gradients(grid):
    """Return functions with the first and the second derivative of relayouts in one another."""
    rows, columns = Layout(["x", U], grid), Layout([U, "x"], grid)

    def inner(x):
        return jax.grad(lambda u: jnp.sum(dtensor.relayout(u * 1.0, columns) ** 3))(x)

    def through_rows(x):
        t = dtensor.relayout(x, rows)
        return jnp.sum(inner(t) + t)

    return inner, jax.grad(through_rows)


def test_gradients_of_nested_relayouts_have_the_layout_of_the_input(grid):
    whole = Layout([U, U], grid)
    x = dtensor.relayout(numbers(8, 8), whole)
    inner, outer = gradients(grid)
    for call, wanted in ((inner, 3 * numbers(8, 8) ** 2), (outer, 6 * numbers(8, 8) + 1)):
        np.testing.assert_allclose(call(x), wanted, rtol=1e-5)
        dtensor.check_layout(call(x), whole)


@pytest.mark.differs("the gradient of `relayout` inside `jit`")
def test_gradients_of_nested_relayouts_inside_jit_have_the_right_values(grid):
    x = dtensor.relayout(numbers(8, 8), Layout([U, U], grid))
    inner, outer = map(jax.jit, gradients(grid))
    np.testing.assert_allclose(inner(x), 3 * numbers(8, 8) ** 2, rtol=1e-5)
    np.testing.assert_allclose(outer(x), 6 * numbers(8, 8) + 1, rtol=1e-5)


def test_a_weight_can_be_gathered_for_its_update(grid):
    @jax.jit
    def updated(w):
        def loss(own):
            return jnp.sum(dtensor.relayout(own + own, Layout([U, U], grid)))

        return w - jax.grad(loss)(w)

    w = dtensor.relayout(numbers(4, 4), Layout(["x", U], grid))
    np.testing.assert_allclose(updated(w), numbers(4, 4) - 2, rtol=1e-6)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("size", [8, 2048])
def test_results_of_a_call_are_laid_out(grid, size, is_graph):
    layouts = [Layout([name], grid) for name in ("x", "y")]

    def made():
        return [dtensor.call_with_layout(jnp.zeros, one, shape=[size]) for one in layouts]

    with dtensor.default_mesh(grid):
        found = (jax.jit(made) if is_graph else made)()
    for array, layout in zip(found, layouts, strict=True):
        check(array, np.zeros(size), layout)


def test_arrays_like_others_are_laid_out(grid):
    layout = Layout([U], grid)
    zeros = dtensor.call_with_layout(jnp.zeros, layout, [6])
    for fill, like in ((0, jnp.zeros_like), (1, jnp.ones_like)):
        check(dtensor.call_with_layout(like, layout, zeros), np.full(6, fill), layout)


@pytest.mark.parametrize(("dtype", "scale"), [(np.float32, 1), (np.float16, 1), (np.float32, 0)])
def test_random_numbers_are_laid_out(grid, dtype, scale):
    def noise(key):
        return jax.random.normal(key, [10], dtype) * dtype(scale)

    layout = Layout([U], grid)
    found = dtensor.call_with_layout(noise, layout, jax.random.key(4))
    assert (found.shape, found.dtype) == ((10,), dtype)
    assert dtensor.fetch_layout(found) == layout
    assert bool(np.any(found)) is bool(scale)


def test_a_dim_that_matches_keeps_its_split(grid):
    x = dtensor.relayout(numbers(4, 4), Layout(["x", "y"], grid))
    found = dtensor.relayout(jnp.sqrt(x), Layout([MATCH, U], grid))
    dtensor.check_layout(found, Layout(["x", U], grid))


@pytest.mark.differs("`MATCH` inside `jit` and `grad`")
def test_inside_jit_no_dim_matches(grid):
    x = dtensor.relayout(numbers(4, 4), Layout(["x", "y"], grid))
    layout = Layout([MATCH, U], grid)
    with pytest.raises(RuntimeError, match="name the mesh dim"):
        jax.jit(lambda v: dtensor.relayout(jnp.sqrt(v), layout))(x)


@pytest.mark.parametrize("specs", [[U, U], ["x", U], [U, "y"]])
def test_a_mesh_dim_of_size_1_counts_in_a_layout(specs):
    thin = dtensor.create_mesh({"x": 1, "y": 2}, devices=["CPU:0", "CPU:1"])
    x = dtensor.relayout(numbers(2, 2), Layout(["x", "y"], thin))
    check(dtensor.relayout(x, Layout(specs, thin)), numbers(2, 2), Layout(specs, thin))


def test_the_product_of_laid_out_arrays_is_laid_out_again(grid):
    rows, columns = Layout(["x", U], grid), Layout([U, "x"], grid)
    a, b = (dtensor.call_with_layout(jnp.ones, one, (6, 6)) for one in (rows, columns))
    found = jax.jit(lambda p, q: dtensor.relayout(p @ q, columns))(a, b)
    check(found, np.full((6, 6), 6), columns)


# ---- What is asked of arrays.


def test_another_layout_than_the_array_s_is_an_error(line):
    x = dtensor.copy_to_mesh(numbers(2), Layout([U], line))
    with pytest.raises(ValueError, match="did not match"):
        dtensor.check_layout(x, Layout(["x"], line))


@pytest.mark.differs("the C++ device (`_dtensor_device`)")
def test_a_device_of_one_s_own_has_no_meshes():
    with pytest.raises(TypeError):
        DTensorDevice([], is_async=True)
    assert not hasattr(DTensorDevice(), "copy_to_mesh")


def test_what_is_computed_of_a_replicated_array_is_replicated(line):
    layout = Layout([U], line)
    x = dtensor.copy_to_mesh(numbers(6), layout)
    for found, wanted in ((x[2:-2], numbers(6)[2:-2]), (x * 2, numbers(6) * 2)):
        check(found, wanted, layout)
    np.testing.assert_array_equal(x, numbers(6))


@pytest.mark.differs("an array on no mesh, or on another one of the same devices, in an operation")
@pytest.mark.parametrize("rows", [1, 10])
def test_an_array_on_no_mesh_can_be_added_to_one_that_is(line, rows):
    layout = Layout([U, U], line)
    x = dtensor.copy_to_mesh(np.ones((10, 10), np.int32), layout)
    check(x + jnp.ones((rows, 10), jnp.int32), np.full((10, 10), 2), layout)


def test_threads_copy_to_a_mesh_at_the_same_time(line):
    found = {}

    def work(number):
        for round_ in range(3):
            with dtensor.default_mesh(line):
                x = dtensor.copy_to_mesh(np.full(4, number, np.float32), Layout([U], line))
                found[number] = jax.jit(lambda v, n=round_: v + v * n)(x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        np.testing.assert_array_equal(found[number], np.full(4, 3 * number))


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.int8, np.float16])
@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_a_variable_is_assigned_a_packed_array(line, dtype, shape):
    layout = Layout([U] * len(shape), line)
    v = DVariable(np.ones(shape, dtype), layout=layout)
    v.assign(dtensor.pack([np.zeros(shape, dtype)] * line.size, layout))
    check(v.read_value(), np.zeros(shape, dtype), layout)


@pytest.mark.differs("arrays")
def test_a_replicated_array_is_a_host_array_again(line):
    x = dtensor.copy_to_mesh(numbers(4), Layout([U], line))
    np.testing.assert_array_equal(np.asarray(x), numbers(4))


def test_an_array_can_be_iterated(line):
    x = dtensor.copy_to_mesh(numbers(6), Layout([U], line))
    assert float(next(iter(x))) == numbers(6)[0]


def test_copying_to_the_same_layout_keeps_it(line):
    layout = Layout([U], line)
    x = dtensor.copy_to_mesh(dtensor.copy_to_mesh(numbers(4), layout), layout)
    check(x, numbers(4), layout)


def test_the_text_of_a_variable_has_its_values_and_its_layout(line):
    whole = DVariable(dtensor.copy_to_mesh(np.float32(5), Layout([], line)))
    split = DVariable(dtensor.pack([[5.0], [7.0]], Layout(["x"], line)))
    for variable, parts in ((whole, ["5", "layout"]), (split, ["5", "7", "layout"])):
        assert [part for part in parts if part not in str(variable)] == []


@pytest.mark.differs("arrays")
def test_the_text_of_an_array_has_its_values(line):
    assert "5" in str(dtensor.copy_to_mesh(np.float32(5), Layout([], line)))
    split = str(dtensor.pack([[5.0], [7.0]], Layout(["x"], line)))
    assert "5" in split
    assert "7" in split


def test_the_shape_of_a_copy_is_known_before_it_runs(line):
    def copied():
        return dtensor.copy_to_mesh(jnp.arange(3.0), Layout([U], line))

    assert jax.eval_shape(copied).shape == (3,)
    check(jax.jit(copied)(), np.arange(3), Layout([U], line))


def test_a_list_cannot_be_unpacked():
    with pytest.raises(TypeError, match="Expecting an array"):
        dtensor.unpack(tensor=[[0.5, 1.5, 2.5]])


def test_a_number_has_no_layout():
    assert dtensor.fetch_layout(tensor=-17) is None
    assert not dtensor.is_dtensor(tensor=-17)


def test_an_array_and_its_variable_have_the_layout_they_were_given(line):
    layout = Layout([U, U], line)
    x = dtensor.call_with_layout(jnp.ones, layout, shape=[2, 3])
    assert dtensor.fetch_layout(x) == layout
    assert dtensor.fetch_layout(DVariable(x)) == layout


def test_an_array_on_no_mesh_has_no_layout():
    with pytest.raises(ValueError, match="an array on a mesh"):
        dtensor.fetch_layout(jnp.array([2, 3]))


@pytest.mark.parametrize("name", ["fetch_layout", "is_dtensor", "unpack"])
def test_what_an_array_is_must_be_asked_eagerly(line, name):
    x = dtensor.copy_to_mesh(np.float32(1), Layout([], line))
    ask = getattr(dtensor, name)
    with pytest.raises(RuntimeError, match=f"{name} must be called eagerly"):
        jax.jit(lambda v: (ask(v), v)[1])(x)


def test_only_arrays_on_meshes_and_their_variables_are_dtensors(line):
    x = dtensor.call_with_layout(jnp.zeros, Layout([U], line), shape=[5])
    assert dtensor.is_dtensor(x)
    assert dtensor.is_dtensor(DVariable(x))
    for other in (jnp.zeros((2, 2)), [0, 1], {False: True}, 1, object()):
        assert not dtensor.is_dtensor(other)


@pytest.mark.differs("`default_mesh`, operations on host arrays")
def test_the_mesh_of_a_device_places_what_is_copied_to_it():
    device = "/job:localhost/replica:0/task:0/device:CPU:3"
    with dtensor.default_mesh(Mesh.from_device(device)):
        assert not dtensor.is_dtensor(jnp.ones((3, 3)))
        x = dtensor.copy_to_mesh(np.ones((3, 3), np.float32), Layout.from_device(device))
    assert dtensor.is_dtensor(x)
    assert [one.id for one in x.devices()] == [3]


def test_an_array_on_the_mesh_of_a_device_says_so():
    mesh = Mesh.from_device("/job:localhost/replica:0/task:0/device:CPU:3")
    layout = Layout.from_single_device_mesh(mesh)
    x = dtensor.copy_to_mesh(np.ones((3, 3), np.float32), layout)
    assert dtensor.fetch_layout(x).mesh == mesh
    (piece,) = dtensor.unpack(x)
    np.testing.assert_array_equal(dtensor.pack([piece], layout), x)


# ---- pack and unpack.


def test_unpack_returns_the_value_of_each_device(line):
    x = dtensor.copy_to_mesh(np.float32(4), Layout([], line))
    assert [float(piece) for piece in dtensor.unpack(x)] == [4, 4]


def test_the_device_unpacks_arrays_on_a_mesh_only(line):
    device = dtensor._dtensor_device()
    v = DVariable(dtensor.call_with_layout(jnp.ones, Layout([U, U], line), shape=[2, 3]))
    with pytest.raises(TypeError, match="a Variable is not an array"):
        device.unpack(v)
    with pytest.raises(ValueError, match="expects an array on a mesh"):
        device.unpack(jnp.array([1.0, 2.0]))


def test_pack_must_be_called_eagerly(line):
    with pytest.raises(RuntimeError, match="pack must be called eagerly"):
        jax.jit(lambda v: dtensor.pack([v, v], Layout([U], line)))(np.float32([1]))


def test_variables_cannot_be_packed(line):
    layout = Layout([U, U], line)
    v = DVariable(dtensor.call_with_layout(jnp.ones, layout, [2, 3]))
    with pytest.raises(ValueError, match="Variable input is not supported"):
        dtensor._dtensor_device().pack([v, v], layout)


@pytest.mark.parametrize("shape", [(2,), (2, 2, 3)])
def test_pieces_are_packed_along_the_split_dim(line, shape):
    pieces = [numbers(*shape), -numbers(*shape)]
    layout = Layout(["x", *[U] * (len(shape) - 1)], line)
    packed = dtensor.pack([jnp.asarray(piece) for piece in pieces], layout=layout)
    dtensor.check_layout(packed, layout)
    assert packed.shape == (4, *shape[1:])
    for found, piece in zip(dtensor.unpack(packed), pieces, strict=True):
        np.testing.assert_array_equal(found, piece)


@pytest.mark.differs("arrays")
def test_pieces_lie_on_the_devices_of_the_mesh_in_their_order():
    mesh = dtensor.create_mesh({"x": 2}, devices=["CPU:6", "CPU:2"])
    packed = dtensor.pack([[1.0, 2.0], [3.0, 4.0]], Layout(["x"], mesh))
    found = [piece.devices().pop().id for piece in dtensor.unpack(packed)]
    assert [name.rpartition(":")[2] for name in mesh.local_devices()] == [*map(str, found)]


@pytest.mark.parametrize("name", ["line", "wide"])
@pytest.mark.parametrize("shape", [(), (2, 1)])
def test_replicas_are_packed(request, name, shape):
    mesh = request.getfixturevalue(name)
    layout = Layout([U] * len(shape), mesh)
    packed = dtensor.pack([numbers(*shape)] * mesh.size, layout)
    assert packed.shape == shape
    check(packed, numbers(*shape), layout)


def test_packed_scalars_have_a_layout_of_rank_0(wide):
    with pytest.raises(ValueError, match="rank"):
        dtensor.pack([1.5] * 8, Layout([U], wide))


def test_replicas_of_split_pieces_are_packed(wide):
    a, b = numbers(2, 1), -numbers(2, 1)
    layout = Layout(["x", U], wide)
    check(dtensor.pack([a] * 4 + [b] * 4, layout), np.concatenate([a, b]), layout)


def test_a_filled_array_has_a_piece_on_each_device(wide):
    layout = Layout(["x", U], wide)
    filled = dtensor.call_with_layout(jnp.full, layout, (4, 1), np.float32(1))
    assert filled.shape == (4, 1)
    check(filled, np.ones((4, 1)), layout)


# ---- Several meshes.


@pytest.fixture(params=[["CPU:0", "CPU:1"], ["CPU:4", "CPU:5"]], ids=["same", "other"])
def second(request):
    """Return a mesh like `line` of the same, or other, devices."""
    return dtensor.create_mesh({"y": 2}, devices=request.param)


def test_an_array_is_copied_from_mesh_to_mesh(line, second):
    first, other = Layout([U], line), Layout([U], second)
    check(dtensor.copy_to_mesh(np.zeros(3, np.int32), first), np.zeros(3), first)
    x = dtensor.copy_to_mesh(np.ones(3, np.int32), other)
    check(dtensor.copy_to_mesh(x, first), np.ones(3), first)


@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("is_split", [True, False])
def test_arrays_of_all_dtypes_are_copied_from_mesh_to_mesh(line, second, dtype, is_split):
    source, target = (Layout([one, U], mesh) if is_split else Layout([U, U], mesh)
                      for one, mesh in (("x", line), ("y", second)))  # fmt: skip
    for start, end in ((source, target), (target, source)):
        x = dtensor.relayout(dtensor.copy_to_mesh(np.ones((8, 8), dtype), start), start)
        check(x, np.ones((8, 8), dtype), start)
        check(dtensor.copy_to_mesh(x, end), np.ones((8, 8), dtype), end)


@pytest.mark.parametrize("is_graph", [False, True])
def test_an_array_is_copied_to_a_layout_that_splits_it(line, is_graph):
    layout = Layout(["x"], line)

    def copied(value):
        return dtensor.copy_to_mesh(value, layout)

    with dtensor.default_mesh(line):
        check((jax.jit(copied) if is_graph else copied)(jnp.zeros(8)), np.zeros(8), layout)


def test_numbers_are_added_on_the_mesh_of_the_array(line, second):
    for fill, mesh in ((0, line), (1, second)):
        layout = Layout([U], mesh)
        x = dtensor.copy_to_mesh(np.full(3, fill, np.int32), layout)
        check(x + 1, np.full(3, fill + 1), layout)
        check(x + x, np.full(3, 2 * fill), layout)


def test_arrays_on_meshes_of_other_devices_cannot_be_added(line):
    other = dtensor.create_mesh({"y": 2}, devices=["CPU:4", "CPU:5"])
    a, b = (dtensor.copy_to_mesh(numbers(4), Layout([U], mesh)) for mesh in (line, other))
    with pytest.raises(ValueError, match="incompatible devices"):
        a + b


@pytest.mark.differs("an array on no mesh, or on another one of the same devices, in an operation")
def test_arrays_on_meshes_of_the_same_devices_can_be_added(line):
    same = dtensor.create_mesh({"y": 2}, devices=["CPU:0", "CPU:1"])
    a, b = (dtensor.copy_to_mesh(numbers(4), Layout([U], mesh)) for mesh in (line, same))
    np.testing.assert_array_equal(a + b, 2 * numbers(4))


def test_a_function_takes_and_returns_arrays_on_meshes_of_the_same_devices(line):
    same = dtensor.create_mesh({"y": 2}, devices=["CPU:0", "CPU:1"])
    layouts = [Layout([U], mesh) for mesh in (line, same)]
    a, b = (dtensor.copy_to_mesh(numbers(4), layout) for layout in layouts)
    square, root = jax.jit(lambda p, q: (p * p, jnp.sqrt(q)))(a, b)
    dtensor.check_layout(square, layouts[0])
    dtensor.check_layout(root, layouts[1])


@pytest.mark.differs("`copy_to_mesh` to other devices inside `jit`")
def test_no_array_is_copied_to_other_devices_inside_a_function():
    first, second = (dtensor.create_mesh({"x": 1}, devices=[f"CPU:{n}"]) for n in (0, 1))
    x = dtensor.copy_to_mesh(np.float32([1, 2, 6]), Layout([U], first))
    target = Layout([U], second)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda v: jnp.sqrt(jnp.sum(dtensor.copy_to_mesh(v, target))))(x)


def test_derivatives_go_from_mesh_to_mesh(line, second):
    source, target = Layout([U], line), Layout([U], second)

    def root(x):
        return jnp.sum(jnp.sqrt(dtensor.copy_to_mesh(x * 4.0, target)))

    x = dtensor.copy_to_mesh(np.float32([1, 4, 16]), source)
    found = jax.grad(root)(x)
    np.testing.assert_allclose(found, [1, 0.5, 0.25], rtol=1e-5)
    dtensor.check_layout(found, source)
    again = jax.grad(lambda v: jnp.sum(jax.grad(root)(v)))(x)
    np.testing.assert_allclose(again, [-1 / 2, -1 / 16, -1 / 128], rtol=1e-5)
    dtensor.check_layout(again, source)


def test_several_arrays_are_copied_between_a_mesh_and_its_host_mesh(line):
    specs = ["x"]
    own, host = Layout(specs, line), Layout(specs, line.host_mesh())
    for source, target in ((own, host), (host, own)):
        for scale in (1, 2):
            x = dtensor.relayout(dtensor.copy_to_mesh(scale * numbers(4), source), source)
            check(jax.jit(lambda v, t=target: dtensor.copy_to_mesh(v, t))(x), scale * numbers(4),
                  target)  # fmt: skip


def test_pieces_survive_the_way_to_the_host_mesh_and_back(wide):
    layout = Layout(["x", U], wide)
    host = Layout(layout.sharding_specs, wide.host_mesh())
    x = dtensor.pack([np.ones((2, 2), np.float32)] * 8, layout)
    there = jax.jit(lambda v: dtensor.copy_to_mesh(v, host))(x)
    back = jax.jit(lambda v: dtensor.copy_to_mesh(v, layout))(there)
    for piece in (*dtensor.unpack(there), *dtensor.unpack(back)):
        np.testing.assert_array_equal(piece, np.ones((2, 2)))


def test_a_variable_lies_on_the_mesh_of_its_value(line):
    dtensor.copy_to_mesh(1.0, Layout([], dtensor.create_mesh({"x": 1}, devices=["CPU:0"])))
    layout = Layout([], line)
    assert DVariable(dtensor.copy_to_mesh(1.0, layout)).layout == layout
