"""`shoal mesh`: draw a mesh, without devices and without JAX."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from shoal.cli.placing import Across, Order, Weights, pairs_of_json, placed
from shoal.draw.media.svg import picture_svg
from shoal.draw.media.terminal import render
from shoal.draw.mesh import draw_mesh
from shoal.draw.page import picture_page, wires_page
from shoal.draw.wiring.mesh_scene import MOST_DEVICES, draw_wires, places_of
from shoal.draw.wiring.wires_svg import wires_svg
from shoal.draw.wiring.wires_text import render_wires
from shoal.errors import UsageError
from shoal.paths import why_refused
from shoal.plan.mesh import Mesh
from shoal.plan.topology import Topology, parse, to_json

_MOST_LISTED = 1 << 24
_AXES = "axes, such as 'data=4 model=2' or '{\"data\": 4, \"model\": 2}'"


def mesh(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[TOPOLOGY] AXES", help=f"a topology, or none; and {_AXES}"),
    ],
    processes: Annotated[
        int | None, typer.Option("-n", "--processes", help="Number of processes.")
    ] = None,
    across: Across = None,
    weights: Weights = None,
    order: Order = None,
    svg: Svg = None,
    html: Html = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Draw a mesh: the position and the process of each device. Needs no device.

    With a topology, the mesh is placed on it, and the wires are drawn: chips, hosts, links, and
    the rings of each axis. Without one, it is the grid of device ids.

    Examples:

      shoal mesh v5p:8x8x8 'data=8 model=64' --svg wires.svg --html wires.html

      shoal mesh 'v5e:4x8 x 2 slices' 'data=4 model=16' --across 'data=2'

      shoal mesh v5e:4x4 data=4 model=4 --order jax

      shoal mesh '{"data": 4, "model": 2}' -n 2

      shoal mesh 'x=4 | ids 3,1,0,2'
    """
    first, *others = _joined(words)
    if not others:
        _refuse_without_topology(first, across, weights, order)
        _draw_grid(read_mesh(first, 1 if processes is None else processes), svg, html, as_json)
        return
    if processes is not None:
        raise UsageError("-n does not go with a topology, whose hosts determine the processes")
    topology = _read_topology(first, others[0])
    _refuse_too_large(topology)
    grid = placed(topology, read_mesh(others[0]), order=order, across=across, weights=weights)
    _draw_wires(topology, grid, svg, html, as_json)


def _joined(words: list[str]) -> list[str]:
    """Return the topology, if there is one, and the axes, which may be several words each.

    Raises:
      UsageError: they may be split into these in no way, or in several: `cores=2` may be an axis.
    """
    if len(words) == 1 or (len(words) == 2 and (_is_topology(words[0]) or _is_topology(words[1]))):
        return words
    cuts = [(" ".join(words[:end]), " ".join(words[end:])) for end in range(len(words))]
    readings = [cut for cut in cuts if (not cut[0] or _is_topology(cut[0])) and _is_mesh(cut[1])]
    if len(readings) == 1:
        return [word for word in readings[0] if word]
    if len(words) == 2:  # which of them is at fault is said where each is read
        return words
    if readings:
        forms = " or ".join(f"shoal mesh {first!r} {second!r}" for first, second in readings)
        raise UsageError(f"the axes may begin in several places: pass {forms}")
    raise UsageError(
        f"{' '.join(words)!r} is not a topology and axes: write shoal mesh v5p:4x4x8 data=16 "
        "model=8"
    )


def _is_mesh(text: str) -> bool:
    try:
        read_mesh(text)
    except UsageError:
        return False
    return True


def _draw_grid(grid: Mesh, svg: str | None, html: str | None, as_json: bool) -> None:
    if as_json:
        if grid.size > _MOST_LISTED:
            raise UsageError(f"{grid!r}: at most {_MOST_LISTED} devices can be listed")
        print(json.dumps(_facts(grid)))
    picture = draw_mesh(grid)
    if not as_json:
        console = Console()
        console.print(render(picture, console.width))
    write_pictures(svg, html, lambda: (picture_svg(picture), picture_page(picture)), quiet=as_json)


