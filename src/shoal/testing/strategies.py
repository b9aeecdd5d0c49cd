"""Hypothesis strategies for meshes, layouts and shapes. Needs `hypothesis`."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from shoal.plan.layout import REDUCTIONS, Layout
from shoal.plan.mesh import Mesh

__all__ = ["axis_names", "layouts", "meshes", "shapes"]


def axis_names() -> st.SearchStrategy[str]:
    """Plain names, and names that need quotes."""
    plain = st.sampled_from(["data", "model", "seq", "expert", "x", "y", "x3", "ids", "over"])
    return plain | st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@st.composite
def meshes(
    draw: st.DrawFn, *, max_devices: int = 24, max_axes: int = 4, reordered: bool = True
) -> Mesh:
    """Meshes of any shape; `reordered`: also with ids and processes in any order."""
    names = draw(st.lists(axis_names(), max_size=max_axes, unique=True))
    sizes: list[int] = []
    for _ in names:
        limit = max_devices // math.prod(sizes)
        sizes.append(draw(st.integers(1, max(1, min(6, limit)))))
    size = math.prod(sizes)
    options: dict[str, object] = {}
    if reordered and draw(st.booleans()):
        ids = st.lists(st.integers(0, 3 * size + 5), min_size=size, max_size=size, unique=True)
        options["device_ids"] = draw(ids)
    if reordered and draw(st.booleans()):
        options["processes"] = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    explicit = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    return Mesh(
        list(zip(names, sizes, strict=True)),
        kind=draw(st.sampled_from(["cpu", "gpu", "tpu"])),
        label=draw(st.sampled_from(["", "pod", "a | b"])),
        axis_types=dict.fromkeys(explicit, "explicit"),
        **options,  # type: ignore[arg-type]
    )


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: Mesh | st.SearchStrategy[Mesh] | None = None,
    *,
    max_rank: int = 4,
    partial: bool = False,
) -> Layout:
    """Layouts on a mesh (default: any); `partial`: also with pending reductions."""
    if mesh is None:
        mesh = meshes()
    grid = mesh if isinstance(mesh, Mesh) else draw(mesh)
    rank = draw(st.integers(0, max_rank))
    dims: list[list[str]] = [[] for _ in range(rank)]
    pending = {}
    for axis in draw(st.permutations(grid.axis_names)):
        place = draw(st.integers(-2 if partial else -1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            pending[axis] = draw(st.sampled_from(REDUCTIONS))
    return Layout(grid, *map(tuple, dims), partial=pending)


@st.composite
def shapes(
    draw: st.DrawFn, layout: Layout, *, even: bool = False, max_shard: int = 3
) -> tuple[int, ...]:
    """Shapes that fit a layout; `even`: divided evenly by it, none of the dims empty."""
    if even:
        shard = [draw(st.integers(1, max_shard)) for _ in range(layout.rank)]
        return layout.global_shape(shard)
    limits = [layout.num_shards(dim) * max_shard for dim in range(layout.rank)]
    return tuple(draw(st.integers(0, limit)) for limit in limits)
