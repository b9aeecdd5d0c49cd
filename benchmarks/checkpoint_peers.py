"""What others save and restore with, each with two functions: save(path) and restore(path).

The tree is a dict of arrays over the devices of one process. A save is durable when it returns:
who does not fsync by himself gets one for each file and folder, inside the timer.
"""

from __future__ import annotations

import importlib.util
import logging
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

import shoal

REQUEST = 8 << 20
THREADS = 2


class Peer(Protocol):
    """One contestant."""

    def save(self, path: Path) -> object: ...
    def restore(self, path: Path) -> object: ...


def peers(tree: Mapping[str, jax.Array], *, tiny: bool = False) -> dict[str, Peer]:
    """Return all that are installed; the limits of the disk only where the leaves are large."""
    found: dict[str, Peer] = {"shoal": Shoal(tree)}
    if not tiny:
        found["raw"] = Raw(tree)
    if _has("orbax"):
        logging.getLogger("absl").setLevel(logging.ERROR)
        found["orbax"] = Orbax(tree)
        found["orbax uncompressed"] = OrbaxUncompressed(tree)
    if _has("torch"):
        found["torch DCP"] = TorchDCP(tree)
    if _has("safetensors"):
        found["safetensors"] = Safetensors(tree)
    if _has("tensorflow"):
        found["tensorflow"] = TensorFlow(tree)
    return found


class Shoal:
    def __init__(self, tree: Mapping[str, jax.Array]) -> None:
        self.tree = tree
        self.target = jax.tree.map(lambda leaf: leaf.sharding, tree)

    def save(self, path: Path) -> None:
        shoal.save(path, self.tree)

    def restore(self, path: Path) -> object:
        return jax.block_until_ready(shoal.restore(path, self.target))


class Raw:
    """The limits: one file by O_DIRECT from warm memory and fsync; pread into fresh memory."""

    def __init__(self, tree: Mapping[str, jax.Array]) -> None:
        self.num_bytes = sum(leaf.nbytes for leaf in tree.values())
        self.memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(self.memory, np.uint8)[:] = 7

    def save(self, path: Path) -> None:
        path.mkdir()
        fd = os.open(path / "data", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        view = memoryview(self.memory)
        self._each(lambda at: os.pwrite(fd, view[at : at + REQUEST], at))
        os.fsync(fd)
        os.close(fd)
        sync(path)

    def restore(self, path: Path) -> object:
        fd = os.open(path / "data", os.O_RDONLY)
        fresh = np.empty(self.num_bytes, np.uint8)
        view = memoryview(fresh)
        self._each(lambda at: os.preadv(fd, [view[at : at + REQUEST]], at))
        os.close(fd)
        return fresh

    def _each(self, move: Any) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            moved = list(pool.map(move, range(0, self.num_bytes, REQUEST)))
        if sum(moved) != self.num_bytes:
            raise SystemExit("a raw request was cut short")


class Orbax:
    def __init__(self, tree: Mapping[str, jax.Array]) -> None:
        import orbax.checkpoint as ocp

        self.tree = tree
        self.checkpointer = ocp.StandardCheckpointer()
        self.abstract = jax.tree.map(_abstract, tree)

    def save(self, path: Path) -> None:
        self.start(path)
        self.finish()

    def start(self, path: Path) -> None:
        self.checkpointer.save(path, self.tree)

    def finish(self) -> None:
        self.checkpointer.wait_until_finished()

    def restore(self, path: Path) -> object:
        return jax.block_until_ready(self.checkpointer.restore(path, self.abstract))


class OrbaxUncompressed:
    """Plain zarr files, its fastest way here."""

    def __init__(self, tree: Mapping[str, jax.Array]) -> None:
        import orbax.checkpoint as ocp

        self.ocp, self.tree = ocp, tree
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=False)
        self.checkpointer = ocp.Checkpointer(handler)

    def save(self, path: Path) -> None:
        self.checkpointer.save(path, args=self.ocp.args.PyTreeSave(self.tree))

    def restore(self, path: Path) -> object:
        how = self.ocp.checkpoint_utils.construct_restore_args(self.tree)
        wanted = self.ocp.args.PyTreeRestore(item=self.tree, restore_args=how)
        return jax.block_until_ready(self.checkpointer.restore(path, args=wanted))


class TorchDCP:
    def __init__(self, tree: Mapping[str, jax.Array]) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        self.dcp = dcp
        self.saving: Any = None
        self.state = {name: torch.from_numpy(np.array(leaf)) for name, leaf in tree.items()}

    def save(self, path: Path) -> None:
        self.dcp.save(self.state, checkpoint_id=path, no_dist=True)
        sync(path)

    def start(self, path: Path) -> None:
        self.saving = self.dcp.async_save(self.state, checkpoint_id=path, no_dist=True)

    def finish(self) -> None:
        self.saving.result()

    def restore(self, path: Path) -> None:
        import torch

        fresh = {name: torch.empty_like(leaf) for name, leaf in self.state.items()}
        self.dcp.load(fresh, checkpoint_id=path, no_dist=True)


class Safetensors:
    def __init__(self, tree: Mapping[str, jax.Array]) -> None:
        import safetensors.numpy

        self.library, self.tree = safetensors.numpy, tree

    def save(self, path: Path) -> None:
        path.mkdir()
        values = {name: np.asarray(leaf) for name, leaf in self.tree.items()}
        self.library.save_file(values, path / "data")
        sync(path / "data")
        sync(path)

    def restore(self, path: Path) -> object:
        return self.library.load_file(path / "data")


class TensorFlow:
    def __init__(self, tree: Mapping[str, jax.Array]) -> None:
        import tensorflow as tf

        self.tf = tf
        self.state = {name: tf.Variable(np.asarray(leaf)) for name, leaf in tree.items()}

    def save(self, path: Path) -> None:
        self.tf.train.Checkpoint(**self.state).write(str(path / "data"))
        for file in path.iterdir():
            sync(file)
        sync(path)

    def restore(self, path: Path) -> None:
        fresh = {name: self.tf.Variable(self.tf.zeros_like(v)) for name, v in self.state.items()}
        self.tf.train.Checkpoint(**fresh).read(str(path / "data")).assert_consumed()


def sync(path: Path) -> None:
    """Make a file or folder durable."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
