"""`broadcast_one_to_all`, `process_allgather`, `assert_equal`: values between processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shoal.collectives.allgather import allgather
from shoal.collectives.broadcast import broadcast
from shoal.collectives.leaves import is_global
from shoal.collectives.same import assert_same
from shoal.colour import collective
from shoal.compat.multihost_utils.errors import SpreadArrayError, UnequalError
from shoal.compat.wording import errors_named
from shoal.runtime import process
from shoal.runtime.client.lanes import one_call
from shoal.runtime.verb import coordinator_here

__all__ = ["assert_equal", "broadcast_one_to_all", "process_allgather"]


Tree = Any


@collective()
@one_call("broadcast_one_to_all", of=coordinator_here)
def broadcast_one_to_all(in_tree: Tree, is_source: bool | None = None) -> Tree:
    """Return the values of one process on all: `shoal.broadcast`.

    Collective over all processes.

    Values arrive bit-exactly, whatever the dtype.

    Args:
      in_tree: arrays, numbers, PRNG keys, str, bytes; of equal structure, shapes and dtypes.
      is_source: True on the process whose values are sent. None: process 0 is the source.

    Returns:
      The tree, with arrays and numbers as NumPy arrays, also with one process.

    Raises:
      DivergenceError: on all: no process is the source, or several are, which are named; or
        trees, shapes or dtypes differ.
      SpreadArrayError: an array is distributed over several processes. Also a RuntimeError.
      UsageError, DeadlineError, ProcessLostError, PeerFailedError: as `shoal.broadcast`.

    >>> broadcast_one_to_all({"lr": 0.5})
    {'lr': array(0.5)}
    """
    is_mine = process.process_index() == 0 if is_source is None else bool(is_source)
    also = [SpreadArrayError] if any(map(_is_spread, jax.tree.leaves(in_tree))) else []
    with errors_named("broadcast_one_to_all", *also):
        tree = broadcast(
            jax.tree.map(_array, in_tree), is_source=is_mine, name="broadcast_one_to_all"
        )
    return jax.tree.map(_array, tree)


@collective()
@one_call("process_allgather", of=coordinator_here)
def process_allgather(in_tree: Tree, tiled: bool = False) -> Tree:
    """Return the values of all processes, side by side, on every process: `shoal.allgather`.

    Collective over all processes.

    Args:
      in_tree: leaves as for `broadcast_one_to_all`; with `tiled` dim 0 may differ.
      tiled: False: add a dim 0, of size N with N processes. True: concatenate along dim 0; values
        without dims are stacked. An array on devices of several processes becomes its global
        value, whatever `tiled` if it is fully replicated.

    Returns:
      The tree, with NumPy arrays, whose rank does not depend on the number of processes.

    Raises:
      UsageError: an array is distributed over several processes, without `tiled`.
      DivergenceError, DeadlineError, ProcessLostError, PeerFailedError: as `shoal.allgather`.

    >>> process_allgather(3.0), process_allgather(np.zeros((2, 3)), tiled=True).shape
    (array([3.]), (2, 3))
    """
    leaves = jax.tree.leaves(in_tree)
    spread = any(map(_is_spread, leaves))
    # Replicated arrays come back as their own value, as with `tiled`: the others then stack by
    # concatenating rows, so that all travel in one call.
    in_rows = not tiled and not spread and any(map(_is_one, leaves))
    only = "Gathering global non-fully-addressable arrays only supports tiled=True: "
    detail = only if spread and not tiled else ""
    tree = jax.tree.map(_row if in_rows else _array, in_tree)
    with errors_named(f"process_allgather: {detail}".removesuffix(": ")):
        gathered = allgather(tree, tiled=bool(tiled) or in_rows, name="process_allgather")
    there = partial(_as_there, bool(tiled) or in_rows)
    return jax.tree.map(there, in_tree, gathered, is_leaf=lambda x: x is None)


@collective()
@one_call("assert_equal", of=coordinator_here)
def assert_equal(in_tree: Tree, fail_message: str = "") -> None:
    """Return if all processes hold equal bits, else raise on all of them: `shoal.assert_same`.

    Collective over all processes.

    Args:
      in_tree: leaves as for `broadcast_one_to_all`. Of an array on devices of several processes
        each region is compared among its holders.
      fail_message: the beginning of the error message.

    Raises:
      UnequalError: on all: values differ; the first difference is shown, with the holders of each
        side. Or trees, shapes or dtypes differ. Also an AssertionError.
      UsageError, DeadlineError, ProcessLostError, PeerFailedError: as `shoal.assert_same`.

    >>> assert_equal({"seed": 7, "w": np.zeros(3)}, fail_message="at the start")
    """
    begin = f"{fail_message}. assert_equal" if fail_message else "assert_equal"
    with errors_named(begin, UnequalError):
        assert_same(jax.tree.map(_array, in_tree), name="assert_equal")


def _array(leaf: Any) -> Any:
    """Return numbers and array-likes as NumPy arrays; other values unchanged."""
    if isinstance(leaf, str | bytes | np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        return leaf
    array = np.asarray(leaf)
    return leaf if array.dtype.hasobject else array


def _is_spread(leaf: Any) -> bool:
    """Is it distributed over several processes?"""
    return is_global(leaf) and not leaf.is_fully_replicated


def _is_one(leaf: Any) -> bool:
    """Is it an array with one value for all processes?

    In a job of one process, a mesh of its devices looks like a mesh of the whole job.
    """
    if not isinstance(leaf, jax.Array) or not leaf.is_fully_replicated:
        return False
    is_alone = process.process_count() == 1 and isinstance(leaf.sharding, NamedSharding)
    return is_alone or is_global(leaf)


def _row(leaf: Any) -> Any:
    """Return a value with a dim 0 of size 1, unless it is one for all processes."""
    value = _array(leaf)
    is_array = isinstance(value, np.ndarray | jax.Array) and not _is_one(value)
    return value[None] if is_array else value


def _as_there(is_tiled: bool, given: Any, gathered: Any) -> Any:
    """Return None for None, and the value of a replicated 0-d array, as JAX does."""
    if given is None:
        return None
    is_scalar = is_tiled and _is_one(given) and given.ndim == 0
    return gathered[0, ...] if is_scalar else gathered
