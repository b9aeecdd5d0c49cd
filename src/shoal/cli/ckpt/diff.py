"""`shoal ckpt diff`: the differences between two checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shoal.checkpoint.blocks.compare import Pair, compare, shape_of
from shoal.checkpoint.disk.opening import Checkpoint, open_folder
from shoal.checkpoint.tree.plain_values import decode_value
from shoal.cli.ckpt.paths import LEAF_HELP, leaf_names, look_at, one_of
from shoal.cli.tables import print_json, safe, short

_SHOWN = 50


def diff(
    first: Annotated[str, typer.Argument(help="A checkpoint, or a history: its newest step.")],
    second: Annotated[str, typer.Argument(help="Another.")],
    leaf: Annotated[str, typer.Option(metavar="GLOB", help=LEAF_HELP)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Compare two checkpoints: names of leaves, shapes, dtypes, and every value, bit by bit.

    Where and how they are stored (layouts, processes, files) makes no difference.

    \b
    Examples:
      shoal ckpt diff run/step_000000000010 run/step_000000000020
      shoal ckpt diff before/ after/ --leaf 'params/**'

    \b
    Exit code:
      0   they are equal
      1   they differ; or one of them is not committed
    """
    pair = [open_folder(one_of(look_at(path)).folder) for path in (first, second)]
    found = _differences(pair[0], pair[1], leaf)
    if as_json:
        print_json({"equal": not found, "differences": found})
    else:
        for one in found[:_SHOWN]:
            print(safe(f"{one['leaf']}: {one['words']}"))
        if len(found) > _SHOWN:
            print(f"and {len(found) - _SHOWN} more leaves")
        print(f"{len(found)} differ" if found else "equal, bit by bit")
    if found:
        raise typer.Exit(1)


def _differences(first: Checkpoint, second: Checkpoint, leaf: str) -> list[dict[str, Any]]:
    both = (first, second)
    numbers = [
        {one.name: n for n, one in enumerate(checkpoint.manifest.leaves)} for checkpoint in both
    ]
    known = list(dict.fromkeys([*numbers[0], *numbers[1]]))
    names = leaf_names(leaf, known)
    wanted = [name for name in known if name in names]
    found: dict[str, dict[str, Any]] = {}
    pairs: dict[str, Pair] = {}
    for name in wanted:
        where = [known[name] for known in numbers if name in known]
        if len(where) < 2:
            words = f"only in {both[name not in numbers[0]].folder.path}"
            found[name] = {"kind": "missing", "words": words}
        elif facts := _described(both, where):
            found[name] = facts
        elif first.manifest.leaves[where[0]].has_data:
            dtype = first.manifest.leaves[where[0]].dtype
            pairs[name] = Pair((where[0], where[1]), shape_of(first, where[0]), dtype)
    compared = zip(pairs, compare(both, list(pairs.values())), strict=True)
    found |= {name: facts for name, facts in compared if facts is not None}
    return [{"leaf": name, **found[name]} for name in wanted if name in found]


def _described(both: tuple[Checkpoint, Checkpoint], where: list[int]) -> dict[str, Any] | None:
    """Return how two leaves differ before their data is compared."""
    one, other = (c.manifest.leaves[n] for c, n in zip(both, where, strict=True))
    sizes: list[Any] = [None, None]
    if one.kind == other.kind == "per_process":
        sizes = [c.values_of(n) for c, n in zip(both, where, strict=True)]
    for kind, left, right in (
        ("kind", one.kind, other.kind),
        ("dtype", one.impl or one.dtype, other.impl or other.dtype),
        ("shape", list(one.shape), list(other.shape)),
        ("value", one.value, other.value),
        ("processes", *(size and {p: n for p, (_, n) in size.items()} for size in sizes)),
    ):
        if left != right:
            words = f"{left} | {right}"
            if kind == "value":
                words = " | ".join(short(decode_value(one.kind, value)) for value in (left, right))
            return {"kind": kind, "first": left, "second": right, "words": words}
    return None
