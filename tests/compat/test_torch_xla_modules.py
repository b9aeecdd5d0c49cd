"""Linear layers and barriers of modules, as in torch_xla."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal.compat.torch_xla as xs
from compat.torch_xla_cases import mesh_of, of_kind
from shoal.compat.torch_xla.fsdp import _prepare_spmd_partition_spec


class Module:
    """A plain module: parts are attributes, a call is `forward`."""

    def __call__(self, *args):
        return self.forward(*args)


class Linear(Module):
    def __init__(self, rows, columns, seed):
        draw = np.random.default_rng(seed).normal
        self.weight = jnp.asarray(draw(size=(rows, columns)), jnp.float32)
        self.bias = jnp.asarray(draw(size=rows), jnp.float32)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1]) @ self.weight.T  # merges the leading dims
        return flat.reshape(*x.shape[:-1], -1) + jnp.broadcast_to(
            self.bias, (*x.shape[:-1], len(self.bias))
        )


class Scaled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Net(Module):
    def __init__(self):
        first = Linear(4, 3, seed=0)
        self.layers = [first, {"second": Linear(5, 4, seed=1)}]
        self.again, self.scaled = first, Scaled(5, 5, seed=2)

    def forward(self, x):
        return self.scaled(self.layers[1]["second"](self.again(x)))


class Torchlike(Module):
    def __init__(self):
        self.inner = Linear(2, 3, seed=0)

    def named_children(self):
        return [("inner", self.inner)]

    def named_modules(self):
        return [("", self), ("inner", self.inner)]

    def forward(self, x):
        return self.inner(x)


def contractions(call, x):
    return jax.jit(call).lower(x).as_text().count("stablehlo.reshape")


def test_layers_are_patched_where_they_stand():
    net, x = Net(), jnp.ones((2, 7, 3))
    layers = [net.again, net.layers[1]["second"]]
    weights = [layer.weight for layer in layers]
    before, scaled = net(x), contractions(net.scaled, jnp.ones((2, 7, 5)))
    assert contractions(layers[0], x) > 0
    assert xs.apply_xla_patch_to_nn_linear(net) is net
    assert [net.layers[0], net.layers[1]["second"]] == layers
    assert all(layer.weight is w for layer, w in zip([net.again, layers[1]], weights, strict=True))
    np.testing.assert_allclose(net(x), before, rtol=1e-5)
    assert contractions(net, x) == scaled  # of the subclass, which keeps its own forward
    assert "forward" not in vars(net.scaled)
    alone = Linear(4, 3, seed=0)
    assert xs.apply_xla_patch_to_nn_linear(alone) is alone
    assert contractions(alone, x) == 0
    inner = xs.apply_xla_patch_to_nn_linear(Torchlike()).inner
    assert contractions(inner, x) == 0


class Loading(types.ModuleType):
    """A module that loads on use, and cannot."""

    def __getattr__(self, name):
        raise OSError(name)


class Slotted(Module):
    __slots__ = ("__inner", "unset")

    def __init__(self):
        self.__inner = Linear(4, 3, seed=0)

    def inner(self):
        return self.__inner


def test_only_a_program_s_own_parts_are_looked_through():
    net, x = Slotted(), jnp.ones((2, 7, 3))
    net.np, net.lazy, net.kind, net.act = np, Loading("lazy"), Linear, jax.nn.relu
    chain = net
    for _ in range(3000):  # deeper than Python recurses
        chain.next = Module()
        chain = chain.next
    chain.last = Linear(4, 3, seed=1)
    xs.apply_xla_patch_to_nn_linear(net)
    assert contractions(net.inner(), x) == contractions(chain.last, x) == 0
    assert "forward" not in vars(Linear(4, 3, seed=0))


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_patched_linear_is_the_linear_map_and_its_derivatives(shape, has_bias):
    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, (4, 3), (4,)))
    given = (x, w, b) if has_bias else (x, w)

    def plain(x, w, b=None):
        y = jnp.einsum("...n,mn->...m", x, w)
        return y if b is None else y + jnp.broadcast_to(b, y.shape)

    y, back = jax.vjp(plain, *given)
    np.testing.assert_allclose(xs.XLAPatchedLinear.apply(*given), y, rtol=1e-5)
    ctx = types.SimpleNamespace()
    np.testing.assert_allclose(xs.XLAPatchedLinear.forward(ctx, *given), y, rtol=1e-5)
    found = xs.XLAPatchedLinear.backward(ctx, jnp.ones_like(y))
    for mine, wanted in zip(found, back(jnp.ones_like(y)), strict=False):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5)
    assert len(found) == 3
    assert (found[2] is None) == (not has_bias)


def test_einsum_linear():
    layer = xs.EinsumLinear(4, 2, key=jax.random.key(0))
    assert (layer.weight.shape, layer.bias.shape) == ((2, 4), (2,))
    assert float(jnp.abs(layer.weight).max()) <= 0.5
    x = jnp.ones((2, 3, 4))
    np.testing.assert_allclose(
        layer(x),
        jnp.einsum("...n,mn->...m", x, layer.weight) + layer.bias.reshape(1, 1, 2),
        rtol=1e-5,
    )
    assert xs.EinsumLinear(4, 2, False, dtype=jnp.bfloat16).bias is None
    np.random.seed(3)
    first = xs.EinsumLinear(4, 2)
    np.random.seed(3)
    assert first.weight.tolist() == xs.EinsumLinear(4, 2).weight.tolist()
    assert first.weight.tolist() != xs.EinsumLinear(4, 2).weight.tolist()
    with pytest.raises(TypeError, match="no device"):
        xs.EinsumLinear(4, 2, device="xla")
    with pytest.raises(
        ValueError, match=r"torch_xla xla_patched_nn_linear_forward \(shoal.compat.linear\)"
    ):
        layer(jnp.ones(3))


def barriers(call, *args):
    return jax.jit(call).lower(*args).as_text().count("optimization_barrier")


def test_backward_barriers():
    weight, x = jnp.ones((2, 4)), jnp.ones((3, 4))

    def layer(weight, x):
        return x @ weight.T

    fenced = xs.apply_backward_optimization_barrier(layer)
    assert barriers(fenced, weight, x) == 0  # only in the backward pass
    assert barriers(jax.grad(lambda *a: fenced(*a).sum(), (0, 1)), weight, x) == 1
    tree = xs.EinsumLinear(4, 2, key=jax.random.key(0))
    called = xs.apply_backward_optimization_barrier(tree)
    assert jax.tree.leaves(called)[0] is tree.weight
    assert barriers(jax.grad(lambda m, x: m(x).sum()), called, x) == 1
    np.testing.assert_array_equal(called(x), tree(x))


def test_a_barrier_in_a_plain_module_holds_its_parameters():
    def loss(weight, x, has_barrier):
        net = Linear(2, 4, seed=0)
        net.weight = weight
        if has_barrier:
            assert xs.apply_backward_optimization_barrier(net) is net
        return net(x).sum()

    weight, x = jnp.ones((2, 4)), jnp.ones((3, 4))
    # also of a first layer, whose input has no gradient
    assert barriers(jax.grad(lambda w: loss(w, x, True)), weight) == 1
    assert barriers(jax.grad(lambda w: loss(w, x, False)), weight) == 0
    np.testing.assert_array_equal(jax.grad(loss)(weight, x, True), jax.grad(loss)(weight, x, False))


def test_a_barrier_keeps_a_module_s_own_forward_and_what_it_sets():
    x = jnp.ones((2, 7, 3))
    patched = xs.apply_xla_patch_to_nn_linear(Linear(4, 3, seed=0))
    xs.apply_backward_optimization_barrier(patched)
    assert contractions(patched, x) == 0  # the einsum is still there
    np.testing.assert_allclose(patched(x), Linear(4, 3, seed=0)(x), rtol=1e-5)

    class Counting(Linear):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            self.mean = self.mean * 0.5 + x.mean()
            return super().forward(x) - self.mean

    net = Counting(4, 3, seed=0)
    net.mean, weight = jnp.zeros(()), net.weight
    xs.apply_backward_optimization_barrier(net)
    for calls in (1, 2):
        net(x)
        assert net.calls == calls
    assert float(net.mean) == 1.5
    assert net.weight is weight

    def loss(weight):
        net.weight, net.mean = weight, jnp.zeros(())
        return net(x).sum()

    assert barriers(jax.grad(loss), weight) == 1


def test_a_barrier_holds_around_any_forward_of_an_object_s_own():
    x, closed = jnp.ones((2, 7, 3)), Linear(4, 3, seed=0)
    weight = closed.weight
    closed.forward = lambda x: 3 * x @ closed.weight.T
    xs.apply_backward_optimization_barrier(closed)
    np.testing.assert_allclose(closed(x), 3 * x @ closed.weight.T, rtol=1e-6)

    def own(weight):
        closed.weight = weight
        return closed(x).sum()

    assert barriers(jax.grad(own), weight) == 1
    closed.weight, closed.forward = weight, lambda x: 1 / 0
    xs.apply_backward_optimization_barrier(closed)
    with pytest.raises(ZeroDivisionError):
        jax.jit(closed)(x)
    assert closed.weight is weight  # and not what was traced


def test_modules_are_distributed_by_a_function():
    mesh = xs.get_1d_mesh("x")

    def partition(name, part, mesh):
        if name == "inner":
            part.weight = xs.mark_sharding(part.weight.T, mesh, (None, None)).T

    def doubled(module, inputs, mesh):
        return (inputs[0] * 2,)

    def halved(module, result, mesh):
        return result / 2

    net, x = Torchlike(), jnp.ones((2, 3))
    plain = net(x)
    assert xs.xla_distribute_module(net, mesh, partition) is net
    assert isinstance(net.inner.weight.sharding, jax.sharding.NamedSharding)
    np.testing.assert_allclose(net(x), plain, rtol=1e-6)
    xs.set_global_mesh(mesh)
    xs.xla_distribute_module(net, None, None, doubled, halved)
    xs.set_global_mesh(None)
    twice = (net.inner(x * 2)) / 2
    np.testing.assert_allclose(net(x), twice, rtol=1e-6)


@of_kind("fsdpv2_partition_spec")
def test_which_dim_of_a_parameter_is_split(case):
    param = np.zeros(case["tensor_shape"])
    spec = _prepare_spmd_partition_spec(param, **case["args"])
    assert list(spec) == case["expected"]["partition_spec"]


@of_kind("fsdpv2_params")
def test_parameters_of_two_layers(case):
    shapes = {"fc1.weight": (64, 128), "fc1.bias": (64,), "fc2.weight": (1, 64), "fc2.bias": (1,)}
    for name, text in case["expected"].items():
        spec = _prepare_spmd_partition_spec(np.zeros(shapes[name]), shard_maximal=True)
        assert str(mesh_of(case).get_op_sharding(spec)) == text


def test_scalars_have_no_dim_to_split():
    assert _prepare_spmd_partition_spec(np.float32(1)) == ()
