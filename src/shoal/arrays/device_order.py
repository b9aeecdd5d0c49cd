"""Order the devices of a new mesh, and explain the order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shoal.arguments import not_flags
from shoal.errors import UsageError
from shoal.plan.hardware.wiring import Slices, Torus
from shoal.plan.mesh import Mesh
from shoal.plan.placement import Rings, hops_of, place
from shoal.plan.topology import Topology, from_devices, parse

T = TypeVar("T")


class OrderWish(NamedTuple):
    """The ordering arguments of `make_mesh`; None: not given."""

    order: str | None = None  # "wires" or "given"
    across: Mapping[str, int] | None = None
    weights: Mapping[str, float] | None = None
    compatible_with: str | None = None
    allow_split_physical_axes: bool | None = None
    contiguous_submeshes: bool | None = None
    rings: Rings | None = None

    @property
    def needs_placement(self) -> bool:
        """Does it request anything that only a placed mesh can have?"""
        return any(value is not None for value in self[1:])


class Order(NamedTuple):
    """The devices of a mesh, in order."""

    mesh: Mesh
    topology: Topology | None  # None: the order is the caller's
    wish: OrderWish

    @property
    def why(self) -> str:
        """The recognised topology, the chosen order, and its cost; computed lazily."""
        if self.topology is None:
            return "in the order given by devices= (order='wires' would place them)"
        count = len(self.mesh.process_indices)
        found = f"{self.topology.text}, {count} process{'es' * (count != 1)}"
        if self.wish.compatible_with is not None:
            chosen = f"in the order that compatible_with={self.wish.compatible_with!r} asks for"
        elif isinstance(self.topology, Torus | Slices):
            busiest = "the last axis" if self.wish.weights is None else "by weights, the busiest"
            chosen = f"placed on the wires, {busiest} on the shortest"
        else:
            chosen = "process after process, for no links are known"
        hops = hops_of(self.topology, self.mesh)
        distances = [
            f"{name} has hops of {one.longest} link{'s' * (one.longest != 1)} at most"
            + (f", over {one.slices} slices" if one.slices > 1 else "")
            for name, one in hops.items()
        ]
        return "; ".join([f"{found}: {chosen}", *distances])


def stands_for(text: str, devices: Sequence[Any]) -> Topology:
    """Return a described topology with the ids of CPU devices, which stand for its own in order.

    Args:
      text: of the topology, as `topology.parse` takes it.
      devices: all of the job, in its order.

    Raises:
      UsageError: there are not as many, on as many processes; or the text describes nothing.
    """
    described = parse(text)
    hosts, counts = np.unique(described.processes, return_counts=True)
    if {device.platform for device in devices} != {"cpu"}:
        raise UsageError(f"SHOAL_TOPOLOGY={text!r}: only CPU devices stand for others: unset it")
    places = np.argsort(described.listed_ids)[described.device_ids.ravel()]  # ids are 0, 1, …
    ids = np.array([device.id for device in devices])
    owners = np.array([device.process_index for device in devices])
    fits = len(devices) == described.num_devices
    if not fits or not np.array_equal(owners[places], described.processes.ravel()):
        now = np.unique(owners)
        raise UsageError(
            f"SHOAL_TOPOLOGY={text!r} has {described.num_devices} devices on {len(hosts)} hosts, "
            f"and this job {len(devices)} on {len(now)}: "
            f"shoal run -n {len(hosts)} --devices {counts.max()} starts as many"
        )
    grid = described.grid
    return described.numbered(ids[places].reshape(grid), owners[places].reshape(grid), ids)


def ordered(
    pairs: Sequence[tuple[str, int]],
    devices: Sequence[Any],
    wish: OrderWish,
    *,
    given: bool,
    present: Sequence[Any] = (),
    described: str = "",
    **named: Any,
) -> Order:
    """Order devices for a mesh.

    Args:
      pairs: name and size of each axis; the product is the number of devices.
      devices: JAX's, or objects with the same attributes.
      wish: the caller's ordering arguments.
      given: did the caller list the devices?
      present: all devices of the job, whose links are known.
      described: the text of the topology that the devices stand for, if they do.
      named: `kind`, `name`, `axis_types` of the mesh.

    Raises:
      UsageError: as `topology.from_devices` and `placement.place`, in the name of `make_mesh`.
    """
    process_of = {device.id: device.process_index for device in devices}
    if wish.order == "given" or (given and wish.order is None and not wish.needs_placement):
        ids, topology = [device.id for device in devices], None
    else:
        if described:
            topology = _as_make_mesh(lambda: stands_for(described, devices))
        else:
            around = _around(devices, present)
            topology = _as_make_mesh(lambda: from_devices(devices, within=around))
        wanted = {name: value for name, value in wish._asdict().items() if name != "order"}
        wanted["contiguous_submeshes"] = bool(wish.contiguous_submeshes)
        placed = _as_make_mesh(lambda: place(topology, pairs, **wanted))
        ids = placed.device_ids.ravel().tolist()
    owners = [process_of[one] for one in ids]
    return Order(Mesh(pairs, ids, owners, **named), topology, wish)


def _around(devices: Sequence[Any], present: Sequence[Any]) -> Sequence[Any] | None:
    """Return the job's devices around these; None where they are of another platform."""
    known = {device.id for device in present if device.platform == devices[0].platform}
    return present if all(device.id in known for device in devices) else None


def _as_make_mesh(call: Callable[[], T]) -> T:
    """Call a planning function; its errors are raised in the name of `make_mesh`."""
    try:
        return call()
    except UsageError as error:
        words = str(error)
        for name in ("place: ", "from_devices: "):
            words = words.removeprefix(name)
        message = words if words.startswith("make_mesh") else f"make_mesh: {words}"
        raise type(error)(message, problems=error.problems) from None


def order_problems(wish: OrderWish, *, is_listed: bool) -> list[str]:
    """Return what is wrong with `order`, by itself and with the other arguments."""
    flags = ("allow_split_physical_axes", "contiguous_submeshes")
    given = {name: value for name in flags if (value := getattr(wish, name)) is not None}
    if wrong := not_flags(**given):
        return wrong
    if wish.order is not None and str(wish.order) not in ("wires", "given"):
        return [f"order={wish.order!r} must be 'wires' or 'given'"]
    if wish.order != "given":
        return []
    if not is_listed:
        return ["order='given' needs a list of devices=, in mesh order"]
    if wish.needs_placement:
        names = [name for name, value in wish._asdict().items() if value is not None][1:]
        return [f"order='given' leaves nothing for {', '.join(names)} to choose"]
    return []
