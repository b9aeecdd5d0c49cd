"""`shoal plan`: the cost of a mesh on hardware that need not exist, and its devices' memory."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer

from shoal.cli.layout import halves, item_bytes, read_shape
from shoal.cli.mesh import Html, read_mesh, write_pictures
from shoal.cli.placing import Across, Order, Weights, placed, read_bytes, read_speed
from shoal.cli.tables import print_json, print_table, safe
from shoal.draw.amounts import in_bytes, in_seconds
from shoal.draw.bars import bar_text, bars_svg
from shoal.draw.page import Table, page, wires_page
from shoal.draw.wiring.mesh_scene import MOST_DEVICES, draw_wires
from shoal.errors import UsageError, raise_all
from shoal.plan.cost import COLLECTIVES, Cost, cost
from shoal.plan.hardware.links import Links, links_of
from shoal.plan.hardware.wiring import Torus
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import Topology, parse

_BAR = 12  # columns of the longest bar


_Topology = Annotated[str, typer.Argument(help="'v5p:4x4x8', 'v5e:4x8 x 2 slices', …")]
_Axes = Annotated[str, typer.Argument(help="'data=16 model=8', or JSON; device ids are kept")]
_Params = Annotated[list[str] | None, typer.Argument(help="'NAME: SHAPE DTYPE LAYOUT', several")]
_Tree = Annotated[
    str, typer.Option("--params", metavar="FILE", help="A tree of them in JSON; -: from stdin.")
]
_Payload = Annotated[
    str,
    typer.Option("--bytes", help="Bytes on each device before a collective; of all_gather, after."),
]
_Link = Annotated[str, typer.Option(help="Speed of a link: 50GB/s or 400Gbit/s.")]
_Network = Annotated[str, typer.Option(help="Speed of a host's network.")]
_Svg = Annotated[
    str | None, typer.Option("--svg", metavar="FILE", help="Also write the times as SVG.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def plan(
    topology: _Topology,
    axes: _Axes,
    params: _Params = None,
    tree: _Tree = "",
    payload: _Payload = "64MiB",
    across: Across = None,
    weights: Weights = None,
    order: Order = None,
    link: _Link = "",
    network: _Network = "",
    svg: _Svg = None,
    html: Html = None,
    as_json: _Json = False,
) -> None:
    """Show the cost of collectives and each device's memory.

    The cost is that of each collective on each axis. No device is needed.

    \b
    Examples:
      shoal plan v5p:4x4x8 'data=16 model=8'
      shoal plan 'v5e:4x8 x 2 slices' 'data=16 model=4' --bytes 1GiB
      shoal plan v5e:4x4 'data=4 model=4' 'w: 8192x1024 bfloat16 data, model'
      shoal plan v5e:4x4 'data=4 model=4' --params params.json --json
      shoal ckpt show run/ --json | shoal plan v5e:4x4 'data=4 model=4' --params -

    params.json: {"dense": {"w": {"shape": [8192, 1024], "dtype": "bfloat16",
    "layout": "data, model"}}}; without a layout a parameter is replicated.
    """
    hardware = parse(topology)
    mesh = placed(hardware, read_mesh(axes), order=order, across=across, weights=weights)
    num_bytes = read_bytes(payload, "--bytes")
    links = _links(hardware, link, network)
    held = read_params(tree, params or (), mesh)
    used = [axis for axis, size in mesh.axes.items() if size > 1]
    ahead = [
        cost(
            topology=hardware, mesh=mesh, collective="permute", axis=axis, num_bytes=1, links=links
        )
        for axis in used
    ]
    runs = itertools.product(used, COLLECTIVES)
    costs = [cost(hardware, mesh, what, axis, num_bytes, links=links) for axis, what in runs]
    if as_json:
        print_json(_facts(hardware, mesh, links, ahead, costs, held))
    else:
        _print_mesh(hardware, mesh, links, ahead)
        if costs:
            _print_costs(costs, num_bytes)
        if held:
            _print_held(held)
    drawn = partial(drawn_plan, hardware, mesh, costs, num_bytes, held)
    write_pictures(svg, html, drawn, quiet=as_json)


def _links(topology: Topology, link: str, network: str) -> Links:
    if network and isinstance(topology, Torus):
        raise UsageError(f"--network: {topology.text} is a single slice, which uses no network")
    return links_of(
        topology,
        link_bytes_per_s=read_speed(link, "--link") if link else None,
        network_bytes_per_s=read_speed(network, "--network") if network else None,
    )


def _print_mesh(topology: Topology, mesh: Mesh, links: Links, ahead: Sequence[Cost]) -> None:
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
    print(safe(f"{topology.text} as {sizes}; {mesh.size} of {topology.num_devices} devices"))
    shown = [links.near, None if isinstance(topology, Torus) else links.network]
    for link in shown:
        if link is not None:
            speed, latency = link.bytes_per_s / 1e9, in_seconds(link.latency_s)
            print(f"{link.name}: {speed:g} GB/s each way, {latency} a step ({link.source})")
    if not ahead:
        print("No axis has two devices: nothing is sent.")
        return
    print()
    rows = [
        [estimate.axes[0], str(mesh.axes[estimate.axes[0]]), _far(estimate)] for estimate in ahead
    ]
    print_table(("axis", "size", "to the next device"), rows, "size")


def _far(ahead: Cost) -> str:
    """Return the largest distance from a device to the next one of its group."""
    if not ahead.link.startswith("ICI"):
        return ahead.link
    return f"{ahead.steps} hops" if ahead.steps > 1 else f"{ahead.steps} hop"


def _print_costs(costs: Sequence[Cost], num_bytes: int) -> None:
    print(f"\n{in_bytes(num_bytes)} on each device before the collective (after an all_gather)")
    rows: list[list[str]] = []
    most = max(estimate.seconds for estimate in costs)
    for estimate in costs:
        first = not rows or estimate.collective == COLLECTIVES[0]
        amounts = [str(estimate.steps), in_bytes(estimate.link_bytes), in_seconds(estimate.seconds)]
        bar = bar_text(estimate.seconds, most, _BAR)
        rows.append(
            [estimate.axes[0] if first else "", estimate.collective, *amounts, estimate.link, bar]
        )
    head = ("axis", "collective", "steps", "busiest", "time", "link", "")
    print_table(head, rows, "steps busiest time")


def _print_held(held: Sequence[Param]) -> None:
    print()
    rows = [
        [p.name, p.dtype, "x".join(map(str, p.shape)) or "-", p.layout.text.partition(" @ ")[0],
         in_bytes(p.bytes_per_device), str(p.copies)]
        for p in held
    ]  # fmt: skip
    head = ("parameter", "dtype", "shape", "layout", "device", "copies")
    print_table(head, rows, "device copies")
    whole, each = sum(p.bytes for p in held), sum(p.bytes_per_device for p in held)
    count = held[0].layout.mesh.size
    mean_copies = each * count / whole if whole else 1
    average = f"{mean_copies:.4g}"
    noun = "copy" if average == "1" else "copies"
    print(
        f"\n{in_bytes(each)} on each device; {in_bytes(whole)} in all, {average} {noun} on average"
    )
    for param in held:
        for problem in param.uneven:
            print(safe(f"{param.name}: {problem}"))


def _facts(
    topology: Topology,
    mesh: Mesh,
    links: Links,
    ahead: Sequence[Cost],
    costs: Sequence[Cost],
    held: Sequence[Param],
) -> dict[str, Any]:
    return {
        "topology": topology.text,
        "mesh": mesh.text,
        "links": {name: link and link._asdict() for name, link in links._asdict().items()},
        "axes": [
            {"axis": estimate.axes[0], "size": mesh.axes[estimate.axes[0]],
             "steps_to_next": estimate.steps, "link": estimate.link}
            for estimate in ahead
        ],
        "costs": [estimate._asdict() for estimate in costs],
        "params": [
            {"name": p.name, "shape": p.shape, "dtype": p.dtype, "layout": p.layout.text,
             "shard_shape": p.layout.shard_shape(p.shape), "bytes": p.bytes,
             "bytes_per_device": p.bytes_per_device, "copies": p.copies, "uneven": p.uneven}
            for p in held
        ],
        "bytes": sum(p.bytes for p in held),
        "bytes_per_device": sum(p.bytes_per_device for p in held),
    }  # fmt: skip


# ---- Pictures of `shoal plan`: bars of the times, and a page with wires and tables.


def drawn_plan(
    topology: Topology, mesh: Mesh, costs: Sequence[Cost], num_bytes: int, held: Sequence[Param]
) -> tuple[str, str]:
    """Return the times as SVG, and the page."""
    title = f"{topology.text}: {in_bytes(num_bytes)} on each device"
    rows = [
        (
            f"{estimate.axes[0]} {estimate.collective}",
            estimate.seconds,
            f"{in_seconds(estimate.seconds)}, {estimate.link}",
        )
        for estimate in costs
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
        (estimate.axes[0], estimate.collective, str(estimate.steps), in_bytes(estimate.link_bytes),
         in_seconds(estimate.seconds), estimate.link)
        for estimate in costs
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


# ---- Parse parameters with layouts from the command line, and size their shards.


_FORMS = '{"w": {"shape": [8, 4], "dtype": "bfloat16", "layout": "data, model"}}, also nested'


class Param(NamedTuple):
    """One array and its layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    layout: Layout

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def bytes_per_device(self) -> int:
        """Bytes of its largest shard."""
        return math.prod(self.layout.shard_shape(self.shape)) * self.item_bytes

    @property
    def copies(self) -> int:
        """The number of devices that hold each shard."""
        return math.prod(self.layout.mesh.axes[axis] for axis in self.layout.unused_axes)

    @property
    def uneven(self) -> list[str]:
        """Messages about dims that their shards do not divide."""
        problems = []
        for dim, size in enumerate(self.shape):
            count = self.layout.num_shards(dim)
            if size % count:
                axes = "+".join(self.layout.axes_of_dims[dim])
                problems.append(f"dim {dim} of {size} does not divide into {count} shards ({axes})")
        return problems


