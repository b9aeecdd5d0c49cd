"""What torch_xla's names do with arrays, on 8 devices of one process."""

from __future__ import annotations

import copy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
import shoal.compat.torch_xla as xs
from compat.torch_xla_cases import mesh_of, of_kind, one, spec_of
from shoal.compat.torch_xla import runtime as xr
from shoal.compat.torch_xla.errors import NoMeaningHere, SpmdError
from shoal.runtime import process

GRID = xs.Mesh(range(8), (4, 2), ("x", "y"))
TURNED = xs.Mesh([7, 6, 5, 4, 3, 2, 1, 0], (4, 2), ("x", "y"))
VALUE = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)


def holds(array, mesh, spec, value=VALUE):
    """Is it this value, laid out as the mesh and the spec say?"""
    assert isinstance(array, jax.Array)
    np.testing.assert_array_equal(np.asarray(array), value)
    wanted = mesh.get_op_sharding(spec).layout
    assert xs.wrap_if_sharded(array).sharding_spec == str(mesh.get_op_sharding(spec))
    assert shoal.layout_of(array).axes_of_dims == wanted.axes_of_dims


@pytest.mark.parametrize("mesh", [GRID, TURNED, xs.Mesh([5, 2], (2, 1), ("x", "y"))])
@pytest.mark.parametrize("spec", [("x", "y"), ("y", None), (("x", 1), None), (None, None), (0, 1)])
def test_mark_sharding(mesh, spec):
    marked = xs.mark_sharding(VALUE, mesh, spec)
    holds(marked, mesh, spec)
    holds(xs.mark_sharding(jnp.asarray(VALUE), mesh, spec, use_dynamo_custom_op=True), mesh, spec)
    again = xs.mark_sharding(marked, mesh, spec)
    assert again.sharding == marked.sharding
    turned = xs.annotate_custom_sharding(marked, mesh, spec[::-1])  # no need to clear it first
    holds(turned, mesh, spec[::-1])
    holds(xs.mark_sharding_with_gradients(VALUE, mesh, spec), mesh, spec)


def test_inside_jit():
    @jax.jit
    def program(x):
        y = xs.mark_sharding(x + 1, GRID, ("x", None))
        return y, xs.clear_sharding(y) * 2, xs.annotate_custom_sharding(y, GRID, ("y", "x"))

    uneven = program(jnp.zeros((7, 5)))  # inside jit dims need not divide evenly
    assert [result.shape for result in uneven] == [(7, 5)] * 3
    y, _, third = program(jnp.zeros((8, 8)))
    assert str(xs.XLAShardedTensor(y).sharding_spec) == str(GRID.get_op_sharding(("x", None)))
    assert xs.XLAShardedTensor(third).sharding_spec == str(GRID.get_op_sharding(("y", "x")))


def test_gradients_are_marked_where_asked():
    def loss(x, mark):
        return (mark(x, GRID, ("x", None)) ** 2).sum()

    x = jnp.ones((8, 8))
    for mark in (xs.mark_sharding_with_gradients, xs.MarkShardingFunction.apply):
        text = jax.jit(jax.grad(loss), static_argnums=1).lower(x, mark).as_text()
        assert text.count("sharding_constraint") == 2
    text = jax.jit(jax.grad(loss), static_argnums=1).lower(x, xs.mark_sharding).as_text()
    assert text.count("sharding_constraint") == 1
    slope = jax.grad(loss)(x, xs.mark_sharding_with_gradients)  # outside jit, too
    holds(slope, GRID, ("x", None), 2 * np.ones((8, 8)))
    ctx = types.SimpleNamespace()
    holds(xs.MarkShardingFunction.forward(ctx, VALUE, GRID, ("x", None)), GRID, ("x", None))
    back = xs.MarkShardingFunction.backward(ctx, VALUE)
    holds(back[0], GRID, ("x", None))
    assert back[1:] == (None, None)


def test_clear_sharding_gives_an_ordinary_array():
    marked = xs.mark_sharding(VALUE, GRID, ("x", "y"))
    view = xs.wrap_as_sharded_tensor(marked)
    cleared = xs.clear_sharding(view)
    assert not cleared.committed
    np.testing.assert_array_equal(cleared, VALUE)
    assert (view.sharding_spec, view.sharding_type, view.partition_spec) == ("", None, None)
    assert not xs.clear_sharding(marked).committed


