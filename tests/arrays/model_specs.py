"""Trees of specs as models carry them: each leaf has the sharding that its library gives.

A program: other tests expect that these libraries are not imported.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import NamedSharding, P

import shoal

RULES = (("embed", "fsdp"), ("mlp", "tensor"))


def shardings(tree):
    return [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(tree)]


def split(initial, *axes):
    return nnx.with_partitioning(initial, axes)


class Block(nnx.Module):
    def __init__(self, rngs):
        kernel, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
        self.up = nnx.Linear(
            8, 16, kernel_init=split(kernel, "fsdp", "tensor"),
            bias_init=split(zeros, "tensor"), rngs=rngs)  # fmt: skip
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def block():
    return nnx.state(Block(nnx.Rngs(0)))


class Logical(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros
        x = nn.Dense(
            16,
            kernel_init=nn.with_logical_partitioning(kernel, ("embed", "mlp")),
            bias_init=nn.with_logical_partitioning(zeros, ("mlp",)),
        )(x)
        return nn.Dense(8, kernel_init=nn.with_logical_partitioning(kernel, ("mlp", "embed")))(x)


def logical():
    return Logical().init(jax.random.key(0), jnp.ones((2, 8)))


def of_nnx(mesh):
    with jax.set_mesh(mesh):
        state = block()
        specs, own = nnx.get_partition_spec(state), nnx.get_named_sharding(state, mesh)
        made = [
            shoal.create(block, layouts=specs),
            shoal.create(block, layouts=own),
            shoal.create(block),  # as the model shards it
            shoal.relayout(shoal.create(block, layouts=mesh), specs),
        ]
    made.append(shoal.create(lambda: jax.tree.map(jnp.zeros_like, state), layouts=own))
    made.append(shoal.named_sharding(specs, mesh))
    for one in made:
        assert shardings(one) == shardings(own)


def of_linen_with_logical_rules(mesh):
    specs = nn.get_partition_spec(jax.eval_shape(logical))
    own = nn.logical_to_mesh_sharding(specs, mesh, RULES)
    on_axes = nn.logical_to_mesh(specs, RULES)
    with shoal.use_mesh(mesh):
        made = [
            shoal.create(logical, layouts=own),
            shoal.create(logical, layouts=on_axes),
            shoal.create(lambda: nn.unbox(logical()), layouts=on_axes),
            shoal.put(jax.tree.map(np.asarray, nn.unbox(logical())), on_axes),
        ]
    for one in made:
        assert shardings(one) == shardings(own)
    assert shoal.named_sharding(on_axes, mesh) == own


def of_equinox(mesh):
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_array)
    specs = jax.tree.map(lambda x: P("fsdp") if x.ndim == 2 else P(), params)
    placed = shoal.put(params, shoal.named_sharding(specs, mesh))
    own = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    assert shardings(placed) == shardings(own)
    assert jax.tree.structure(placed) == jax.tree.structure(params)


if __name__ == "__main__":
    shoal.initialize(virtual_devices=8)
    grid = shoal.make_mesh({"fsdp": 4, "tensor": 2})
    for check in (of_nnx, of_linen_with_logical_rules, of_equinox):
        check(grid)
        print(check.__name__)
