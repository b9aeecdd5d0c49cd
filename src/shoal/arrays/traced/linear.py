"""A linear map that does not merge leading dims."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    axes_of,
    cannot_be_pending,
    leaf_layouts,
    must_divide,
    padded,
)
from shoal.arrays.host.agreed_program import agree_on_program, concrete, fail_program, owners_of
from shoal.arrays.host.digest import digest
from shoal.arrays.host.host_values import as_array, unfit, warn_of_narrowing
from shoal.arrays.host.record_call import record_call
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.traced.constrain import constrain_agreed, explicit_part
from shoal.colour import traced
from shoal.errors import UsageTypeError, raise_all
from shoal.plan.layout import Layout
from shoal.plan.mesh import mesh_of


@traced
def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    layout: Layouts = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Return `x @ weight.T + bias` over the last dim, for any number of leading dims.

    Traced.

    Leading dims are never merged, forward or backward: if axes split several of them (batch and
    sequence, say), merging them would gather the values first. The map and its three derivatives
    are one contraction each: `...n,mn->...m` for the result, `...m,mn->...n`, `...m,...n->mn` and a
    sum over the leading dims. Outside `jit`, with arrays that are split over several processes, all
    of these call it, and first agree on the call, before anything is sent.

    Args:
      x: [..., in].
      weight: [out, in], as in torch and its checkpoints, so that both contract their last
        dims. For a kernel [in, out] pass `kernel.T`, which costs nothing.
      bias: [out]; None: none. All have one dtype.
      layout: the layout of the result, as for `constrain`; None: the compiler's choice. On
        Explicit axes JAX requires it if axes split the contracted dim.
      preferred_element_type: the dtype in which products are summed, also between devices, and that
        of the result. None: the dtype of `x`. For 16 bits `jnp.float32` keeps the sums exact to
        that; derivatives are summed in it as well, and come back in the arguments' own dtype.

    Returns:
      [..., out].

    Raises:
      UsageError: ranks, sizes or dtypes that do not fit; all of them, while tracing.

    Example:
      >>> import jax.numpy as jnp, shoal
      >>> shoal.compat.linear(jnp.ones((2, 3, 4)), jnp.ones((5, 4)), jnp.ones(5)).shape
      (2, 3, 5)
    """
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    try:
        arrays = _arrays(given)
        x, weight = arrays["x"], arrays["weight"]
        _check_sums(x, weight, layout, preferred_element_type)
        shape = (*x.shape[:-1], weight.shape[0])
        result = None if layout is None else _result(layout, shape)
    except BaseException as error:
        with contextlib.suppress(Exception):  # whose call it is cannot be known
            fail_program("linear", error, _spread_out(given).values())
        raise
    _agree(arrays, result, preferred_element_type)
    where = None if result is None else explicit_part(result)
    y = _contracted(x, weight, where, preferred_element_type)
    if bias is not None:
        y += _spread(arrays["bias"].astype(y.dtype), y)
    return y if layout is None else constrain_agreed(y, layout)


def _contracted(
    x: jax.Array, weight: jax.Array, where: NamedSharding | None, dtype: Any
) -> jax.Array:
    """Return the sums of products.

    XLA computes wrong values for some products of which an axis splits the contracted dim and, in
    other places, the result (see openxla/xla#40034; of random layouts on eight CPU devices about
    one in fifty). On Explicit axes no such product is asked for, nor by its derivatives: the
    arguments first share the axes of the contracted dim, which then split nothing else, and the
    result moves afterwards. What Auto axes split is not seen here.
    """
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    (*lead, inner), (rows, columns) = (
        [*map(axes_of, jax.typeof(a).sharding.spec)] or [()] * a.ndim for a in (x, weight)
    )
    used = {axis for dim in lead for axis in dim}
    if not inner and used.isdisjoint(columns):
        inner = columns
    kept = rows if {*used, *inner}.isdisjoint(rows) else ()
    result = [*lead, rows] if where is None else [*map(axes_of, where.spec.partitions)]
    result += [()] * (x.ndim - len(result))
    has_pending = where is not None and bool(where.spec.unreduced)  # which does not move afterwards
    is_plain = has_pending or (columns, rows, result) == (inner, kept, [*lead, rows])
    mesh = jax.typeof(x).sharding.mesh if where is None else where.mesh
    if not is_plain:
        x, weight = _moved(x, mesh, *lead, inner), _moved(weight, mesh, kept, inner)
        where = NamedSharding(mesh, PartitionSpec(*lead, kept))
    y = jax.lax.dot_general(x, weight, dims, preferred_element_type=dtype, out_sharding=where)
    return y if is_plain else _moved(y, mesh, *result)


def _moved(x: jax.Array, mesh: Any, *dims: tuple[str, ...]) -> jax.Array:
    target = NamedSharding(mesh, PartitionSpec(*(dim or None for dim in dims)))
    moved: jax.Array = jax.reshard(x, target)
    return moved