def test_shard_as():
    def program(x):
        one, other = xs.shard_as({"w": xs.mark_sharding(x, GRID, ("x", None))}, {"w": x * 0})
        return one["w"], other["w"]

    _, other = jax.jit(program)(jnp.asarray(VALUE))
    assert shoal.layout_of(other).dims == ("x", None)
    with pytest.raises(AssertionError, match=r"torch_xla shard_as \(shoal.shard_alike\)"):
        xs.shard_as({"w": VALUE}, {"v": VALUE})


@pytest.mark.parametrize("mesh", [GRID, TURNED])
def test_manual_sharding(mesh):
    shards = xs.enable_manual_sharding(VALUE, ("x", None), mesh=mesh)
    assert [shard.shape for shard in shards] == [(2, 8)] * 8
    whole = xs.disable_manual_sharding(
        [shard * 2 for shard in shards], ("x", None), (8, 8), mesh=mesh
    )
    holds(whole, mesh, ("x", None), VALUE * 2)
    with pytest.raises(RuntimeError, match="make"):
        xs.disable_manual_sharding(shards, ("x", None), (7, 8), mesh=mesh)
    with pytest.raises(ValueError, match="manual"):
        jax.jit(lambda x: xs.enable_manual_sharding(x, ("x", None), mesh=mesh))(VALUE)
    with pytest.raises(NotImplementedError, match=r"shoal.manual"):
        xs._mark_manual_sharding(whole)


@pytest.mark.parametrize("mesh", [GRID, TURNED])
@pytest.mark.parametrize("spec", [("x", "y"), ("y", None), (None, None)])
def test_shards_of_a_view(mesh, spec):
    view = xs.wrap_as_sharded_tensor(xs.mark_sharding(VALUE, mesh, spec))
    shards = view.local_shards
    assert [shard.shard_device for shard in shards] == [f"CPU:{n}" for n in range(8)]
    for shard in shards:
        index = shard.indices if shard.indices is Ellipsis else tuple(shard.indices)
        np.testing.assert_array_equal(shard.unpadded_data, VALUE[index])
        assert (shard.indices is Ellipsis) == (spec == (None, None))
        assert shard.indices is Ellipsis or {one.step for one in shard.indices} == {1}
        shard.unpadded_data = shard.unpadded_data + 100
    np.testing.assert_array_equal(view.global_tensor, VALUE)  # a copy: nothing is written back
    before = view.global_tensor.sharding
    assert view.load_local_shards_(shards) is view
    np.testing.assert_array_equal(view.global_tensor, VALUE + 100)
    assert view.global_tensor.sharding == before


def test_a_view_that_is_wrapped_again_follows_its_array():
    view = xs.wrap_as_sharded_tensor(xs.mark_sharding(VALUE, GRID, ("x", None)))
    assert xs.wrap_as_sharded_tensor(view) is view
    assert xs.wrap_as_sharded_tensor(view, mesh_shape=(8,)).mesh_shape == (8,)
    view.global_tensor = xs.mark_sharding(VALUE, GRID, (None, "y"))
    assert (view.mesh_shape, view.partition_spec) == ((8,), (None, "y"))


def test_shards_that_do_not_fit():
    view = xs.XLAShardedTensor(xs.mark_sharding(VALUE, GRID, ("x", None)))
    with pytest.raises(RuntimeError, match="for all local devices: 8, not 7"):
        view.load_local_shards_(view.local_shards[:7])
    case = one("0579")  # shards of 4 for an array of 5 that every device holds
    mesh = xs.get_1d_mesh("d")
    whole = xs.XLAShardedTensor(xs.mark_sharding(np.zeros(5, np.float32), mesh, (None,)))
    shards = [xs.XLAShard(np.float32(v), ..., "", 0) for v in case["shard_values"]]
    with pytest.raises(RuntimeError, match=r"shard 0 must be float32\[5\].*not float32\[4\]"):
        whole.load_local_shards_(shards)
    torn = whole.local_shards
    torn[3].data += 1
    with pytest.raises(RuntimeError, match="replicas"):
        whole.load_local_shards_(torn)


@of_kind("xla_shard_unpadded")
def test_xla_shard_unpadded(case):
    shard = xs.XLAShard(np.arange(4.0), [slice(0, 3)], "CPU:0", 0)
    if "unpadded" in case["expected"]:
        assert shard.unpadded_data.tolist() == case["expected"]["unpadded"]
    else:
        shard.unpadded_data = np.ones(3)
        assert shard.data.tolist() == case["expected"]["data_after_set"]


