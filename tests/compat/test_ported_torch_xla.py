"""What torch_xla's own tests say of meshes, marks, shards, gradients and pictures."""

from __future__ import annotations

import copy
import importlib
import re
import types
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
import shoal.compat.torch_xla as xs
from shoal.compat.torch_xla import mesh as meshes
from shoal.compat.torch_xla import runtime as xr

torch = pytest.importorskip("torch")
LINE = xs.Mesh(range(8), (8,))
ROW = xs.Mesh(range(8), (1, 8))
GRID = xs.Mesh(range(8), (2, 4), ("a", "b"))
BRM = xs.Mesh(range(8), (1, 2, 4), ("r", "b", "m"))
ACROSS = [0, 4, 1, 5, 2, 6, 3, 7]  # the numbers of a 2x4 grid, column by column


@pytest.fixture(autouse=True)
def _no_global_mesh():
    yield
    xs.set_global_mesh(None)


def drawn(*shape, seed=0):
    """Return a torch tensor of normal numbers."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def view(tensor, mesh, spec):
    return xs.wrap_if_sharded(xs.mark_sharding(tensor, mesh, spec))


def spec_of(array):
    return xs.wrap_if_sharded(array).sharding_spec


def tiles(*dims, order=range(8), partial=False):
    """Return XLA's words for this split."""
    last = " last_tile_dim_replicate" if partial else ""
    return f"{{devices=[{','.join(map(str, dims))}]{','.join(map(str, order))}{last}}}"


# ---- Meshes.


@pytest.mark.parametrize("names", [("rows", "columns"), None])
def test_a_mesh_keeps_what_it_was_made_of(names):
    mesh = xs.Mesh(np.arange(8), (2, 4), names)
    assert mesh.device_ids.tolist() == [*range(8)]
    assert (mesh.mesh_shape, mesh.axis_names, mesh.size()) == ((2, 4), names, 8)
    assert mesh.shape() == OrderedDict(zip(names or range(2), (2, 4), strict=True))
    assert mesh.get_logical_mesh().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("ids", [[0, 1], [2, 3], [*range(8)]])
def test_arguments_that_do_not_make_a_mesh_are_assertion_errors(ids):
    shape = (1, len(ids))
    bad = {
        r"number of axis names \(3\) must match mesh dimensions \(2\)": (ids, shape, [*"abc"]),
        "axis 'a' is repeated": (ids, shape, ("a", "a")),
        f"{len(ids)} device ids for ": (ids, (2, len(ids))),
        f"device ids are repeated: {ids[-1]}": ([ids[-1]] * len(ids), shape),
    }
    for words, arguments in bad.items():
        with pytest.raises(AssertionError, match=words):
            xs.Mesh(*arguments)


@pytest.mark.differs("devices of a `Mesh`")
@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [4, 5]])
def test_a_mesh_may_have_some_of_the_devices(ids):
    mesh = xs.Mesh(ids, (1, len(ids)))
    array = xs.mark_sharding(drawn(3, 4), mesh, (0, 1))
    assert sorted(device.id for device in array.devices()) == ids


@pytest.mark.differs("devices of a `Mesh`")
def test_numbers_of_no_device_are_refused_when_an_array_is_placed():
    mesh = xs.Mesh(np.arange(8) + 4, (1, 8))
    with pytest.raises(AssertionError, match=r"no device \[8, 9, 10, 11\]"):
        xs.mark_sharding(drawn(2, 8), mesh, (0, 1))


def test_the_one_dimensional_mesh_has_every_device():
    mesh = xs.get_1d_mesh("rows")
    assert (mesh.mesh_shape, mesh.axis_names) == ((xr.global_runtime_device_count(),), ("rows",))
    assert len(view(drawn(16, 2), mesh, ("rows", None)).local_shards) == mesh.size()
    plain = xs.get_1d_mesh()
    assert (plain.mesh_shape, plain.axis_names) == (mesh.mesh_shape, None)


def test_the_global_mesh_is_the_object_that_was_set():
    xs.set_global_mesh(GRID)
    assert xs.get_global_mesh() is GRID


def test_jax_has_the_same_mesh():
    for ids in (range(8), [3, 1, 7, 5, 0, 2, 6, 4]):
        mesh = xs.Mesh(ids, (8,), ("model",))
        theirs = mesh.get_jax_mesh()
        assert theirs.devices.shape == mesh.mesh_shape
        assert [device.id for device in theirs.devices.flat] == mesh.device_ids.tolist()
        names = [row["name"] for row in xr.global_runtime_device_attributes()]
        assert [names[n] for n in ids] == [f"CPU:{device.id}" for device in theirs.devices.flat]


