"""Meshes over the eight virtual devices of the suite, in any order, whole or in part."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.testing.strategies import layouts

DEVICES = 8
LETTERS = st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="\"'\\")
NAMES = st.sampled_from(["data", "model", "x", "y"]) | st.text(LETTERS, min_size=1, max_size=4)


@st.composite
def grids(draw: st.DrawFn, *, axis_types: str | None = None) -> Mesh:
    """Meshes whose devices exist here. `axis_types`: one for all axes; None: any mixture."""
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    sizes: list[int] = []
    for _ in names:
        sizes.append(draw(st.integers(1, DEVICES // math.prod(sizes))))
    size = math.prod(sizes)
    ids = draw(st.permutations(range(DEVICES)))[:size]
    kinds = st.sampled_from(["auto", "explicit"])
    types = {name: axis_types or draw(kinds) for name in names}
    return Mesh(list(zip(names, sizes, strict=True)), device_ids=ids, axis_types=types)


@st.composite
def placements(draw: st.DrawFn, **options) -> tuple[Layout, tuple[int, ...]]:
    """Layouts over devices that exist, each with a shape that it divides evenly."""
    layout = draw(layouts(draw(grids(**options)), max_rank=3))
    shard = [draw(st.integers(0, 3)) for _ in range(layout.rank)]
    return layout, layout.global_shape(shard)