@of_kind("placements_property")
def test_placements_of_named_specs(case):
    view = xs.wrap_if_sharded(xs.mark_sharding(np.zeros(case["tensor_shape"], np.float32),
                                               mesh_of(case), spec_of(case)))  # fmt: skip
    assert view.placements == (xs.Shard(0), xs.Shard(1))  # there: replicated, which is wrong


def test_redistribute_leaves_the_view_as_it_is():
    view = xs.XLAShardedTensor(xs.mark_sharding(VALUE, GRID, ("x", "y")))
    moved = view.redistribute(GRID, [xs.Replicate(), xs.Shard(-1)])
    holds(moved.global_tensor, GRID, (None, "y"))
    holds(view.global_tensor, GRID, ("x", "y"))
    assert (view._spec.dims, view.mesh_shape, view.partition_spec) == (
        ("x", "y"),
        (4, 2),
        ("x", "y"),
    )
    view.invalidate_spec_cache()
    both = view.redistribute(GRID, [xs.Shard(0), xs.Shard(0)], async_op=True)
    holds(both.global_tensor, GRID, (("x", "y"), None))  # there the first is lost
    assert both.placements == (xs.Shard(0), xs.Shard(0))
    with pytest.raises(ValueError, match=r"placements \(1\) must match mesh dimensions \(2\)"):
        view.redistribute(GRID, [xs.Shard(0)])
    with pytest.raises(IndexError, match="Shard dimension 2 is out of bounds"):
        view.redistribute(GRID, [xs.Shard(2), xs.Replicate()])
    partial = type("Partial", (), {})()  # torch's
    with pytest.raises(NotImplementedError, match="Unsupported placement type"):
        view.redistribute(GRID, [partial, xs.Replicate()])
    for plain in (jnp.ones(3), xs.clear_sharding(xs.mark_sharding(VALUE, GRID, ("x", None)))):
        with pytest.raises(ValueError, match="on no mesh"):
            xs.XLAShardedTensor(plain).placements  # noqa: B018
    turned = xs.XLAShardedTensor(xs.mark_sharding(VALUE, GRID, (("y", "x"), None)))
    with pytest.raises(SpmdError, match="against the order of the mesh"):
        turned.placements  # noqa: B018


def test_the_spec_on_a_mesh_without_names_has_indices():
    mesh = xs.Mesh(np.arange(8), (4, 2))
    view = xs.XLAShardedTensor(xs.mark_sharding(VALUE, mesh, (0, None)))
    assert view.partition_spec == (0, None)
    both = xs.XLAShardedTensor(xs.mark_sharding(VALUE, mesh, ((0, 1), None)))
    assert both.partition_spec == ((0, 1), None)


def test_the_path_of_the_module_is_there():
    import shoal.compat.torch_xla.xla_sharding as module

    for name in module.__all__:
        assert getattr(module, name) is getattr(xs, name), name


def test_views_wrap_and_unwrap():
    marked = xs.mark_sharding(VALUE, GRID, ("x", None))
    view = xs.wrap_as_sharded_tensor(marked, mesh_shape=(4, 2), partition_spec=(0, None))
    assert view.partition_spec == (0, None)
    assert xs.wrap_as_sharded_tensor(view, partition_spec=("x", None)) is view
    assert view.partition_spec == ("x", None)
    assert xs.unwrap_sharded_tensor(view) is marked
    assert xs.unwrap_sharded_tensor(VALUE) is VALUE
    assert isinstance(xs.wrap_if_sharded(marked), xs.XLAShardedTensor)
    assert xs.wrap_if_sharded(jnp.ones(3)).shape == (3,)
    assert not isinstance(xs.wrap_if_sharded(jnp.ones(3)), xs.XLAShardedTensor)
    assert xs.wrap_if_sharded("text") == "text"
    assert jnp.asarray(view) is marked
    np.testing.assert_array_equal(np.asarray(view), VALUE)
    assert (view.shape, view.dtype, view.sharding_type) == (
        (8, 8), np.float32, xs.ShardingType.PARTIAL,
    )  # fmt: skip
    assert copy.deepcopy(view).sharding_spec == view.sharding_spec
    assert xs.mark_sharding(view, GRID, (None, "y")) is view  # the view holds the result
    holds(view.global_tensor, GRID, (None, "y"))
    for refused in (xs.XLAShardedTensor.__torch_dispatch__, xs.XLAShardedTensor.__torch_function__):
        with pytest.raises(NoMeaningHere, match=r"jax\.numpy"):
            refused(None, ())


