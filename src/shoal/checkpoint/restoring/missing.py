"""Explain which leaves of a target the checkpoint lacks, and suggest where it has them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shoal.checkpoint.planning.renaming import renames, subtrees
from shoal.errors import nearest
from shoal.plan.patterns import leaving_out

_MOST_GUESSED, _MOST_COMPARED = 10, 1000  # names to suggest for, candidates for each


class Missing(NamedTuple):
    """A leaf of the target that the checkpoint lacks."""

    name: str
    stored: str  # the name it would have in the checkpoint
    shape: tuple[int, ...] | None  # None: any
    is_layout: bool  # may stand for a subtree
    hint: str = ""


class Spare(NamedTuple):
    """The leaves of a checkpoint that the target does not use."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # "float32"; of what is no array "int"
    all_names: Sequence[str]  # of the checkpoint
    unexpected: Sequence[str]  # of those, the ones that `only` takes

    def shown(self, name: str) -> str:
        """Return a leaf as `params/w (float32[4,2])`."""
        dtype, shape = self.dtypes[name], self.shapes[name]
        return f"{name} ({dtype}[{','.join(map(str, shape))}])" if shape else f"{name} ({dtype})"


def problem_lines(
    missing: Sequence[Missing],
    spare: Spare,
    found: Sequence[str],
    rename: Mapping[str, str] | None,
    stored_name: Callable[[Mapping[str, str], str], str],
) -> tuple[list[str], list[str]]:
    """Return one line per problem, one for each renamed subtree; and what no `rename=` would find.

    Args:
      found: the leaves of the target that the checkpoint has.
      rename: as given by the user; None: it is a function.
      stored_name: maps a name in the target to the checkpoint, for a given `rename`.
    """
    pairs = {} if rename is None else _pairs(missing, spare, found)
    whole = {**(rename or {}), **pairs}
    taken = _taken(missing, spare, lambda name: stored_name(whole, name)) if pairs else {}
    if any(stored_name(whole, name) != stored_name(rename or {}, name) for name in found):
        pairs, taken = {}, {}
    lines = _renamed(pairs, taken, whole, spare)
    left = [one for one in missing if one.name not in taken]
    gone = {name for names in taken.values() for name in names}
    unexpected = [name for name in spare.unexpected if name not in gone]
    known = list(unexpected or spare.all_names)[:_MOST_COMPARED]
    above = sorted({name[:end] for name in known for end, c in enumerate(name) if c == "/"})
    hints = {
        one.name: _hint(one, known, above, spare) if len(left) <= _MOST_GUESSED else ""
        for one in left
    }
    uses = Counter(hints.values())
    for one in left:
        near = hints[one.name] if uses[hints[one.name]] == 1 else ""
        where = f" (as {one.stored})" if one.stored != one.name else ""
        near = f": {one.hint}" if one.hint else near
        lines.append(f"{one.name}: is not in the checkpoint{where}{near}")
    detail = "is in the checkpoint, not in the target"
    names = {*found, *spare.all_names}
    for name in unexpected:
        lines.append(f"{name}: {detail}; only={leaving_out(name, names)!r} leaves it out")
    return lines, [one.name for one in left]


def _hint(one: Missing, known: Sequence[str], above: Sequence[str], spare: Spare) -> str:
    """Return which leaf of the checkpoint may be meant; "" where several may be.

    Of two moments of an optimizer the nearer name may be the wrong one.
    """
    fitting = [name for name in known if one.shape in (None, spare.shapes.get(name))]
    last = one.stored.rpartition("/")[2]
    if sum(name.rpartition("/")[2] == last for name in fitting) > 1:
        return ""
    return nearest(one.stored, [*fitting, *(above if one.is_layout else ())])


def _pairs(missing: Sequence[Missing], spare: Spare, found: Sequence[str]) -> dict[str, str]:
    """Return which prefixes have other names in the checkpoint."""
    pairs = renames({one.name: one.shape for one in missing}, spare.shapes, found)
    if not pairs and len(missing) == 1 and missing[0].is_layout:
        tops = subtrees(spare.shapes, spare.all_names)
        if len(tops) == 1:  # a layout does not show the leaves below it
            return {missing[0].name: tops[0]}
    return pairs


def _taken(
    missing: Sequence[Missing], spare: Spare, stored_name: Callable[[str], str]
) -> dict[str, list[str]]:
    """Return the leaves of the checkpoint that each leaf of the target would use."""
    taken = {}
    for one in missing:
        new = stored_name(one.name)
        below = [new] if new in spare.shapes else []
        if one.is_layout and not below:
            below = [name for name in spare.shapes if name.startswith(f"{new}/")]
        if below:
            taken[one.name] = below
    return taken


def _renamed(
    pairs: Mapping[str, str],
    taken: Mapping[str, Sequence[str]],
    whole: Mapping[str, str],
    spare: Spare,
) -> list[str]:
    """Describe the renamed subtrees, and the option that maps them.

    Shapes decide what fits, and names of several parts may: a dtype shows a mistake of both.
    """
    leaves: defaultdict[str, list[str]] = defaultdict(list)
    for name in taken:
        ends = [prefix for prefix in pairs if not prefix or f"{name}/".startswith(f"{prefix}/")]
        leaves[max(ends, key=len)].append(name)
    lines = []
    for prefix, names in leaves.items():
        count = sum(len(taken[name]) for name in names)
        first = taken[names[0]][0]
        if count == 1:
            lines.append(f"{names[0]}: is not in the checkpoint, which has {spare.shown(first)}")
            continue
        below = f"below {pairs[prefix]}" if pairs[prefix] else "at its root"
        which = f"{count} leaves{' below it' if prefix else ''} are not in the checkpoint"
        such = f"such leaves {below}, as {spare.shown(first)}"
        lines.append(f"{prefix or 'the tree'}: {which}, which has {such}")
    option = f"rename={dict(whole)}"
    if len(lines) == 1:
        return [f"{lines[0]}: {option} takes {'those' if ' leaves ' in lines[0] else 'that'}"]
    return [*lines, f"all of these: {option} takes them"] if lines else []
