"""Assign a layout to every leaf of a tree, from a table of rules by path.

The first matching rule decides, as in the tables of `match_partition_rules` found in many
codebases: an order reads from top to bottom, while "the most specific" of `**/kernel` and
`decoder/**` would have to be defined. What an order can get wrong is an error: a rule that never
decides, because it matches nothing or because earlier rules take all that it matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from shoal.arguments import not_flags
from shoal.arrays.bridge.layout_functions import short_text, wrong_arguments
from shoal.arrays.bridge.leaf_layouts import (
    Layouts,
    Leaf,
    Path,
    cannot_be_pending,
    is_layout_function,
    is_one_layout,
    leaf_for,
    meshes_in,
    must_divide,
)
from shoal.arrays.bridge.use_mesh import default_mesh, use_mesh
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError, WrongType, raise_all, with_article
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh, mesh_of
from shoal.plan.patterns import is_pattern, near, taken

_MOST_NAMED = 8  # leaves named for one problem


@local
def match_layouts(
    rules: Mapping[str, Layouts] | Iterable[tuple[str, Layouts]],
    shapes: Any,
    *,
    mesh: Mesh | jax.sharding.Mesh | None = None,
    all_rules: bool = True,
) -> Any:
    """Return a layout for every leaf of a tree, from one table of rules by path.

    Local.

    The result is accepted wherever layouts are (`put`, `create`, `relayout`, `restore`,
    `Checkpoints.resume`, `feed`), and `shoal.named_sharding` of it by `jit(out_shardings=…)`. One
    table serves parameters and the state of an optimizer, whose trees repeat the parameters' paths
    at a deeper level: `**/kernel` matches `params/dense/kernel` and `opt/0/mu/dense/kernel`. The
    first matching rule decides. A scalar leaf (a step, a count) is replicated, whichever rule
    matches, and needs none.

    A leaf is never replicated because a rule for it was forgotten: add `"**": P()` last if that is
    intended.

    Args:
      rules: pattern → layout, a mapping or pairs. Patterns are those of `restore(only=…)`: `*` and
        `?` match characters of one component of a path, `[ab]` for one of them, a component `**`
        for any number of components; a string that is a leaf's path is that leaf alone. A layout is
        a PartitionSpec, a tuple of axis names and None, a name, or None or `()` (split nothing); a
        NamedSharding, Layout or mesh; or a function of (path such as "params/w", leaf) that
        returns one. Dims at the end may be left out.
      shapes: a tree of leaves with shapes: the result of `jax.eval_shape`, or arrays.
      mesh: the mesh of PartitionSpecs, tuples and names; None: the one in force (see `use_mesh`),
        else the one that the NamedShardings, Layouts and meshes among the rules share.
      all_rules: False: permit rules that decide nothing, for a table that serves several trees.

    Returns:
      The tree, with a Layout for each leaf, of as many dims as its rule has.

    Raises:
      UsageError: leaves that no rule matches, rules that decide nothing, ranks, axes, dims that
        their shards do not divide evenly, invalid rules: all of them at once.

    Example:
      >>> import jax, jax.numpy as jnp, shoal
      >>> from jax import P
      >>> params = {"dense": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}, "step": 0}
      >>> mesh = shoal.make_mesh({"data": -1})
      >>> table = {"**/kernel": P("data"), "**/bias": P()}
      >>> found = shoal.match_layouts(table, jax.eval_shape(lambda: params), mesh=mesh)
      >>> [layout.dims for layout in jax.tree.leaves(found)]
      [(), ('data',), ()]
    """
    problems: list[str] = []
    table = _rules(rules, problems)
    problems += not_flags(all_rules=all_rules)
    raise_all("match_layouts", problems)
    chosen = _mesh(mesh, table)
    pairs, treedef = tree_flatten_with_path(shapes, is_leaf=_is_bare_shape)
    filling = _Filling(table, [keystr(path, simple=True, separator="/") for path, _ in pairs])
    with use_mesh(chosen):
        layouts = [
            filling.layout_of(name, path, value, chosen)
            for name, (path, value) in zip(filling.names, pairs, strict=True)
        ]
    filling.finish(all_rules=all_rules)
    return jax.tree.unflatten(treedef, layouts)


class _Rule(NamedTuple):
    """One rule of the table."""

    pattern: str
    given: Any


class _Filling:
    """The layouts found so far, and the problems."""

    def __init__(self, table: Sequence[_Rule], names: Sequence[str]) -> None:
        self._table, self.names = table, names
        self._taken = [taken(rule.pattern, dict.fromkeys(names)) for rule in table]
        self._decided = [0] * len(table)  # leaves by rule
        self._wrong: dict[str, list[str]] = {}  # problem → names of the leaves that have it
        self._problems: list[str] = []

    def layout_of(self, name: str, path: Path, value: Any, mesh: Mesh) -> Layout | None:
        """Return the layout of a leaf; None if there is a problem with it."""
        rule_index = next((n for n, names in enumerate(self._taken) if name in names), None)
        if rule_index is not None:
            self._decided[rule_index] += 1
        try:
            given = None if rule_index is None else self._table[rule_index].given
            leaf = _leaf(name, value, path, given, mesh, has_rule=rule_index is not None)
        except UsageError as error:
            self._wrong.setdefault(str(error), []).append(name or "the array")
            return None
        leaf = leaf._replace(path=name or "the array")
        must_divide(leaf, self._problems)
        cannot_be_pending(leaf, self._problems)
        return Layout(leaf.layout.mesh, leaf.spec)  # with no more dims than the rule has

    def finish(self, *, all_rules: bool) -> None:
        """Raise one error with all problems."""
        wrong = [f"{_listed(names)}: {error}" for error, names in self._wrong.items()]
        idle = [
            f"rule {rule.pattern!r}: {self._why_idle(index)}"
            for index, rule in enumerate(self._table)
            if not self._decided[index] and (all_rules or not is_pattern(rule.pattern))
        ]
        raise_all("match_layouts", wrong + self._problems + idle)

    def _why_idle(self, rule_index: int) -> str:
        """Return why a rule decides nothing, and what may have been meant."""
        for name in (leaf_name for leaf_name in self.names if leaf_name in self._taken[rule_index]):
            earlier = next(n for n in range(rule_index) if name in self._taken[n])
            return (
                "earlier rules already match every leaf that it matches "
                f"({self._table[earlier].pattern!r} takes "
                f"{name!r}); the first that matches decides: put it before them"
            )
        return f"matches nothing{near(self._table[rule_index].pattern, self.names)}"


def _leaf(name: str, value: Any, path: Path, given: Any, mesh: Mesh, *, has_rule: bool) -> Leaf:
    if _is_bare_shape(value):
        raise UsageTypeError(
            f"{value!r} are numbers, not a shape: pass jax.ShapeDtypeStruct({value!r}, dtype), or "
            "numbers that are leaves as np.int32"
        )
    if not hasattr(value, "shape") and not isinstance(value, bool | int | float | complex):
        raise UsageTypeError(f"{with_article(type(value).__name__)} has no shape")
    if np.ndim(value) == 0:
        return Leaf(name, value, Layout(_mesh_named(given) or mesh))
    if not has_rule:
        raise UsageError("no rule matches; '**': () at the end replicates all other leaves")
    if is_layout_function(given):
        why = wrong_arguments(given, "the leaf")
        if why:
            raise UsageError(why)
        function, given = given, given(name, value)
        if given is None:  # a function without a return statement
            raise UsageError(f"the function {_name(function)} returned None; () splits nothing")
        if not is_one_layout(given) or is_layout_function(given):
            raise UsageError(
                f"the function {_name(function)} returned {given!r}, which is not a layout"
            )
    return leaf_for(given, value, path)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _is_bare_shape(node: Any) -> bool:
    """True for (8, 4): a tree of two numbers to JAX, but meant as a shape."""
    return type(node) is tuple and len(node) > 0 and all(type(size) is int for size in node)


def _rules(rules: Any, problems: list[str]) -> list[_Rule]:
    if isinstance(rules, Mapping):
        rules = rules.items()
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        problems.append(WrongType(f"rules={rules!r} must map patterns to layouts"))
        return []
    table: list[_Rule] = []
    for rule in rules:
        if not isinstance(rule, tuple | list) or len(rule) != 2:
            problems.append(WrongType(f"rule {rule!r}: must be a pair of a pattern and a layout"))
            continue
        pattern, given = rule
        if not isinstance(pattern, str) or not pattern:
            problems.append(
                WrongType(f"rule {rule!r}: {pattern!r} is not a pattern such as '**/w'")
            )
        elif not is_one_layout(given):
            text = "is not a layout; pass a tuple of axis names and None, or a Layout"
            text = f"{short_text(given)} {text}"
            problems.append(WrongType(f"rule {pattern!r}: {text}"))
        else:
            table.append(_Rule(pattern, given))
    return table


def _mesh(given: Mesh | jax.sharding.Mesh | None, table: Sequence[_Rule]) -> Mesh:
    """Return the mesh for rules that do not name one."""
    chosen = default_mesh() if given is None else mesh_of("match_layouts", given)
    if chosen is not None:
        return chosen
    named = {mesh: None for rule in table if (mesh := _mesh_named(rule.given)) is not None}
    if len(named) == 1:
        return next(iter(named))
    raise UsageError("match_layouts: rules without a mesh need one: pass mesh=, or enter use_mesh")


def _mesh_named(given: Any) -> Mesh | None:
    return next(meshes_in(given), None)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
