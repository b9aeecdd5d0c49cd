"""Render a scene as SVG: chips, outlines of hosts, links, rings; a legend below them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple, Protocol

from shoal.draw.media.palette import FILLS, axis_class, fill_class
from shoal.draw.media.svg import Canvas, number, rect, text, text_width
from shoal.draw.wiring.scene import Arrow, Bundle, Chip, ChipPlane, LinkMark, MarkPlace, Scene
from shoal.errors import counted
from shoal.plan.notation.words import quote

_MOST_WIDTH = 1320.0


class Grain(NamedTuple):
    """Sizes in pixels."""

    pitch: float  # distance between rows
    chip: float
    font: float  # font size of ids; 0: no room for them

    edge: float  # margin beside the chips of a panel, for links that wrap and hops that leave
    cores: int = 1  # devices of a chip, side by side

    @property
    def wide(self) -> float:
        """Width of a chip."""
        return self.chip * (1 + 0.5 * (self.cores - 1))

    @property
    def across(self) -> float:
        """Distance between columns; `pitch` is that between rows."""
        return self.pitch - self.chip + self.wide


_GRAINS: Mapping[int, Grain] = {  # by the maximum number of chips
    16: Grain(68, 42, 14, 40),
    72: Grain(52, 34, 11.5, 32),
    1200: Grain(35, 25, 9, 22),
}
_FINE = Grain(13, 10, 0, 13)
_CLOSED = 12.0  # the margin of a panel without such links and hops


def wires_svg(scene: Scene, *, alone: bool = True) -> str:
    """Return a scene as SVG; `alone`: with a heading and style sheet of its own."""
    canvas = Canvas()
    drawing = _Wires(scene, canvas)
    drawing.draw(alone)
    label = f"{scene.title}: {scene.subtitle}. " + " ".join(f"{line}." for line in legend_of(scene))
    return canvas.svg(label, alone=alone)


def legend_of(scene: Scene) -> list[str]:
    """Return the lines of the legend, as text."""
    lines = [f"{quote(axis.name)}={axis.size}: {axis.far}" for axis in scene.axes]
    return [*lines, *_signs(scene), *scene.notes]


def chip_title(scene: Scene, chip: Chip) -> str:
    """Return the facts about a chip, one line per device."""
    place = f" at ({', '.join(map(str, chip.coords))})" if chip.coords else ""
    section = scene.sections[scene.panels[chip.panel].section]
    of = f" of {section}" if section else ""
    lines = [f"{scene.unit}{place}{of}"]
    for device in chip.devices:
        names = (axis.name for axis in scene.axes)
        position = " ".join(f"{quote(n)}={i}" for n, i in zip(names, device.position, strict=False))
        lines.append(
            f"device {device.id}, process {device.process}{': ' * bool(position)}{position}"
        )
    return "\n".join(lines)


def _signs(scene: Scene) -> list[str]:
    """Return the explanations of fills, outlines and dashes."""
    signs = []
    busiest = next((axis for axis in reversed(scene.axes) if axis.size > 1), None)
    if busiest and scene.num_groups > 1:
        again = f"; fills repeat after {FILLS}" if scene.num_groups > FILLS else ""
        signs.append(
            f"Same fill: same ring of {quote(busiest.name)}, {scene.num_groups} in all{again}"
        )
    if scene.hosts:
        signs.append(
            "Outline: the chips of one host" if scene.unit == "chip" else "Outline: a host"
        )
    if any(link.wraps for link in scene.links) or any(bundle.wraps for bundle in scene.bundles):
        signs.append("Dashed: a link that wraps, on to the other end of its line")
    if any(any(arrow.around) or arrow.start.panel != arrow.end.panel for arrow in scene.arrows):
        signs.append(f"Short arrows: a hop leaves one {scene.unit} and enters the next")
    if scene.bundles:
        signs.append("Thick: the links between the chips of two planes, one for each")
    return signs


def _leaves(part: LinkMark | Bundle | Arrow) -> bool:
    """Whether an arrow or link leaves its panel."""
    return part.start.panel != part.end.panel if isinstance(part, Arrow) else part.wraps


class _Wires:
    """Draws one scene."""

    def __init__(self, scene: Scene, canvas: Canvas) -> None:
        self.scene, self.canvas = scene, canvas
        count = len(scene.chips)
        grain = next((g for most, g in _GRAINS.items() if count <= most), _FINE)
        parts: list[LinkMark | Bundle | Arrow] = [*scene.links, *scene.bundles, *scene.arrows]
        is_open = any(_leaves(part) for part in parts)
        self.grain = grain if is_open else grain._replace(edge=_CLOSED)
        digits = max(len(str(d.id)) for chip in scene.chips for d in chip.devices)
        cores = len(scene.chips[0].devices)
        self.grain = self.grain._replace(cores=cores)
        self.font = min(self.grain.font, self.grain.wide / cores / (0.62 * digits + 0.4))
        self.corners = self._lay_out()

    def draw(self, alone: bool) -> None:
        """Draw the whole scene."""
        self._hosts()
        self._links()
        self._bundles()
        self._chips()
        self._arrows()
        self._titles()
        self._legend(alone)

    def middle(self, panel: int, column: float, row: float) -> tuple[float, float]:
        """Return the middle of a cell."""
        left, top = self.corners[panel]
        return left + (column + 0.5) * self.grain.across, top + (row + 0.5) * self.grain.pitch

    def _size(self, panel: ChipPlane) -> tuple[float, float]:
        """Return the width and height of a panel with its margins and title."""
        wide = len(panel.columns) * self.grain.across + 2 * self.grain.edge
        high = len(panel.rows) * self.grain.pitch + 2 * self.grain.edge
        return wide, high + 16.0 * bool(panel.title)

    def _lay_out(self) -> list[tuple[float, float]]:
        """Return the origin of each panel's grid; frame the sections."""
        corners: list[tuple[float, float]] = []
        x, y, high = 0.0, 0.0, 0.0
        for section, title in enumerate(self.scene.sections):
            own = [panel for panel in self.scene.panels if panel.section == section]
            if not own:
                continue
            grid, wide, tall = self._flow(own)
            head = 24.0 if title else 0.0
            if x and x + wide > _MOST_WIDTH:
                x, y, high = 0.0, y + high + 14, 0.0
            if title:
                self.canvas.rect(
                    left=x, top=y, wide=wide, high=tall + head, kind="section", round_=8
                )
                self.canvas.text(x=x + 12, y=y + 18, words=title, size=12, kind="dim")
            else:
                self.canvas.cover(x, y, x + wide, y + tall)
            edge = self.grain.edge
            corners += [(x + left + edge, y + head + top + edge) for left, top in grid]
            x, high = x + wide + 14, max(high, tall + head)
        return corners

    def _flow(self, panels: Sequence[ChipPlane]) -> tuple[list[tuple[float, float]], float, float]:
        """Return the corners of a section's panels in even lines, and its width and height."""
        wide, high = self._size(panels[0])
        lines = math.ceil(len(panels) / max(1, int(_MOST_WIDTH / wide)))
        each = math.ceil(len(panels) / lines)
        corners = [(index % each * wide, index // each * high) for index in range(len(panels))]
        return corners, each * wide, lines * high

    def _hosts(self) -> None:
        pitch, across = self.grain.pitch, self.grain.across
        gap, kind = (min(3.5, 0.08 * pitch), "host") if self.font else (0.0, "host fine")
        for host in self.scene.hosts:
            left, top = self.corners[host.panel]
            wide, high = host.right - host.left + 1, host.bottom - host.top + 1
            left, top = left + host.left * across + gap, top + host.top * pitch + gap
            size = (wide * across - 2 * gap, high * pitch - 2 * gap)
            self.canvas.rect(left, top, *size, kind, round_=0.14 * pitch * bool(gap))

    def _links(self) -> None:
        if not self.grain.font:
            self._edges()
            return
        grain = self.grain
        near_x, near_y = grain.wide / 2, grain.chip / 2
        far_x, far_y = (size / 2 + grain.edge - 4 for size in (grain.across, grain.pitch))
        for link in self.scene.links:
            a, b = (self.middle(link.panel, *end) for end in (link.start, link.end))
            if not link.wraps:
                self.canvas.path([a, b], "link")
                continue
            across = link.start[1] == link.end[1]
            ends = []
            for (x, y), way in ((a, 1), (b, -1)):
                if across:
                    ends += [(x + near_x * way, y), (x + far_x * way, y)]
                else:
                    ends += [(x, y + near_y * way), (x, y + far_y * way)]
            self.canvas.path(ends, "wrap")

    def _edges(self) -> None:
        """Mark the sides whose lines wrap, if single links are too small to see."""
        pitch, off = self.grain.pitch, 4.0
        for number_, panel in enumerate(self.scene.panels):
            left, top = self.corners[number_]
            right, bottom = (
                left + len(panel.columns) * self.grain.across,
                top + len(panel.rows) * pitch,
            )
            if panel.wraps[0]:
                sides = [(left - off, top), (left - off, bottom)]
                self.canvas.path([*sides, (right + off, top), (right + off, bottom)], "wrap")
            if panel.wraps[1]:
                sides = [(left, top - off), (right, top - off)]
                self.canvas.path([*sides, (left, bottom + off), (right, bottom + off)], "wrap")

    def _bundles(self) -> None:
        """Draw the links between planes of a torus: lines if they are adjacent, else two stubs."""
        for bundle in self.scene.bundles:
            a, b = self.scene.panels[bundle.start], self.scene.panels[bundle.end]
            (left, top), (right, below) = self.corners[bundle.start], self.corners[bundle.end]
            pitch, under = self.grain.pitch, self.grain.edge + 4
            start = (left + len(a.columns) * self.grain.across, top + len(a.rows) * pitch + under)
            end = (right, below + len(b.rows) * pitch + under)
            kind = "bundle wrap" if bundle.wraps else "bundle"
            title = f"{bundle.links} links, from {a.title} to {b.title}"
            if start[1] == end[1] and start[0] < end[0]:
                self.canvas.path([start, end], kind, title)
            else:
                stub = self.grain.edge * 0.8
                near = (start[0] + stub, start[1]), (end[0] - stub, end[1])
                self.canvas.path([start, near[0], near[1], end], kind, title)

    def _chips(self) -> None:
        size, whole = self.grain.chip, self.grain.wide
        corner = min(5.0, 0.18 * size) if self.font else 0.0
        for chip in self.scene.chips:
            x, y = self.middle(chip.panel, chip.column, chip.row)
            wide = whole / len(chip.devices)
            parts = [f'<g class="chip"><title>{escape(chip_title(self.scene, chip))}</title>']
            for core, device in enumerate(chip.devices):
                left = x - whole / 2 + core * wide
                kind = fill_class(device.group)
                parts.append(
                    rect(left, top=y - size / 2, wide=wide, high=size, kind=kind, round_=corner)
                )
                if self.font:
                    parts.append(
                        text(
                            x=left + wide / 2, y=y, words=f"{device.id}", size=self.font, kind="id"
                        )
                    )
            self.canvas.add("".join([*parts, "</g>"]))

    def _arrows(self) -> None:
        slots = Slots(self.scene.arrows)
        for arrow in self.scene.arrows:
            start = self.middle(*arrow.start)
            end = self.middle(*arrow.end)
            self.canvas.add(arrow_svg(self.scene, arrow, start, end, self.grain, slots))

    def _titles(self) -> None:
        for number_, panel in enumerate(self.scene.panels):
            if panel.title:
                left, top = self.corners[number_]
                x = left + len(panel.columns) * self.grain.across / 2
                y = top + len(panel.rows) * self.grain.pitch + self.grain.edge + 8
                self.canvas.text(x, y, words=panel.title, size=12, kind="dim", end=0.5)

    def _legend(self, alone: bool) -> None:
        """Draw the legend: the title above; the axes and the signs below."""
        canvas = self.canvas
        left, top, _, bottom = canvas.bounds
        if alone:
            canvas.text(x=left, y=top - 34, words=self.scene.title, size=17, kind="head")
            canvas.text(x=left, y=top - 14, words=self.scene.subtitle, size=13, kind="dim")
        y = bottom + 24
        names = [f"{quote(axis.name)}={axis.size}" for axis in self.scene.axes]
        indent = max([text_width(name, 13) for name in names], default=0) + 18
        for index, axis in enumerate(self.scene.axes):
            if axis.size > 1:
                canvas.add(sample_svg(index, left, y - 4.5))
            canvas.text(
                x=left + 44, y=y, words=names[index], size=13, kind=f"head {axis_class(index)}"
            )
            canvas.text(left + 44 + indent, y, axis.far, 13)
            y += 21
        for line in [*_signs(self.scene), *self.scene.notes]:
            canvas.text(x=left, y=y, words=line, size=12, kind="dim")
            y += 18


# ---- The hops of rings as arrows in SVG.
#
# A hop to a neighbor is a straight arrow between two chips; one over other chips is an arc
# beside them; one across a wrap-around link, or to another panel, leaves and re-enters.


Point = tuple[float, float]

_FAR = 6  # cells; a longer arc would cross too much


class Sizes(Protocol):
    """Sizes in pixels."""

    @property
    def pitch(self) -> float:
        """Distance between rows."""

    @property
    def chip(self) -> float:
        """Height of a chip."""

    @property
    def wide(self) -> float:
        """Width of a chip."""

    @property
    def across(self) -> float:
        """Distance between columns."""

    @property
    def cores(self) -> int:
        """Devices of a chip, side by side."""

    @property
    def font(self) -> float:
        """Font size of the ids; 0: none."""

    @property
    def edge(self) -> float:
        """Margin beside a panel's chips."""


class Slots:
    """Assigns parallel lanes to arrows between the same two places."""

    def __init__(self, arrows: Iterable[Arrow]) -> None:
        self._lanes: dict[frozenset[MarkPlace], list[Arrow]] = {}
        self._beside = Counter[object]()
        for arrow in arrows:
            self._lanes.setdefault(frozenset((arrow.start, arrow.end)), []).append(arrow)
            self._beside[self._gap(arrow)] += 1

    def _gap(self, arrow: Arrow) -> object:
        """A key that is equal for arrows through the same gap between rows, from panel to panel."""
        return arrow.axis, arrow.start.panel, arrow.end.panel, arrow.start.row

    def is_alone(self, arrow: Arrow) -> bool:
        """Does its axis have no other arrow in the same gap?"""
        return self._beside[self._gap(arrow)] == 1

    def of(self, arrow: Arrow) -> float:
        """Return an arrow's lane: how far right of the middle, seen in its direction."""
        lanes = self._lanes[frozenset((arrow.start, arrow.end))]
        lane = lanes.index(arrow) - (len(lanes) - 1) / 2
        return lane if arrow.start <= arrow.end else -lane


def arrow_svg(
    scene: Scene, arrow: Arrow, start: Point, end: Point, sizes: Sizes, slots: Slots
) -> str:
    """Return one hop.

    Args:
      scene: the scene.
      arrow: the hop.
      start: the middle of its first device.
      end: the middle of its second.
      sizes: of chips.
      slots: the lanes taken by other arrows.
    """
    axis = scene.axes[arrow.axis]
    ring, hop = axis.ring, arrow.hop
    title = f"{quote(axis.name)}: {ring[hop]} to {ring[(hop + 1) % len(ring)]}, {_far(arrow)}"
    paths = "".join(_paths(scene, arrow, start, end, sizes, slots))
    kind = axis_class(arrow.axis)
    return f'<g class="arrow {kind}"><title>{escape(title)}</title>{paths}</g>'


def sample_svg(axis: int, x: float, y: float) -> str:
    """Return an arrow of an axis, for the legend."""
    return f'<g class="sample {axis_class(axis)}">{_line((x, y), (x + 34, y), 9)}</g>'


def _far(arrow: Arrow) -> str:
    if arrow.links is None:
        return "over the network"
    return "within a chip" if arrow.links == 0 else counted(arrow.links, "link")


def _paths(
    scene: Scene, arrow: Arrow, start: Point, end: Point, sizes: Sizes, slots: Slots
) -> list[str]:
    tip = 7.0 if sizes.font else 4.5
    columns = arrow.end.column - arrow.start.column
    rows = arrow.end.row - arrow.start.row
    if arrow.start.panel != arrow.end.panel:
        is_next = abs(start[1] - end[1]) < 0.1 and abs(arrow.end.panel - arrow.start.panel) == 1
        if is_next and slots.is_alone(arrow):
            return [_arc(start, end, sizes, tip, side=-1)]
        return _diagonal_arrow(arrow, start, end, sizes, tip)
    panel = scene.panels[arrow.start.panel]
    for away, other, dim, last in (
        (columns, rows, 0, len(panel.columns) - 1),
        (rows, columns, 1, len(panel.rows) - 1),
    ):
        way = arrow.around[dim]
        if way and not other and abs(away) == last:
            out: Point = (float(way), 0.0) if dim == 0 else (0.0, float(way))
            return _leave(start, end, sizes, tip, out, arrival=(-out[0], -out[1]))
    if abs(columns) * sizes.cores + abs(rows) < 1.01:
        aside = slots.of(arrow) * (6 if sizes.font else 3)
        if abs(columns) < 1 and arrow.links == 0:  # next to the ids of a chip's two devices
            aside = 0.36 * sizes.chip
        return [_between(start, end, sizes, aside, tip)]
    if columns and rows and abs(columns) + abs(rows) > _FAR:
        return _diagonal_arrow(arrow, start, end, sizes, tip)
    return [_arc(start, end, sizes, tip, side=1)]


def _diagonal_arrow(arrow: Arrow, start: Point, end: Point, sizes: Sizes, tip: float) -> list[str]:
    """Return an arrow that leaves and enters between chips, next to those of other axes."""
    aside = 0.25 * sizes.chip * (arrow.axis % 3)
    start, end = (start[0] - aside, start[1]), (end[0] + aside, end[1])
    return _leave(start, end, sizes, tip, out=(0.7, -0.7), arrival=(-0.7, -0.7))


def _between(start: Point, end: Point, sizes: Sizes, aside: float, tip: float) -> str:
    """Return a straight arrow in the gap between two devices, off the middle of the gap."""
    ux, uy, length = _direction(start, end)
    room = _half(sizes, ux, uy) if sizes.font else 0.0
    room = min(room, 0.3 * length)
    off = (-uy * aside, ux * aside)
    a = (start[0] + ux * room + off[0], start[1] + uy * room + off[1])
    b = (end[0] - ux * room + off[0], end[1] - uy * room + off[1])
    return _line(a, b, tip)


def _half(sizes: Sizes, ux: float, uy: float) -> float:
    """Return the distance from the middle of a device to its side."""
    return abs(ux) * sizes.wide / sizes.cores / 2 + abs(uy) * sizes.chip / 2


def _leave(
    start: Point, end: Point, sizes: Sizes, tip: float, out: Point, arrival: Point
) -> list[str]:
    """Return an arrow that leaves in one direction, and one that enters from another."""
    near = _half(sizes, *out)
    gap = sizes.pitch - sizes.chip
    is_aslant = bool(out[0] and out[1])  # then another chip is there
    aslant = gap if sizes.font else 0.8 * sizes.chip  # small chips have no ids to cover
    far = near + (aslant if is_aslant else gap / 2 + 0.75 * sizes.edge)
    a, b = ((start[0] + out[0] * r, start[1] + out[1] * r) for r in (near, far))
    c, d = ((end[0] + arrival[0] * r, end[1] + arrival[1] * r) for r in (far, near))
    return [_line(a, b, tip), _line(c, d, tip)]


def _arc(start: Point, end: Point, sizes: Sizes, tip: float, side: int) -> str:
    """Return an arc over other chips: from side to side of them, in the gap beside them.

    `side`: 1: on its right hand; -1: above.
    """
    ux, uy, length = _direction(start, end)
    px, py = (-uy * side, ux * side) if side > 0 else (0.0, -1.0)
    straight = abs(ux) < 1e-6 or abs(uy) < 1e-6
    near = _half(sizes, px, py)
    rise = 0.7 * (sizes.pitch - sizes.chip) if straight else min(0.25 * length, sizes.pitch)
    lean = min(0.2 * length, sizes.chip)
    a = (start[0] + px * near, start[1] + py * near)
    b = (end[0] + px * near, end[1] + py * near)
    c = (a[0] + px * rise + ux * lean, a[1] + py * rise + uy * lean)
    d = (b[0] + px * rise - ux * lean, b[1] + py * rise - uy * lean)
    vx, vy, _ = _direction(d, b)
    stop = (b[0] - vx * tip, b[1] - vy * tip)
    curve = f"M{_at(a)}C{_at(c)} {_at(d)} {_at(stop)}"
    return f'<path d="{curve}"/>{_tip(b, vx, vy, tip)}'


def _line(start: Point, end: Point, tip: float) -> str:
    ux, uy, length = _direction(start, end)
    tip = min(tip, length)
    stop = (end[0] - ux * tip, end[1] - uy * tip)
    return f'<path d="M{_at(start)}L{_at(stop)}"/>{_tip(end, ux, uy, tip)}'


def _tip(end: Point, ux: float, uy: float, size: float) -> str:
    """Return the head of an arrow as a triangle: markers cannot take the colour of their line."""
    half = 0.55 * size
    back = (end[0] - ux * size, end[1] - uy * size)
    one = (back[0] - uy * half, back[1] + ux * half)
    two = (back[0] + uy * half, back[1] - ux * half)
    return f'<path class="tip" d="M{_at(end)}L{_at(one)}L{_at(two)}Z"/>'


def _direction(start: Point, end: Point) -> tuple[float, float, float]:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy) or 1.0
    return dx / length, dy / length, length


def _at(point: Point) -> str:
    return f"{number(point[0])} {number(point[1])}"
