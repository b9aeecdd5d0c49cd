"""The programs of examples/recipes, to be run in the processes of a cluster: see test_ecosystem."""

from __future__ import annotations

import runpy
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shoal
from meta.source import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "examples/recipes").glob("*.py"))}


def train(name, folder, steps):
    """Train up to a step; return a number for each leaf of the state."""
    state = runpy.run_path(str(RECIPES[name]))["main"](folder, steps)
    return [number_of(leaf) for leaf in jax.tree.leaves(state)]


def resume_all(folder, steps):
    """Resume each program, and run it undisturbed."""
    return {
        name: [train(name, f"{folder}/{name}{end}", steps) for end in ("", " undisturbed")]
        for name in RECIPES
    }


def number_of(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return float(jnp.abs(leaf.astype(jnp.float32) * 0.37).sum())


# ---- States as optimizers make them: placed parameters, then `tx.init`.


def _optimizers(optax):
    schedule = optax.cosine_decay_schedule(1e-1, 100)
    is_matrix = {"w": True, "b": False}
    names = {"w": "adam", "b": "sgd"}
    return {
        "adam": optax.adam(1e-1),
        "adamw": optax.adamw(schedule),
        "adafactor": optax.adafactor(1e-1),
        "adagrad": optax.adagrad(1e-1),
        "adamax": optax.adamax(1e-1),
        "amsgrad": optax.amsgrad(1e-1),
        "lion": optax.lion(1e-2),
        "lamb": optax.lamb(1e-2),
        "novograd": optax.novograd(1e-2),
        "radam": optax.radam(1e-1),
        "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
        "yogi": optax.yogi(1e-1),
        "sgd": optax.sgd(schedule, momentum=0.9, nesterov=True),
        "noisy_sgd": optax.noisy_sgd(1e-2, key=jax.random.key(3)),
        "multi_steps": optax.MultiSteps(optax.adam(1e-1), 2).gradient_transformation(),
        "apply_if_finite": optax.apply_if_finite(optax.adam(1e-1), 3),
        "masked": optax.masked(optax.adam(1e-1), is_matrix),
        "partition": optax.partition({"adam": optax.adam(1e-1), "sgd": optax.sgd(1e-1)}, names),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
        "ema": optax.chain(optax.ema(0.9), optax.sgd(1e-1)),
        "chain": optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(),
            optax.scale_by_schedule(schedule),
            optax.scale(-1.0),
        ),
    }


def _loss(params):
    return ((params["w"] * (1 + params["b"])) ** 2).mean()


def _optax_loops(optax, params):
    """Return for each optimizer its first state, and a train step."""
    for name, tx in _optimizers(optax).items():

        def step(state, tx=tx):
            loss, gradients = jax.value_and_grad(_loss)(state["params"])
            updates, opt = tx.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        yield name, {"params": params, "opt": tx.init(params)}, jax.jit(step)


def _library_loops(optax, params):
    """Return the same for the states of flax and equinox."""
    import equinox as eqx
    from flax import nnx
    from flax.training import train_state

    tx = optax.adam(1e-1)
    flax_state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    def flax_step(state):
        loss, gradients = jax.value_and_grad(_loss)(state.params)
        return state.apply_gradients(grads=gradients), loss

    yield "TrainState", flax_state, jax.jit(flax_step)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(params["w"])
            self.b = nnx.Param(params["b"])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    model = Model(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph, first = nnx.split((model, optimizer))

    def nnx_step(state):
        model, optimizer = nnx.merge(graph, state)

        def loss_of(model):
            return _loss({"w": model.dropout(model.w[...]), "b": model.b[...]})

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    yield "nnx.Optimizer", first, jax.jit(nnx_step)

    class Linear(eqx.Module):
        w: jax.Array
        b: jax.Array
        name: str = eqx.field(static=True, default="linear")

    linear = Linear(**params)
    arrays = {"model": linear, "opt": tx.init(linear)}

    def eqx_step(state):
        loss, gradients = jax.value_and_grad(lambda m: _loss({"w": m.w, "b": m.b}))(state["model"])
        updates, opt = tx.update(gradients, state["opt"], state["model"])
        return {"model": eqx.apply_updates(state["model"], updates), "opt": opt}, loss

    yield "equinox", arrays, jax.jit(eqx_step)


def resumed_losses(folder, kind):
    """Train each loop three steps, stop, resume, and train three more; also without the stop."""
    import optax

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType[kind],))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*dims)) for dims in (["data"], []))
    params = {
        "w": jax.device_put(np.linspace(-1, 1, 96, dtype="float32").reshape(24, 4), rows),
        "b": jax.device_put(np.full(4, 0.5, "float32"), whole),
    }
    found = {}
    with jax.set_mesh(mesh) if kind == "Explicit" else nullcontext():
        for name, first, step in [*_optax_loops(optax, params), *_library_loops(optax, params)]:
            undisturbed, state = [], first
            for _ in range(6):
                state, loss = step(state)
                undisturbed.append(float(loss))
            losses = []
            for _ in range(2):
                with shoal.Checkpoints(f"{folder}/{name}") as checkpoints:
                    state, begin = checkpoints.resume(first, first)
                    for number in range(begin, begin + 3):
                        state, loss = step(state)
                        losses.append(float(loss))
                        checkpoints.save(number, state)
            found[name] = losses, undisturbed
    return found
