"""Errors of shoal that are also instances of the types DTensor raises, under its names."""

from __future__ import annotations

from contextlib import AbstractContextManager

from shoal.arrays.host.upload import is_tracing
from shoal.compat.wording import errors_named
from shoal.errors import (
    CorruptCheckpointError,
    DivergenceError,
    InitializeError,
    NotCommittedError,
    StepAlreadyCommittedError,
    UsageError,
)
from shoal.runtime.jax_service import jax_runtime

__all__ = ["EagerOnly", "NotPossible", "StartError", "check_eager", "prefix_errors"]


class NotPossible(UsageError, NotImplementedError):
    """A DTensor function without a counterpart here; the message says what to do."""


class EagerOnly(UsageError, RuntimeError):
    """A function that needs concrete arrays was called inside `jit`."""


class StartError(InitializeError, ValueError):
    """The devices were initialized twice, or too late, or not at all."""


# Where DTensor raised a ValueError, or one of `tf.errors`, shoal's error is a ValueError, too.


class Diverged(DivergenceError, ValueError):
    """Processes made different calls; of `barrier` also: its sum over the mesh is wrong."""


class NoCheckpoint(NotCommittedError, ValueError):
    """Nothing is saved there."""


class CheckpointExists(StepAlreadyCommittedError, ValueError):
    """Something is saved there already."""


class DamagedCheckpoint(CorruptCheckpointError, ValueError):
    """Bytes on disk differ from those that were saved."""


_ALSO_VALUE_ERRORS = (Diverged, NoCheckpoint, CheckpointExists, DamagedCheckpoint)


def prefix_errors(name: str) -> AbstractContextManager[None]:
    """Prefix shoal's errors in the block with the DTensor function that was called.

    They become the types of this file, by which they are also what DTensor raised.
    """
    return errors_named(f"dtensor.{name}", *_ALSO_VALUE_ERRORS, facade="dtensor.")


def check_eager(name: str, ours: str) -> None:
    """Refuse a call inside `jit`, as DTensor does with a RuntimeError.

    Raises:
      EagerOnly: a function is being traced.
    """
    # Asking JAX would start its devices; until they have started, nothing can be traced.
    if jax_runtime.backend_exists() and is_tracing():
        raise EagerOnly(f"dtensor.{name} must be called eagerly, outside jit; {ours}")
