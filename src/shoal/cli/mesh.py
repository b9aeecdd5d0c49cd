"""`shoal mesh`: draw a mesh, without devices and without JAX."""

from __future__ import annotations

import json
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from shoal.draw.mesh import draw_mesh
from shoal.draw.terminal import render
from shoal.errors import UsageError
from shoal.plan.mesh import Mesh

__all__ = ["mesh", "read_mesh"]

_MOST_DEVICES = 1 << 24


def mesh(
    axes: Annotated[str, typer.Argument(help="""'{"data": 4, "model": 2}' or 'data=4 model=2'""")],
    processes: Annotated[int, typer.Option("-n", "--processes", help="Spread over so many.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Draw a mesh: which device stands where, and whose it is. Needs no device.

    Examples:

      shoal mesh '{"data": 4, "model": 2}'

      shoal mesh 'data=4 model=2' -n 2

      shoal mesh 'x=4 | ids 3,1,0,2'
    """
    grid = read_mesh(axes, processes)
    if as_json:
        if grid.size > _MOST_DEVICES:
            raise UsageError(f"{grid!r}: {_MOST_DEVICES} devices are the most that are listed here")
        print(json.dumps(_facts(grid)))
    else:
        Console().print(render(draw_mesh(grid)))


def read_mesh(text: str, processes: int = 1) -> Mesh:
    """Read a mesh from JSON or from its text form; `processes` share its devices evenly."""
    grid = Mesh(_read_json(text)) if text.lstrip().startswith("{") else Mesh.parse(text)
    if processes == 1:
        return grid
    if grid.size > _MOST_DEVICES:
        raise UsageError(f"{grid!r}: {_MOST_DEVICES} devices are the most that are spread here")
    if processes < 1 or grid.size % processes:
        raise UsageError(f"{grid.size} devices cannot be spread evenly over {processes} processes")
    owners = np.repeat(np.arange(processes), grid.size // processes)
    return Mesh(
        grid.axes, grid.device_ids, owners, grid.kind, grid.name, axis_types=grid.axis_types
    )


def _read_json(text: str) -> list[tuple[str, int]]:
    try:
        # pairs, so that a repeated name is seen
        pairs: list[tuple[str, int]] = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"mesh {text!r} is not JSON: {error}") from None
    return pairs


def _facts(grid: Mesh) -> dict[str, object]:
    return {
        "mesh": grid.text,
        "axes": dict(grid.axes),
        "size": grid.size,
        "kind": grid.kind,
        "device_ids": grid.device_ids.tolist(),
        "processes": grid.processes.tolist(),
    }
