"""A self-contained HTML page: pictures, and the same content as text and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from shoal.draw.media.palette import style
from shoal.draw.media.picture import Picture
from shoal.draw.media.svg import picture_svg
from shoal.draw.wiring.scene import Scene
from shoal.draw.wiring.wires_svg import wires_svg
from shoal.plan.notation.words import quote

_MOST_ROWS = 1024  # of the table of devices

_STYLE = """\
:root{color-scheme:light dark;--ink:#1B1F24;--dim:#59626D;--paper:#FFFFFF;--line:#D5DAE0}
@media (prefers-color-scheme:dark){
:root{--ink:#E6E9ED;--dim:#A3ADB9;--paper:#15181D;--line:#343B45}}
body{margin:0 auto;padding:2rem 1.25rem 4rem;max-width:84rem;background:var(--paper);
color:var(--ink);font:16px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,\
Arial,sans-serif}
h1{font-size:1.5rem;line-height:1.3;margin:0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.25rem 0 1rem;color:var(--dim)}
figure{margin:1rem 0;overflow-x:auto}
svg{max-width:100%;height:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .9rem .3rem 0;border-bottom:1px solid var(--line);text-align:left;
vertical-align:top}
th{color:var(--dim);font-weight:600}
summary{cursor:pointer;color:var(--dim);margin:1rem 0 .5rem}
"""


class Table(NamedTuple):
    """Rows of text under a heading; collapsed if long."""

    heading: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_folded: bool = False


def page(title: str, subtitle: str, svgs: Iterable[str], tables: Iterable[Table]) -> str:
    """Return a whole page.

    Args:
      title: its heading.
      subtitle: the line below it; may be "".
      svgs: pictures without style sheets of their own.
      tables: the same content as text.
    """
    figures = "".join(f"<figure>\n{svg}</figure>\n" for svg in svgs)
    below = f"<p>{escape(subtitle)}</p>\n" if subtitle else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(': '.join(filter(None, (title, subtitle))))}</title>\n"
        f"<style>\n{_STYLE}{style()}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{escape(title)}</h1>\n{below}{figures}"
        f"{''.join(map(_table, tables))}</main>\n</body>\n</html>\n"
    )


def wires_page(scene: Scene, bars: Iterable[str] = (), further: Iterable[Table] = ()) -> str:
    """Return the page of a topology and a mesh on it.

    Args:
      scene: the scene.
      bars: further pictures, without style sheets of their own.
      further: tables to place before those of the scene.
    """
    tables = [Table("Devices", _heads(scene), _devices(scene), is_folded=True)]
    if scene.axes:
        rows = [
            (quote(axis.name), str(axis.size), axis.far, _ring(axis.ring)) for axis in scene.axes
        ]
        tables.insert(0, Table("Axes", ("axis", "size", "its rings", "the first ring"), rows))
    pictures = [wires_svg(scene, alone=False), *bars]
    return page(scene.title, scene.subtitle, pictures, [*further, *tables])


def picture_page(picture: Picture) -> str:
    """Return the page of a mesh or a layout."""
    rows = [
        (", ".join(filter(None, (panel.title, label, column))), cell.text.replace("\n", "; "))
        for panel in picture.panels
        for label, cells in panel.rows
        for column, cell in zip(panel.columns, cells, strict=True)
        if cell.colour >= 0
    ]
    table = Table("Blocks", ("where", "devices"), rows, is_folded=True)
    return page(picture.title, "", [picture_svg(picture, alone=False)], [table])


def _ring(ids: Sequence[int]) -> str:
    shown = " → ".join(map(str, ids[:64]))
    return f"{shown} → …" if len(ids) > 64 else f"{shown} → {ids[0]}"


def _heads(scene: Scene) -> list[str]:
    is_torus = scene.unit == "chip"
    return ["device", "process", *["chip"] * is_torus, *(quote(axis.name) for axis in scene.axes)]


def _devices(scene: Scene) -> list[list[str]]:
    """Return a row for each device that is shown, by its id."""
    rows = []
    for chip in scene.chips:
        section = scene.sections[scene.panels[chip.panel].section]
        where = f"{section} " * bool(section) + f"({', '.join(map(str, chip.coords))})"
        for device in chip.devices:
            position = [*map(str, device.position), *[""] * len(scene.axes)][: len(scene.axes)]
            place = [where] if scene.unit == "chip" else []
            rows.append((device.id, [str(device.id), str(device.process), *place, *position]))
    rows.sort()
    shown = [row for _, row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        shown.append(["…"] * len(shown[0]))
    return shown


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in table.head)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>" for row in table.rows
    )
    whole = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"
    if table.is_folded:
        return f"<details>\n<summary>{escape(table.heading)}</summary>\n{whole}</details>\n"
    return f"<h2>{escape(table.heading)}</h2>\n{whole}"
