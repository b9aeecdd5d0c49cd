"""Traffic of a move per class of links: a table in a terminal, ribbons in SVG."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from shoal.draw.amounts import in_bytes
from shoal.draw.media.palette import fill_class
from shoal.draw.media.picture import GAP, Cell, CellTable, Picture, elide
from shoal.draw.media.svg import Canvas, rect
from shoal.plan.layout import Layout
from shoal.plan.transfer.traffic import Traffic

_MOST_ROWS = 24  # there can be many rounds of single sends
_WIDE, _BAR, _FULL, _LEAST = 300.0, 6.0, 120.0, 18.0


class Ribbon(NamedTuple):
    """Traffic of one step over one class of links."""

    step: int
    kind: int  # position in the classes
    num_bytes: int
    words: str


def draw_traffic(traffic: Traffic) -> Picture:
    """Return a row for each step, a column for each class of links, and sums."""
    columns = [*traffic.classes, "in all"]
    rows = [(flow.title, _cells(flow.num_bytes)) for flow in traffic.flows]
    if len(rows) > 1:
        rows = elide(rows, _MOST_ROWS, ("…", [GAP] * len(columns)))
        rows.append(("in all", _cells(tuple(traffic.num_bytes.values()))))
    notes = [] if rows else ["nothing is sent"]
    panels = [CellTable("", "step", columns, rows)] if rows else []
    return Picture(_title(traffic), panels, notes)


def ribbons_of(traffic: Traffic) -> list[Ribbon]:
    """Return a ribbon for each class of links of each step that sends over them."""
    return [
        Ribbon(step, kind, count, f"{traffic.classes[kind]} {in_bytes(count)}")
        for step, flow in enumerate(traffic.flows[:_MOST_ROWS])
        for kind, count in enumerate(flow.num_bytes)
        if count
    ]


def ribbons_svg(traffic: Traffic, *, alone: bool = True) -> str:
    """Return a ribbon for each class of links from layout to layout, as wide as its bytes.

    Args:
      alone: with a heading and style sheet of its own.
    """
    canvas, ribbons = Canvas(), ribbons_of(traffic)
    canvas.text(x=0, y=0, words=_title(traffic), size=15, kind="head")
    most = max((sum(flow.num_bytes) for flow in traffic.flows), default=0)
    high = [_LEAST] * (len(traffic.flows[:_MOST_ROWS]) + 1)
    for step, flow in enumerate(traffic.flows[:_MOST_ROWS]):
        left, top = step * _WIDE, 60.0
        canvas.text(
            x=left + _WIDE / 2 + _BAR,
            y=40,
            words=f"{step + 1}. {flow.title}",
            size=11,
            kind="dim",
            end=0.5,
        )
        for ribbon in (r for r in ribbons if r.step == step):
            wide = max(_LEAST, _FULL * ribbon.num_bytes / most)
            _ribbon(canvas, left=left + _BAR, top=top, wide=wide, ribbon=ribbon)
            top += wide + 4
        if not any(flow.num_bytes):
            canvas.text(
                x=left + _WIDE / 2,
                y=top + 13,
                words="nothing is sent",
                size=12,
                kind="dim",
                end=0.5,
            )
        for end in (step, step + 1):
            high[end] = max(high[end], top - 60.0 - 4)
    for column, tall in enumerate(high):
        canvas.rect(left=column * _WIDE, top=60, wide=_BAR, high=tall, kind="bar", round_=2)
    summary = "; ".join(f"{ribbon.step + 1}. {ribbon.words}" for ribbon in ribbons)
    hidden = len(traffic.flows) - len(high) + 1
    if hidden:
        canvas.text(
            x=0, y=80 + max(high), words=f"{hidden} more rounds are not shown", size=12, kind="dim"
        )
    return canvas.svg(f"{_title(traffic)}. {summary or 'Nothing is sent'}.", alone=alone)


def _ribbon(canvas: Canvas, left: float, top: float, wide: float, ribbon: Ribbon) -> None:
    """Draw a ribbon to the next bar, with its words on it."""
    right = left + _WIDE - _BAR
    canvas.cover(left, top, right, top + wide)
    box = rect(left, top, wide=right - left, high=wide, kind=fill_class(ribbon.kind))
    canvas.add(f"<g><title>{escape(ribbon.words)}</title>{box}</g>")
    canvas.text((left + right) / 2, top + wide / 2 + 4, ribbon.words, 12, end=0.5)


def _cells(counts: tuple[int, ...]) -> list[Cell]:
    each = [Cell(in_bytes(count) if count else "-", kind) for kind, count in enumerate(counts)]
    return [*each, Cell(in_bytes(sum(counts)))]


def _title(traffic: Traffic) -> str:
    plan = traffic.transfer
    shape = "×".join(map(str, plan.shape)) or "scalar"
    return f"{_dims(plan.source)} → {_dims(plan.target)}, {shape}, {plan.item_bytes} bytes each"


def _dims(layout: Layout) -> str:
    dims = layout.text.removesuffix(f" @ {layout.mesh.text}")
    return dims if dims.startswith("(") else f"({dims})"
