"""Train a flax.linen model on a mesh, and continue on another one.

    shoal run -n 2 --devices 2 linen.py run 4      # four steps, on 4 devices
    shoal run -n 1 --devices 8 linen.py run 8      # four more, on 8 devices

The second command prints the losses that one run of eight steps would have.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax import P

import shoal


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        columns = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("in", "hidden"))
        rows = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("hidden", "out"))
        x = nn.Dense(16, kernel_init=columns, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(1, kernel_init=rows)(nn.relu(x))


class TrainState(train_state.TrainState):
    batch_stats: Any


net = Net()
optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 100))
RULES = [("hidden", "model"), ("in", None), ("out", None)]  # logical axes → mesh axes


def init():
    made = net.init(jax.random.key(0), jnp.zeros((1, 8)))
    return TrainState.create(apply_fn=net.apply, tx=optimizer, **made)


def specs_of(shapes):
    return nn.logical_to_mesh(nn.get_partition_spec(shapes), RULES)


def train_step(state, x, y):
    def loss_of(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
        return ((out - y) ** 2).mean(), changed

    (loss, changed), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, **changed), loss


def batch_of(step):
    x = np.random.default_rng(step).normal(size=(32, 8)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


def main(folder, steps):
    shoal.initialize()
    shoal.assert_same({"steps": steps})  # all that comes from flags and files
    mesh = shoal.make_mesh({"data": -1, "model": 2})
    with shoal.use_mesh(mesh), shoal.Checkpoints(folder, keep=2) as ckpts:
        specs = specs_of(jax.eval_shape(init))
        train = jax.jit(train_step, out_shardings=(shoal.named_sharding(specs), None))
        state, first = ckpts.resume(specs, lambda: shoal.create(init, layouts=specs))
        for step in range(first, steps):
            state, loss = train(state, *shoal.put(batch_of(step), P("data")))
            ckpts.save(step, state)
            if shoal.process_index() == 0:
                print(f"step {step} loss {float(loss):.4f}", flush=True)
    return state


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