def test_views_are_used_as_the_arrays_that_they_show():
    marked = xs.mark_sharding(VALUE, GRID, ("x", None))
    view = xs.wrap_if_sharded(marked)
    for found in (view + 1, 1 + view, jnp.add(view, 1), jax.jit(lambda v: v + 1)(view)):
        holds(found, GRID, ("x", None), VALUE + 1)
    np.testing.assert_allclose(jnp.sin(view).T, jnp.sin(VALUE).T, rtol=1e-6)
    np.testing.assert_array_equal(jnp.concatenate([view, marked]), np.concatenate([VALUE] * 2))
    np.testing.assert_array_equal(VALUE @ view, VALUE @ marked)
    np.testing.assert_array_equal(view == VALUE, np.ones((8, 8), bool))
    assert (float(view[0, 1]), view.ndim, len(view), float(view.sum())) == (1, 2, 8, VALUE.sum())
    assert {view: 3}[view] == 3
    slope = jax.grad(lambda v: (v * v).sum())(view)
    holds(slope.global_tensor, GRID, ("x", None), 2 * VALUE)
    turned = jax.jit(lambda v: xs.mark_sharding(v, GRID, (1, 0)))(view)
    holds(turned.global_tensor, GRID, ("y", "x"))
    assert (turned.mesh_shape, turned.partition_spec) == ((4, 2), ("y", "x"))
    assert view.partition_spec == ("x", None)
    with pytest.raises(
        AttributeError, match=r"neither XLAShardedTensor nor jax.Array has .*'cuda'"
    ):
        view.cuda()


def test_a_view_outlives_no_tracer():
    view = xs.wrap_if_sharded(xs.mark_sharding(VALUE, GRID, ("x", None)))
    found = jax.jit(lambda: xs.mark_sharding(view, GRID, ("y", None)) * 2)()
    np.testing.assert_array_equal(found, VALUE * 2)
    jax.jit(lambda: xs.clear_sharding(view) + xs.annotate_custom_sharding(view, GRID, (None, 0)))()
    holds(view.global_tensor, GRID, ("x", None))
    jax.grad(lambda x: (x * xs.mark_sharding(view, GRID, ("y", None))).sum())(VALUE)
    holds(view.global_tensor, GRID, ("y", None))  # grad alone runs eagerly


@pytest.mark.parametrize("clear", [xs.clear_sharding, lambda x: shoal.constrain(x, None)])
def test_clearing_names_no_devices_that_a_program_does_not_run_on(clear):
    half = xs.Mesh(range(4), (4,), ("x",))
    marked = xs.mark_sharding(VALUE, GRID, ("x", None))
    xs.set_global_mesh(half)
    with shoal.use_mesh(half.on_devices()):
        found = jax.jit(lambda x: clear(x + 1) * 2)(marked)
        np.testing.assert_array_equal(found, (VALUE + 1) * 2)

        @jax.jit
        def program(x):
            return clear(xs.mark_sharding(x, GRID, ("x", None))) + clear(x)

        np.testing.assert_array_equal(program(VALUE), 2 * VALUE)
        on_half = jax.jit(lambda x: clear(xs.mark_sharding(x, half, ("x", None))))
        np.testing.assert_array_equal(on_half(VALUE), VALUE)
        assert on_half.lower(VALUE).as_text().count("sharding_constraint") == 2
    xs.set_global_mesh(None)


@of_kind("input_sharding")
def test_a_minibatch_on_a_reordered_mesh_keeps_its_rows(case):
    spec = xs.ShardingSpec(mesh_of(case), spec_of(case), minibatch=case["minibatch"])
    value = np.arange(64, dtype=np.float32).reshape(case["expected"]["global_shape"])
    placed = spec.apply(value)
    np.testing.assert_array_equal(placed, value)  # there: data_preserved is false
    assert xs.wrap_if_sharded(placed).sharding_spec == case["expected"]["op_sharding"]


def test_sharding_specs_apply():
    holds(xs.ShardingSpec(GRID, ("x", "y")).apply(VALUE), GRID, ("x", "y"))
    assert not xs.ShardingSpec(GRID, ("x",)).can_apply(VALUE)
    with pytest.raises(AssertionError, match="Partition spec length"):
        xs.ShardingSpec(GRID, ("x",)).apply(VALUE)
    with pytest.raises(RuntimeError, match="along the batch dimension"):
        xs.ShardingSpec(GRID, (None, "x"), minibatch=True).apply(VALUE)


