"""Picture of a layout: the array as blocks, and the devices that hold each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from shoal.draw.amounts import in_bytes
from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, elide
from shoal.errors import UsageError, counted
from shoal.plan.layout import Layout
from shoal.plan.notation.mesh_text import short_runs
from shoal.plan.notation.words import quote
from shoal.plan.shards import owners

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 16, 8, 4
_MOST_DEVICES = 1 << 24


def draw_layout(
    layout: Layout, shape: Sequence[int] | None = None, item_bytes: float = 0, name: str = ""
) -> Picture:
    """Return the blocks of an array and their holders.

    Args:
      layout: the layout.
      shape: the array's shape [rank]; default: one index for each shard.
      item_bytes: bytes of one element; 0: unknown.
      name: a label for the array, such as its name and dtype.
    """
    given = layout.global_shape((1,) * layout.rank) if shape is None else shape
    sizes = layout.check_shape(given)
    if layout.mesh.size > _MOST_DEVICES:
        raise UsageError(f"{layout!r} cannot be drawn: it has more than {_MOST_DEVICES} devices")
    blocks = _Blocks(Layout(layout.mesh, *layout.dims), sizes)  # pending sums do not matter
    outer = [range(count) for count in blocks.counts[:-2]]
    places = list(itertools.islice(itertools.product(*outer), 1 + _MOST_PANELS))
    panels = [blocks.panel(place) for place in places[:_MOST_PANELS]]
    notes = _notes(layout, sizes, item_bytes)
    if len(places) > len(panels):
        notes.append(f"{len(panels)} of {math.prod(map(len, outer))} panels are shown")
    title = f"{name}[{', '.join(map(str, sizes))}] as {layout!r}"
    return Picture(title, panels, notes)


class _Blocks:
    """The blocks of an array, found by their shard number along each dim."""

    def __init__(self, layout: Layout, sizes: Sequence[int]) -> None:
        held = owners(layout, sizes)
        self._ids, self._axes = layout.mesh.device_ids.reshape(-1), layout.axes_of_dims
        has_owners = len(layout.mesh.process_indices) > 1
        self._processes = layout.mesh.processes.reshape(-1) if has_owners else None
        self.counts = [layout.num_shards(d) if n else 1 for d, n in enumerate(sizes)]
        self._held = held
        self._order = np.argsort(held.box, kind="stable")
        self._begin = np.searchsorted(held.box[self._order], np.arange(held.num_boxes + 1))

    def panel(self, place: tuple[int, ...]) -> CellTable:
        """The panel of the last two dims at the shard numbers `place` of the others."""
        rank = len(self.counts)
        row_dim = rank - 2 if rank > 1 else None
        column_dim = rank - 1 if rank else None
        rows = self._numbers(row_dim, _MOST_ROWS)
        columns = self._numbers(column_dim, _MOST_COLUMNS)
        body = []
        for row in rows:
            numbers = [(*place, *(n for n in (row, c) if n != -1)) for c in columns]
            body.append((self._label(row_dim, row), [self._cell(shards) for shards in numbers]))
        title = ", ".join(
            f"{self._name(d)} {self._label(d, shard)}" for d, shard in enumerate(place)
        )
        corner = ""
        if row_dim is not None:
            corner = f"{self._name(row_dim)} ↓  {self._name(column_dim)} →"
        elif column_dim is not None:
            title = f"{self._name(column_dim)} →"
        labels = [self._label(column_dim, column) for column in columns]
        totals = [0 if dim is None else self.counts[dim] for dim in (row_dim, column_dim)]
        return CellTable(title, corner, labels, body, *totals)

    def _numbers(self, dim: int | None, limit: int) -> list[int | None]:
        """The shard numbers to show, None for a gap; [-1] where there is no such dim."""
        return [-1] if dim is None else elide(range(self.counts[dim]), limit, None)

    def _label(self, dim: int | None, shard: int | None) -> str:
        if dim is None or shard is None:
            return "" if dim is None else "…"
        stride = math.prod(self.counts[dim + 1 :])
        position = self._order[self._begin[shard * stride]]
        return f"{self._held.start[position, dim]}:{self._held.stop[position, dim]}"

    def _name(self, dim: int | None) -> str:
        axes = "+".join(map(quote, self._axes[dim])) if dim is not None else ""
        return f"dim {dim} ({axes or 'whole'})"

    def _cell(self, numbers: tuple[int | None, ...]) -> Cell:
        if None in numbers:
            return GAP
        box = 0
        for shard, count in zip(numbers, self.counts, strict=True):
            box = box * count + (shard or 0)
        positions = self._order[self._begin[box] : self._begin[box + 1]]
        ids = self._ids[positions]
        if self._processes is None:
            return Cell(short_runs(ids), box)
        processes = self._processes[positions]
        lines = [f"p{p}: {short_runs(ids[processes == p])}" for p in np.unique(processes).tolist()]
        return Cell("\n".join(elide(lines, 4, "…")), box)


def _notes(layout: Layout, sizes: Sequence[int], item_bytes: float) -> list[str]:
    blocks = math.prod(layout.num_shards(dim) for dim in range(layout.rank))
    copies = layout.mesh.size // blocks
    note = f"each block on {counted(copies, 'device')}"
    if item_bytes:
        own = in_bytes(math.prod(layout.shard_shape(sizes)) * item_bytes)
        note = f"{own} per device, {in_bytes(math.prod(sizes) * item_bytes)} in all; {note}"
    notes = [note]
    if layout.partial:
        terms = ", ".join(f"{how} over {quote(axis)}" for axis, how in layout.partial.items())
        notes.append(f"pending: {terms}")
    return notes
