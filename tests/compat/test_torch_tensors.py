"""torch's tensors at the edge of every function of the facade that took them."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal.compat.torch_xla as xs
from shoal.compat.torch_xla.fsdp import _prepare_spmd_partition_spec
from shoal.compat.torch_xla.tensors import host_form

torch = pytest.importorskip("torch")
MESH = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
SPEC = ("x", None)
DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "int32", "float16", "bfloat16", "float32",
    "complex64", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def tensor(*shape, dtype="float32"):
    values = torch.arange(int(np.prod(shape))).reshape(shape)
    return (values % 2 if dtype == "bool" else values % 16).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_each_dtype_arrives_whole_and_is_copied(dtype):
    given = tensor(8, 4, dtype=dtype).T.contiguous().T  # strided, too
    wanted = given.to(torch.complex64).numpy().copy()
    array = xs.mark_sharding(given, MESH, SPEC)
    given.zero_()
    assert (str(array.dtype), tuple(array.sharding.spec)) == (dtype, ("x", None))
    np.testing.assert_array_equal(np.asarray(array).astype(np.complex64), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_an_array_is_a_tensor_again(dtype):
    array = xs.mark_sharding(tensor(8, 4, dtype=dtype), MESH, SPEC)
    again = torch.from_dlpack(xs.clear_sharding(array))
    assert torch.equal(again, tensor(8, 4, dtype=dtype))


def test_conjugates_and_negatives_that_torch_has_not_computed_yet():
    z = torch.tensor([1 + 2j, 3 - 1j])
    np.testing.assert_array_equal(host_form(z.conj()), [1 - 2j, 3 + 1j])
    np.testing.assert_array_equal(host_form(z.conj().imag), [-2, 1])


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_wide_tensors_are_narrowed_as_host_values_are(dtype):
    array = xs.XLAShardedTensor(tensor(3, dtype=dtype)).global_tensor
    assert str(array.dtype) == dtype.replace("64", "32")
    for function in (xs.XLAShardedTensor, lambda t: xs.mark_sharding(t, MESH, ("x",))):
        with pytest.raises(ValueError, match="does not fit int32"):
            function(torch.arange(8) + 2**40)


FUNCTIONS = {
    "mark_sharding": lambda t: xs.mark_sharding(t, MESH, SPEC),
    "mark_sharding_with_gradients": lambda t: xs.mark_sharding_with_gradients(t, MESH, SPEC),
    "annotate_custom_sharding": lambda t: xs.annotate_custom_sharding(t, MESH, SPEC),
    "MarkShardingFunction": lambda t: xs.MarkShardingFunction.apply(t, MESH, SPEC),
    "clear_sharding": xs.clear_sharding,
    "shard_as, the first": lambda t: xs.shard_as(t, jnp.ones((8, 4)))[0],
    "shard_as, the second": lambda t: xs.shard_as(jnp.ones((8, 4)), t)[1],
    "ShardingSpec": lambda t: xs.ShardingSpec(MESH, SPEC).apply(t),
    "ShardingSpec, minibatch": lambda t: xs.ShardingSpec(MESH, SPEC, minibatch=True).apply(t),
    "XLAShardedTensor": lambda t: xs.XLAShardedTensor(t).global_tensor,
    "wrap_as_sharded_tensor": lambda t: xs.wrap_as_sharded_tensor(t).global_tensor,
    "a view that is marked": lambda t: xs.mark_sharding(
        xs.XLAShardedTensor(t), MESH, SPEC
    ).global_tensor,
    "redistribute": lambda t: xs.XLAShardedTensor(t).redistribute(
        MESH, [xs.Shard(0), xs.Replicate()]
    ).global_tensor,
    "xla_distribute_tensor": lambda t: xs.xla_distribute_tensor(
        t, MESH, [xs.Shard(0), xs.Replicate()]
    ),
    "inside jit": lambda t: jax.jit(lambda: xs.mark_sharding(t, MESH, SPEC))(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_comes_back_is_an_array_of_its_values(name):
    for given in (tensor(8, 4), torch.nn.Parameter(tensor(8, 4))):
        array = FUNCTIONS[name](given)
        assert isinstance(array, jax.Array)
        assert array.dtype == np.float32
        with torch.no_grad():
            given.add_(1)
        np.testing.assert_array_equal(array, np.arange(32).reshape(8, 4) % 16)


def test_a_plain_tensor_is_tied_to_a_sharded_array():
    rows = xs.mark_sharding(tensor(8, 4), MESH, SPEC)
    for number, pair in enumerate([(rows, tensor(8, 4)), (tensor(8, 4), rows)]):
        tied = xs.shard_as(*pair)
        assert tied[1 - number].sharding == rows.sharding


def test_manual_regions_take_and_give_shards():
    shards = xs.enable_manual_sharding(tensor(8, 4), SPEC, mesh=MESH)
    assert [shard.shape for shard in shards] == [(2, 4)] * 8
    own = [torch.from_numpy(np.array(shard)) * 2 for shard in shards]
    whole = xs.disable_manual_sharding(own, SPEC, (8, 4), mesh=MESH)
    np.testing.assert_array_equal(whole, 2 * tensor(8, 4).numpy())


def test_shards_of_a_view_are_set_from_tensors():
    view = xs.wrap_as_sharded_tensor(xs.mark_sharding(tensor(8, 4), MESH, SPEC))
    shards = view.local_shards
    for shard in shards:
        shard.data = torch.from_numpy(shard.data) + 1
    np.testing.assert_array_equal(view.load_local_shards_(shards), tensor(8, 4).numpy() + 1)
    shards = view.local_shards
    for shard in shards:
        shard.unpadded_data = torch.zeros(2, 4)
    assert not np.any(view.load_local_shards_(shards))


def test_linear_layers_compute_from_tensors():
    layer = torch.nn.Linear(4, 2)
    given = tensor(3, 4)
    wanted = layer(given).detach().numpy()
    linear = xs.XLAPatchedLinear
    context = type("Context", (), {})()
    results = [
        linear.apply(given, layer.weight, layer.bias),
        linear.forward(context, given, layer.weight, layer.bias),
        xs.xla_patched_nn_linear_forward(layer, given),
        xs.apply_xla_patch_to_nn_linear(torch.nn.Sequential(layer))(given),
    ]
    for result in results:
        assert isinstance(result, jax.Array)
        np.testing.assert_allclose(result, wanted, rtol=1e-5)
    with torch.no_grad():
        layer.weight.mul_(100)  # which `backward` does not see
        given.mul_(7)
    slopes = linear.backward(context, torch.ones(3, 2))
    np.testing.assert_allclose(slopes[1], [[12, 15, 18, 21]] * 2)
    np.testing.assert_allclose(slopes[2], [3, 3])
    layer = xs.EinsumLinear(4, 2, dtype=torch.bfloat16, key=jax.random.key(0))
    assert layer(tensor(3, 4, dtype="bfloat16")).dtype == jnp.bfloat16


def test_a_torch_module_keeps_its_parameters_and_arrays_are_collected():
    layer, arrays = torch.nn.Linear(4, 2), {}

    def collect(name, part, mesh):
        for parameter, value in part.named_parameters(recurse=False):
            arrays[f"{name}.{parameter}"] = xs.mark_sharding(value, mesh, ("y",) + (None,) * (
                value.ndim - 1))  # fmt: skip

    def assign(name, part, mesh):
        part.weight = xs.mark_sharding(part.weight, mesh, ("y", None))

    assert xs.xla_distribute_module(layer, MESH, collect) is layer
    assert {name: array.shape for name, array in arrays.items()} == {
        ".weight": (2, 4), ".bias": (2,),
    }  # fmt: skip
    with pytest.raises(TypeError, match="cannot assign"):
        xs.xla_distribute_module(layer, MESH, assign)


def test_functions_that_only_read_shapes_accept_torch_tensors():
    spec = xs.ShardingSpec(MESH, SPEC)
    assert spec.can_apply(tensor(8, 4))
    assert spec.can_apply(torch.ones(8, 4, device="meta"))
    assert not spec.can_apply(tensor(8))
    assert str(spec.xla_spec(tensor(8, 4))).startswith("{devices=[4,1,2]")
    assert xs.convert_to_xla_partition_spec(tensor(8, 4), [xs.Shard(1)]) == (None, 0)
    assert _prepare_spmd_partition_spec(tensor(3, 9), shard_maximal=True) == (None, "fsdp")
    assert xs.Mesh(torch.arange(8), torch.Size([4, 2])).get_logical_mesh().shape == (4, 2)
    plain = tensor(3)
    assert xs.wrap_if_sharded(plain) is plain
    assert xs.unwrap_sharded_tensor(plain) is plain


def test_tensors_of_every_form_are_filled_in_place(tmp_path):
    manager = xs.CheckpointManager(tmp_path, 1)
    values = {
        "conjugated": torch.tensor([1 + 2j, 3 + 4j]),
        "bf16": tensor(4, dtype="bfloat16"),
        "turned": tensor(3, 4),
        "none": torch.zeros(0),
        "number": torch.tensor(7),
    }
    manager.save(1, values)
    state = {
        "conjugated": torch.zeros(2, dtype=torch.complex64).conj(),
        "bf16": torch.zeros(4, dtype=torch.bfloat16),
        "turned": torch.zeros(4, 3).T,
        "none": torch.zeros(0),
        "number": torch.tensor(0),
    }
    before = {name: (value, value._version) for name, value in state.items()}
    manager.restore(1, state)
    for name, value in values.items():
        assert state[name] is before[name][0]
        assert torch.equal(state[name], value)
        assert state[name]._version > before[name][1]  # as autograd has to know
    manager.save(2, {"w": torch.arange(3.0)})
    with pytest.raises(RuntimeError, match="single memory location"):
        manager.restore(2, {"w": torch.zeros(1).expand(3)})


def test_a_shard_takes_its_part_as_a_tensor_too():
    (shard, *_) = xs.wrap_as_sharded_tensor(xs.mark_sharding(tensor(8, 4), MESH, SPEC)).local_shards
    shard.data = torch.from_numpy(shard.data)
    shard.unpadded_data = torch.zeros(2, 4)
    assert not shard.data.any()


def test_placements_of_torch():
    from torch.distributed.tensor import Partial, Replicate, Shard

    array = xs.xla_distribute_tensor(tensor(8, 4), MESH, [Replicate(), Shard(-1)])
    assert tuple(array.sharding.spec) == (None, "y")
    with pytest.raises(NotImplementedError, match="pending sum"):
        xs.xla_distribute_tensor(tensor(8, 4), MESH, [Partial(), Replicate()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_become_an_array_says_what_to_pass():
    cases = {
        r"must be on the CPU, not on meta; pass its \.cpu\(\)": torch.ones(8, 4, device="meta"),
        r"not dense; pass its \.to_dense\(\)": torch.ones(8, 4).to_sparse(),
        "nested; pass its parts": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "JAX has no dtype torch.bits8": tensor(8, 4, dtype="uint8").view(torch.bits8),
    }
    for words, given in cases.items():
        with pytest.raises(TypeError, match=rf"^torch_xla mark_sharding \(shoal.put\): .*{words}"):
            xs.mark_sharding(given, MESH, SPEC)
    with pytest.raises(NotImplementedError, match="torch's gradients; pass a function"):
        xs.apply_backward_optimization_barrier(torch.nn.Linear(4, 2))


def test_a_checkpoint_fills_the_tensors_of_a_model_and_its_optimizer(tmp_path):
    manager = xs.CheckpointManager(tmp_path, save_interval=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()

    def state():
        more = {"bf16": tensor(3, dtype="bfloat16"), "array": xs.mark_sharding(
            tensor(8, 4), MESH, SPEC)}  # fmt: skip
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}

    kept = state()
    wanted = copy.deepcopy({name: kept[name] for name in ("model", "optimizer", "bf16")})
    assert manager.save_async(1, kept)
    kept["bf16"].zero_()  # which the copy does not see
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    manager.join()
    tensors = {name: kept["model"][name] for name in kept["model"]}
    assert manager.restore(1, kept) is kept
    assert all(kept["model"][name] is tensors[name] for name in tensors)  # in place
    assert torch.equal(kept["bf16"], wanted["bf16"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted["model"][name])
    for number, slots in wanted["optimizer"]["state"].items():
        for name, value in slots.items():
            assert torch.equal(kept["optimizer"]["state"][number][name], value)
