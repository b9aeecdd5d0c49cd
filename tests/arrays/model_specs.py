"""Trees of specs as models carry them: each leaf has the sharding that its library gives.

A program: other tests expect that these libraries are not imported.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx, traverse_util
from jax import NamedSharding, P

import shoal

RULES = (("embed", "fsdp"), ("mlp", "tensor"))

# Of flax's examples: parameter, small shape with the rank of the example's, spec or logical axes.
GEMMA = {
    ("embedder", "embedding"): ((32, 16), P("tensor", "fsdp")),
    ("layers", 0, "pre_attention_norm", "scale"): ((16,), P("tensor")),
    ("layers", 0, "attn", "attn_vec_einsum", "kernel"): ((4, 8, 16), P("tensor", None, "fsdp")),
    ("layers", 0, "attn", "q_einsum", "kernel"): ((4, 16, 8), P("tensor", "fsdp", None)),
    ("layers", 0, "attn", "kv_einsum", "kernel"): ((2, 1, 16, 8), P(None, None, "fsdp", None)),
    ("layers", 0, "attn", "_query_norm", "scale"): ((8,), None),
    ("layers", 0, "attn", "_key_norm", "scale"): ((8,), None),
    ("layers", 0, "post_attention_norm", "scale"): ((16,), P("tensor")),
    ("layers", 0, "pre_ffw_norm", "scale"): ((16,), P("tensor")),
    ("layers", 0, "mlp", "gate_proj", "kernel"): ((16, 32), P("fsdp", "tensor")),
    ("layers", 0, "mlp", "up_proj", "kernel"): ((16, 32), P("fsdp", "tensor")),
    ("layers", 0, "mlp", "down_proj", "kernel"): ((32, 16), P("tensor", "fsdp")),
    ("layers", 0, "post_ffw_norm", "scale"): ((16,), P("tensor")),
    ("layers", 1, "attn", "qkv_einsum", "kernel"): ((3, 4, 16, 8), P(None, "tensor", "fsdp", None)),
    ("final_norm", "scale"): ((16,), P("tensor")),
}
LM1B_RULES = (("mlp", "tensor"), ("vocab", "tensor"), ("embed", "fsdp"), ("heads", "tensor"))
LM1B = {
    ("Embed_0", "embedding"): ((32, 16), ("vocab", "embed")),
    ("block_0", "LayerNorm_0", "bias"): ((16,), ("embed",)),
    ("block_0", "LayerNorm_0", "scale"): ((16,), ("embed",)),
    # flax's attention has heads in a dim of their own, which these axes of two dims do not know
    ("block_0", "attention", "query", "kernel"): ((16, 4, 4), ("embed", "kv")),
    ("block_0", "attention", "out", "kernel"): ((4, 4, 16), ("embed", "kv")),
    ("block_0", "MlpBlock_0", "Dense_0", "kernel"): ((16, 32), ("embed", "mlp")),
    ("block_0", "MlpBlock_0", "Dense_0", "bias"): ((32,), ("mlp",)),
    ("block_0", "MlpBlock_0", "Dense_1", "kernel"): ((32, 16), ("mlp", "embed")),
    ("block_0", "MlpBlock_0", "Dense_1", "bias"): ((16,), ("embed",)),
    ("logitdense", "kernel"): ((16, 32), ("embed", "vocab")),
    ("logitdense", "bias"): ((32,), ("vocab",)),
}
NLP_SEQ = {  # without axes: replicated
    ("embed", "embedding"): ((32, 16), None),
    ("Encoder1DBlock_0", "LayerNorm_0", "scale"): ((16,), None),
    ("Encoder1DBlock_0", "attention", "query", "kernel"): ((16, 4, 4), None),
    ("Encoder1DBlock_0", "MlpBlock_0", "Dense_0", "kernel"): ((16, 32), None),
    ("Dense_0", "kernel"): ((16, 32), None),
    ("Dense_0", "bias"): ((32,), None),
}


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
    for tree in made:
        assert shardings(tree) == shardings(own)


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
    for tree in made:
        assert shardings(tree) == shardings(own)
    assert shoal.named_sharding(on_axes, mesh) == own


def of_flax_gemma(mesh):
    def init():
        made = {
            path: nnx.Param(jnp.ones(shape), **({"out_sharding": spec} if spec else {}))
            for path, (shape, spec) in GEMMA.items()
        }
        return nnx.State.from_flat_path(made)

    with jax.set_mesh(mesh):
        state = init()
        specs, own = nnx.get_partition_spec(state), nnx.get_named_sharding(state, mesh)
        host = jax.tree.map(np.asarray, state)
        made = [
            shoal.create(init, layouts=specs),
            shoal.put(host, specs),
            shoal.put(host, own),
        ]
        as_made = shoal.create(init)  # of which the compiler drops a None at the end
    for x, wanted in zip(jax.tree.leaves(as_made), shardings(own), strict=True):
        assert x.sharding.is_equivalent_to(wanted, x.ndim)
    assert shardings(shoal.named_sharding(specs, mesh)) == shardings(own)
    for tree in made:
        assert shardings(tree) == shardings(own)
        assert jax.tree.structure(tree) == jax.tree.structure(state)


def of_flax_lm1b(mesh):
    _of_linen(mesh, LM1B)


def of_flax_nlp_seq(mesh):
    _of_linen(mesh, NLP_SEQ)


def _of_linen(mesh, table):
    def init():
        made = {
            path: nn.LogicallyPartitioned(jnp.ones(shape), axes) if axes else jnp.ones(shape)
            for path, (shape, axes) in table.items()
        }
        return traverse_util.unflatten_dict(made)

    specs = nn.get_partition_spec(jax.eval_shape(init))
    own = nn.logical_to_mesh_sharding(specs, mesh, LM1B_RULES)
    on_axes = nn.logical_to_mesh(specs, LM1B_RULES)
    with shoal.use_mesh(mesh):
        made = [
            shoal.create(init, layouts=own),
            shoal.create(init, layouts=on_axes),
            shoal.put(jax.tree.map(np.asarray, nn.unbox(init())), on_axes),
            shoal.named_sharding(on_axes),
        ]
    for tree in made:
        assert shardings(tree) == shardings(own)


def of_equinox(mesh):
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_array)
    specs = jax.tree.map(lambda x: P("fsdp") if x.ndim == 2 else P(), params)
    placed = shoal.put(params, shoal.named_sharding(specs, mesh))
    own = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    assert shardings(placed) == shardings(own)
    assert jax.tree.structure(placed) == jax.tree.structure(params)


CHECKS = (
    of_nnx, of_linen_with_logical_rules, of_flax_gemma, of_flax_lm1b, of_flax_nlp_seq, of_equinox,
)  # fmt: skip

if __name__ == "__main__":
    shoal.initialize(virtual_devices=8)
    grid = shoal.make_mesh({"fsdp": 4, "tensor": 2})
    for check in CHECKS:
        check(grid)
        print(check.__name__)
