"""Train a small classifier with shoal and optax.

    shoal run -n 2 --devices 2 after.py FOLDER STEPS     # or: srun python after.py FOLDER STEPS

`before.py` is the same program with jax.distributed, multihost_utils and orbax.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax import NamedSharding, P

import shoal

ROWS, BATCH = 1024, 64
TABLE = {"**/hidden": P(None, "model"), "**/out": P("model", None)}
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


def main(folder, steps):
    shoal.initialize()
    if shoal.process_index() == 0 and not (folder / "data").exists():
        write_data(folder / "data")
    shoal.barrier("data is written")
    data = tuple(np.load(folder / "data" / name, mmap_mode="r") for name in ("x.npy", "y.npy"))

    mesh = shoal.make_mesh({"data": -1, "model": 2})
    key = jax.random.key(0)
    layouts = shoal.match_layouts(TABLE, jax.eval_shape(init, key), mesh=mesh)
    shardings = shoal.named_sharding(layouts)
    train = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))

    rows = NamedSharding(mesh, P("data"))
    order = row_order(steps)

    with shoal.Checkpoints(folder / "run", every=10, keep=2) as ckpts:
        state, first = ckpts.resume(layouts, lambda: shoal.create(init, key, layouts=layouts))
        with shoal.feed(data, rows, batch=BATCH, order=order, start=first * BATCH) as batches:
            for step, batch in enumerate(batches, first):
                state, loss = train(state, *batch)
                if step % 5 == 0 and shoal.process_index() == 0:
                    print(f"step {step} loss {float(loss)!r}", flush=True)
                ckpts.save(step, state)
                if shoal.preempted(step):
                    break
    return shoal.preemption.exit_code()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), int(sys.argv[2])))