def test_a_hybrid_mesh_of_one_slice_has_the_shape_of_a_mesh():
    for shape in ((1, 8), (2, 4)):
        mesh = xs.HybridMesh(ici_mesh_shape=shape)
        assert mesh.get_logical_mesh().shape == xs.Mesh(range(8), shape).get_logical_mesh().shape


def test_a_hybrid_mesh_puts_slices_first_whatever_their_numbers(monkeypatch):
    numbers = {0: [3, 0, 2, 1], 1: [6, 7, 5, 4]}  # of the chips (0,0) (1,0) (0,1) (1,1)
    chips = [
        types.SimpleNamespace(
            id=number, process_index=which, slice_index=which, platform="tpu",
            device_kind="TPU v4", core_on_chip=0, coords=(place % 2, place // 2, 0),
        )
        for which, ids in numbers.items()
        for place, number in enumerate(ids)
    ]  # fmt: skip
    chips.sort(key=lambda chip: chip.id)
    monkeypatch.setattr(meshes, "numbered_devices", lambda: chips)
    mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1))
    assert mesh.get_logical_mesh().tolist() == [[3, 0], [2, 1], [6, 7], [5, 4]]


# ---- The runtime.


def test_the_runtime_counts_one_process_and_all_its_devices():
    assert (xr.process_index(), xr.process_count()) == (0, 1)
    assert xr.global_runtime_device_count() == jax.device_count()
    assert xr.addressable_runtime_device_count() == jax.local_device_count()
    attributes = xr.global_runtime_device_attributes()
    assert len({row["name"] for row in attributes}) == len(attributes) == jax.device_count()


@pytest.mark.differs("`is_spmd` before `use_spmd`")
def test_every_program_is_spmd():
    assert xr.is_spmd()
    xr.use_spmd()
    assert xr.is_spmd()


@pytest.mark.differs("`use_spmd(auto=True)`")
def test_a_search_for_layouts_is_refused():
    with pytest.raises(NotImplementedError, match="not searched"):
        xr.use_spmd(auto=True)
    with pytest.raises(NotImplementedError, match="not searched"):
        xs.auto_policy("layer", None, GRID)
    with pytest.raises(NotImplementedError, match="initialize"):
        xr.get_master_ip()


# ---- Marks, and their words.

WORDS = [
    ((2, 24), ROW, (0, 1), tiles(1, 8)),
    ((2, 24), xs.Mesh(np.arange(8)[::-1], (1, 8)), (0, 1), tiles(1, 8, order=range(7, -1, -1))),
    ((3, 1, 6, 8), xs.Mesh(range(8), (1, 1, 2, 4)), (0, 1, 2, 3), tiles(1, 1, 2, 4)),
    ((24,), GRID, ((0, 1),), tiles(8)),
    ((6, 5), BRM, (("r", "b"), None), tiles(2, 1, 4, partial=True)),
    ((6, 5), BRM, ((0, 1), None), tiles(2, 1, 4, partial=True)),
    ((5, 16), BRM, (None, ("b", "m")), tiles(1, 8)),
    ((5, 16), BRM, (None, ("r", "m")), tiles(1, 4, 2, order=ACROSS, partial=True)),
    ((5, 16), BRM, (None, ("m", "b")), tiles(1, 8, order=ACROSS)),
    ((5, 16), BRM, (None, (2, 1)), tiles(1, 8, order=ACROSS)),
    ((4, 4), xs.Mesh(range(8), (1, 2, 4, 1), [*"abcd"]), (("a", "b"), ("c", "d")), tiles(2, 4)),
    ((3, 2, 4), GRID, (None, 0, 1), tiles(1, 2, 4)),
    ((3, 8), xs.Mesh(range(8), (2, 4, 1)), (2, 1), tiles(1, 4, 2, order=ACROSS, partial=True)),
    ((16, 3), xs.Mesh(range(8), (1, 8), ("d", "m")), ("m", "d"), tiles(8, 1)),
    ((16, 3), ROW, (1, 0), tiles(8, 1)),
    ((4, 3), GRID, (0, None), tiles(2, 1, 4, partial=True)),
    ((3, 4), GRID, (None, 0), tiles(1, 2, 4, partial=True)),
    ((3, 5, 6), xs.Mesh(range(8), (2, 1, 4)), (1, None, 0), tiles(1, 1, 2, 4, partial=True)),
    ((3, 4), ROW, (None, None), "{replicated}"),
    ((3, 4), ROW, (0, None), "{replicated}"),
    ((), ROW, (), "{replicated}"),
]


