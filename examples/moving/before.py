"""Train a small classifier with jax.distributed, multihost_utils, optax and orbax.

    srun python before.py FOLDER STEPS

`after.py` is the same program with shoal.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import NamedSharding, P
from jax.experimental import multihost_utils
from jax.sharding import AxisType

ROWS, BATCH = 1024, 64
SPECS = {"hidden": P(None, "model"), "out": P("model", None)}
optimizer = optax.adamw(1e-2)


def init(key):
    first, second = jax.random.split(key)
    hidden = jax.random.normal(first, (32, 64)) / 6
    params = {"hidden": hidden, "out": jax.random.normal(second, (64, 10)) / 8}
    return {"params": params, "opt": optimizer.init(params)}


def loss_of(params, x, y):
    logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train_step(state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def write_data(folder):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 32)).astype(np.float32)
    y = (x @ rng.normal(size=(32, 10))).argmax(1).astype(np.int32)
    folder.mkdir(parents=True)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)


def row_order(steps):
    """Return the row numbers of all batches: a new permutation for each epoch."""
    epochs = range(-(-steps * BATCH // ROWS))
    rows = [np.random.default_rng(epoch).permutation(ROWS) for epoch in epochs]
    return np.concatenate(rows)[: steps * BATCH]


def abstract(shape, sharding):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def main(folder, steps):
    jax.distributed.initialize()
    if jax.process_index() == 0 and not (folder / "data").exists():
        write_data(folder / "data")
    multihost_utils.sync_global_devices("data is written")
    data = [np.load(folder / "data" / name, mmap_mode="r") for name in ("x.npy", "y.npy")]

    shape = (jax.device_count() // 2, 2)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def sharding_of(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return NamedSharding(mesh, SPECS.get(name, P()))

    key = jax.random.key(0)
    shapes = jax.eval_shape(init, key)
    shardings = jax.tree_util.tree_map_with_path(sharding_of, shapes)
    train = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))

    rows = NamedSharding(mesh, P("data"))
    order = row_order(steps)

    def batch_of(step):
        numbers = order[step * BATCH : (step + 1) * BATCH]
        mine = np.split(numbers, jax.process_count())[jax.process_index()]
        return [jax.make_array_from_process_local_data(rows, part[mine]) for part in data]

    options = ocp.CheckpointManagerOptions(save_interval_steps=10, max_to_keep=2)
    with ocp.CheckpointManager(folder / "run", options=options) as ckpts:
        latest = ckpts.latest_step()
        if latest is None:
            state, first = jax.jit(init, out_shardings=shardings)(key), 0
        else:
            target = jax.tree.map(abstract, shapes, shardings)
            state = ckpts.restore(latest, args=ocp.args.StandardRestore(target))
            first = latest + 1

        for step in range(first, steps):
            state, loss = train(state, *batch_of(step))
            if step % 5 == 0 and jax.process_index() == 0:
                print(f"step {step} loss {float(loss)!r}", flush=True)
            ckpts.save(step, args=ocp.args.StandardSave(state))
            if ckpts.reached_preemption(step):
                return 75
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), int(sys.argv[2])))
