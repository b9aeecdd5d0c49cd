"""Layouts of values inside jit, read in the programs that come out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.sharding import layout_of, sharding_of
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.arrays.placing.put import put
from shoal.arrays.traced.constrain import constrain
from shoal.arrays.traced.manual import manual
from shoal.errors import DtypeWarning, UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

AXES = {"data": 4, "model": 2}
AUTO, EXPLICIT = Mesh(AXES), Mesh(AXES, axis_types="explicit")
MIXED = Mesh(AXES, axis_types={"data": "explicit"})
MESHES = {"auto": AUTO, "explicit": EXPLICIT, "mixed": MIXED}


def whole(mesh, shape=(8, 8)):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return put(values, Layout.replicated(mesh, len(shape)))


def constraints(function, *args):
    """Return the sharding of each constraint in a traced function, those of calls included."""
    specs = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "sharding_constraint":
                specs.append(tuple(equation.params["sharding"].spec))
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
                if is_program(inner):
                    look(getattr(inner, "jaxpr", inner))

    def is_program(value):
        return hasattr(value, "eqns") or hasattr(value, "jaxpr")

    look(jax.make_jaxpr(function)(*args).jaxpr)
    return specs


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(
    "dims", [("data", "model"), ("model", "data"), ("model", None), (None, "data")]
)
def test_results_lie_as_pinned_and_keep_their_values(mesh, dims):
    layout, x = Layout(mesh, *dims), whole(mesh)
    y = jax.jit(lambda x: constrain(x * 2, layout))(x)
    assert layout_of(y) == layout
    np.testing.assert_array_equal(y, np.asarray(x) * 2)


def test_several_axes_on_one_dim_and_trees():
    layout = Layout(AUTO, ("model", "data"), None)
    a, b = jax.jit(lambda a, b: constrain((a, b), (layout, Layout(AUTO, "data"))))(
        whole(AUTO), whole(AUTO, (8,))
    )
    assert layout_of(a) == layout
    assert layout_of(b) == Layout(AUTO, "data")


def test_specs_with_a_default_mesh():
    with use_mesh(AUTO):
        y = jax.jit(lambda x: constrain(x, P(None, "model")))(whole(AUTO))
    assert layout_of(y) == Layout(AUTO, None, "model")


def test_the_program_computes_sharded():
    layout = Layout(AUTO, "data", None)
    program = jax.jit(lambda x: constrain(jnp.sin(x), layout).sum()).lower(whole(AUTO)).compile()
    assert "f32[2,8]" in program.as_text()
    free = jax.jit(lambda x: jnp.sin(x).sum()).lower(whole(AUTO)).compile()
    assert "f32[2,8]" not in free.as_text()


def test_none_clears():
    x, rows = whole(AUTO), Layout(AUTO, "data", None)
    with use_mesh(AUTO):
        specs = constraints(lambda x: constrain(constrain(x, rows), None), x)
    assert specs == [("data", None), (P.UNCONSTRAINED, P.UNCONSTRAINED)]
    assert constraints(lambda x: constrain(constrain(x, rows), None), x) == [("data", None)]
    np.testing.assert_array_equal(jax.jit(lambda x: constrain(x, None))(x), x)
    tree = jax.jit(lambda t: constrain(t, {"a": rows, "b": None}))({"a": x, "b": x})
    assert layout_of(tree["a"]) == rows


def test_none_clears_nothing_on_explicit_axes():
    with pytest.raises(UsageError, match="None clears nothing on Explicit axes"):
        jax.jit(lambda x: constrain(x, None))(whole(EXPLICIT))


@pytest.mark.parametrize("gradient", [False, True])
def test_the_cotangent_is_pinned_only_if_asked(gradient):
    layout, x = Layout(AUTO, "data", None), whole(AUTO)

    def pinned(x):
        return constrain(x, layout, gradient=gradient)

    def back(x, ct):
        return jax.vjp(pinned, x)[1](ct)

    forward = constraints(pinned, x)
    assert forward == [("data", None)]
    assert len(constraints(back, x, x)) == len(forward) + gradient
    _, tangent = jax.jit(lambda x: jax.jvp(pinned, (x,), (x,)))(x)
    np.testing.assert_array_equal(tangent, x)
    (ct,) = jax.jit(back)(x, x)
    np.testing.assert_array_equal(ct, x)
    assert (layout_of(ct) == layout) is gradient


@pytest.mark.parametrize("gradient", [False, True])
def test_second_derivatives_batches_and_loops(gradient):
    layout = Layout(AUTO, "data", None)

    def cube(x):
        return (constrain(x, layout, gradient=gradient) ** 3).sum()

    x = whole(AUTO)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: jax.grad(cube)(x).sum()))(x), 6 * np.asarray(x)
    )
    batch = jnp.stack([x, x + 1])
    slopes = jax.jit(jax.vmap(jax.grad(cube)))(batch)
    np.testing.assert_allclose(slopes, 3 * np.asarray(batch) ** 2)

    def body(carry, _):
        return constrain(carry * 2, layout, gradient=gradient), None

    last, _ = jax.jit(lambda x: jax.lax.scan(body, x, None, length=3))(x)
    np.testing.assert_array_equal(last, np.asarray(x) * 8)


@pytest.mark.parametrize("mesh", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
def test_on_explicit_axes_cotangents_follow_the_types(mesh):
    layout, x = Layout(mesh, "data", None), whole(mesh)
    seen = []

    def loss(x):
        y = constrain(x, layout)
        seen.append(jax.typeof(y).sharding.spec)
        return (y * y).sum()

    with jax.set_mesh(jax_mesh(mesh)):
        slope = jax.jit(jax.grad(loss))(x)
    np.testing.assert_array_equal(slope, 2 * np.asarray(x))
    assert seen[0] == P("data", None)


def test_integers_keys_and_host_constants():
    layout = Layout(AUTO, "data")
    y = jax.jit(lambda x: constrain(x, layout))(
        put(np.arange(8, dtype=np.int32), Layout(AUTO, None))
    )
    assert layout_of(y) == layout
    keys = put(jax.random.split(jax.random.key(0), 8), Layout(AUTO, None))
    assert layout_of(jax.jit(lambda k: constrain(k, layout))(keys)) == layout
    constant = jax.jit(lambda: constrain(np.ones(8, np.float32), layout))()
    assert layout_of(constant) == layout


def test_uneven_dims_are_the_compilers_on_auto_axes_only():
    odd = np.arange(7, dtype=np.float32)
    y = jax.jit(lambda x: constrain(x, Layout(AUTO, "data")) * 2)(odd)
    np.testing.assert_array_equal(y, odd * 2)
    with pytest.raises(UsageError, match="size 7, which 4 shards"):
        jax.jit(lambda x: constrain(x, Layout(EXPLICIT, "data")))(whole(EXPLICIT, (7,)))
    with pytest.raises(UsageError, match="size 7, which 4 shards"):
        constrain(jnp.asarray(odd), Layout(AUTO, "data"))


def test_without_jit():
    with jax.disable_jit():
        y = jax.jit(lambda x: constrain(x, Layout(AUTO, "data", "model")))(whole(AUTO))
    np.testing.assert_array_equal(y, whole(AUTO))


def test_inside_shard_map_the_other_axes_can_be_pinned():
    layout, seen = Layout(AUTO, None, "model"), []

    def body(x):
        y = constrain(x * 2, layout)
        with pytest.raises(UsageError, match="axes data are Manual inside this shard_map"):
            constrain(x, Layout(AUTO, "data", None))
        seen.append(y.shape)
        return y

    mapped = jax.shard_map(
        body, mesh=jax_mesh(AUTO), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    y = jax.jit(mapped)(whole(AUTO))
    np.testing.assert_array_equal(y, np.asarray(whole(AUTO)) * 2)
    assert seen[0] == (2, 8)


def test_problems_raise_while_tracing():
    tree = {"a": jnp.ones((8, 8)), "b": jnp.ones(8)}
    with pytest.raises(UsageError, match=r"\['b'\]: shape \(8,\) has rank 1"):
        jax.jit(lambda t: constrain(t, Layout(AUTO, "data", None)))(tree)
    with pytest.raises(UsageError, match="dim 0 is split by an Auto axis before an Explicit one"):
        jax.jit(lambda x: constrain(x, Layout(MIXED, ("model", "data"), None)))(whole(MIXED))
    with use_mesh(AUTO), pytest.raises(UsageError, match=r"no axis 'dat'.*did you mean 'data'"):
        jax.jit(lambda x: constrain(x, ("dat", None)))(jnp.ones((8, 8)))
    with pytest.raises(UsageError, match=r"\['n'\]: holds 1e\+39, which does not fit float32"):
        jax.jit(lambda: constrain({"n": np.full(8, 1e39)}, Layout(AUTO, "data")))()


@pytest.mark.parametrize("axes", [{"data"}, {"data", "model"}], ids=["partly", "wholly"])
@pytest.mark.parametrize("mesh", [AUTO, Mesh({"x": 8})], ids=["same", "other"])
def test_inside_shard_map_none_clears_too(axes, mesh):
    mapped = jax.shard_map(
        lambda x: constrain(x * 2, None), mesh=jax_mesh(AUTO), in_specs=P("data"),
        out_specs=P("data"), axis_names=axes,
    )  # fmt: skip
    with use_mesh(mesh):
        y = jax.jit(mapped)(whole(AUTO))
    np.testing.assert_array_equal(y, np.asarray(whole(AUTO)) * 2)


def test_inside_shard_map_layouts_are_of_its_mesh():
    mapped = jax.shard_map(
        lambda x: constrain(x, Layout(Mesh({"x": 8}), "x", None)), mesh=jax_mesh(AUTO),
        in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"this shard_map over data=4, model=2 .* \(Mesh\(x=8"):
        jax.jit(mapped)(whole(AUTO))


@pytest.mark.parametrize("gradient", [False, True])
def test_compiled_cotangent_has_the_pinned_layout(gradient):
    x = whole(AUTO, (16, 8))

    def back(ct):
        return jax.vjp(lambda x: constrain(x, Layout(AUTO, "data", None), gradient=gradient), x)[1](
            jnp.sin(ct)
        )

    text = jax.jit(back).lower(x).compile().as_text()
    assert ("f32[4,8]" in text) is gradient
    assert "all-gather" not in text


@pytest.mark.parametrize("rank", [0, 1, 3, 6, 8])
def test_any_rank(rank):
    shape = (4, 2, *[1] * rank)[:rank]
    layout = Layout(AUTO, *("data", "model", *[None] * rank)[:rank])
    y = jax.jit(lambda x: constrain(x + 1, layout))(whole(AUTO, shape))
    assert layout_of(y) == layout
    np.testing.assert_array_equal(y, np.asarray(whole(AUTO, shape)) + 1)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "dims", [(("data", "model"), None), (("data", "model"), "seq"), ("data", ("model", "seq"))]
)
def test_auto_axes_split_on_what_explicit_ones_have_split(dims, inside):
    mesh = Mesh({"data": 2, "model": 2, "seq": 2}, axis_types={"data": "explicit"})
    layout, x = Layout(mesh, *dims), whole(mesh)

    def pinned(x):
        return constrain(x, layout)

    y = (jax.jit(pinned) if inside else pinned)(x)
    assert layout_of(y) == layout
    np.testing.assert_array_equal(y, x)
    with jax.set_mesh(jax_mesh(mesh)):
        slope = jax.jit(jax.grad(lambda x: (constrain(x, layout, gradient=True) ** 2).sum()))(x)
    np.testing.assert_array_equal(slope, 2 * np.asarray(x))


def test_only_the_explicit_axes_of_a_layout_must_divide_inside_jit():
    x = put(np.arange(12, dtype=np.float32).reshape(4, 3), Layout(MIXED, None, None))
    y = jax.jit(lambda x: constrain(x, Layout(MIXED, "data", "model")) * 2)(x)
    np.testing.assert_array_equal(y, np.asarray(x) * 2)
    assert jax.typeof(y).sharding.spec == P("data", None)


@pytest.mark.parametrize("gradient", [False, True])
def test_the_program_says_whether_the_cotangent_is_pinned(gradient):
    def pinned(x):
        return constrain(x, Layout(AUTO, "data", None), gradient=gradient)

    forward = jax.jit(pinned).lower(whole(AUTO)).as_text()
    back = jax.jit(lambda x, ct: jax.vjp(pinned, x)[1](ct), keep_unused=True)
    pin = 'sdy.sharding_constraint %arg{} <@mesh, [{{"data"}}, {{}}]>'
    assert forward.count(pin.format(0)) == 1
    text = back.lower(whole(AUTO), whole(AUTO)).as_text()
    assert text.count(pin.format(1)) == gradient  # %arg1 is the cotangent


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_outside_jit_none_gives_an_ordinary_array(mesh):
    x = put(
        {"w": np.arange(8, dtype=np.float32), "k": jax.random.key(3)},
        lambda path, x: Layout.replicated(mesh, x.ndim),
    )
    y = constrain(x, None)
    assert not y["w"].committed
    assert y["w"].sharding.device_set == {jax.devices()[0]}
    np.testing.assert_array_equal(y["w"], x["w"])
    assert jax.random.key_data(y["k"]).tolist() == jax.random.key_data(x["k"]).tolist()
    other = put(np.ones(8, np.float32), Layout(Mesh({"x": 2}, device_ids=[5, 6]), "x"))
    assert (y["w"] + other).sharding == other.sharding
    assert constrain(y, None)["w"] is y["w"]


@pytest.mark.parametrize("gradient", [False, True])
def test_an_ordinary_array_has_the_derivative_of_the_identity(gradient):
    x = whole(AUTO)
    slope = jax.grad(lambda x: (constrain(x, None, gradient=gradient) ** 2).sum())(x)
    np.testing.assert_array_equal(slope, 2 * np.asarray(x))
    batch = jax.vmap(lambda x: constrain(x, None) * 2)(x)
    np.testing.assert_array_equal(batch, 2 * np.asarray(x))


@pytest.mark.parametrize("gradient", [False, True])
def test_inside_a_region_over_all_axes_there_is_nothing_to_pin(gradient):
    rows, whole = Layout(AUTO, "data", None), Layout(AUTO, None, None)
    run = manual(lambda x: constrain(x, whole, gradient=gradient), rows, rows)
    batch = np.ones((2, 8, 4), np.float32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(run))(batch), batch)


def test_outside_jit_arrays_on_other_devices_are_for_relayout():
    rows = Layout(AUTO, "data", None)
    turned = Mesh(AUTO.axes, device_ids=AUTO.device_ids[::-1])
    for array in (
        jax.device_put(np.ones((8, 4), np.float32), jax.devices()[3]),
        put(np.ones((8, 4), np.float32), Layout(turned, "data", None)),
    ):
        with pytest.raises(UsageError, match=r"the array: is on other devices .*relayout moves"):
            constrain(array, rows)


@pytest.mark.parametrize("to", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_outside_jit_the_mesh_of_jax_set_mesh_does_not_matter(to):
    rows = Layout(to, "data", "model")
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    others = [jax_mesh(Mesh({"q": 2, "r": 4}, axis_types="explicit")), jax_mesh(EXPLICIT)]
    for mesh in others:
        with jax.set_mesh(mesh):
            for value in (values, jnp.asarray(values), whole(AUTO), whole(EXPLICIT)):
                made = constrain(value, rows)
                np.testing.assert_array_equal(made, values)
                assert layout_of(made) == rows


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("axes", [AXES, {"q": 8}], ids=["same axes", "other axes"])
def test_auto_axes_inside_jit_where_all_are_explicit(axes, gradient):
    def pinned(x):
        return constrain({"w": x * 2}, Layout(AUTO, "data", None), gradient=gradient)["w"]

    value = np.ones((8, 4), np.float32)
    with jax.set_mesh(jax_mesh(Mesh(axes, axis_types="explicit"))):
        for program in (jax.jit(pinned), jax.jit(jax.grad(lambda x: pinned(x).sum()))):
            with pytest.raises(
                UsageError, match=r"\['w'\]: Layout\(data, - @ .* has Auto axes"
            ) as c:
                program(value)
            words = ", ".join(f"{axis}={size}" for axis, size in axes.items())
            assert f"and here (jax.set_mesh) the axes {words} are Explicit" in str(c.value)
            assert "make its mesh with axis_types='explicit', or set an Auto one" in str(c.value)
        same = jax.jit(lambda x: constrain(x * 2, Layout(AUTO, None, None)))(value)
        np.testing.assert_array_equal(same, value * 2)  # it is what the type says


def test_pending_sums_are_for_explicit_axes_inside_jit():
    pending, whole = Layout(EXPLICIT, None, partial={"data": "sum"}), Layout(EXPLICIT, None)
    value = np.arange(4, dtype=np.float32)
    with jax.set_mesh(sharding_of(whole).mesh):
        for given in (value, put(value, whole)):
            there_and_back = jax.jit(lambda x: constrain(constrain(x, pending), whole))(given)
            np.testing.assert_array_equal(there_and_back, value)
    with pytest.raises(UsageError, match="partial over data; values are never partial"):
        constrain(value, pending)


def test_rounded_floats_warn():
    with pytest.warns(DtypeWarning, match=r"constrain: .*float64 becomes float32"):
        assert constrain(np.ones(4), Layout(AUTO, "data")).dtype == np.float32
    assert constrain(np.arange(4), Layout(AUTO, "data")).dtype == np.int32


def test_a_host_value_may_be_changed_afterwards():
    memory = np.zeros((1 << 22) + 64, np.uint8)
    value = memory[-memory.ctypes.data % 64 :][: 1 << 22].view(np.float32)  # JAX would share it
    for layout in (Layout(AUTO, "data"), Layout(AUTO, None), None):
        value[:] = 1
        made = constrain(value, layout)
        value[:] = 2
        assert float(made.max()) == 1


def test_outside_jit_it_is_compiled_once(caplog):
    placed = [put(np.full((8, 8), n, np.float32), Layout(MIXED, "data", None)) for n in range(3)]
    target = Layout(MIXED, "data", "model")
    constrain(placed[0], target)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        made = [constrain(array, target) for array in placed]
    assert [record.message for record in caplog.records if "ompil" in record.message] == []
    assert [float(np.asarray(array)[0, 0]) for array in made] == [0, 1, 2]
    assert [layout_of(array) for array in made] == [target] * 3
