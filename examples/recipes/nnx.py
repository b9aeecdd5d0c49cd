"""Train a flax.nnx model on a mesh, and continue on another one.

    shoal run -n 2 --devices 2 nnx.py run 4      # four steps, on 4 devices
    shoal run -n 1 --devices 8 nnx.py run 8      # four more, on 8 devices

The second command prints the losses that one run of eight steps would have.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax import P

import shoal


class Net(nnx.Module):
    def __init__(self, rngs):
        columns = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        rows = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
        self.hidden = nnx.Linear(8, 16, kernel_init=columns, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(16, 1, kernel_init=rows, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def build():
    net = Net(nnx.Rngs(0))
    return {"net": net, "optimizer": nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)}


specs_of = nnx.get_partition_spec


def init():
    return nnx.state(build())


def train_step(state, x, y):
    graph = nnx.graphdef(nnx.eval_shape(build))  # all but the arrays
    built = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(built["net"])
    built["optimizer"].update(built["net"], grads)
    return nnx.state(built), loss


def batch_of(step):
    x = np.random.default_rng(step).normal(size=(32, 8)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


def main(folder, steps):
    shoal.initialize()
    shoal.assert_same({"steps": steps})  # all that comes from flags and files
    mesh = shoal.make_mesh({"data": -1, "model": 2})
    with jax.set_mesh(mesh), shoal.Checkpoints(folder, keep=2) as ckpts:
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
