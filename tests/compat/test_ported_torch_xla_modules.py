"""What torch_xla's own tests say of placements, modules, inputs, training and checkpoints."""

from __future__ import annotations

import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
import shoal.compat.torch_xla as xs
from shoal.compat.torch_xla.fsdp import _prepare_spmd_partition_spec
from shoal.errors import StepAlreadyCommittedError
from shoal.runtime import process
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.system import fault_points

torch = pytest.importorskip("torch")
tensors = pytest.importorskip("torch.distributed.tensor")
Partial, Replicate, Shard = tensors.Partial, tensors.Replicate, tensors.Shard
LINE = xs.Mesh(range(8), (8,))
GRID = xs.Mesh(range(8), (2, 4))


def drawn(*shape, seed=0):
    """Return a torch tensor of normal numbers."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def device_mesh(*shape, names=None, count=8):
    ids = torch.arange(count).reshape(shape or (count,))
    return tensors.DeviceMesh("cpu", ids, mesh_dim_names=names, _init_backend=False, _rank=0)


def spec_of(array):
    return xs.wrap_if_sharded(array).sharding_spec


def distributed(tensor, mesh, placements):
    return xs.wrap_if_sharded(xs.xla_distribute_tensor(tensor, mesh, placements))


# ---- Meshes and placements of torch.


@pytest.mark.parametrize(
    ("shape", "names"), [((8,), None), ((2, 4), None), ((1, 8), None), ((8,), ("data",))]
)
def test_a_device_mesh_of_torch_becomes_a_mesh(shape, names):
    given = device_mesh(*shape, names=names)
    mesh = xs.convert_to_xla_mesh(given)
    assert isinstance(mesh, xs.Mesh)
    assert (mesh.mesh_shape, mesh.axis_names) == (tuple(given.mesh.shape), names)
    assert mesh.device_ids.tolist() == given.mesh.flatten().tolist()
    assert mesh.size() == given.size() == 8


@pytest.mark.differs("devices of a `Mesh`")
def test_a_device_mesh_of_some_devices_becomes_a_mesh():
    assert xs.convert_to_xla_mesh(device_mesh(count=5)).mesh_shape == (5,)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_is_distributed_by_placements(requires_grad):
    given = drawn(24, 5).requires_grad_(requires_grad)
    shown = distributed(given, device_mesh(), [Shard(0)])
    assert shown.sharding_spec
    assert shown.global_tensor.shape == (24, 5)
    assert [shard.data.shape for shard in shown.local_shards] == [(3, 5)] * 8
    slope = jax.grad(lambda x: (xs.xla_distribute_tensor(x, LINE, [Shard(0)]) * 3).sum())
    np.testing.assert_array_equal(slope(jnp.ones((24, 5))), np.full((24, 5), 3))


CASES = [
    ((16, 24), (8,), [Shard(0)]),
    ((5, 24), (8,), [Shard(1)]),
    ((16, 3, 5), (8,), [Shard(0)]),
    ((5, 3), (8,), [Replicate()]),
    ((6, 12), (2, 4), [Shard(0), Shard(1)]),
    ((6, 5), (2, 4), [Shard(0), Replicate()]),
]


@pytest.mark.differs("`_spec` of a view")
@pytest.mark.parametrize(("shape", "mesh", "placements"), CASES)
def test_placements_are_read_back_from_the_array(shape, mesh, placements):
    shown = distributed(drawn(*shape), device_mesh(*mesh), placements)
    assert [p.is_shard() for p in shown.placements] == [p.is_shard() for p in placements]
    assert [getattr(p, "dim", None) for p in shown.placements] == [
        getattr(p, "dim", None) for p in placements
    ]
    assert (shown._spec.mesh.shape, shown._spec.mesh.size) == (mesh, 8)
    assert (shown.shape, shown.dtype) == (shape, np.float32)


@pytest.mark.differs("`_spec` of a view")
def test_placements_stay_after_the_cache_is_invalidated():
    shown = distributed(drawn(5, 3), device_mesh(), [Replicate()])
    before, spec = shown.placements, shown._spec
    shown.invalidate_spec_cache()
    assert before == shown.placements == (xs.Replicate(),)
    assert shown._spec == spec


def test_an_array_on_no_mesh_has_no_placements():
    with pytest.raises(ValueError, match="on no mesh: mark_sharding places it"):
        xs.XLAShardedTensor(drawn(12, 5)).placements  # noqa: B018


def test_a_view_takes_the_attributes_that_it_is_given():
    shown = xs.wrap_as_sharded_tensor(drawn(8, 5), mesh_shape=(8,), partition_spec=(0, None))
    assert isinstance(shown, xs.XLAShardedTensor)
    assert (shown.mesh_shape, shown.partition_spec) == ((8,), (0, None))


@pytest.mark.differs("`_spec` of a view")
def test_new_attributes_of_a_view_move_nothing():
    shown = distributed(drawn(8, 12), device_mesh(), [Shard(0)])
    before = shown._spec
    again = xs.wrap_as_sharded_tensor(shown, mesh_shape=(2, 4), partition_spec=(0, 1))
    assert (again.mesh_shape, again.partition_spec) == ((2, 4), (0, 1))
    assert again._spec == before
    moved = xs.wrap_if_sharded(xs.mark_sharding(again, GRID, (0, 1)))
    assert (moved._spec.mesh.shape, moved.placements[1].dim) == ((2, 4), 1)


@pytest.mark.differs("what is computed from a view")
def test_what_is_computed_from_a_view_has_a_spec():
    shown = distributed(drawn(8, 4), device_mesh(), [Shard(0)])
    doubled = xs.wrap_if_sharded(shown + shown)
    assert doubled.placements == (xs.Shard(0),)
    assert doubled._spec.axes_of_dims == shown._spec.axes_of_dims


def test_placements_on_weights_compute_what_the_module_does():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(12, 16, bias=False)
            self.down = torch.nn.Linear(16, 6, bias=False)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    model, x = Model(), drawn(3, 12)
    wanted = model(x).detach()
    mesh = device_mesh()
    given = xs.xla_distribute_tensor(x, mesh, placements=[Replicate()])
    up = xs.xla_distribute_tensor(model.up.weight, mesh, placements=[Shard(0)])
    down = xs.xla_distribute_tensor(model.down.weight, mesh, placements=[Shard(1)])
    found = jax.jit(lambda x, up, down: jax.nn.relu(x @ up.T) @ down.T)(given, up, down)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# ---- Redistributing.


@pytest.mark.parametrize("shape", [(16,), (16, 3), (8, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_redistributing_to_the_same_placement_changes_nothing(shape, dtype):
    tensor = (drawn(*shape) * 50).to(dtype)
    spec = (0, *[None] * (len(shape) - 1))
    moved = xs.wrap_if_sharded(xs.mark_sharding(tensor, LINE, spec)).redistribute(LINE, [Shard(0)])
    assert moved.partition_spec == spec
    assert moved.sharding_spec.startswith(f"{{devices=[{','.join(['8', *'1' * (len(spec) - 1)])}]")
    assert str(moved.dtype) == str(dtype).removeprefix("torch.")
    np.testing.assert_array_equal(np.asarray(moved, np.float32), tensor.float())


def test_a_scalar_is_redistributed_to_every_device():
    shown = xs.wrap_if_sharded(xs.mark_sharding(torch.tensor(4.5), LINE, ()))
    assert shown.redistribute(LINE, [Replicate()]).partition_spec == ()


@pytest.mark.parametrize(
    ("mesh", "placements", "spec", "words"),
    [
        (LINE, [Replicate()], (None, None), "{replicated}"),
        (LINE, [Shard(0)], (0, None), "devices=[8,1]"),
        (LINE, [Shard(1)], (None, 0), "devices=[1,8]"),
        (GRID, [Replicate(), Shard(1)], (None, 1), "devices=[1,4,2]"),
        (GRID, [Replicate(), Shard(0)], (1, None), "devices=[4,1,2]"),
    ],
)
@pytest.mark.parametrize("async_op", [False, True])
def test_redistributing_follows_the_placements(mesh, placements, spec, words, async_op):
    tensor = drawn(8, 16)
    shown = xs.wrap_if_sharded(xs.mark_sharding(tensor, mesh, (0, None)))
    moved = shown.redistribute(mesh, placements, async_op=async_op)
    assert moved.partition_spec == spec
    assert words in moved.sharding_spec
    np.testing.assert_array_equal(moved, tensor)
    assert shown.partition_spec == (0, None)


def test_placements_that_cannot_be_are_refused():
    shown = xs.wrap_if_sharded(xs.mark_sharding(drawn(8, 16), LINE, (0, None)))
    with pytest.raises(IndexError, match="dimension 3 is out of bounds"):
        shown.redistribute(LINE, [Shard(3)])
    with pytest.raises(ValueError, match=r"placements \(2\) must match mesh dimensions \(1\)"):
        shown.redistribute(LINE, [Replicate(), Shard(1)])
    with pytest.raises(NotImplementedError, match="Partial"):
        shown.redistribute(LINE, [Partial()])


def test_redistributed_arrays_compute():
    one, other = (
        xs.wrap_if_sharded(xs.mark_sharding(drawn(8, 16, seed=s), LINE, (0, None))).redistribute(
            LINE, [Shard(1)]
        )
        for s in range(2)
    )
    a, b = drawn(8, 16), drawn(8, 16, seed=1)
    np.testing.assert_array_equal(jax.nn.relu(one.global_tensor), torch.relu(a))
    np.testing.assert_allclose(one + other, a + b, rtol=1e-6)
    np.testing.assert_allclose(one.global_tensor * other.global_tensor, a * b, rtol=1e-6)


# ---- Modules, and steps of an optimizer.


class Linear:
    def __init__(self, rows, columns, seed):
        self.weight = jnp.asarray(drawn(rows, columns, seed=seed).numpy() / 4)
        self.bias = jnp.zeros(rows)

    def forward(self, x):
        return xs.xla_patched_nn_linear_forward(self, x)


class Net:
    def __init__(self):
        self.fc1, self.fc2 = Linear(16, 24, seed=1), Linear(8, 16, seed=2)

    def named_modules(self):
        return [("", self), ("fc1", self.fc1), ("fc2", self.fc2)]

    def forward(self, x):
        return self.fc2.forward(jax.nn.relu(self.fc1.forward(x)))


def values(net):
    return {n: {"w": p.weight, "b": p.bias} for n, p in net.named_modules() if n}


def loss(params, x, target, *, mesh=None, fence=False):
    hidden = jax.nn.relu(xs.XLAPatchedLinear.apply(x, params["fc1"]["w"], params["fc1"]["b"]))
    if mesh is not None:
        hidden = xs.mark_sharding_with_gradients(hidden, mesh, (None, 0))
    last = xs.XLAPatchedLinear.apply
    if fence:
        last = xs.apply_backward_optimization_barrier(last)
    out = last(hidden, params["fc2"]["w"], params["fc2"]["b"])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(out), target[:, None], axis=1)
    return -chosen.mean()


BATCH = drawn(12, 24).numpy(), np.arange(12) % 8


def trained(params, steps=3, **options):
    @jax.jit
    def step(params):
        value, slopes = jax.value_and_grad(loss)(params, *map(jnp.asarray, BATCH), **options)
        return jax.tree.map(lambda p, s: p - 0.1 * s, params, slopes), value

    losses = []
    for _ in range(steps):
        params, value = step(params)
        losses.append(float(value))
    return params, losses


@pytest.mark.parametrize("by", ["spec", "placements"])
def test_a_marked_weight_keeps_its_layout_through_steps(by):
    params = values(Net())
    wanted = trained(params)[1]
    w = params["fc1"]["w"]
    params["fc1"]["w"] = (
        xs.mark_sharding(w, xs.Mesh(range(8), (1, 8)), (0, 1))
        if by == "spec"
        else xs.xla_distribute_tensor(w, device_mesh(), [Shard(0)])
    )
    words = spec_of(params["fc1"]["w"])
    assert words.startswith("{devices=[")
    assert not xs.XLAShardedTensor(params["fc2"]["w"]).sharding_spec
    for steps in (1, 3):
        after, losses = trained(params, steps)
        assert spec_of(after["fc1"]["w"]) == words
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert losses[-1] < losses[0]


def test_a_module_is_distributed_and_trains():
    def partition(name, part, mesh):
        if hasattr(part, "weight"):
            part.weight = xs.xla_distribute_tensor(part.weight, mesh, [Shard(0)])
            part.bias = xs.xla_distribute_tensor(part.bias, mesh, [Shard(0)])

    plain = trained(values(Net()))[1]
    net = xs.xla_distribute_module(Net(), device_mesh(), partition)
    for part in (net.fc1, net.fc2):
        assert spec_of(part.weight) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    np.testing.assert_allclose(trained(values(net))[1], plain, rtol=1e-4)


def test_rematerialized_and_fenced_steps_have_the_same_losses():
    params = values(Net())
    plain = trained(params)[1]
    for options in ({"mesh": LINE}, {"mesh": LINE, "fence": True}):
        np.testing.assert_allclose(trained(params, **options)[1], plain, rtol=1e-4)
        once = jax.checkpoint(lambda p, options=options: loss(p, *BATCH, **options))
        kept = jax.grad(lambda p, options=options: loss(p, *BATCH, **options))(params)
        again = jax.grad(once)(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
                     kept, again)  # fmt: skip


def test_gradients_are_accumulated_in_a_loop_as_one_by_one():
    params = values(Net())
    params["fc1"]["w"] = xs.mark_sharding(params["fc1"]["w"], LINE, (0, None))
    xs_, ys = jnp.asarray(BATCH[0]).reshape(3, 4, 24), jnp.asarray(BATCH[1]).reshape(3, 4)
    slope = jax.jit(jax.grad(lambda p, x, y: loss(p, x, y, mesh=LINE)))
    wanted = [slope(params, x, y) for x, y in zip(xs_, ys, strict=True)]

    @jax.jit
    def looped(params):
        zeros = jax.tree.map(jnp.zeros_like, params)

        def add(total, xy):
            return jax.tree.map(jnp.add, total, slope(params, *xy)), None

        return jax.lax.scan(add, zeros, (xs_, ys))[0]

    found = looped(params)
    for name in ("fc1", "fc2"):
        total = sum(np.asarray(one[name]["w"]) for one in wanted)
        np.testing.assert_allclose(found[name]["w"], total, rtol=1e-4, atol=1e-6)


def test_the_patched_linear_map_is_torch_s_and_so_are_its_gradients():
    x, w, b = (drawn(*shape).requires_grad_() for shape in ((3, 5), (4, 5), (4,)))
    wanted = torch.nn.functional.linear(x, w, b)
    wanted.sum().backward()
    given = [jnp.asarray(t.detach().numpy()) for t in (x, w, b)]
    found, back = jax.vjp(xs.XLAPatchedLinear.apply, *given)
    np.testing.assert_allclose(found, wanted.detach(), rtol=1e-4, atol=1e-6)
    for slope, tensor in zip(back(jnp.ones((3, 4))), (x, w, b), strict=True):
        np.testing.assert_allclose(slope, tensor.grad, rtol=1e-4, atol=1e-6)


def test_a_patched_module_computes_what_it_did():
    original = torch.nn.Linear(5, 3)
    patched = xs.apply_xla_patch_to_nn_linear(copy.deepcopy(original))
    np.testing.assert_allclose(
        patched(torch.ones(5)), original(torch.ones(5)).detach(), rtol=1e-4, atol=1e-6
    )


def test_a_barrier_stands_in_the_backward_pass():
    params = values(Net())
    for fence in (False, True):
        slope = jax.jit(jax.grad(lambda p, fence=fence: loss(p, *BATCH, fence=fence)))
        assert ("optimization_barrier" in slope.lower(params).as_text()) == fence


# ---- Fully sharded data parallelism: the layouts that the wrapper gave.


def test_the_largest_dim_of_a_weight_and_the_rows_of_an_output_are_split():
    mesh = xs.Mesh(range(8), (8, 1), ("fsdp", "tensor"))
    for weight in (drawn(24, 32), drawn(1, 16)):
        marked = xs.mark_sharding(weight, mesh, _prepare_spmd_partition_spec(weight, None, True))
        assert spec_of(marked) == "{devices=[1,8]0,1,2,3,4,5,6,7}"
    x, w = drawn(16, 32), drawn(24, 32, seed=1)
    rows = xs.mark_sharding(x, mesh, ("fsdp", None))
    split = xs.mark_sharding(w, mesh, _prepare_spmd_partition_spec(w, shard_maximal=True))

    @jax.jit
    def forward(x, w):
        out = xs.XLAPatchedLinear.apply(x, w)
        return xs.mark_sharding_with_gradients(out, mesh, _prepare_spmd_partition_spec(out))

    found = forward(rows, split)
    assert spec_of(found) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    np.testing.assert_allclose(found, x @ w.T, rtol=1e-4, atol=1e-5)


def test_an_axis_across_slices_splits_the_rows_too():
    mesh = xs.Mesh(range(8), (2, 4, 1), ("data", "fsdp", "tensor"))
    w, x = drawn(12, 16), drawn(16, 16)
    marked = xs.mark_sharding(w, mesh, _prepare_spmd_partition_spec(w, shard_maximal=True))
    assert spec_of(marked) == "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    rows = xs.mark_sharding(x, mesh, _prepare_spmd_partition_spec(x, "data"))
    assert spec_of(rows) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    np.testing.assert_allclose(rows @ marked.T, x @ w.T, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="'ddp'"):
        xs.mark_sharding(x, mesh, _prepare_spmd_partition_spec(x, "ddp"))


@pytest.mark.differs("`SpmdFullyShardedDataParallel`")
def test_the_wrapper_is_refused():
    with pytest.raises(NotImplementedError, match="mark_sharding"):
        xs.SpmdFullyShardedDataParallel(torch.nn.Linear(3, 2), mesh=LINE)


# ---- Inputs.

BATCHES = {"x": drawn(16, 6), "y": drawn(8, 3, 5, seed=1)}
SPECS = {
    "x": xs.ShardingSpec(xs.get_1d_mesh("d"), ("d", None)),
    "y": xs.ShardingSpec(xs.get_1d_mesh("d"), ("d", None, None)),
}


def test_a_spec_places_inputs_as_a_mark_does():
    for name, spec in SPECS.items():
        assert spec.can_apply(BATCHES[name])
        placed = spec.apply(BATCHES[name])
        marked = xs.mark_sharding(BATCHES[name], spec.mesh, spec.partition_spec)
        assert spec_of(placed) == spec_of(marked) == str(spec.xla_spec(BATCHES[name]))
        assert len(placed.addressable_shards) == 8
        np.testing.assert_array_equal(placed / 0.5, BATCHES[name] / 0.5)


@pytest.mark.differs("`MpDeviceLoader`, `ParallelLoader`, `send_cpu_data_to_device`")
def test_a_feed_places_the_parts_of_a_batch():
    for call in (xs.MpDeviceLoader, xs.send_cpu_data_to_device):
        with pytest.raises(NotImplementedError, match=r"shoal\.(feed|put)"):
            call([BATCHES], "xla", input_sharding=SPECS)
    mesh = xs.get_1d_mesh("d").on_devices()
    rows = shoal.Layout(mesh, "d", None)
    batch = {"x": drawn(16, 6).numpy(), "z": drawn(16, 4).numpy()}
    for layouts in (rows, {"x": rows, "z": rows}, {"x": rows, "z": shoal.Layout(mesh, "d", None)}):
        with shoal.feed([batch] * 2, layouts) as feed:
            for placed in feed:
                assert spec_of(placed["x"]) == spec_of(placed["z"]) == str(SPECS["x"].xla_spec(
                    batch["x"]))  # fmt: skip
                np.testing.assert_array_equal(placed["x"], batch["x"])
    with shoal.feed([batch["x"]], rows) as feed:
        assert spec_of(next(iter(feed))) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    for given in (batch, batch["x"]):  # a layout is lacking; there are layouts of names for one
        with shoal.feed([given], {"x": rows}) as feed, pytest.raises((ValueError, KeyError)):
            next(iter(feed))


@pytest.mark.differs("an input of another rank than its `ShardingSpec`")
def test_a_batch_that_does_not_fit_the_spec_is_refused():
    images = drawn(7, 3, 4, 4)
    spec = ("d", None, None, None)
    for minibatch in (False, True):
        whole = xs.ShardingSpec(xs.get_1d_mesh("d"), spec, minibatch=minibatch)
        with pytest.raises(RuntimeError, match="not divide"):
            whole.apply(images)
        assert not whole.can_apply(drawn(8))
        with pytest.raises(AssertionError, match=r"length \(4\) should be equal to .* rank \(1\)"):
            whole.apply(drawn(8))


# ---- Checkpoints.


def weights(mesh=None, seed=0):
    """Return a state: one weight in a layout, one replicated, two biases on no mesh."""
    mesh = xs.Mesh(range(8), (1, 8)) if mesh is None else mesh
    w, v = drawn(16, 24, seed=seed), drawn(1, 16, seed=seed + 1)
    return {
        "fc1.weight": xs.mark_sharding(w, mesh, (0, 1)),
        "fc1.bias": jnp.asarray(drawn(16, seed=seed + 2).numpy()),
        "fc2.weight": xs.mark_sharding(v, mesh, (None, None)),
        "fc2.bias": jnp.asarray(drawn(1, seed=seed + 3).numpy()),
    }


def plain(seed=0):
    return {name: jnp.asarray(np.asarray(v)) for name, v in weights(seed=seed).items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def manager(tmp_path):
    return xs.CheckpointManager(tmp_path, save_interval=10, chkpt_on_preemption=False)


MESHES = {shape: xs.Mesh(range(8), shape) for shape in ((8, 1), (4, 2), (2, 4))}
CHANGES = {
    "from whole to split": (plain, weights),
    "from split to whole": (weights, plain),
    "to another mesh": (
        lambda seed: weights(MESHES[4, 2], seed), lambda seed: weights(MESHES[8, 1], seed),
    ),
    "to the mesh turned": (
        lambda seed: weights(MESHES[4, 2], seed), lambda seed: weights(MESHES[2, 4], seed),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_is_restored_in_the_layout_of_the_target(change, manager):
    saved, target = (make(seed=seed) for make, seed in zip(CHANGES[change], (0, 9), strict=True))
    layouts = {name: value.sharding for name, value in target.items()}
    assert not same(saved, target)
    assert manager.save(0, saved)
    manager.restore(0, target)
    assert same(saved, target)
    for name, layout in layouts.items():
        if name.endswith("weight"):
            assert target[name].sharding.is_equivalent_to(layout, 2)


@pytest.mark.differs("`mark_sharding` outside `jit`: a dim that does not divide")
def test_an_array_of_odd_sizes_is_split_where_it_can_be(manager):
    odd = drawn(7, 24)
    with pytest.raises(RuntimeError, match="do not divide"):
        xs.mark_sharding(odd, LINE, (0, None))
    manager.save(0, {"w": xs.mark_sharding(odd, LINE, (None, 0))})
    state = {"w": xs.mark_sharding(odd * 0, xs.Mesh(range(4), (4,)), (None, 0))}
    np.testing.assert_array_equal(manager.restore(0, state)["w"], odd)


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_the_steps_of_the_interval_are_tracked(way, manager):
    save, state = getattr(manager, way), weights()
    assert manager.all_steps() == []
    for step in range(1, 10):
        assert not save(step, state)
    assert manager.all_steps() == []
    for step in range(0, 60, 10):
        assert save(step, state)
        assert way == "save_async" or manager.all_steps() == [*range(0, step + 1, 10)]
    manager.join()
    assert manager.all_steps() == [*range(0, 60, 10)]
    target = weights(seed=9)
    manager.restore(0, target)
    assert same(target, state)


def test_a_step_in_the_background_is_tracked_once_it_is_there(manager, monkeypatch):
    goes_on = threading.Event()

    def reach(point, process=None):
        if point == "save.write":
            assert goes_on.wait(60)

    monkeypatch.setattr(fault_points, "reach", reach)
    try:
        assert manager.save_async(10, weights())
        assert manager.all_steps() == []
    finally:
        goes_on.set()
    manager.join()
    assert manager.all_steps() == [10]


@pytest.mark.differs("`max_to_keep`")
def test_the_steps_of_the_highest_numbers_are_kept(tmp_path):
    def make():
        return xs.CheckpointManager(tmp_path, 10, max_to_keep=2, chkpt_on_preemption=False)

    manager, state = make(), weights()
    for step, kept in ((10, [10]), (20, [10, 20]), (30, [20, 30])):
        assert manager.save(step, state)
        assert manager.all_steps() == kept
    with pytest.raises(StepAlreadyCommittedError):
        manager.save(20, state)
    manager = make()
    assert manager.all_steps() == [20, 30]
    assert manager.save(40, state)
    assert manager.all_steps() == [30, 40]


@pytest.mark.differs("`CheckpointManager.reached_preemption`")
def test_a_notice_saves_a_step_that_is_not_due(tmp_path, monkeypatch):
    alone = LocalJob(1).clients[0]
    monkeypatch.setattr(process, "client", lambda: alone)
    monkeypatch.setattr(process, "is_watching", lambda: True)
    manager, state = xs.CheckpointManager(tmp_path, save_interval=100), weights()
    for step in range(1, 8):
        assert not manager.save(step, state)
        assert not manager.reached_preemption(step)
    alone.give_notice(ReceivedNotice("going", "a test"))
    assert manager.save(8, state)
    assert all(manager.reached_preemption(step) for step in (8, 9))
    assert manager.all_steps() == [8]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_model_and_its_optimizer_are_restored(kind, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(3, 6)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    def state(model, optimizer):
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = xs.CheckpointManager(tmp_path, 1)
    saved, target = make(0), make(1)
    assert manager.save(0, state(*saved), force=True)
    restored = manager.restore(0, state(*target))
    target[0].load_state_dict(restored["model"])
    target[1].load_state_dict(restored["optim"])
    for one, other in zip(*map(jax.tree.leaves, (state(*saved), state(*target))), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert (type(one), one) == (type(other), other)


@pytest.mark.differs("`prime_optimizer`, `SPMDSavePlanner`, `SPMDLoadPlanner`")
@pytest.mark.parametrize("name", ["prime_optimizer", "SPMDSavePlanner", "SPMDLoadPlanner"])
def test_optimizers_are_not_primed_and_nothing_is_planned(name):
    with pytest.raises(NotImplementedError, match=r"shoal\.(save|restore)"):
        getattr(xs, name)(*([None] if name == "prime_optimizer" else []))
