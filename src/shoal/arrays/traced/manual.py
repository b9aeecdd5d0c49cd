"""Manual regions: parts of a program written from the view of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import PyTreeDef

from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.bridge.layout_functions import short_text
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    axes_of,
    cannot_be_pending,
    dims_of,
    is_layout_function,
    is_one_layout,
    leaf_layouts,
    meshes_in,
    must_divide,
)
from shoal.arrays.bridge.use_mesh import default_mesh, use_mesh
from shoal.arrays.host.agreed_program import agree_on_program, concrete, fail_program
from shoal.arrays.host.host_values import as_array, unfit, warn_of_narrowing
from shoal.arrays.host.program_lines import program_lines, program_of, programs_in
from shoal.arrays.host.record_call import owners_of_mesh
from shoal.arrays.host.upload import is_tracing
from shoal.arrays.placing.host_arguments import is_elsewhere, place_arguments
from shoal.arrays.traced.constrain import AnyMesh, constrain, manual_axes
from shoal.colour import traced
from shoal.errors import UsageError, UsageTypeError, nearest, raise_all
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.rules.spec_lines import SpecLine
from shoal.tracebacks import at_caller


class _Nested(Exception):
    """A region was traced that contains another one."""


class _Region(NamedTuple):
    """A manual region."""

    name: str  # of the function, for messages
    mesh: Mesh
    axes: frozenset[str]  # the Manual axes
    here: AnyMesh  # the JAX mesh: inside another region, the current one


@traced
def manual(
    fn: Callable[..., Any],
    in_layouts: Layouts,
    out_layouts: Layouts,
    *,
    axes: Collection[str] | None = None,
) -> Callable[..., Any]:
    """Return a function that runs `fn` on each device, on its shards.

    Traced.

    Inside, values have the shapes of shards, and devices communicate by the collectives of
    `jax.lax` with axis names (`psum(x, "data")`, `axis_index("data")`). Outside, the function takes
    and returns whole values: arguments are laid out by `in_layouts`, results are assembled by
    `out_layouts`. A result that is declared equal along an axis always is (except for what a
    callback returns): this is checked while tracing, including the predicates of `cond`, `while`
    and sorts, which JAX's types do not track. Under `jit`, `grad`, `vmap` and `scan` it is an
    ordinary function; outside `jit` it is compiled on its own, once for each signature. There host
    values are compared between processes as those of `put`, and on a mesh of several processes all
    of these call the function, and first agree on the call, on the program that `fn` is traced to,
    and on what it closes over, before it runs.

    Args:
      fn: a function of positional arrays, or trees of them.
      in_layouts: one layout for all arguments, or a tuple with one for each, or a prefix tree of
        them, as for `put`. All layouts are on one mesh, which specs and tuples need not name.
      out_layouts: one layout, or a prefix tree of them, for the results of `fn`. Functions of
        paths are not allowed here.
      axes: the Manual axes; default: all of the mesh (inside another region, the remaining ones).
        Along the others values stay whole inside, and are left to the compiler: such axes in a
        layout are pinned before and after, as by `constrain`.

    Returns:
      The function.

    Raises:
      UsageError: layouts that do not fit, are on several meshes, or leave a sum pending; dims that
        the Manual axes do not divide evenly; results that may differ where their layout says that
        they are equal; collectives that only some devices would reach; all offending leaves by
        path, while tracing.

    Example:
      >>> import jax, jax.numpy as jnp, shoal
      >>> from jax import NamedSharding, P
      >>> mesh = shoal.make_mesh({"data": -1})
      >>> mean = shoal.manual(
      ...     lambda x: jax.lax.pmean(x.mean(), "data"),
      ...     NamedSharding(mesh, P("data")), mesh)
      >>> float(mean(jnp.arange(float(4 * mesh.size)))) == (4 * mesh.size - 1) / 2
      True

    Source: `jax.shard_map`, whose types track what differs between devices (`check_vma`).
    """
    if not callable(fn):
        raise UsageTypeError(f"manual: the first argument must be a function, not {short_text(fn)}")
    name = getattr(fn, "__name__", type(fn).__name__)
    for argument, layouts in (("in_layouts", in_layouts), ("out_layouts", out_layouts)):
        for given in jax.tree.leaves(layouts, is_leaf=is_one_layout):
            if not is_one_layout(given):
                raise UsageTypeError(
                    f"manual: {argument}: {given!r} is not a layout; pass a NamedSharding or a spec"
                )
    program = _program(fn, name, out_layouts)
    # Kept by trace, as `jit` keeps traces by signature; with this function, since they hold arrays.
    lines_of = lru_cache(maxsize=64)(partial(program_lines, what="the function"))
    results = [str(given) for given in jax.tree.leaves(out_layouts, is_leaf=is_one_layout)]

    @wraps(fn)
    @at_caller
    def region_of(*args: Any, **options: Any) -> Any:
        try:
            if options:
                raise UsageTypeError(
                    f"manual: {name}: layouts apply to positional arguments: {', '.join(options)}"
                )
            region = _region(name, in_layouts, out_layouts, axes)
            leaves, treedef = _arguments(args, in_layouts, region)
            leaves = place_arguments("manual", leaves)
            values = [as_array(leaf.value) for leaf in leaves]
            given = region, tuple(leaf.layout for leaf in leaves), treedef, *values
            meets = not is_tracing() and len(owners_of_mesh(region.mesh)) > 1
            # The trace that runs: what `fn` closes over is in it.
            lines = lines_of(program.trace(*given).jaxpr) if meets else ()
        except BaseException as error:
            with contextlib.suppress(Exception):  # whose call it is cannot be known
                _fail(error, args, (in_layouts, out_layouts))
            raise
        if meets:
            _agree(region, leaves, results, lines)
        return program(*given)

    return region_of


def _agree(
    region: _Region, leaves: Sequence[Leaf], results: Sequence[str], lines: Sequence[str]
) -> None:
    """Outside `jit`, agree with the other processes of the mesh on a call."""
    axes = ", ".join(axis for axis in region.mesh.axis_names if axis in region.axes)
    options = [
        f"function: {region.name} over {axes}",
        *[f"result as {result}" for result in results],
    ]
    arrays = {leaf.path: concrete(leaf.value) for leaf in leaves}
    known = {path: array for path, array in arrays.items() if array is not None}
    options = [SpecLine("mesh", value=region.mesh.text).packed, *options]
    agree_on_program("manual", leaves, known, options=options, nodes=lines)


def _fail(error: BaseException, args: tuple[Any, ...], layouts: Layouts) -> None:
    """Outside `jit`, fail a refused call for the other processes of its mesh."""
    if not is_tracing():
        arrays = [
            array for value in jax.tree.leaves(args) if (array := concrete(value)) is not None
        ]
        fail_program("manual", error, arrays, meshes_in(layouts))


def _program(fn: Callable[..., Any], name: str, out_layouts: Layouts) -> Any:
    """Return a function, by `jit`, of a region, the layouts, tree and leaves of its arguments."""
    specs = _specs(out_layouts)

    def whole(
        region: _Region, layouts: tuple[Layout, ...], treedef: PyTreeDef, *values: jax.Array
    ) -> Any:
        def shards(*parts: jax.Array) -> Any:
            result = fn(*jax.tree.unflatten(treedef, parts))
            return _checked(result, out_layouts, region)

        body = _Body(region, out_layouts, jax.jit(shards, inline=True))
        in_specs = tuple(_spec(layout, region.axes) for layout in layouts)
        mapped = partial(body.mapped, in_specs, specs(region))
        entered = [_entered(v, layout, region) for v, layout in zip(values, layouts, strict=True)]
        try:
            result = mapped(is_nested=bool(manual_axes(region.here)))(*entered)
        except _Nested:
            result = mapped(is_nested=True)(*entered)
        return _left(result, out_layouts, region)

    whole.__name__ = name  # shown in profiles and programs
    return jax.jit(whole, static_argnums=(0, 1, 2))


class _Body(NamedTuple):
    """The function of a region, on the shards of one device."""

    region: _Region
    out_layouts: Layouts
    shards: Any  # by `jit`: traced once, for the check

    def mapped(self, in_specs: Any, out_specs: Any, *, is_nested: bool) -> Callable[..., Any]:
        """Return the body as a function of whole values.

        JAX types residuals saved for the derivative as varying along all Manual axes, including
        those of an enclosing region, which may not be named again (jax 0.10 to 0.12). So where
        regions are nested, `jax.checkpoint` saves only the arguments, whose layouts are known. It
        is applied here, and again in `_checked` for the derivative of the derivative.

        Args:
          is_nested: whether the region is inside another one, or contains one.

        Raises:
          _Nested: while tracing: it contains a region, and `is_nested` is False.
        """
        checked = partial(self._checked, is_nested)
        return jax.shard_map(
            jax.checkpoint(checked) if is_nested else checked,
            mesh=self.region.here,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.region.axes,
        )

    def _checked(self, is_nested: bool, *parts: jax.Array) -> Any:
        """Return the results; refuse those that may differ where they are declared equal."""
        region = self.region
        hunt = Hunt()
        program = self.shards.trace(*parts).jaxpr
        hidden = hunt.results(program)
        raise_all(f"manual: {region.name}", list(hunt.problems))
        if not is_nested and has_regions(program):
            raise _Nested
        shards = jax.checkpoint(self.shards) if is_nested else self.shards
        result = shards(*parts)
        leaves, _ = _results(result, self.out_layouts, region)
        _refuse_differing(leaves, hidden, region)
        return result


def _region(
    name: str, in_layouts: Layouts, out_layouts: Layouts, axes: Collection[str] | None
) -> _Region:
    """Return the region of a call: its mesh and axes."""
    named = dict.fromkeys(meshes_in((in_layouts, out_layouts)))
    if len(named) > 1:
        raise UsageError(
            f"manual: {name}: one region is on one mesh, and the layouts are on "
            f"{', '.join(map(repr, named))}"
        )
    mesh = next(iter(named), default_mesh())
    if mesh is None:
        raise UsageError(
            f"manual: {name}: no layout names a mesh: pass NamedShardings, or call this inside "
            "`with use_mesh(mesh):`"
        )
    here: AnyMesh = jax.sharding.get_abstract_mesh()
    if not here.empty and not _is_one_of(mesh, here):
        listed = zip(here.shape.items(), here.axis_types, strict=True)
        in_force = ", ".join(f"{axis}={size} {kind.name}" for (axis, size), kind in listed)
        raise UsageError(f"manual: {name}: on {mesh!r}, but the mesh in force here is {in_force}")
    taken = manual_axes(here)
    if axes is None:
        axes = [axis for axis in mesh.axis_names if axis not in taken]
    wanted = _wanted(name, axes, mesh, taken)
    return _Region(name, mesh, wanted, here if taken else jax_mesh(mesh))


def _is_one_of(mesh: Mesh, here: AnyMesh) -> bool:
    """True if JAX's mesh has a mesh's axes, of the same types except for Manual ones."""
    types = zip(jax_mesh(mesh).axis_types, here.axis_types, strict=False)
    return dict(here.shape) == dict(mesh.axes) and all(
        kind in (own, AxisType.Manual) for own, kind in types
    )


def _wanted(name: str, axes: Collection[str], mesh: Mesh, taken: Collection[str]) -> frozenset[str]:
    """Return the axes to make Manual, if that is possible."""
    if not isinstance(axes, Collection):
        raise UsageTypeError(f"manual: {name}: axes={axes!r} must be names of axes")
    wanted = [axes] if isinstance(axes, str) else [*axes]
    known = ", ".join(mesh.axis_names)
    problems = [
        f"axes: no axis {axis!r} (axes: {known}){nearest(axis, mesh.axis_names)}"
        for axis in wanted
        if axis not in mesh.axis_names
    ]
    problems += [f"axes: {axis} is Manual here already" for axis in wanted if axis in taken]
    if not wanted:
        problems.append("axes: none is left; without any the region is the function itself")
    raise_all(f"manual: {name}", problems)
    return frozenset(wanted)


def _arguments(
    args: tuple[Any, ...], layouts: Layouts, region: _Region
) -> tuple[list[Leaf], PyTreeDef]:
    problems: list[str] = []
    with use_mesh(region.mesh):
        leaves, treedef = leaf_layouts(args, layouts, problems)
    for leaf in leaves:
        why = unfit(leaf.value)
        if why:
            problems.append(f"{leaf.path}: {why}")
            continue
        _check(leaf, region, problems)
        own = Layout(region.mesh, *_spec(leaf.layout, region.axes).partitions)
        must_divide(leaf.on(own), problems)
        if is_elsewhere(leaf.value, jax_mesh(region.mesh)):
            problems.append(
                f"{leaf.path}: is on other devices than {region.mesh!r}, or in another order; "
                "relayout moves it"
            )
    name = f"manual: arguments of {region.name}"
    raise_all(name, problems)
    warn_of_narrowing(name, ((leaf.path, leaf.value) for leaf in leaves))
    return leaves, treedef


def _check(leaf: Leaf, region: _Region, problems: list[str]) -> None:
    """Report what keeps a layout from being used in this region."""
    layout, taken = leaf.layout, manual_axes(region.here)
    cannot_be_pending(leaf, problems)
    if layout.mesh != region.mesh:
        problems.append(f"{leaf.path}: {layout!r} is on another mesh than {region.mesh!r}")
        return
    for dim_index, dim in enumerate(layout.axes_of_dims):
        if (False, True) in pairwise(axis in region.axes for axis in dim):
            problems.append(
                f"{leaf.path}: dim {dim_index} is split by {', '.join(dim)}: the Manual axes "
                f"({', '.join(sorted(region.axes))}) must come first"
            )
        outer = sorted(taken & set(dim))
        if outer:
            problems.append(
                f"{leaf.path}: dim {dim_index} is split by {', '.join(outer)}, and here values are "
                "shards along these axes already"
            )


def _spec(layout: Layout, axes: frozenset[str]) -> PartitionSpec:
    """Return which of the Manual axes split which dims."""
    own = [tuple(axis for axis in dim if axis in axes) for dim in layout.axes_of_dims]
    return PartitionSpec(*[dim or None for dim in own])


def _specs(out_layouts: Layouts) -> Callable[[_Region], Any]:
    """Return a function from the layouts of results to the specs for JAX.

    The number of dims and leaves is not known yet; `_checked` compares them later.
    """

    def spec(given: Any, axes: frozenset[str]) -> PartitionSpec:
        if isinstance(given, Layout):
            return _spec(given, axes)
        each = map(axes_of, dims_of(given))
        return PartitionSpec(*[tuple(a for a in dim if a in axes) or None for dim in each])

    for given in jax.tree.leaves(out_layouts, is_leaf=is_one_layout):
        if is_layout_function(given):
            raise UsageError("manual: out_layouts: pass layouts, not functions of paths")
    return lambda region: jax.tree.map(
        lambda given: spec(given, region.axes), out_layouts, is_leaf=is_one_layout
    )


def _results(result: Any, layouts: Layouts, region: _Region) -> tuple[list[Leaf], PyTreeDef]:
    problems: list[str] = []
    with use_mesh(region.mesh):
        leaves, treedef = leaf_layouts(result, layouts, problems)
    for leaf in leaves:
        why = unfit(leaf.value)
        if why:
            problems.append(f"{leaf.path}: {why}")
        else:
            _check(leaf, region, problems)
    raise_all(f"manual: results of {region.name}", problems)
    return leaves, treedef


def _checked(result: Any, layouts: Layouts, region: _Region) -> Any:
    """Return the results of a region, if they match their layouts."""
    leaves, treedef = _results(result, layouts, region)
    try:
        jax.tree.map(lambda *_: None, layouts, result, is_leaf=is_one_layout)
    except ValueError:
        containers = str(jax.tree.structure(layouts, is_leaf=is_one_layout)).removeprefix(
            "PyTreeDef"
        )
        structure = str(treedef).removeprefix("PyTreeDef")
        raise UsageError(
            f"manual: results of {region.name}: the layouts are in other containers: "
            f"{containers[:200]} for {structure[:200]}"
        ) from None
    values = [as_array(leaf.value) for leaf in leaves]
    typed = [jax.typeof(value).manual_axis_type.varying for value in values]
    _refuse_differing(leaves, [dict.fromkeys(axes, "") for axes in typed], region)
    return jax.tree.unflatten(treedef, values)


def _refuse_differing(leaves: Sequence[Leaf], hidden: Sequence[Hidden], region: _Region) -> None:
    """Raise for results that may differ along axes where their layouts say they are equal.

    Args:
      hidden: these axes for each result → the operation that causes it, "" if the types say so.
    """
    problems = []
    for leaf, varying in zip(leaves, hidden, strict=True):
        split = {axis for dim in leaf.layout.axes_of_dims for axis in dim}
        undeclared = [
            axis for axis in region.mesh.axis_names if axis in (region.axes & {*varying}) - split
        ]
        if not undeclared:
            continue
        names = ", ".join(undeclared)
        why = varying[undeclared[0]]
        why = f" (by its {why}, of which an operand differs)" if why else ""
        problems.append(
            f"{leaf.path}: may differ along {names}{why}, and {leaf.layout!r} has one value for "
            f"all of {names}: split a dim by it, or end with jax.lax.psum, pmean or pmax over "
            f"it (all_gather(…, to='invarying') for a gathered one)"
        )
    raise_all(f"manual: results of {region.name}", problems)


def _entered(value: jax.Array, layout: Layout, region: _Region) -> jax.Array:
    """Return an argument as passed to the region: JAX splits only by Manual and Auto axes."""
    is_explicit = AxisType.Explicit in region.here.axis_types
    if is_explicit or _others(layout, region):
        return constrain(value, layout)
    return value


def _left(result: Any, layouts: Layouts, region: _Region) -> Any:
    leaves, treedef = _results(result, layouts, region)
    pinned = [
        constrain(leaf.value, leaf.layout) if _others(leaf.layout, region) else leaf.value
        for leaf in leaves
    ]
    return jax.tree.unflatten(treedef, pinned)


def _others(layout: Layout, region: _Region) -> bool:
    """True if axes that are not Manual split a dim."""
    return any(axis not in region.axes for dim in layout.axes_of_dims for axis in dim)


# Find values that vary between the devices of a manual region although JAX's types say otherwise.
#
# The types (`check_vma` of `jax.shard_map`) follow the operands of each operation, but not its
# predicate (jax 0.10 to 0.12): which branch a `cond` takes, how often a `while` runs, how a `sort`
# permutes its other operands, what a callback received, and of which of several groups of devices
# a maximum is (`axis_index_groups`). Here these are added, operation by operation, and removed
# again where a collective makes a value equal on all devices. Where predicates differ, a
# collective would deadlock, and a gradient of a shared value would be wrong: each device would
# take its own branch.

Hidden = dict[str, str]
"""Axes along which a value may vary, beyond those of its type → the operation that causes it."""
# Of these, each result is one operand.
_ONE_BY_ONE = ("optimization_barrier", "shard_alike", "device_put", "pvary")
_SILENT = ("axis_index", "pvary", "pcast", "vary_unreduced_cast")  # name axes without communicating


class Hunt:
    """A walk through a program; problems are collected in `problems`."""

    def __init__(self) -> None:
        self.problems: dict[str, None] = {}
        self._constants: set[int] = set()  # variables that depend on no argument

    def results(self, jaxpr: Any, given: Sequence[Hidden] | None = None) -> list[Hidden]:
        """Return the axes along which each result may vary, beyond those of its type.

        Args:
          jaxpr: the program, such as `jit(f).trace(…).jaxpr`.
          given: the same for its arguments; None: as their types say.
        """
        consts = getattr(jaxpr, "consts", ())
        jaxpr = program_of(jaxpr)
        for var, value in zip(jaxpr.constvars, consts, strict=False):
            if not isinstance(value, jax.core.Tracer):
                self._constants.add(id(var))
        varying: dict[int, Hidden] = {}
        for var, hidden in zip(jaxpr.invars, given or [{}] * len(jaxpr.invars), strict=True):
            varying[id(var)] = hidden
        for eqn in jaxpr.eqns:
            if all(map(self._is_constant, eqn.invars)):
                self._constants.update(map(id, eqn.outvars))
            operands = [varying.get(id(var), {}) for var in eqn.invars]
            for var, hidden in zip(eqn.outvars, self._of(eqn, operands), strict=True):
                typed = _typed(var)
                varying[id(var)] = {axis: why for axis, why in hidden.items() if axis not in typed}
        return [varying.get(id(var), {}) for var in jaxpr.outvars]

    def _of(self, eqn: Any, operands: list[Hidden]) -> list[Hidden]:
        """Return the same for the results of one operation."""
        name, results = eqn.primitive.name, len(eqn.outvars)
        inner = programs_in(eqn)
        if name == "cond":
            return self._of_cond(eqn, operands, inner)
        if name == "while":
            return self._of_while(eqn, operands)
        if len(inner) == 1 and len(inner[0].invars) == len(operands):
            by_result = self.results(inner[0], operands)
            if name != "scan" or not any(by_result):
                return by_result
            anything = _union([*by_result, *operands])  # from one round to the next
            return [
                _union([anything, *self.results(inner[0], [anything] * len(operands))])
            ] * results
        if inner:
            return [_union(operands)] * results
        axes = _axes(eqn)
        if axes and _is_by_groups(eqn):  # equal within each, whatever the types say
            pairs = zip(eqn.invars, operands, strict=True)
            if results == len(operands):
                return [_all([var], [hidden], f"{name} by groups") for var, hidden in pairs]
            return [_all(eqn.invars, operands, f"{name} by groups")] * results
        if results == len(operands) > 1 and (axes or name in _ONE_BY_ONE):
            by_result = operands
        else:
            by_result = [_all(eqn.invars, operands, name)] * results
        return [
            {axis: why for axis, why in reasons.items() if axis not in axes}
            for reasons in by_result
        ]

    def _of_cond(self, eqn: Any, operands: list[Hidden], branches: list[Any]) -> list[Hidden]:
        chosen_by = _all(eqn.invars[:1], operands[:1], "cond")
        self._must_not_wait(branches, chosen_by, "a cond")
        self._compare(eqn.invars[1:], chosen_by)
        each = [self.results(branch, operands[1:]) for branch in branches]
        return [_union([chosen_by, *of_one]) for of_one in zip(*each, strict=True)]

    def _of_while(self, eqn: Any, operands: list[Hidden]) -> list[Hidden]:
        condition, body = (program_of(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        predicate, used = operands[:first], operands[first : first + second]
        carried = operands[first + second :]
        while True:
            going_on = _all(
                condition.outvars, self.results(condition, [*predicate, *carried]), "while"
            )
            rounds = self.results(body, [*used, *carried])
            after = [_union([*both, going_on]) for both in zip(carried, rounds, strict=True)]
            if [set(reasons) for reasons in after] == [set(reasons) for reasons in carried]:
                break
            carried = after
        self._must_not_wait([condition, body], going_on, "a while loop")
        return after

    def _must_not_wait(self, programs: Iterable[Any], chosen_by: Hidden, what: str) -> None:
        """Reject collectives that only some of their devices reach."""
        for program in programs:
            for name, axes in _collectives(program):
                differ = ", ".join(sorted(axes & {*chosen_by}))
                if differ:
                    self.problems[
                        f"{name} over {differ} inside {what} whose predicate differs along "
                        f"{differ}: devices that skip it leave the others waiting for ever; make "
                        "the predicate equal on all devices (jax.lax.pmax), or communicate before "
                        "or after"
                    ] = None

    def _is_constant(self, var: Any) -> bool:
        return isinstance(var, Literal) or id(var) in self._constants

    def _compare(self, operands: Sequence[Any], chosen_by: Hidden) -> None:
        """Reject gradients of shared values under predicates that vary."""
        for var in operands:
            if self._is_constant(var) or not jnp.issubdtype(var.aval.dtype, jnp.inexact):
                continue
            differ = ", ".join(repr(axis) for axis in sorted({*chosen_by} - _typed(var)))
            if differ:
                self.problems[
                    f"a cond whose predicate differs along {differ} uses a "
                    f"{var.aval.dtype}{list(var.aval.shape)} that does not: its gradient would be "
                    f"wrong; pass it as jax.lax.pcast(value, ({differ},), to='varying')"
                ] = None


def has_regions(program: Any) -> bool:
    """Return whether there are manual regions in a program."""
    return any(
        eqn.primitive.name == "shard_map" or any(map(has_regions, programs_in(eqn)))
        for eqn in program_of(program).eqns
    )


def _all(variables: Iterable[Any], hidden: Iterable[Hidden], name: str) -> Hidden:
    """Return the axes along which any of some values may vary, by type or otherwise."""
    typed = {axis: name for var in variables for axis in sorted(_typed(var))}
    return _union([*hidden, typed])


def _union(several: Iterable[Hidden]) -> Hidden:
    joined: Hidden = {}
    for hidden in several:
        joined = {**hidden, **joined}
    return joined


def _typed(var: Any) -> frozenset[str]:
    """Return the axes along which a value varies by its type."""
    kind = getattr(var.aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def _collectives(program: Any) -> Iterable[tuple[str, frozenset[str]]]:
    """Yield the collectives of a program, nested ones included: name and axes."""
    for eqn in program.eqns:
        axes = _axes(eqn)
        if axes and eqn.primitive.name not in _SILENT:
            yield eqn.primitive.name.removesuffix("_invariant"), axes
        for inner in programs_in(eqn):
            yield from _collectives(inner)


def _axes(eqn: Any) -> frozenset[str]:
    """Return the axes that an operation names."""
    axes: set[str] = set()
    for key in ("axes", "axis_name"):
        given = eqn.params.get(key)
        listed = given if isinstance(given, tuple | list | frozenset | set) else (given,)
        axes.update(axis for axis in listed if isinstance(axis, str))
    return frozenset(axes)


def _is_by_groups(eqn: Any) -> bool:
    """Return whether a collective is one of several groups of devices, each by itself."""
    return len(eqn.params.get("axis_index_groups") or ()) > 1