def _draw_wires(
    topology: Topology, grid: Mesh, svg: str | None, html: str | None, as_json: bool
) -> None:
    if as_json:
        wires = {"topology": to_json(topology), **places_of(topology, grid)}
        print(json.dumps({**_facts(grid), **wires}))
    else:
        console = Console()
        has_colours = console.color_system is not None
        console.print(render_wires(topology, grid, console.width, has_colours=has_colours))

    def drawn() -> tuple[str, str]:
        scene = draw_wires(topology, grid)
        return wires_svg(scene), wires_page(scene)

    write_pictures(svg, html, drawn, quiet=as_json)


def _refuse_without_topology(
    text: str, across: str | None, weights: str | None, order: str | None
) -> None:
    for option, value in (("--across", across), ("--weights", weights), ("--order", order)):
        if value is not None:
            raise UsageError(f"{option} requires a topology: shoal mesh v5p:4x4x4 {text!r} …")
    if _is_topology(text):
        raise UsageError(
            f"{text!r} is a topology: also pass the axes of the mesh, as in "
            f"shoal mesh {text!r} 'data=2 model=4'"
        )


def _read_topology(first: str, second: str) -> Topology:
    if not _is_topology(first) and _is_topology(second):
        raise UsageError(f"the topology comes first: shoal mesh {second!r} {first!r}")
    return parse(first)


def _is_topology(text: str) -> bool:
    try:
        parse(text)
    except UsageError:
        return False
    return True


def _refuse_too_large(topology: Topology) -> None:
    if topology.num_devices > MOST_DEVICES:
        count = topology.num_devices
        raise UsageError(f"{topology.text}: {count} devices; at most {MOST_DEVICES} can be drawn")


def read_mesh(text: str, processes: int = 1) -> Mesh:
    """Parse a mesh in JSON or text form; `processes` share its devices evenly."""
    grid = Mesh(pairs_of_json(text, "mesh")) if text.lstrip().startswith("{") else Mesh.parse(text)
    if processes == 1:
        return grid
    if grid.size > _MOST_LISTED:
        raise UsageError(f"{grid!r}: at most {_MOST_LISTED} devices can be spread")
    if processes < 1 or grid.size % processes:
        raise UsageError(f"{grid.size} devices cannot be spread evenly over {processes} processes")
    owners = np.repeat(np.arange(processes), grid.size // processes)
    return Mesh(
        grid.axes,
        device_ids=grid.device_ids,
        processes=owners,
        kind=grid.kind,
        label=grid.label,
        axis_types=grid.axis_types,
    )


def _facts(grid: Mesh) -> dict[str, object]:
    return {
        "mesh": grid.text,
        "axes": dict(grid.axes),
        "size": grid.size,
        "kind": grid.kind,
        "device_ids": grid.device_ids.tolist(),
        "processes": grid.processes.tolist(),
    }


# ---- The options `--svg` and `--html`, which write pictures to files.


Svg = Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Also write it as SVG.")]
Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Also write it as an HTML page.")
]


def write_pictures(
    svg: str | None, html: str | None, drawn: Callable[[], tuple[str, str]], *, quiet: bool = False
) -> None:
    """Write the requested files, and print their names.

    Args:
      svg: path of the SVG; None: do not write it.
      html: path of the page.
      drawn: returns the SVG and the page.
      quiet: print to stderr instead of stdout.

    Raises:
      UsageError: a file cannot be written.
    """
    if svg is None and html is None:
        return
    for option, name, text in zip(("--svg", "--html"), (svg, html), drawn(), strict=True):
        if name is not None:
            _write(option, name, text)
            print(f"wrote {name}", file=sys.stderr if quiet else sys.stdout)


def _write(option: str, name: str, text: str) -> None:
    if name in ("", "-"):
        raise UsageError(f"{option} {name!r} is not a file; for standard output pass /dev/stdout")
    path = Path(name)
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = why_refused(error, name) if isinstance(error, OSError) else error
        folder = path.parent
        missing = "" if folder.is_dir() else f"; there is no directory {str(folder)!r}"
        raise UsageError(f"{option} {name!r} cannot be written: {reason}{missing}") from None