@pytest.mark.parametrize(("shape", "mesh", "spec", "words"), WORDS)
def test_a_marked_array_has_the_words_and_the_values(shape, mesh, spec, words):
    tensor = drawn(*shape)
    array = xs.mark_sharding(tensor, mesh, spec)
    assert spec_of(array) == words
    np.testing.assert_array_equal(array, tensor)
    np.testing.assert_allclose(array + array, 2 * tensor)
    for shard in xs.wrap_if_sharded(array).local_shards:
        index = shard.indices if shard.indices is Ellipsis else tuple(shard.indices)
        np.testing.assert_array_equal(shard.data, tensor[index])


def test_the_words_with_an_iota_are_those_of_shardy():
    for mesh, spec, words in [
        (ROW, (0, 1), "{devices=[1,8]<=[8]}"),
        (BRM, (("r", "b"), None), "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"),
        (BRM, (None, ("r", "m")), "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"),
        (BRM, (None, ("m", "b")), "{devices=[1,8]<=[2,4]T(1,0)}"),
        (GRID, ((0, 1),), "{devices=[8]<=[8]}"),
    ]:
        assert mesh.get_op_sharding(spec).iota_text == words


@pytest.mark.differs("`iota_text` of a mesh of reordered ids")
def test_the_words_of_turned_devices_list_them():
    turned = xs.Mesh(np.arange(8)[::-1], (1, 8))
    assert turned.get_op_sharding((0, 1)).iota_text == tiles(1, 8, order=range(7, -1, -1))


@pytest.mark.parametrize(
    ("mesh", "spec", "shape", "shard"),
    [
        (ROW, (1, 0), (24, 6), (3, 6)),
        (xs.Mesh(range(8), (2, 1, 4)), (1, 2, 0), (3, 8, 6), (3, 2, 3)),
        (xs.Mesh(range(8), (2, 1, 1, 4)), (3, 1, 2, 0), (12, 2, 3, 6), (3, 2, 3, 3)),
    ],
)
def test_dims_may_follow_the_axes_in_any_order(mesh, spec, shape, shard):
    tensor = drawn(*shape)
    marked = view(tensor, mesh, spec)
    assert {one.data.shape for one in marked.local_shards} == {shard}
    np.testing.assert_allclose(marked + marked, 2 * tensor)


def test_kinds_of_sharding():
    assert xs.XLAShardedTensor(drawn(4, 8)).sharding_type is None
    assert view(drawn(4, 8), GRID, (0, 1)).sharding_type is xs.ShardingType.TILED
    assert view(drawn(4, 8), GRID, (None, None)).sharding_type is xs.ShardingType.REPLICATED
    assert view(drawn(4, 8), GRID, (None, 1)).sharding_type is xs.ShardingType.PARTIAL


@pytest.mark.differs("`mark_sharding` of a tensor")
def test_a_marked_tensor_is_an_array_and_a_view_shows_it():
    array = xs.mark_sharding(drawn(1, 8), ROW, (0, 1))
    assert isinstance(array, jax.Array)
    assert isinstance(xs.wrap_if_sharded(array), xs.XLAShardedTensor)
    assert not isinstance(xs.wrap_if_sharded(array), torch.Tensor)


@pytest.mark.differs("what is computed from a view")
def test_only_views_are_printed_as_views():
    array = xs.mark_sharding(drawn(8, 4), LINE, (0, None))
    linear = xs.apply_xla_patch_to_nn_linear(torch.nn.Linear(4, 3))
    assert "XLAShardedTensor" in str(xs.wrap_if_sharded(array))
    for found in (linear(drawn(8, 4)), linear(array), xs.wrap_if_sharded(array) * 2):
        assert "XLAShardedTensor" not in str(found)


def test_a_linear_layer_takes_a_view():
    shown = view(drawn(8, 4), LINE, (0, None))
    layer = xs.apply_xla_patch_to_nn_linear(torch.nn.Linear(4, 3))
    np.testing.assert_allclose(layer(shown), layer(drawn(8, 4)), rtol=1e-5, atol=1e-6)


def test_arrays_that_are_not_marked_compute_as_ever():
    for one, other in (([[3.0, 1, 2]], [[7.0, 9, 8]]), ([*range(9)], [*range(9)])):
        found = jnp.asarray(torch.tensor(one).numpy()) + jnp.asarray(torch.tensor(other).numpy())
        assert found.tolist() == np.add(one, other).tolist()
        assert spec_of(xs.XLAShardedTensor(found)) == ""
    marked = xs.mark_sharding(torch.tensor([[4.0, 1, 3, 2, 8, 6, 7, 5]]), ROW, (0, 1))
    assert (marked + 0).tolist() == [[4, 1, 3, 2, 8, 6, 7, 5]]
    assert (marked / 0.5).tolist() == [[8, 2, 6, 4, 16, 12, 14, 10]]


