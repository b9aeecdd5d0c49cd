"""The context in which shoal runs device programs of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def own_programs() -> Iterator[None]:
    """Run shoal's programs as they are, whatever JAX's debugging flags say of the user's.

    Under `jax.disable_jit` a program would not place its results: they would stay where its
    arguments are. `jax.debug_nans` and `jax.debug_infs` would refuse values that only move. So the
    user's functions are never called inside.
    """
    import jax

    flags = jax.config
    if not (flags.jax_disable_jit or flags.jax_debug_nans or flags.jax_debug_infs):
        yield  # to enter the three takes as long as a small `put`
        return
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        yield