def test_placements_of_torch_are_taken_for_ours():
    torch_s = types.SimpleNamespace(dim=1, is_shard=lambda: True, is_replicate=lambda: False)
    torch_r = types.SimpleNamespace(is_shard=lambda: False, is_replicate=lambda: True)
    pending = types.SimpleNamespace(is_shard=lambda: False, is_replicate=lambda: False)
    assert xs.convert_to_xla_partition_spec(VALUE, [torch_s, torch_r]) == (None, 0)
    with pytest.raises(ValueError, match="Unsupported placement type"):
        xs.convert_to_xla_partition_spec(VALUE, [pending])
    mesh = types.SimpleNamespace(mesh=np.arange(8).reshape(4, 2), mesh_dim_names=("x", "y"))
    assert xs.convert_to_xla_mesh(mesh) == GRID
    holds(xs.xla_distribute_tensor(VALUE, mesh, [torch_r, torch_s]), GRID, (None, "y"))
    holds(xs.xla_distribute_tensor(VALUE, GRID), GRID, (None, None))
    with pytest.raises(AssertionError, match="1 placements for the 2 axes"):
        xs.xla_distribute_tensor(VALUE, mesh, [torch_r])
    with pytest.raises(TypeError, match="no mesh of device ids"):
        xs.convert_to_xla_mesh(3)


@pytest.mark.parametrize(
    "text",
    ["{devices=[4]0,1,2,3}", "{devices=[2,2]<=[4]}", "{devices=[2,2,2]0,1,2,3,4,5,6,7}",
     "{devices=[2,2]0,2,1,3 last_tile_dim_replicate}", "{replicated}", "{maximal device=3}"],
)  # fmt: skip
def test_pictures(text, capsys):
    picture = xs.visualize_sharding(text, use_color=False, max_width=100)
    assert capsys.readouterr().out == picture + "\n"
    devices = set(map(int, text[text.index("]") + 1 :].split(" ")[0].strip("}").split(","))) if (
        "=[" in text and "<=" not in text) else set()  # fmt: skip
    assert all(str(device) in picture for device in devices)


def test_pictures_of_arrays(capsys):
    marked = xs.mark_sharding(VALUE, TURNED, ("x", None))
    assert xs.visualize_tensor_sharding(xs.wrap_if_sharded(marked)) == shoal.describe(marked)
    assert shoal.describe(marked) in capsys.readouterr().out
    for text in ("{manual}", "garbage", "{devices=[2,2]0,1}"):
        with pytest.raises(ValueError, match=r"visualize_sharding \(shoal.describe\)"):
            xs.visualize_sharding(text)


def test_functions_without_a_meaning_raise_or_do_nothing():
    xr.use_spmd()
    assert xr.is_spmd()
    with pytest.raises(NotImplementedError, match=r"shoal\.match_layouts"):
        xr.use_spmd(auto=True)
    with pytest.raises(NotImplementedError, match=r"shoal\.match_layouts"):
        xs.auto_policy("w", None, None)
    assert xs.with_xla(len)((1, 2)) == 2
    assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == 8
    assert [row["name"] for row in xr.global_runtime_device_attributes()][-1] == "CPU:7"
    assert (process.process_index(), process.process_count()) == (0, 1)


@pytest.mark.parametrize(
    ("name", "args", "ours"),
    [
        ("MpDeviceLoader", ([], "xla"), "feed"),
        ("ParallelLoader", ([], ["xla"]), "feed"),
        ("SpmdFullyShardedDataParallel", (None,), "match_layouts"),
        ("SPMDSavePlanner", (), "save"),
        ("SPMDLoadPlanner", (), "restore"),
        ("prime_optimizer", (None,), "restore"),
        ("send_cpu_data_to_device", ([], "xla"), "put"),
        ("auto_policy", ("w", None, None), "match_layouts"),
        ("get_master_ip", (), "initialize"),
    ],
)
def test_names_without_a_meaning_exist_and_say_what_to_write(name, args, ours):
    refused = getattr(xr if hasattr(xr, name) else xs, name)
    with pytest.raises(NotImplementedError, match=rf"^torch_xla {name} \(shoal\.{ours}\): \w"):
        refused(*args)


def test_a_class_without_a_meaning_can_be_derived_from():
    class Wrapped(xs.SpmdFullyShardedDataParallel):
        pass

    with pytest.raises(NoMeaningHere, match="parameters are arguments here"):
        Wrapped(None, mesh=GRID)