def read_params(source: str, texts: Sequence[str], mesh: Mesh) -> list[Param]:
    """Parse parameters from a JSON file (or "-", the standard input) and from texts.

    Raises:
      UsageError: all problems, by name.
    """
    rows = [*(_from_file(source) if source else ()), *map(_from_text, texts)]
    plain = Mesh(dict(mesh.axes))  # its text is short, whatever the order of the devices
    problems: list[str] = []
    params = []
    for name, shape, dtype, layout in rows:
        try:
            params.append(_param(name, shape, dtype, layout, plain))
        except UsageError as error:
            problems.append(f"{name}: {error}")
    names = [param.name for param in params]
    problems += [f"{name} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    raise_all("plan", problems)
    return params


def _param(name: str, shape: Any, dtype: Any, text: Any, mesh: Mesh) -> Param:
    if isinstance(shape, str):
        sizes = read_shape("" if shape == "()" else shape, "the shape")
    elif isinstance(shape, list) and all(type(size) is int for size in shape):
        sizes = tuple(shape)
    else:
        raise UsageError(f"the shape {shape!r} must be a list of integers")
    if not isinstance(dtype, str) or not isinstance(text, str | None):
        raise UsageError(f"dtype {dtype!r} and layout {text!r} must be strings")
    if text is None or not text.strip():
        layout = Layout.replicated(mesh, len(sizes))
    else:
        layout = Layout.parse(f"{halves(text)[0]} @ {mesh.text}")
    layout.check_shape(sizes)
    return Param(
        name, shape=sizes, dtype=dtype, item_bytes=item_bytes(dtype, "the dtype"), layout=layout
    )


def _from_text(text: str) -> tuple[str, Any, Any, Any]:
    """Parse `NAME: SHAPE DTYPE LAYOUT`; without a layout the parameter is replicated."""
    name, colon, rest = text.partition(":")
    parts = rest.split(None, 2)
    if not colon or len(parts) < 2:
        raise UsageError(
            f"plan: {text!r} must be 'NAME: SHAPE DTYPE LAYOUT', such as 'w: 1024x512 bfloat16 "
            "data, -'"
        )
    return name.strip(), parts[0], parts[1], parts[2] if len(parts) > 2 else None


def _from_file(source: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Parse a JSON tree of parameters, or the output of `shoal ckpt show --json`."""
    try:
        if source == "-":
            tree = json.loads(sys.stdin.read())
        else:
            with open(source, encoding="utf-8") as file:
                tree = json.load(file)
    except OSError as error:
        raise UsageError(f"--params {source}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--params {source} is not JSON: {error}") from None
    if not isinstance(tree, Mapping):
        raise UsageError(f"--params {source}: must be an object of parameters, such as {_FORMS}")
    leaves = tree.get("leaves")
    if isinstance(leaves, list) and all(isinstance(row, Mapping) for row in leaves):
        rows = [row for row in leaves if row.get("dtype")]  # of a checkpoint: only arrays
        return iter(
            [(str(r.get("name")), r.get("shape"), r["dtype"], r.get("layout")) for r in rows]
        )
    return _walk(tree, "", source)


def _walk(tree: Mapping[str, Any], path: str, source: str) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, value in tree.items():
        name = f"{path}/{key}" if path else key
        if not isinstance(value, Mapping):
            raise UsageError(f"--params {source}: {name} is {value!r}, not a parameter: {_FORMS}")
        if not isinstance(value.get("shape"), list):
            yield from _walk(value, name, source)
            continue
        known = ("shape", "dtype", "layout")
        unknown = [word for word in value if word not in known]
        if unknown:
            raise UsageError(
                f"--params {source}: {name} has {unknown[0]!r}, which is not one of "
                f"{', '.join(known)}"
            )
        yield name, value["shape"], value.get("dtype", "float32"), value.get("layout")
