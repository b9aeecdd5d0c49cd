"""Optimization barriers: everything before completes before anything after begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from shoal.arguments import check_flags
from shoal.arrays.bridge.leaf_layouts import path_text
from shoal.arrays.host.host_values import as_array, unfit, warn_of_narrowing
from shoal.arrays.host.upload import is_tracing
from shoal.colour import traced
from shoal.errors import UsageError, raise_all

Values = list[jax.Array]


@traced
def fence(target: Any, *, backward: bool = False) -> Any:
    """Keep the compiler from moving or fusing work across a point of the program.

    Traced.

    `fence(tree)` returns a tree of values: nothing that uses one of them begins before all of
    them are available. `fence(fn, backward=True)` returns a function that computes what `fn` does;
    where it is differentiated, the cotangents of all its arguments, parameters and inputs, pass
    one barrier, so that the backward pass of the layers before waits until the gradients of
    this layer's parameters are done, and their memory and collectives are not deferred to the end.
    Values and derivatives are unchanged, and outside `jit` it has no effect.

    Args:
      target: a tree: arrays, keys, numbers, None; or a function whose parameters are arguments
        (closures are not seen). A callable tree, such as a module, is a tree.
      backward: fence only the derivative, not the values. Also for trees: `fence(tree,
        backward=True)`.

    Returns:
      The tree, or the function.

    Raises:
      UsageError: a function without `backward=True`, leaves that are not values; all by path.

    Example:
      >>> import jax, jax.numpy as jnp, shoal
      >>> layer = shoal.compat.fence(lambda w, x: jnp.tanh(x @ w), backward=True)
      >>> slope = jax.jit(jax.grad(lambda w, x: layer(w, x).sum()))
      >>> slope(jnp.zeros((2, 2)), jnp.ones((1, 2))).tolist()
      [[1.0, 1.0], [1.0, 1.0]]

    Source: `optimization_barrier` of StableHLO; `jax.lax.optimization_barrier`.
    """
    check_flags("fence", backward=backward)
    if callable(target) and jax.tree_util.all_leaves([target]):
        return _function(target, backward)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(target)
    named = [(path_text(path), value) for path, value in leaves if not _is_float0(value)]
    raise_all("fence", [f"{path}: {why}" for path, value in named if (why := unfit(value))])
    warn_of_narrowing("fence", named)
    return jax.tree.unflatten(treedef, _fenced([value for _, value in leaves], backward))


def _function(fn: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    if not backward:
        raise UsageError(
            "fence: of a function only the derivative can be fenced: backward=True; for its "
            "values, fence its inputs or outputs"
        )

    @wraps(fn)
    def fenced(*args: Any, **options: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, options))
        args, options = jax.tree.unflatten(treedef, _fenced(leaves, backward=True))
        return fn(*args, **options)

    return fenced


def _fenced(leaves: list[Any], backward: bool) -> list[Any]:
    """Return leaves behind one barrier; leaves that cannot be fenced are unchanged."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) and not is_tracing():
        return leaves
    held = [n for n, leaf in enumerate(leaves) if _is_held(leaf, backward)]
    values = [as_array(leaves[n]) for n in held]
    fenced = list(leaves)
    for n, value in zip(held, _barrier(values, backward) if values else [], strict=True):
        fenced[n] = value
    return fenced


def _is_held(leaf: Any, backward: bool) -> bool:
    if backward:  # has a derivative; functions may be given anything
        return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    return not _is_float0(leaf)


def _barrier(values: Values, backward: bool) -> Values:
    """Fence differentiable values.

    The derivative of JAX's own barrier makes zeros for values without one, and differentiates all
    that is computed from them for nothing (jax 0.10).
    """

    @jax.custom_jvp
    def passed(values: Values) -> Values:
        return values if backward else jax.lax.optimization_barrier(values)

    def derivative(primals: tuple[Values], tangents: tuple[list[Any]]) -> tuple[Values, list[Any]]:
        moving = [n for n, dot in enumerate(tangents[0]) if not isinstance(dot, SymbolicZero)]
        results = passed(*primals)
        # JAX's zeros lack the Manual axes along which they vary (jax 0.10)
        dots: list[Any] = [SymbolicZero(jax.typeof(result).to_tangent_aval()) for result in results]
        given = tangents[0]
        for n, dot in zip(
            moving, jax.lax.optimization_barrier([given[n] for n in moving]), strict=True
        ):
            dots[n] = dot
        return results, dots

    passed.defjvp(derivative, symbolic_zeros=True)
    return passed(values)


def _is_float0(value: Any) -> bool:
    """True for the cotangent of an integer, which has no value."""
    return getattr(value, "dtype", None) == jax.dtypes.float0