def test_marked_and_unmarked_arrays_mix():
    one, other = drawn(4, 8, seed=1), drawn(4, 8, seed=2)
    plain = jnp.asarray(other.numpy())
    marked = xs.mark_sharding(one, ROW, (0, 1))
    np.testing.assert_allclose(marked + plain, one + other)
    np.testing.assert_allclose(marked + xs.mark_sharding(other, ROW, (0, 1)), one + other)


def test_a_product_over_a_part_of_the_devices_is_the_product():
    x, w, b = drawn(4, 8), drawn(8, 16, seed=1), drawn(4, 16, seed=2)
    wanted = (x @ w + b).numpy()
    rows, columns = xs.mark_sharding(x, GRID, (0, None)), xs.mark_sharding(w, GRID, (None, 1))
    shards = xs.wrap_if_sharded(rows).local_shards
    np.testing.assert_array_equal(shards[0].data, shards[1].data)  # of one group of replicas
    for right in (columns, jnp.asarray(w.numpy())):
        np.testing.assert_allclose(rows @ right + b.numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ids", [[0, 1], [2, 3]])
@pytest.mark.parametrize("both", [True, False])
def test_a_part_of_the_devices_computes_alone(ids, both):
    mesh = xs.Mesh(ids, (1, 2), ("x", "y"))
    one, other, third = (drawn(4, 4, seed=seed) for seed in range(3))
    a = xs.mark_sharding(one + 2, mesh, ("x", "y"))
    b, c = (
        xs.mark_sharding(t, mesh, ("x", "y")) if both else jnp.asarray(t.numpy())
        for t in (other, third)
    )
    np.testing.assert_allclose(a @ b, (one + 2) @ other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose((a + b) @ c, (one + 2 + other) @ third, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(2 * a + b, 2 * (one + 2) + other, rtol=1e-5)
    rows = xs.mark_sharding(one, mesh, ("x", None)) + 4.2
    np.testing.assert_allclose(rows, one + 4.2, rtol=1e-5)
    assert sorted(device.id for device in rows.devices()) == ids


def test_whole_numbers_arrive():
    given = torch.arange(48).reshape(8, 6)
    assert xs.mark_sharding(given, xs.Mesh(range(8), (8, 1)), (0, 1)).tolist() == given.tolist()


def test_a_scalar_lies_on_every_device():
    marked = view(torch.tensor(2.5), ROW, ())
    assert (float(marked), marked.sharding_type) == (2.5, xs.ShardingType.REPLICATED)
    shards = marked.local_shards
    assert [(float(s.data), s.indices, s.replica_id) for s in shards] == [
        (2.5, Ellipsis, number) for number in range(8)
    ]


def test_a_spec_of_another_length_than_the_rank_is_an_assertion_error():
    for mark in (xs.mark_sharding, xs.mark_sharding_with_gradients):
        with pytest.raises(AssertionError, match=r"Partition spec length \(1\).*input rank \(2\)"):
            mark(drawn(8, 8), GRID, (0,))


def test_clearing_takes_the_words_away():
    marked = view(drawn(2, 3, 5, 8), xs.Mesh(range(8), (1, 1, 1, 8)), (0, 1, 2, 3))
    assert marked.sharding_spec
    xs.clear_sharding(marked)
    assert not marked.sharding_spec


def test_a_replicated_array_can_be_marked_again():
    marked = view(drawn(2, 8), ROW, (None, None))
    xs.mark_sharding(marked, ROW, (0, 1))
    assert marked.sharding_spec == tiles(1, 8)


@pytest.mark.differs("`mark_sharding` of a marked tensor")
@pytest.mark.parametrize("mark", [xs.mark_sharding, xs.annotate_custom_sharding])
def test_another_mark_moves_the_array(mark):
    tensor = drawn(3, 8, 16)
    first, second = xs.Mesh(range(8), (1, 4, 2)), xs.Mesh(range(8), (1, 1, 8))
    array = xs.mark_sharding(tensor, first, (0, 1, 2))
    moved = mark(array, second, (0, 1, 2))
    assert (spec_of(array), spec_of(moved)) == (tiles(1, 4, 2), tiles(1, 1, 8))
    np.testing.assert_array_equal(moved, tensor)
    assert spec_of(jax.jit(lambda x: x * 2)(moved)) == tiles(1, 1, 8)


def test_a_mark_inside_a_program_follows_that_of_its_input():
    first, second = xs.Mesh(range(8), (4, 2)), xs.Mesh(range(8), (1, 8))
    array = xs.mark_sharding(drawn(8, 16), first, (0, 1))
    program = jax.jit(lambda x: xs.annotate_custom_sharding(x, second, (0, 1)))
    text = program.lower(array).as_text()
    assert re.search(r"@main\(%arg0.*sharding", text)
    assert text.count("sharding_constraint") == 1
    assert (spec_of(array), spec_of(program(array))) == (tiles(4, 2), tiles(1, 8))


def test_what_was_computed_before_the_mark_stays():
    plain = jnp.asarray(drawn(8, 6).numpy())
    fivefold = plain * 5
    assert not xs.XLAShardedTensor(plain).sharding_spec
    marked = xs.mark_sharding(plain, ROW, (1, 0))
    assert spec_of(marked) == tiles(8, 1)
    np.testing.assert_allclose(marked * 5, fivefold)
    np.testing.assert_array_equal(marked, plain)


def test_copies_keep_the_mark():
    array = xs.mark_sharding(drawn(2, 3, 8), xs.Mesh(range(8), (1, 1, 8)), (0, 1, 2))
    shown = xs.wrap_if_sharded(array)
    for again in (copy.deepcopy(array), copy.deepcopy(shown), jnp.copy(array), array + 1):
        assert spec_of(again) == spec_of(array) == tiles(1, 1, 8)


def test_equal_meshes_and_specs_share_one_op_sharding():
    one, other = (xs.Mesh(range(8), (1, 8)) for _ in range(2))
    assert one.get_op_sharding((0, 1)) is other.get_op_sharding((0, 1))
    assert one.get_op_sharding((0, None)) is not one.get_op_sharding((0, 1))


# ---- Marks inside programs.


def test_a_mark_on_a_computed_value_is_in_the_program():
    one, other = drawn(2, 16), drawn(2, 16, seed=1)
    program = jax.jit(lambda a, b: xs.mark_sharding(a + b, ROW, (0, 1)) * 1)
    text = program.lower(one.numpy(), other.numpy()).as_text()
    places = [text.index(word) for word in ("stablehlo.add", "sharding_constraint", "multiply")]
    assert places == sorted(places)
    found = program(one.numpy(), other.numpy())
    assert spec_of(found) == tiles(1, 8)
    np.testing.assert_allclose(found, one + other)


def test_only_the_marked_one_of_two_results_is_marked():
    def program(x):
        return xs.mark_sharding(x.max(1), LINE, (0,)), x.argmax(1)

    text = jax.jit(program).lower(drawn(8, 5).numpy()).as_text()
    assert text.count("sharding_constraint") == 1
    value, place = jax.jit(program)(drawn(8, 5).numpy())
    assert spec_of(value) == tiles(8)
    assert place.tolist() == drawn(8, 5).argmax(1).tolist()


def test_results_keep_the_layout_of_what_they_are_computed_from():
    a = xs.mark_sharding(drawn(64), GRID, ("a",))
    b = xs.mark_sharding(drawn(6, 64), GRID, (None, "b"))
    for found, given in zip(jax.jit(lambda x, y: (x + 1, y * 2))(a, b), (a, b), strict=True):
        assert spec_of(found) == spec_of(given)
    text = jax.jit(lambda x, y: (x + 1, y * 2)).lower(a, b).as_text()
    assert re.search(r'%arg0.*sharding<@mesh, \[{"a"}\]>.*%arg1.*\[{}, {"b"}\]>', text)


def test_a_program_for_a_marked_array_is_another_one():
    plain = jnp.ones((2, 8))
    marked = xs.mark_sharding(plain, ROW, (0, 1))
    program = jax.jit(lambda x: x + 0)
    np.testing.assert_array_equal(program(marked), program(plain))
    assert program.lower(marked).as_text() != program.lower(plain).as_text()


def test_a_split_contraction_is_summed_over_the_devices():
    x = xs.mark_sharding(drawn(1, 64), ROW, (0, 1))
    product = jax.jit(lambda x, w: x @ w).lower(x, jnp.ones((64, 1))).compile()
    assert "all-reduce" in product.as_text()


def test_a_marked_array_can_be_donated():
    array = xs.mark_sharding(drawn(4, 8), ROW, (0, 1))
    program = jax.jit(lambda x: x + 1, donate_argnums=0)
    found = program(array)
    assert array.is_deleted()
    assert spec_of(found) == tiles(1, 8)
    np.testing.assert_allclose(found, drawn(4, 8) + 1)


@pytest.mark.parametrize(("mesh", "spec"), [(LINE, (0, None)), (GRID, (("a", "b"), None))])
@pytest.mark.parametrize("mark", [xs.mark_sharding, xs.mark_sharding_with_gradients])
def test_pure_functions_may_mark(mark, mesh, spec):
    xs.set_global_mesh(mesh)
    found, back = jax.jit(lambda x: jax.vjp(lambda x: mark(x, mesh, spec), x))(jnp.ones((16, 3)))
    assert spec_of(found) == tiles(8, 1)
    np.testing.assert_array_equal(back(jnp.ones((16, 3)))[0], np.ones((16, 3)))


# ---- Gradients.


def test_the_gradient_of_a_marked_intermediate_is_marked():
    def loss(z):
        return xs.MarkShardingFunction.apply(z, ROW, (0, 1)).sum()

    x = jnp.asarray(drawn(8, 8).numpy())
    slope = jax.jit(jax.grad(loss))(x @ x)
    assert spec_of(slope) == tiles(1, 8)
    np.testing.assert_array_equal(slope, np.ones((8, 8)))


def test_forward_and_backward_programs_each_have_the_mark():
    def program(x):
        return xs.MarkShardingFunction.apply(jnp.sin(x), LINE, (0,)) + 42

    x = jnp.asarray(drawn(16).numpy())
    value, back = jax.vjp(program, x)
    slope = back(jnp.ones(16))[0]
    assert spec_of(value) == spec_of(slope) == tiles(8)
    np.testing.assert_allclose(value, np.sin(x) + 42, rtol=1e-5)
    np.testing.assert_allclose(slope, np.cos(x), rtol=1e-5)
    for one, given in ((program, x), (lambda ct: back(ct)[0], jnp.ones(16))):
        assert "sharding_constraint" in jax.jit(one).lower(given).as_text()


def test_the_gradient_of_a_sum_is_ones_in_the_layout_of_the_mark():
    given = jnp.asarray(torch.tensor([[2.0, 3, 5, 7, 11, 13, 17, 19]]).numpy())
    marked = xs.mark_sharding_with_gradients(given, ROW, (0, 1))
    slope = jax.grad(lambda x: xs.mark_sharding_with_gradients(x, ROW, (0, 1)).sum())(given)
    np.testing.assert_array_equal(slope, np.ones((1, 8)))
    assert spec_of(marked) == spec_of(slope) == tiles(1, 8)
    assert not xs.XLAShardedTensor(given).sharding_spec  # what it was made of is as it was


@pytest.mark.differs("gradients")
def test_a_view_has_a_gradient_of_its_shape():
    shown = xs.XLAShardedTensor(drawn(8, 6), requires_grad=True)
    slope = jax.grad(lambda v: v.sum())(shown)
    assert slope.shape == shown.shape == (8, 6)
    np.testing.assert_array_equal(slope, np.ones((8, 6)))


def test_values_are_sharded_as_others_are():
    x = xs.mark_sharding_with_gradients(drawn(16), LINE, (0,))
    for found in xs.shard_as(x, drawn(16, seed=1)):
        assert spec_of(found) == tiles(8)


@pytest.mark.parametrize("turned", [False, True])
def test_values_are_sharded_as_a_view_is(turned):
    shown = view(drawn(16), LINE, (0,))
    pair = (shown, drawn(16, seed=1))
    for found in xs.shard_as(*(pair[::-1] if turned else pair)):
        assert spec_of(xs.unwrap_sharded_tensor(found)) == tiles(8)


# ---- Shards.


def test_shards_of_a_split_array_have_its_parts():
    tensor = drawn(16)
    shards = view(tensor, LINE, (0,)).local_shards
    assert len(shards) == 8
    for number, shard in enumerate(shards):
        assert isinstance(shard.data, np.ndarray)
        assert shard.indices == [slice(2 * number, 2 * number + 2, 1)]
        np.testing.assert_array_equal(shard.data, tensor[2 * number : 2 * number + 2])
        assert shard.replica_id == 0


@pytest.mark.differs("`mark_sharding` outside `jit`: a dim that does not divide")
def test_shards_are_never_padded():
    with pytest.raises(RuntimeError, match=r"size 9, which 8 shards .* do not divide"):
        xs.mark_sharding(drawn(9), LINE, (0,))
    inside = jax.jit(lambda x: xs.mark_sharding(x * 1, LINE, (0,)))(drawn(9).numpy())
    for shard in xs.wrap_if_sharded(inside).local_shards:
        index = shard.indices if shard.indices is Ellipsis else tuple(shard.indices)
        np.testing.assert_array_equal(shard.unpadded_data, drawn(9)[index])


def test_shards_of_a_replicated_array_are_the_whole():
    tensor = drawn(5)
    for number, shard in enumerate(view(tensor, LINE, (None,)).local_shards):
        assert shard.indices is Ellipsis
        np.testing.assert_array_equal(shard.data, tensor)
        np.testing.assert_array_equal(shard.data, shard.unpadded_data)
        assert shard.replica_id == number


def test_shards_of_a_partly_replicated_array_are_numbered_by_replica():
    tensor = drawn(6, 10)
    shards = view(tensor, xs.Mesh(range(8), (4, 2)), (None, 1)).local_shards
    assert len(shards) == 8
    for number, shard in enumerate(shards):
        half = slice(5 * (number % 2), 5 * (number % 2) + 5, 1)
        assert shard.indices == [slice(0, 6, 1), half]
        np.testing.assert_array_equal(shard.data, tensor[:, half])
        np.testing.assert_array_equal(shard.data, shard.unpadded_data)
        assert shard.replica_id == number // 2


def test_shards_that_were_changed_are_loaded():
    marked = view(drawn(16), LINE, (0,))
    shards = marked.local_shards
    for shard in shards:
        shard.data *= -3
    marked.load_local_shards_(shards)
    np.testing.assert_allclose(marked, -3 * drawn(16))
    with pytest.raises(RuntimeError, match="8, not 7"):
        marked.load_local_shards_(shards[1:])
    for shard in shards:
        shard.data = np.ones((4, 4), np.float32)
    with pytest.raises(RuntimeError, match=r"must be float32\[2\]"):
        marked.load_local_shards_(shards)


@pytest.mark.differs("`load_local_shards_` of a replicated array")
def test_shards_of_a_replicated_array_are_loaded_too():
    marked = view(drawn(3), LINE, (None,))
    shards = marked.local_shards
    for shard in shards:
        shard.data = shard.data + 1
    marked.load_local_shards_(shards)
    np.testing.assert_allclose(marked, drawn(3) + 1)


# ---- Manual regions, and arrays made of shards.


@pytest.mark.differs("`enable_manual_sharding`")
@pytest.mark.parametrize(
    ("mesh", "spec", "shape"),
    [(ROW, (0, 1), (6, 2)), (xs.Mesh(range(8), (8, 1)), (None, None), (6, 16))],
)
def test_manual_regions_show_shards_and_end_in_the_whole(mesh, spec, shape):
    tensor = drawn(6, 16)
    xs.set_global_mesh(mesh)
    for arguments in ({}, {"mesh": mesh}):
        shards = xs.enable_manual_sharding(tensor, spec, **arguments)
        assert [shard.shape for shard in shards] == [shape] * 8
        back = xs.disable_manual_sharding([s + 1 for s in shards], spec, tensor.shape, **arguments)
        assert back.shape == (6, 16)
        assert spec_of(back) == str(mesh.get_op_sharding(spec))
        np.testing.assert_allclose(back, tensor + 1)


@pytest.mark.differs("`_mark_manual_sharding`")
def test_values_are_not_marked_as_manual():
    for value in (drawn(3, 2), jnp.ones((3, 2)) + 1):
        with pytest.raises(RuntimeError, match="cannot be marked as manual"):
            xs._mark_manual_sharding(value)


@pytest.mark.parametrize("dim", [0, 1])
def test_sums_are_scattered_in_a_manual_region(dim):
    mesh = xs.get_1d_mesh("x").on_devices()
    dims = ("x", None) if dim == 0 else (None, "x")
    program = shoal.manual(
        lambda shard: jax.lax.psum_scatter(shard, "x", scatter_dimension=dim, tiled=True),
        shoal.Layout(mesh, None, None),
        shoal.Layout(mesh, *dims),
    )
    found = program(drawn(8, 8).numpy())
    np.testing.assert_allclose(found, 8 * drawn(8, 8), rtol=1e-5)
    wanted = (1, 8) if dim == 0 else (8, 1)
    assert {shard.data.shape for shard in found.addressable_shards} == {wanted}
    assert "reduce-scatter" in jax.jit(program).lower(jnp.ones((8, 8))).compile().as_text()


@pytest.mark.parametrize("scale", [1, 0.25])
def test_sums_of_all_devices_in_a_manual_region(scale):
    mesh = xs.get_1d_mesh("x").on_devices()
    whole = shoal.Layout(mesh, None, None)
    program = shoal.manual(lambda shard: jax.lax.psum(shard, "x") * scale, whole, whole)
    np.testing.assert_allclose(program(jnp.ones((4, 6))), np.full((4, 6), 8 * scale))
    assert "all-reduce" in jax.jit(program).lower(jnp.ones((4, 6))).compile().as_text()


def test_replicated_shards_make_the_array_that_each_is():
    shards = [torch.tensor([5, 3, 8])] * 8
    made = xs.disable_manual_sharding(shards, (None,), (3,), mesh=LINE)
    assert made.tolist() == [5, 3, 8]
    for shape in ((4,), (2,), (3, 1)):
        with pytest.raises(RuntimeError, match="disable_manual_sharding"):
            xs.disable_manual_sharding(shards, (None,), shape, mesh=LINE)
    one = xs.disable_manual_sharding([torch.tensor([[6]])] * 8, (None, None), (1, 1), mesh=GRID)
    assert one.tolist() == [[6]]


def test_shards_make_the_array_that_they_tile():
    shards = [torch.tensor([3 * number, 3 * number + 1, 3 * number + 2]) for number in range(8)]
    made = xs.disable_manual_sharding(shards, (0,), (24,), mesh=LINE)
    assert made.tolist() == [*range(24)]
    for shape in ((25,), (48,), (1, 24), (1,)):
        with pytest.raises(RuntimeError, match="disable_manual_sharding"):
            xs.disable_manual_sharding(shards, (0,), shape, mesh=LINE)
    with pytest.raises(RuntimeError, match="7 pieces for the 8 devices"):
        xs.disable_manual_sharding(shards[:-1], (0,), (24,), mesh=LINE)


@pytest.mark.differs("`disable_manual_sharding` of shards that are larger than the shape")
def test_shards_of_more_than_the_shape_are_refused():
    shards = [torch.arange(8) + 8 * number for number in range(8)]
    for size in (63, 57, 56):
        with pytest.raises(RuntimeError, match=rf"make \(64,\), not \({size},\)"):
            xs.disable_manual_sharding(shards, (0,), (size,), mesh=LINE)


def test_shards_tile_two_dims_and_may_be_replicas():
    mesh = xs.Mesh(range(8), (4, 2))
    each = [torch.tensor([[10 + number]]) for number in range(8)]
    made = xs.disable_manual_sharding(each, (0, 1), (4, 2), mesh=mesh)
    assert made.tolist() == [[10, 11], [12, 13], [14, 15], [16, 17]]
    made = xs.disable_manual_sharding(each[:2] * 4, (None, 1), (1, 2), mesh=mesh)
    assert made.tolist() == [[10, 11]]


# ---- Pictures.

PICTURES = [
    ("{devices=[2,4]0,1,2,3,4,5,6,7}", [["0", "1", "2", "3"], ["4", "5", "6", "7"]]),
    (
        "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
        [["0..1"], ["2..3"], ["4..5"], ["6..7"]],
    ),
    (
        "{devices=[2,6]0,4,8,2,6,10,1,5,9,3,7,11}",
        [["0", "4", "8", "2", "6", "10"], ["1", "5", "9", "3", "7", "11"]],
    ),
    (
        "{devices=[6,1,2]0,1,4,5,8,9,2,3,6,7,10,11 last_tile_dim_replicate}",
        [["0..1"], ["4..5"], ["8..9"], ["2..3"], ["6..7"], ["10..11"]],
    ),
]


def cells(picture):
    """Return the devices in each block of a picture, row by row."""
    rows = [line.split("│")[2:-1] for line in picture.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


@pytest.mark.parametrize(("text", "blocks"), PICTURES)
def test_a_picture_has_the_devices_of_each_block(text, blocks, capsys):
    assert cells(xs.visualize_sharding(text)) == blocks
    assert cells(capsys.readouterr().out) == blocks


@pytest.mark.differs("`visualize_sharding`")
@pytest.mark.parametrize("spec", [(0, None), (None, None)])
def test_a_picture_of_an_array_that_is_whole_everywhere(spec, capsys):
    array = xs.mark_sharding(drawn(3, 5), ROW, spec)
    assert cells(xs.visualize_tensor_sharding(array)) == [["0..7"]]


def test_the_picture_of_replicated_has_all_devices(capsys):
    picture = xs.visualize_sharding("{replicated}")
    assert "0..7" in picture


@pytest.mark.differs("the module `debugging`")
def test_the_words_of_a_tensor_with_devices_listed():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("shoal.compat.torch_xla.debugging")
    for shape, mesh, spec, words in WORDS:
        array = xs.mark_sharding(drawn(*shape), mesh, spec)
        assert xs.wrap_if_sharded(array).sharding_spec == words
