"""The hops of rings as arrows in SVG.

A hop to a neighbour is a straight arrow between two chips; one over other chips is an arc beside
them; one across a wrap-around link, or to another panel, leaves and re-enters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import Protocol

from shoal.draw.media.palette import axis_class
from shoal.draw.media.svg import number
from shoal.draw.wiring.scene import Arrow, MarkPlace, Scene
from shoal.plan.notation.words import quote

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
    return "within a chip" if arrow.links == 0 else f"{arrow.links} link{'s' * (arrow.links > 1)}"


def _paths(
    scene: Scene, arrow: Arrow, start: Point, end: Point, sizes: Sizes, slots: Slots
) -> list[str]:
    tip = 7.0 if sizes.font else 4.5
    columns = arrow.end.column - arrow.start.column
    rows = arrow.end.row - arrow.start.row
    if arrow.start.panel != arrow.end.panel:
        is_next = abs(start[1] - end[1]) < 0.1 and abs(arrow.end.panel - arrow.start.panel) == 1
        if is_next and slots.is_alone(arrow):
            return [_arc(start, end, sizes, tip, -1)]
        return _diagonal_arrow(arrow, start, end, sizes, tip)
    panel = scene.panels[arrow.start.panel]
    for away, other, dim, last in (
        (columns, rows, 0, len(panel.columns) - 1),
        (rows, columns, 1, len(panel.rows) - 1),
    ):
        way = arrow.around[dim]
        if way and not other and abs(away) == last:
            out: Point = (float(way), 0.0) if dim == 0 else (0.0, float(way))
            return _leave(start, end, sizes, tip, out, (-out[0], -out[1]))
    if abs(columns) * sizes.cores + abs(rows) < 1.01:
        aside = slots.of(arrow) * (6 if sizes.font else 3)
        if abs(columns) < 1 and arrow.links == 0:  # next to the ids of a chip's two devices
            aside = 0.36 * sizes.chip
        return [_between(start, end, sizes, aside, tip)]
    if columns and rows and abs(columns) + abs(rows) > _FAR:
        return _diagonal_arrow(arrow, start, end, sizes, tip)
    return [_arc(start, end, sizes, tip, 1)]


def _diagonal_arrow(arrow: Arrow, start: Point, end: Point, sizes: Sizes, tip: float) -> list[str]:
    """Return an arrow that leaves and enters between chips, next to those of other axes."""
    aside = 0.25 * sizes.chip * (arrow.axis % 3)
    start, end = (start[0] - aside, start[1]), (end[0] + aside, end[1])
    return _leave(start, end, sizes, tip, (0.7, -0.7), (-0.7, -0.7))


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
