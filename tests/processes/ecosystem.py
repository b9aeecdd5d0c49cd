"""Programs of flax, optax and equinox that train, are killed, and go on: see test_ecosystem.

Each returns how to begin, and a step; the loop is one for all.
"""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np

import shoal

STEPS, KILLED_AT = 6, 3


def batch(number):
    draw = np.random.default_rng(number)
    x = draw.normal(size=(16, 8)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) > 0).astype(np.float32)


def linen():
    """A Dense network, Adam, and a schedule."""
    import flax.linen as nn
    import optax

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))

    net, opt = Net(), optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def init():
        params = net.init(jax.random.key(0), jnp.zeros((1, 8)))
        return {"params": params, "opt": opt.init(params)}

    def step(state, x, y):
        slope = jax.grad(lambda p: ((net.apply(p, x) - y) ** 2).mean())(state["params"])
        updates, after = opt.update(slope, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": after}

    return init, step


def linen_with_statistics():
    """A TrainState with batch statistics, and two optimizers for parts of the tree."""
    import flax.linen as nn
    import optax
    from flax import struct
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
            return nn.Dense(1)(nn.relu(x))

    class State(train_state.TrainState):
        batch_stats: dict = struct.field(default_factory=dict)

    net = Net()
    opt = optax.multi_transform(
        {"sgd": optax.sgd(1e-2, momentum=0.9), "adam": optax.adamw(1e-2)},
        {"Dense_0": "sgd", "Dense_1": "adam", "BatchNorm_0": "adam"},
    )

    def init():
        made = net.init(jax.random.key(0), jnp.zeros((2, 8)))
        state = State.create(
            apply_fn=net.apply, params=made["params"], tx=opt, batch_stats=made["batch_stats"]
        )
        return state.replace(step=jnp.int32(0))

    def step(state, x, y):
        def loss(params):
            tree = {"params": params, "batch_stats": state.batch_stats}
            out, more = state.apply_fn(tree, x, mutable=["batch_stats"])
            return ((out - y) ** 2).mean(), more

        slope, more = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=slope, batch_stats=more["batch_stats"])

    return init, step


def nnx():
    """A module of nnx, as its State, with dropout's random stream in it."""
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.second(self.dropout(nnx.relu(self.first(x))))

    graph, parts = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    del parts
    opt = optax.sgd(1e-2, momentum=0.9)

    def init():
        state = nnx.state(Net(nnx.Rngs(0)))
        return {"model": state, "opt": opt.init(state.filter(nnx.Param))}

    def step(state, x, y):
        net = nnx.merge(graph, state["model"])
        slope = nnx.grad(lambda net: ((net(x) - y) ** 2).mean())(net)
        params = nnx.state(net, nnx.Param)
        updates, after = opt.update(slope, state["opt"], params)
        nnx.update(net, optax.apply_updates(params, updates))
        return {"model": nnx.state(net), "opt": after}

    return init, step


def equinox():
    """The arrays of a module of equinox, beside its functions."""
    import equinox as eqx
    import optax

    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))

    def build():
        return eqx.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))

    _, functions = eqx.partition(eqx.filter_eval_shape(build), lambda leaf: hasattr(leaf, "shape"))

    def init():
        arrays = eqx.filter(build(), eqx.is_array)
        return {"model": arrays, "opt": opt.init(arrays)}

    def step(state, x, y):
        def loss(arrays):
            return ((jax.vmap(eqx.combine(arrays, functions))(x) - y) ** 2).mean()

        updates, after = opt.update(jax.grad(loss)(state["model"]), state["opt"], state["model"])
        return {"model": eqx.apply_updates(state["model"], updates), "opt": after}

    return init, step


def optax_of_many():
    """Gradients that are accumulated over steps, with injected and averaged parameters."""
    import optax

    opt = optax.MultiSteps(
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2), every_k_schedule=2
    )

    def init():
        params = {"w": jnp.ones((8, 1)), "b": jnp.zeros(1)}
        return {"params": params, "opt": opt.init(params), "mean": params}

    def step(state, x, y):
        slope = jax.grad(lambda p: ((x @ p["w"] + p["b"] - y) ** 2).mean())(state["params"])
        updates, after = opt.update(slope, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        mean = optax.incremental_update(params, state["mean"], 0.1)
        return {"params": params, "opt": after, "mean": mean}

    return init, step


PROGRAMS = {
    one.__name__: one for one in (linen, linen_with_statistics, nnx, equinox, optax_of_many)
}


def spread(shape, mesh):
    """Split the last dim that the devices divide; leave the others whole."""
    dims = [None] * len(shape)
    for dim in reversed(range(len(shape))):
        if shape[dim] and shape[dim] % mesh.size == 0:
            dims[dim] = "x"
            break
    return shoal.Layout(mesh, *dims)


def train(name, folder, *, is_killed=False):
    """Train to the end, or kill process 1 after a step.

    Return the first step, and a number for each leaf of the state.
    """
    init, step = PROGRAMS[name]()
    mesh = shoal.make_mesh({"x": -1})
    rows = shoal.Layout(mesh, "x", None)
    layouts = jax.tree.map(lambda leaf: spread(leaf.shape, mesh), jax.eval_shape(init))
    jitted = jax.jit(step)
    with shoal.Checkpoints(folder, keep=2) as history:
        state, first = history.resume(layouts, lambda: shoal.create(init, layouts=layouts))
        for number in range(first, STEPS):
            state = jitted(state, *(shoal.put(part, rows) for part in batch(number)))
            history.save(number, state, force=True)
            if is_killed and number == KILLED_AT:
                history.wait()
                shoal.barrier("saved")
                if shoal.process_index() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                shoal.barrier("after it")
    return first, [number_of(leaf) for leaf in jax.tree.leaves(state)]


def resume_all(folder):
    """Resume each program, and run it undisturbed."""
    return {
        name: [train(name, f"{folder}/{name}{end}") for end in ("", " undisturbed")]
        for name in PROGRAMS
    }


def number_of(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return float(jnp.abs(leaf.astype(jnp.float32) * 0.37).sum())
