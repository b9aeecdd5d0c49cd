"""Train with several optax transformations on a mesh, and continue on another one.

    shoal run -n 2 --devices 2 optax_states.py run 4      # four steps, on 4 devices
    shoal run -n 1 --devices 8 optax_states.py run 8      # four more, on 8 devices

The second command prints the losses that one run of eight steps would have.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import shoal

weights = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
biases = optax.sgd(1e-2, momentum=0.9)
both = optax.multi_transform(
    {"weights": weights, "biases": biases},
    {"hidden": "weights", "out": "weights", "bias": "biases"},
)
optimizer = optax.MultiSteps(
    optax.chain(optax.clip_by_global_norm(1.0), both),
    every_k_schedule=2,
)
TABLE = {"**/hidden": P(None, "model"), "**/out": P("model"), "**": P()}


def init():
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "hidden": jax.random.normal(first, (8, 16)) / 3,
        "out": jax.random.normal(second, (16, 1)) / 4,
        "bias": jnp.zeros(16),
    }
    return {"params": params, "opt": optimizer.init(params), "mean": params}


def specs_of(shapes):
    return shoal.match_layouts(TABLE, shapes)


def train_step(state, x, y):
    def loss_of(params):
        out = jax.nn.relu(x @ params["hidden"] + params["bias"]) @ params["out"]
        return ((out - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    mean = optax.incremental_update(params, state["mean"], 0.1)  # averaged, for evaluation
    return {"params": params, "opt": opt, "mean": mean}, loss


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
