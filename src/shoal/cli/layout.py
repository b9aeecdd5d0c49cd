"""`shoal layout`: draw how a mesh splits an array, without devices and without JAX."""

from __future__ import annotations

import json
import re
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from shoal.cli.mesh import Html, Svg, read_mesh, write_pictures
from shoal.draw.layout import draw_layout
from shoal.draw.media.svg import picture_svg
from shoal.draw.media.terminal import render
from shoal.draw.page import picture_page
from shoal.errors import UsageError
from shoal.plan.hlo import hlo_text
from shoal.plan.layout import Layout
from shoal.plan.shards import owners

_HALVES = re.compile(r'((?:"(?:[^"\\]|\\.)*"|[^@])*?)(?:(@)(.*))?', re.DOTALL)  # "@" in names aside


def layout(
    dims: Annotated[str, typer.Argument(help="'data, model+seq, -', or with '@' and a mesh")],
    mesh: Annotated[str, typer.Option(help="The mesh, as for `shoal mesh`.")] = "",
    shape: Annotated[str, typer.Option(help="The array's shape, such as 1024,512.")] = "",
    dtype: Annotated[str, typer.Option(help="The array's dtype, for its bytes.")] = "float32",
    processes: Annotated[int, typer.Option("-n", "--processes", help="Number of processes.")] = 1,
    svg: Svg = None,
    html: Html = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Draw a layout: an array as blocks, each with its devices.

    Examples:

      shoal layout 'data, model @ data=4 model=2' --shape 8,4

      shoal layout 'data, - @ data=4 model=2' --svg layout.svg --html layout.html

      shoal layout 'model, -' --mesh '{"data": 4, "model": 2}' --shape 1024,512 --dtype bfloat16
    """
    chosen = _read(dims, mesh, processes)
    sizes = read_shape(shape) if shape else None
    each = item_bytes(dtype) if shape else 0
    name = dtype if shape else ""
    if as_json:
        print(json.dumps(_facts(chosen, sizes)))
    else:
        console = Console()
        console.print(render(draw_layout(chosen, sizes, each, name), console.width))

    def drawn() -> tuple[str, str]:
        picture = draw_layout(chosen, sizes, each, name)
        return picture_svg(picture), picture_page(picture)

    write_pictures(svg, html, drawn, quiet=as_json)


def _read(dims: str, mesh: str, processes: int) -> Layout:
    text, at, inner = halves(dims)
    if bool(at) == bool(mesh):
        raise UsageError(f"layout {dims!r}: pass the mesh once, after '@' or with --mesh")
    grid = read_mesh(inner.strip() if at else mesh, processes)
    return Layout.parse(f"{text} @ {grid.text}")


def halves(text: str) -> tuple[str, str, str]:
    """Split a layout's text into its dims, "@" and its mesh; the latter two may be empty."""
    dims, at, mesh = _HALVES.fullmatch(text).groups(default="")  # type: ignore[union-attr]
    return dims, at, mesh


def read_shape(text: str, what: str = "--shape") -> tuple[int, ...]:
    """Parse the shape of an array: `1024,512` or `1024x512`; empty for a scalar."""
    try:
        sizes = text.replace("x", ",").removesuffix(",")
        return tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        raise UsageError(f"{what} {text!r} must be numbers with commas, such as 1024,512") from None


def item_bytes(name: str, what: str = "--dtype") -> int:
    """Return the item size in bytes of a dtype of NumPy or ml_dtypes."""
    import ml_dtypes

    try:
        return np.dtype(getattr(ml_dtypes, name, name)).itemsize
    except (TypeError, ValueError, SyntaxError):
        raise UsageError(f"{what} {name!r} is not a dtype of NumPy or ml_dtypes") from None


def _facts(chosen: Layout, sizes: tuple[int, ...] | None) -> dict[str, object]:
    shape = chosen.global_shape((1,) * chosen.rank) if sizes is None else sizes
    held = owners(Layout(chosen.mesh, *chosen.dims), shape)  # pending reductions move nothing
    ids = chosen.mesh.device_ids.reshape(-1)
    order = np.argsort(held.box, kind="stable")
    ends = np.searchsorted(held.box[order], np.arange(1, held.num_boxes))
    boxes = []
    for box, positions in enumerate(np.split(order, ends)):
        boxes.append(
            {
                "start": held.start[positions[0]].tolist(),
                "stop": held.stop[positions[0]].tolist(),
                "devices": ids[positions].tolist(),
                "writer": int(held.writer[box]),
            }
        )
    return {
        "layout": chosen.text,
        "shape": list(shape),
        "shard_shape": list(chosen.shard_shape(shape)),
        "hlo": hlo_text(chosen, version=2),
        "boxes": boxes,
    }