def _arrays(given: dict[str, Any]) -> dict[str, jax.Array]:
    """Return the arguments as arrays, if they make a linear map."""
    problems = [f"{name}: {why}" for name, v in given.items() if (why := unfit(v))]
    raise_all("linear", problems)
    warn_of_narrowing("linear", given.items())
    given = {name: as_array(value) for name, value in given.items()}
    shapes = {name: np.shape(value) for name, value in given.items()}
    expected = {"weight": (2, "[out, in]"), "bias": (1, "[out]")}
    if not shapes["x"]:
        problems.append("x: a scalar has no last dim; pass [..., in]")
    for name, (rank, dims) in expected.items():
        if name in shapes and len(shapes[name]) != rank:
            problems.append(
                f"{name}: shape {shapes[name]} has rank {len(shapes[name])}; pass {dims}"
            )
    raise_all("linear", problems)
    size, (rows, columns) = shapes["x"][-1], shapes["weight"]
    if size != columns:
        hint = "; weight is [out, in]: pass its .T" if size == rows else ""
        problems.append(f"x {shapes['x']} has {size} in, weight {shapes['weight']} {columns}{hint}")
    if "bias" in shapes and shapes["bias"] != (rows,):
        problems.append(f"bias {shapes['bias']} must be [{rows}], one for each row of weight")
    dtypes = {n: jnp.result_type(value) for n, value in given.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        problems.append(f"dtypes differ: {listed}; cast them (preferred_element_type= sums wider)")
    elif not jnp.issubdtype(dtypes["x"], np.number):
        problems.append(f"{dtypes['x']} values cannot be multiplied")
    raise_all("linear", problems)
    return given


def _check_sums(x: jax.Array, weight: jax.Array, layout: Layouts, dtype: Any) -> None:
    """Reject sums in a dtype that JAX would narrow, or whose layout the types do not determine."""
    problems = []
    wanted = _dtype(dtype, x.dtype)
    kept = jax.dtypes.canonicalize_dtype(wanted)
    if kept != wanted:
        problems.append(f"preferred_element_type: {wanted} would become {kept}")
    split = [spec[-1] for a in (x, weight) if (spec := tuple(jax.typeof(a).sharding.spec))]
    if layout is None and len(split) == 2 and not all(split):
        problems += _used_twice(x, weight)
    if layout is None and len(split) == 2 and all(split):
        problems.append(
            f"{split[0]} and {split[1]} split the contracted dim, and on Explicit axes "
            "the result's type must be given: layout="
        )
    raise_all("linear", problems)


def _dtype(given: Any, default: Any) -> Any:
    is_record = isinstance(given, list | tuple | dict)  # which NumPy would read as a record dtype
    try:
        chosen = default if given is None else given
        wanted = None if is_record else jnp.dtype(chosen)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses strings
        wanted = None
    if wanted is None or not any(jnp.issubdtype(wanted, kind) for kind in (np.number, np.bool_)):
        raise UsageTypeError(f"linear: preferred_element_type={given!r} is not a dtype")
    return wanted


def _used_twice(x: jax.Array, weight: jax.Array) -> list[str]:
    """Return a problem if an Explicit axis splits a leading dim of `x` and the weight's rows."""
    lead = {axis for dim in jax.typeof(x).sharding.spec[:-1] for axis in axes_of(dim)}
    twice = sorted(lead.intersection(axes_of(jax.typeof(weight).sharding.spec[0])))
    if not twice:
        return []
    return [
        f"{', '.join(twice)} would split two dims of the result, one as in x and one as in weight; "
        "on Explicit axes choose one: layout="
    ]


def _result(layout: Layouts, shape: tuple[int, ...]) -> Leaf:
    """Return the result, as its shape, with its layout."""
    problems: list[str] = []
    leaves, _ = leaf_layouts(jax.ShapeDtypeStruct(shape, np.float32), layout, problems)
    if leaves and not is_tracing():
        cannot_be_pending(leaves[0], problems)
    raise_all("linear: the result", problems)
    where = explicit_part(leaves[0])
    if where is not None:
        own = Layout(leaves[0].layout.mesh, *where.spec.partitions)
        must_divide(leaves[0].on(padded(own, len(shape))), problems)
    raise_all("linear: the result", problems)
    return leaves[0]._replace(path="the result")


def _agree(arrays: dict[str, jax.Array], result: Leaf | None, dtype: Any) -> None:
    """Outside `jit`, agree with the other processes, unless each holds all of the arguments."""
    known = _spread_out(arrays)
    if not known:
        return
    own = {name: array for name, array in arrays.items() if name not in known}
    if result is None and all(a.is_fully_replicated for a in known.values()):
        sharding = next(iter(known.values())).sharding
        if isinstance(sharding, NamedSharding):
            mesh = mesh_of("linear", sharding.mesh)
            leaves = [Leaf(n, a, Layout.replicated(mesh, a.ndim)) for n, a in own.items()]
            record_call("linear", leaves, lane=None, values=True)
        return
    facts = [f"{n}: {a.dtype}{list(a.shape)}{_values(a)}" for n, a in own.items()]
    options = [f"summed in {_dtype(dtype, arrays['x'].dtype)}", *facts]
    agree_on_program("linear", [] if result is None else [result], known, options=options)


def _values(array: jax.Array) -> str:
    """Return the digest of an array that this process holds alone, which others hold too."""
    value = concrete(array)
    return "" if value is None else f": values {digest(np.asarray(value))}"


def _spread_out(given: dict[str, Any]) -> dict[str, jax.Array]:
    """Return the arrays of several processes among the arguments; none inside `jit`."""
    if is_tracing():
        return {}
    arrays = {name: concrete(value) for name, value in given.items()}
    return {
        name: array
        for name, array in arrays.items()
        if array is not None and len(owners_of(array.sharding)) > 1
    }


def _spread(bias: jax.Array, like: jax.Array) -> jax.Array:
    where = jax.typeof(like).sharding
    return jax.lax.broadcast_in_dim(
        bias,
        like.shape,
        (like.ndim - 1,),
        out_sharding=where if AxisType.Explicit in where.mesh.axis_types else None,
    )
