"""Tie two values to one layout, whichever the compiler chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding

from shoal.arguments import check_flags
from shoal.arrays.bridge.leaf_layouts import path_text
from shoal.arrays.bridge.sharding import layout_of_sharding
from shoal.arrays.host.host_values import as_array, is_key, unfit, warn_of_narrowing
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.placing.put import put
from shoal.colour import traced
from shoal.errors import UsageError, raise_all
from shoal.plan.layout import Layout


@traced
def shard_alike(a: Any, b: Any, *, gradient: bool = False) -> tuple[Any, Any]:
    """Give two trees of values one layout inside `jit`, leaf by leaf, without naming it.

    Traced.

    Whatever the compiler knows about the layout of either value, from uses before or after, holds
    for the other too: a pinned value (`constrain`) pins the other, and two free ones are laid out
    alike. Values are unchanged, and neither waits for the other. A function that is itself under
    `jit` and called several times is compiled once, so that the values of all its calls are laid
    out alike (`jit(…, inline=True)` keeps them apart). So a region that is manual over some axes
    cannot hold one if the program has the region twice (two calls, both branches of a `cond`, a
    derivative next to the value): XLA refuses that, with an error. Outside `jit`, `grad` and
    `vmap`, a host value, or an array that was not placed, is placed like an array on a mesh, as by
    `put`.

    Args:
      a, b: trees of one structure, with leaves of the same shapes; dtypes may differ. None has
        no effect.
      gradient: also lay out derivatives alike: the two tangents in forward mode, the two cotangents
        in reverse. By default the compiler places them.

    Returns:
      Both trees. Use these: the given values are unchanged.

    Raises:
      UsageError: structures or shapes that differ, keys next to numbers, types that differ on
        Explicit axes, Shardy switched off, or, outside `jit`, where each array is placed already,
        arrays in different layouts; all offending leaves by path, while tracing.

    Example:
      >>> import jax, jax.numpy as jnp, shoal
      >>> from jax import NamedSharding, P
      >>> rows = NamedSharding(shoal.make_mesh({"x": -1}), P("x"))
      >>> def twins(x):
      ...     return shoal.shard_alike(shoal.constrain(x, rows), jnp.ones((8, 3)))
      >>> _, y = jax.jit(twins)(jnp.ones((8, 3)))
      >>> y.sharding.is_equivalent_to(rows, 2)
      True

    Source: sharding groups of the Shardy partitioner, openxla.org/shardy.
    """
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise UsageError("shard_alike needs the Shardy partitioner; leave it enabled")
    check_flags("shard_alike", gradient=gradient)
    firsts, seconds = _by_path(a), _by_path(b)
    raise_all("shard_alike", _structure_problems(a, b, firsts, seconds))
    problems = []
    for path, first in firsts.items():
        second = seconds[path]
        sides = {"the first": first, "the second": second}
        whys = [f"in {side} tree: {why}" for side, v in sides.items() if (why := unfit(v))]
        problems += [f"{path}: {why}" for why in whys or _differences(first, second)]
    raise_all("shard_alike", problems)
    placed = {path: _placed_alike(firsts[path], seconds[path]) for path in firsts}
    warn_of_narrowing("shard_alike", [(path, value) for path in placed for value in placed[path]])
    pairs = [
        _tied(as_array(first), as_array(second), gradient) for first, second in placed.values()
    ]
    treedef = jax.tree.structure(a)
    first_leaves, second_leaves = zip(*pairs, strict=True) if pairs else ((), ())
    return jax.tree.unflatten(treedef, first_leaves), jax.tree.unflatten(treedef, second_leaves)


def _placed_alike(first: Any, second: Any) -> tuple[Any, Any]:
    """Return a pair with the one that is placed nowhere yet in the layout of the other."""
    if is_tracing() or any(isinstance(value, jax.core.Tracer) for value in (first, second)):
        return first, second
    layout = _own_layout(first)
    if layout is not None and not _is_committed(second):
        return first, put(second, layout)
    layout = _own_layout(second)
    if layout is not None and not _is_committed(first):
        return put(first, layout), second
    return first, second


def _is_committed(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.committed


def _own_layout(value: Any) -> Layout | None:
    """Return the layout of an array on a mesh; None for others, and for terms of a sum."""
    if not _is_committed(value) or not isinstance(value.sharding, NamedSharding):
        return None
    layout = layout_of_sharding(value.sharding, value.ndim)
    return None if layout.partial else layout


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_text(path): value for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _structure_problems(
    a: Any, b: Any, firsts: Mapping[str, Any], seconds: Mapping[str, Any]
) -> list[str]:
    problems = [f"{path}: in the first tree only" for path in firsts if path not in seconds]
    problems += [f"{path}: in the second tree only" for path in seconds if path not in firsts]
    kinds = [jax.tree.structure(tree) for tree in (a, b)]
    if not problems and kinds[0] != kinds[1]:
        one, other = (str(kind).removeprefix("PyTreeDef")[:200] for kind in kinds)
        problems.append(f"the containers differ: {one} and {other}")
    return problems


def _differences(first: Any, second: Any) -> list[str]:
    """Return why two leaves cannot have the same layout."""
    shapes = [jnp.shape(value) for value in (first, second)]
    if shapes[0] != shapes[1]:
        return [f"shapes {shapes[0]} and {shapes[1]} differ; only equal shapes have one layout"]
    if is_key(first) != is_key(second):
        return ["keys and numbers have no layout in common; pass keys with keys"]
    if not all(isinstance(value, jax.Array) for value in (first, second)):
        return []
    if isinstance(first, jax.core.Tracer) or isinstance(second, jax.core.Tracer):
        types = [jax.typeof(value).sharding for value in (first, second)]
        explicit = all(AxisType.Explicit in kind.mesh.axis_types for kind in types)
        if explicit and types[0].spec != types[1].spec:
            return [
                f"on Explicit axes the types say {types[0].spec} and {types[1].spec}; "
                "constrain one of them to the other's"
            ]
        return []
    lies, shall = first.sharding, second.sharding
    if is_tracing() or not (first.committed and second.committed):
        return []
    if lies.is_equivalent_to(shall, first.ndim):
        return []
    return [
        f"outside jit both are placed already: {_layout(lies, first.ndim)} and "
        f"{_layout(shall, first.ndim)}; relayout(b, layout_of(a)) moves one"
    ]


def _layout(where: jax.sharding.Sharding, rank: int) -> str:
    return repr(layout_of_sharding(where, rank) if isinstance(where, NamedSharding) else where)


def _tied(a: jax.Array, b: jax.Array, gradient: bool) -> tuple[jax.Array, jax.Array]:
    here = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in here.axis_types and AxisType.Auto not in here.axis_types:
        return a, b  # per-device values have no layout to choose
    kinds = [jnp.issubdtype(value.dtype, jnp.inexact) for value in (a, b)]
    if not any(kinds):
        return tuple(_ALIKE.bind(a, b))

    @jax.custom_jvp
    def alike(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(_ALIKE.bind(a, b))

    @alike.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        if gradient and all(kinds):
            tangents = _ALIKE.bind(*tangents)
        return alike(*primals), tuple(tangents)

    return alike(a, b)


def _transpose(cotangents: Sequence[Any], *_: Any) -> Sequence[Any]:
    if any(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return cotangents  # symbolic zeros are not arrays
    return _ALIKE.bind(*cotangents)


def _batch(values: Sequence[Any], dims: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Tie batches to each other; an unbatched value to the first element of a batch."""
    a, b = values
    if dims[0] is not None and dims[1] is not None:
        return _ALIKE.bind(a, jnp.moveaxis(b, dims[1], dims[0])), (dims[0], dims[0])
    if dims[0] is not None:
        return [a, _ALIKE.bind(jax.lax.index_in_dim(a, 0, dims[0], keepdims=False), b)[1]], dims
    return [_ALIKE.bind(a, jax.lax.index_in_dim(b, 0, dims[1], keepdims=False))[0], b], dims


def _lower(ctx: mlir.LoweringRuleContext, a: ir.Value, b: ir.Value) -> Sequence[ir.Value]:
    """Put both values into a group of their own, numbered within the module, so that every process
    compiles the same program.
    """
    groups = 0

    def count(operation: ir.Operation) -> ir.WalkResult:
        nonlocal groups
        groups += operation.name == "sdy.sharding_group"
        return ir.WalkResult.ADVANCE

    ctx.module_context.module.operation.walk(count)
    for value in (a, b):
        sdy.sharding_group(value, groups // 2)
    return a, b


_ALIKE = Primitive("shard_alike")
_ALIKE.multiple_results = True
_ALIKE.def_impl(lambda a, b: [a, b])
_ALIKE.def_abstract_eval(lambda a, b: [a, b])
ad.deflinear(_ALIKE, _transpose)
batching.primitive_batchers[_ALIKE] = _batch
mlir.register_lowering(_ALIKE, _lower, cacheable=False)  # otherwise equal calls would share a group
