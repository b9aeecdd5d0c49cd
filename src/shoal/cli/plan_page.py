"""Pictures of `shoal plan`: bars of the times, and a page with wires and tables."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cli.params import Param
from shoal.draw.amounts import in_bytes, in_seconds
from shoal.draw.bars import bars_svg
from shoal.draw.page import Table, page, wires_page
from shoal.draw.wiring.mesh_scene import MOST_DEVICES, draw_wires
from shoal.plan.cost import Cost
from shoal.plan.mesh import Mesh
from shoal.plan.topology import Topology


def drawn_plan(
    topology: Topology, mesh: Mesh, costs: Sequence[Cost], num_bytes: int, held: Sequence[Param]
) -> tuple[str, str]:
    """Return the times as SVG, and the page."""
    title = f"{topology.text}: {in_bytes(num_bytes)} on each device"
    rows = [
        (f"{one.axes[0]} {one.collective}", one.seconds, f"{in_seconds(one.seconds)}, {one.link}")
        for one in costs
    ]
    tables = [_costs(costs)] * bool(costs) + [_held(held)] * bool(held)
    bars = bars_svg("Time of each collective", rows, alone=False)
    if topology.num_devices > MOST_DEVICES:
        whole = page(title, repr(mesh), [bars], tables)
    else:
        whole = wires_page(draw_wires(topology, mesh), [bars], tables)
    return bars_svg(title, rows), whole


def _costs(costs: Sequence[Cost]) -> Table:
    rows = [
        (one.axes[0], one.collective, str(one.steps), in_bytes(one.link_bytes),
         in_seconds(one.seconds), one.link)
        for one in costs
    ]  # fmt: skip
    head = ("axis", "collective", "steps", "bytes over the busiest link", "time", "link")
    return Table("Collectives", head, rows)


def _held(held: Sequence[Param]) -> Table:
    rows = [
        (p.name, p.dtype, "x".join(map(str, p.shape)) or "-", p.layout.text.partition(" @ ")[0],
         in_bytes(p.bytes_per_device), str(p.copies), "; ".join(p.uneven))
        for p in held
    ]  # fmt: skip
    head = ("parameter", "dtype", "shape", "layout", "on each device", "copies", "")
    return Table("Parameters", head, rows)
