"""What a checkpoint holds, read without what restores; and jobs whose processes are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.checkpoint.at import store_at
from shoal.checkpoint.blocks.reader import Want, read_boxes, verify_files
from shoal.checkpoint.bucket.address import Bucket
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.format import blobs
from shoal.checkpoint.store.opening import Checkpoint, open_checkpoint
from shoal.checkpoint.tree import dtypes, plain_values
from shoal.runtime.client.in_process import LocalJob, LocalJobClient

Array = np.ndarray[Any, Any]


def damage(place: Path | str | Bucket, step: int) -> None:
    """Flip a bit of a step's data, on a disk or in a bucket."""
    store = store_at(place, "").step(step)
    name = next(one for one in store.names() if one.startswith("data-"))
    if isinstance(store, LocalStore):
        with open(f"{store.path}/{name}", "r+b") as file:
            file.seek(-1, 2)
            byte = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([byte[0] ^ 1]))
        return
    data = bytearray(store._objects.read(name)[0])
    data[-1] ^= 1
    store._objects.put(name, bytes(data))


def kept(path: Path | str) -> dict[str, Any]:
    """Return every leaf by name; every block was verified. Of keys the words."""
    checkpoint = open_checkpoint(LocalStore(path))
    assert verify_files(checkpoint) == []
    found = {}
    for number, leaf in enumerate(checkpoint.manifest.leaves):
        if not leaf.has_data:
            found[leaf.name] = plain_values.decode_value(leaf.kind, leaf.value)
        elif leaf.kind == "per_process":
            found[leaf.name] = _own(checkpoint, number)
        else:
            out = np.empty(leaf.stored_shape, dtypes.dtype_of(leaf.dtype))
            read_boxes(checkpoint, [Want(number, (0,) * out.ndim, out)], most_bytes=1 << 27)
            is_bulk = leaf.kind in ("str", "bytes")
            found[leaf.name] = plain_values.value_of_bulk(leaf.kind, out) if is_bulk else out
    return found


def _own(checkpoint: Checkpoint, leaf: int) -> list[Any]:
    own = []
    for origin, size in checkpoint.values_of(leaf).values():
        out = np.empty(size, np.uint8)
        read_boxes(checkpoint, [Want(leaf, (origin,), out)], most_bytes=1 << 27)
        own.append(blobs.decode_tree(out.tobytes()))
    return own


def same_bits(one: Any, other: Any) -> bool:
    """Are two arrays equal to the bit, dtype and shape?"""
    one, other = np.asarray(one), np.asarray(other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def files_of(path: Path | str) -> list[str]:
    """Return the kinds of files there."""
    return sorted(name.split("-")[0] for name in os.listdir(path)) if os.path.isdir(path) else []


CLEAN = ["COMMIT", "data", "index", "manifest"]


def in_job(
    processes: int, work: Callable[[LocalJobClient], Any], job: LocalJob | None = None
) -> list[Any]:
    """Let N threads do the work of N processes; return what each returned or raised."""
    job = job or LocalJob(processes)
    results: list[Any] = [None] * processes

    def run(process: int) -> None:
        try:
            results[process] = work(job.clients[process])
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            results[process] = error

    threads = [threading.Thread(target=run, args=(p,), daemon=True) for p in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a process hangs"
    return results


def messages(results: list[Any]) -> Mapping[int, str]:
    """Return what each raised, in words."""
    return {p: f"{type(r).__name__}: {r}" for p, r in enumerate(results)}
