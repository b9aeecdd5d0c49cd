"""Train a classifier of handwritten digits: sharded parameters, sharded batches, any mesh.

    shoal run -n 2 --devices 4 examples/digits.py [FOLDER] [--checkpoints PATH]

The data are scikit-learn's 1,797 images of 8 x 8 pixels, written into the folder once and read
from there: each process reads the rows that its devices need. One table says where everything lies.
The same program runs as one process (`python examples/digits.py`) and as many, on CPU devices, GPUs
or TPUs. In the folder, or at PATH, which may be in a bucket (s3://bucket/run), it saves while it
trains. Started again, on whatever mesh, it goes on after the epoch that was saved last; a SIGTERM
makes it save once more and end with 75.
`examples/preempted.py` shows all of that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import shoal

EPOCHS, BATCH, HIDDEN, RATE, MOMENTUM = 30, 128, 128, 0.1, 0.9
FILES = ("images.npy", "test_images.npy", "labels.npy", "test_labels.npy")


def init(key):
    """The parameters and their velocities, before training."""
    first, second = jax.random.split(key)
    params = {
        "hidden": {"w": jax.random.normal(first, (64, HIDDEN)) / 8.0, "b": jnp.zeros(HIDDEN)},
        "out": {"w": jax.random.normal(second, (HIDDEN, 10)) / 16.0, "b": jnp.zeros(10)},
    }
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


# The hidden layer is split over `model`; the classes are whole on every device.
TABLE = {
    "**/hidden/w": P(None, "model"),
    "**/hidden/b": P("model"),
    "**/out/w": P("model"),
    "**/out/b": P(),
}


# To answer with, it is split over all devices.
SERVING = {
    "**/hidden/w": P(None, ("data", "model")),
    "**/hidden/b": P(("data", "model")),
    "**/out/w": P(("data", "model")),
    "**/out/b": P(),
}


def layouts_on(mesh):
    """Parameters and velocities lie alike: both trees have the same paths further down."""
    return shoal.match_layouts(TABLE, jax.eval_shape(init, jax.random.key(0)), mesh=mesh)


def rows_on(mesh):
    """Images and labels are split over `data`."""
    return NamedSharding(mesh, P("data"))


def logits(params, images):
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"][None, :])
    return hidden @ params["out"]["w"] + params["out"]["b"][None, :]


def loss(params, images, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(params, images)), labels[:, None], 1)
    return -chosen.mean()


@partial(jax.jit, donate_argnums=0)
def train_step(state, images, labels):
    value, gradient = jax.value_and_grad(loss)(state["params"], images, labels)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v - RATE * g, state["velocity"], gradient)
    params = jax.tree.map(jnp.add, state["params"], velocity)
    return {"params": params, "velocity": velocity}, value


@jax.jit
def count_right(params, images, labels):
    return (logits(params, images).argmax(1) == labels).sum()


def write_data(folder):
    """Write images and labels, to train with and to test with, as files that are there or not."""
    digits = load_digits()
    images = (digits.data / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int32)
    parts = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    for name, part in zip(FILES, parts, strict=True):
        np.save(unfinished / name, part)
    unfinished.rename(folder)


def data_in(folder):
    """The data, on disk: a process reads what it needs of them. Process 0 writes them, once."""
    if shoal.process_index() == 0 and not folder.exists():
        write_data(folder)
    shoal.barrier("the data are written")
    return [np.load(folder / name, mmap_mode="r") for name in FILES]


def epoch_of(data, rows, seed):
    """Whole batches in an order that every process shuffles alike."""
    order = np.random.default_rng(seed).permutation(len(data[0]))
    return shoal.feed(data, rows, batch=BATCH, order=order)


def train(ckpts, data, mesh, say):
    """Train to the end or until preempted; return the trained state, None if preempted."""
    layouts, rows = layouts_on(mesh), rows_on(mesh)
    state, first = ckpts.resume(
        layouts, lambda: shoal.create(init, jax.random.key(0), layouts=layouts)
    )
    say(f"resumed after epoch {first}" if first else f"{shoal.describe(state)}\n", flush=True)
    for epoch in range(first, EPOCHS):
        with epoch_of(data, rows, seed=epoch + 1) as batches:
            for images, labels in batches:
                state, value = train_step(state, images, labels)
        if epoch % 3 == 2:
            say(bar(epoch + 1, float(value)), flush=True)
        stop = shoal.preempted(epoch)
        ckpts.save(epoch, state, force=stop)
        if stop:
            source = shoal.preemption.notice().source
            say(f"received {source}; saved after {epoch + 1} epochs, as step {epoch}", flush=True)
            return None
    return state


def moved_to_serve(params, mesh, say):
    """The parameters as they are to answer; says first what that moves."""
    layouts = shoal.match_layouts(SERVING, params, mesh=mesh)
    plans = jax.tree.map(shoal.plan_relayout, params, layouts)
    for path, plan in jax.tree_util.tree_leaves_with_path(plans):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        say(f"{name:9} {plan.way:11} a device receives {plan.received_bytes:,} bytes")
    params = shoal.relayout(params, layouts)
    say(f"\n{shoal.describe(params)}", flush=True)
    return params


def bar(epoch, value):
    done = 24 * epoch // EPOCHS
    return f"epoch {epoch:2d} of {EPOCHS} {'━' * done}{'╌' * (24 - done)} loss {value:.4f}"


def main(folder=None, checkpoints=None):
    shoal.initialize()
    own = tempfile.TemporaryDirectory() if folder is None and shoal.process_index() == 0 else None
    if folder is None:  # the same for all processes; it goes when the first of them ends
        folder = shoal.broadcast(own.name if own else "")
    mesh = shoal.make_mesh({"data": -1, "model": 2 if jax.device_count() % 2 == 0 else 1})
    say = print if shoal.process_index() == 0 else lambda *words, **options: None
    say(shoal.describe(mesh), "\n", sep="")
    images, test_images, labels, test_labels = data_in(Path(folder, "data"))
    with shoal.Checkpoints(checkpoints or folder, keep=2, every=3) as ckpts:
        state = train(ckpts, (images, labels), mesh, say)
    if state is not None:
        say("\nmove the weights to the layouts that serve them:")
        params = moved_to_serve(state["params"], mesh, say)
        right = count_right(params, *shoal.put((test_images, test_labels), rows_on(mesh)))
        shoal.barrier("trained")
        say(f"test accuracy {int(right) / len(test_labels):.3f}", flush=True)
    shoal.shutdown()
    return shoal.preemption.exit_code()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--checkpoints")
    sys.exit(main(**vars(parser.parse_args())))
