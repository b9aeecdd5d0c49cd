"""Notebook pictures: IPython formatters for meshes, layouts, topologies, costs, traffic.

`plan` is independent of it: formatters are registered by type name, and import the drawing code
when first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register(ip: Any) -> None:
    """Register formatters with an IPython shell; a shell without HTML is left unchanged.

    Args:
      ip: the result of `IPython.get_ipython()`; None without a shell.
    """
    shown = getattr(getattr(ip, "display_formatter", None), "formatters", {}).get("text/html")
    if shown is None:
        return
    drawers: dict[tuple[str, str], Callable[[Any], str | None]] = {
        ("shoal.plan.mesh", "Mesh"): _mesh,
        ("shoal.plan.layout", "Layout"): _layout,
        ("shoal.plan.hardware.wiring", "Torus"): _topology,
        ("shoal.plan.hardware.wiring", "Slices"): _topology,
        ("shoal.plan.hardware.hosts", "Hosts"): _topology,
        ("shoal.plan.hardware.hosts", "Flat"): _topology,
        ("shoal.plan.cost", "Cost"): _cost,
        ("shoal.plan.transfer.traffic", "Traffic"): _traffic,
    }
    for (module, name), draw in drawers.items():
        shown.for_type_by_name(module, name, draw)


def _mesh(mesh: Any) -> str | None:
    from shoal.draw.media.svg import picture_svg
    from shoal.draw.mesh import draw_mesh

    return _unless_too_large(lambda: picture_svg(draw_mesh(mesh)))


def _layout(layout: Any) -> str | None:
    from shoal.draw.layout import draw_layout
    from shoal.draw.media.svg import picture_svg

    return _unless_too_large(lambda: picture_svg(draw_layout(layout)))


def _topology(topology: Any) -> str | None:
    from shoal.draw.wiring.mesh_scene import draw_wires
    from shoal.draw.wiring.wires_svg import wires_svg

    return _unless_too_large(lambda: wires_svg(draw_wires(topology)))


def _cost(cost: Any) -> str | None:
    from shoal.draw.amounts import in_bytes, in_seconds
    from shoal.draw.bars import bars_svg

    title = f"{cost.collective} of {in_bytes(cost.num_bytes)} over {', '.join(cost.axes)}"
    label = f"{in_seconds(cost.seconds)}, {in_bytes(cost.link_bytes)} over {cost.link}"
    return _unless_too_large(lambda: bars_svg(title, [(f"{cost.steps} steps", 1.0, label)]))


def _traffic(traffic: Any) -> str | None:
    from shoal.draw.ribbons import ribbons_svg

    return _unless_too_large(lambda: ribbons_svg(traffic))


def _unless_too_large(draw: Callable[[], str]) -> str | None:
    """Return a picture, or None, for which IPython shows the `repr`, if it cannot be drawn."""
    from shoal.errors import UsageError

    try:
        return draw()
    except UsageError:
        return None
