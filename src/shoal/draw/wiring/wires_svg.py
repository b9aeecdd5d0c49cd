"""Render a scene as SVG: chips, outlines of hosts, links, rings; a legend below them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shoal.draw.media.palette import FILLS, axis_class, fill_class
from shoal.draw.media.svg import Canvas, rect, text, text_width
from shoal.draw.wiring.arrows_svg import Slots, arrow_svg, sample_svg
from shoal.draw.wiring.scene import Arrow, Bundle, Chip, ChipPlane, LinkMark, Scene
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
    lines = [f"{scene.unit}{place}{f' of {section}' if section else ''}"]
    for device in chip.devices:
        names = (axis.name for axis in scene.axes)
        at = " ".join(f"{quote(n)}={i}" for n, i in zip(names, device.position, strict=False))
        lines.append(f"device {device.id}, process {device.process}{': ' * bool(at)}{at}")
    return "\n".join(lines)


def _signs(scene: Scene) -> list[str]:
    """Return the explanations of fills, outlines and dashes."""
    found = []
    busiest = next((axis for axis in reversed(scene.axes) if axis.size > 1), None)
    if busiest and scene.num_groups > 1:
        again = f"; fills repeat after {FILLS}" if scene.num_groups > FILLS else ""
        found.append(
            f"Same fill: same ring of {quote(busiest.name)}, {scene.num_groups} in all{again}"
        )
    if scene.hosts:
        found.append(
            "Outline: the chips of one host" if scene.unit == "chip" else "Outline: a host"
        )
    if any(link.wraps for link in scene.links) or any(one.wraps for one in scene.bundles):
        found.append("Dashed: a link that wraps, on to the other end of its line")
    if any(any(one.around) or one.start.panel != one.end.panel for one in scene.arrows):
        found.append(f"Short arrows: a hop leaves one {scene.unit} and enters the next")
    if scene.bundles:
        found.append("Thick: the links between the chips of two planes, one for each")
    return found


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
                self.canvas.rect(x, y, wide, tall + head, "section", round_=8)
                self.canvas.text(x + 12, y + 18, title, 12, "dim")
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
        corners = [(at % each * wide, at // each * high) for at in range(len(panels))]
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
                parts.append(rect(left, y - size / 2, wide, size, kind, round_=corner))
                if self.font:
                    parts.append(text(left + wide / 2, y, f"{device.id}", self.font, "id"))
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
                self.canvas.text(x, y, panel.title, 12, "dim", end=0.5)

    def _legend(self, alone: bool) -> None:
        """Draw the legend: the title above; the axes and the signs below."""
        canvas = self.canvas
        left, top, _, bottom = canvas.bounds
        if alone:
            canvas.text(left, top - 34, self.scene.title, 17, "head")
            canvas.text(left, top - 14, self.scene.subtitle, 13, "dim")
        y = bottom + 24
        names = [f"{quote(axis.name)}={axis.size}" for axis in self.scene.axes]
        indent = max([text_width(name, 13) for name in names], default=0) + 18
        for at, axis in enumerate(self.scene.axes):
            if axis.size > 1:
                canvas.add(sample_svg(at, left, y - 4.5))
            canvas.text(left + 44, y, names[at], 13, f"head {axis_class(at)}")
            canvas.text(left + 44 + indent, y, axis.far, 13)
            y += 21
        for line in [*_signs(self.scene), *self.scene.notes]:
            canvas.text(left, y, line, 12, "dim")
            y += 18
