"""Train an equinox model on a mesh, and continue on another one.

    shoal run -n 2 --devices 2 eqx.py run 4      # four steps, on 4 devices
    shoal run -n 1 --devices 8 eqx.py run 8      # four more, on 8 devices

The second command prints the losses that one run of eight steps would have.
"""

import sys

import equinox as eqx
import jax
import numpy as np
import optax
from jax import P

import shoal


class Net(eqx.Module):
    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(8, 16, key=first)
        self.dropout = eqx.nn.Dropout(0.1)
        self.out = eqx.nn.Linear(16, 1, key=second)

    def __call__(self, x, key):
        return self.out(self.dropout(jax.nn.relu(self.hidden(x)), key=key))


optimizer = optax.adam(1e-2)
TABLE = {"**/hidden/weight": P("model"), "**/out/weight": P(None, "model"), "**": P()}


def build():
    return Net(jax.random.key(0))


# The rest of the model: functions, flags and sizes. filter_eval_shape creates no arrays.
_, static = eqx.partition(eqx.filter_eval_shape(build), lambda leaf: hasattr(leaf, "shape"))


def init():
    arrays = eqx.filter(build(), eqx.is_array)
    return {"net": arrays, "opt": optimizer.init(arrays), "key": jax.random.key(1)}


def specs_of(shapes):
    return shoal.match_layouts(TABLE, shapes)


def train_step(state, x, y):
    key, now = jax.random.split(state["key"])

    def loss_of(arrays):
        net = eqx.combine(arrays, static)
        out = jax.vmap(net)(x, jax.random.split(now, len(x)))
        return ((out - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["net"])
    updates, opt = optimizer.update(grads, state["opt"], state["net"])
    return {"net": eqx.apply_updates(state["net"], updates), "opt": opt, "key": key}, loss


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
