"""A topology and a mesh on it as text for a terminal, as wide as the terminal.

╭─────┬─────╮     frames hold the chips of a host; a dashed edge: the ends of these lines are
│ 0  1│ 2  3│     linked. Where the ids do not fit, a letter stands for each chip: the same for
│ 4  5│ 6  7│     those of one ring of the last axis.
╰─────┴─────╯
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shoal.draw.media.picture import elide
from shoal.draw.media.terminal import colour_style
from shoal.draw.wiring.mesh_scene import Most, draw_wires
from shoal.draw.wiring.scene import Axis, Chip, Scene
from shoal.plan.hardware.wiring import Topology
from shoal.plan.mesh import Mesh
from shoal.plan.notation.words import quote

_LETTERS = string.ascii_letters + string.digits
_MOST_WITH_IDS = 1024  # chips
_MOST_CHIPS = 4096
_APART = 2  # columns between panels
# Which arms meet → the sign: up, down, left, right.
_JOINTS = {
    (0, 0, 0, 0): " ", (0, 0, 1, 1): "─", (1, 1, 0, 0): "│", (0, 1, 0, 1): "╭",
    (0, 1, 1, 0): "╮", (1, 0, 0, 1): "╰", (1, 0, 1, 0): "╯", (1, 1, 0, 1): "├",
    (1, 1, 1, 0): "┤", (0, 1, 1, 1): "┬", (1, 0, 1, 1): "┴", (1, 1, 1, 1): "┼",
}  # fmt: skip


def render_wires(
    topology: Topology, mesh: Mesh | None, width: int, *, has_colours: bool = True
) -> RenderableType:
    """Return what a `rich` console of `width` columns prints.

    Args:
      topology: the devices.
      mesh: the mesh on them, or None.
      width: of the console.
      has_colours: whether it shows colours; else the legend omits them.
    """
    scene = draw_wires(topology, mesh, Most(chips=_MOST_CHIPS, arrows=0))
    frames = [_Frame(scene, panel) for panel in range(len(scene.panels))]
    has_ids = len(scene.chips) <= _MOST_WITH_IDS and all(frame.width <= width for frame in frames)
    if not has_ids:
        most = Most(columns=max(3, width - 2), chips=_MOST_CHIPS, arrows=0)
        scene = draw_wires(topology, mesh, most)
        frames = [_Frame(scene, panel, has_ids=False) for panel in range(len(scene.panels))]
    parts: list[RenderableType] = [Text(scene.title, style="bold"), Text(scene.subtitle)]
    parts += _flow(frames, width)
    for axis in scene.axes:
        parts.append(Text.assemble((f"{quote(axis.name)}={axis.size}", "bold"), f"  {axis.far}"))
        parts += [Text(_ring(axis, width), no_wrap=True)] if axis.size > 1 else []
    parts += [Text(line, style="dim") for line in _signs(scene, has_ids, has_colours)]
    return Group(*parts)


def _signs(scene: Scene, has_ids: bool, has_colours: bool) -> Iterator[str]:
    """Yield the explanations of colours, letters and frames."""
    busiest = next((axis for axis in reversed(scene.axes) if axis.size > 1), None)
    if busiest and scene.num_groups > 1 and (has_colours or not has_ids):
        ring = f"same ring of {quote(busiest.name)}, {scene.num_groups} in all"
        again = not has_ids and scene.num_groups > len(_LETTERS)
        repeat = f"; letters repeat after {len(_LETTERS)}" if again else ""
        sign = "colour" if has_ids else "letter"
        yield f"same {sign}: {ring}{repeat}"
    if scene.hosts and has_ids:
        yield "frame: the chips of one host" if scene.unit == "chip" else "frame: a host"
    if any(True in panel.wraps for panel in scene.panels):
        yield "dashed edge: the ends of these lines are linked"
    if any(bundle.wraps for bundle in scene.bundles):
        yield "z: the last plane is linked to the first"
    yield from scene.notes


def _ring(axis: Axis, width: int) -> str:
    """Return the ids of a ring, as many as fit in a line."""
    ids = [*map(str, axis.ring), str(axis.ring[0])]
    for limit in range(min(len(ids), width), 2, -1):
        line = "  " + " → ".join(elide(ids, limit, "…"))
        if len(line) <= width:
            return line
    return f"  {ids[0]} → …"[:width]


class _Frame:
    """The lines of one panel."""

    def __init__(self, scene: Scene, panel: int, *, has_ids: bool = True) -> None:
        shown = scene.panels[panel]
        self.wraps, self.shown = shown.wraps, shown
        self.rows, self.columns = range(len(shown.rows)), range(len(shown.columns))
        chips = [chip for chip in scene.chips if chip.panel == panel]
        self.chips = {(chip.row, chip.column): chip for chip in chips}
        self.has_ids, self.has_hosts = has_ids, has_ids and bool(scene.hosts)
        self.cell = 1 + max(len(self._label(chip)) for chip in scene.chips) if has_ids else 1
        self.across = self._lines(self.rows, self.columns, turned=False)
        self.down = self._lines(self.columns, self.rows, turned=True)
        section = scene.sections[shown.section]
        self.title = ", ".join(filter(None, (section, shown.title)))

    @property
    def width(self) -> int:
        """Width in columns of text."""
        return max(len(self.columns) * self.cell + len(self.across), len(self.title))

    def _label(self, chip: Chip) -> str:
        if self.has_ids:
            return " ".join(str(device.id) for device in chip.devices)
        group = chip.devices[0].group
        return "·" if group < 0 else _LETTERS[group % len(_LETTERS)]

    def _gap(self, row: int, column: int) -> str:
        return "…" if None in (self.shown.rows[row], self.shown.columns[column]) else ""

    def _owner(self, row: int, column: int) -> object:
        """Return the owner of a cell; a gap belongs to the cell before it."""
        row -= self.shown.rows[row] is None
        column -= self.shown.columns[column] is None
        chip = self.chips.get((row, column))
        if chip is None:
            return None
        return chip.devices[0].process if self.has_hosts else -1

    def _lines(self, rows: range, columns: range, *, turned: bool) -> dict[int, set[int]]:
        """Return the lines to draw between columns, and their rows."""
        lines = {0: set(rows), len(columns): set(rows)}
        for row, column in itertools.product(rows, columns[1:]):
            before, here = (row, column - 1), (row, column)
            if turned:
                before, here = before[::-1], here[::-1]
            if self._owner(*before) != self._owner(*here):
                lines.setdefault(column, set()).add(row)
        return dict(sorted(lines.items()))

    def lines(self) -> Iterator[Text]:
        """Yield its title and its lines."""
        if self.title:
            yield Text(self.title, style="italic")
        for row in (*self.rows, len(self.rows)):
            if row in self.down:
                yield Text(self._rule(row))
            if row in self.rows:
                yield self._row(row)

    def _rule(self, row: int) -> str:
        """Return a line between rows."""
        here = self.down[row]
        is_linked_edge = self.wraps[1] and row in (0, len(self.rows))
        sign = "╌" if is_linked_edge else "─"
        parts = []
        for column in (*self.columns, len(self.columns)):
            if column in self.across:
                beside = self.across[column]
                arms = (row - 1 in beside, row in beside, column - 1 in here, column in here)
                parts.append(_JOINTS.get(arms, " "))
            if column in self.columns:
                parts.append((sign if column in here else " ") * self.cell)
        return "".join(parts)

    def _row(self, row: int) -> Text:
        line = Text()
        for column in (*self.columns, len(self.columns)):
            if column in self.across:
                is_linked_edge = self.wraps[0] and column in (0, len(self.columns))
                sign = "┆" if is_linked_edge else "│"
                line.append(sign if row in self.across[column] else " ")
            if column in self.columns:
                chip = self.chips.get((row, column))
                text = self._label(chip) if chip else self._gap(row, column)
                style = colour_style(chip.devices[0].group) if chip else ""
                line.append(text.rjust(self.cell), style=style)
        return line


def _flow(frames: Sequence[_Frame], width: int) -> Iterator[Text]:
    """Yield the lines of the frames, as many of them side by side as fit."""
    left = list(frames)
    while left:
        count, used = 1, left[0].width
        while count < len(left) and used + _APART + left[count].width <= width:
            used += _APART + left[count].width
            count += 1
        beside, left = left[:count], left[count:]
        for row in itertools.zip_longest(*(frame.lines() for frame in beside)):
            line = Text(no_wrap=True)
            for frame, part in zip(beside, row, strict=True):
                line.append_text(part or Text())
                line.append(" " * (frame.width + _APART - (part.cell_len if part else 0)))
            line.rstrip()
            yield line
