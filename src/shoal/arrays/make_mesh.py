"""Make a mesh over the devices of this job."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType
from numpy.typing import NDArray

from shoal import settings
from shoal.arguments import as_integer, not_flags
from shoal.arrays.bridge.agreed_devices import View, agree_on_devices, owners_of
from shoal.arrays.bridge.devices import jax_mesh
from shoal.arrays.host.record_call import lane_problems
from shoal.colour import collective
from shoal.errors import (
    DeviceStartError,
    InitializeError,
    ShoalError,
    UsageError,
    UsageTypeError,
    counted,
    raise_all,
)
from shoal.plan.hardware.wiring import Slices, Torus
from shoal.plan.mesh import Mesh
from shoal.plan.placement import Rings, hops_of, place
from shoal.plan.topology import Topology, from_devices, parse
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import fail_call, refused_for_all
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.process import client, device_start, has_joined, registered
from shoal.runtime.startup.device_start import start_devices
from shoal.runtime.startup.single_process import alone
from shoal.runtime.system.callsite import callsite

AxisTypes: TypeAlias = (
    str | AxisType | Sequence[AxisType] | Sequence[str] | Mapping[str, str] | Mapping[str, AxisType]
)

_LOG = logging.getLogger("shoal")
_PLATFORMS = ("tpu", "gpu", "cpu")
_ENOUGH_S = 600.0  # to report an invalid deadline
_MOST_CPUS = 4096  # that a message suggests
_MOST_SHAPES = 4096  # shapes compared for an error message


def _fail(
    error: BaseException,
    *_: object,
    devices: Any = None,
    lane: object = "main",
    **__: object,
) -> None:
    """Fail the call for the other processes that own the devices."""
    owners = None
    if devices is not None and not isinstance(devices, str):
        owners = {device.process_index for device in _listed(devices, jax.devices())[0]}
    if owners is None or len(owners) > 1:
        fail_call(_client(devices), "make_mesh", error, lane=lane, processes=owners)


@collective("the mesh's processes")
@refused_for_all(_fail)
def make_mesh(
    axes: Mapping[str, int] | Iterable[tuple[str, int]] | Sequence[int],
    axis_names: Sequence[str] | None = None,
    axis_types: AxisTypes = "auto",
    *,
    devices: Iterable[jax.Device | int] | str | None = None,
    order: str | None = None,
    across: Mapping[str, int] | None = None,
    compatible_with: str | None = None,
    allow_split_physical_axes: bool | None = None,
    timeout_s: float | None = None,
    lane: str = "main",
) -> jax.sharding.Mesh:
    """Return a `jax.sharding.Mesh` of the job's devices, with Auto axes: `jax.make_mesh`'s are not.

    Collective over the mesh's processes.

    The devices are in an order that matches their interconnect. TPU devices are placed by
    `planning.place`: neighbors along an axis are neighbors on the interconnect, and the first axes
    span slices; devices of CPU and GPU hosts are ordered by process. `place` has further options:
    pass the `device_ids.ravel()` of its mesh as `devices`. The logger "shoal" reports at level
    DEBUG the recognized topology, the chosen order, and why.

    No device is ever left out silently: a subset must be named. The call raises if the processes
    that own the mesh's devices pass different arguments, see different devices (ids, owners,
    coordinates), or own devices other than those their peers list for them. They compare all this
    in one round trip. A process without a device in the mesh may call it or not. If one process
    owns all devices, nothing is sent. No call relies on an earlier one, because after an interrupt
    one process might not remember the same calls as the others.

    The devices are initialized if necessary; meanwhile the other processes are watched.

    Args:
      axes: name → size, major first, the axis with the most traffic last; a dict or pairs. Or the
        sizes alone, as `jax.make_mesh` takes them. One size may be -1: the remaining factor.
      axis_names: the names, where `axes` has the sizes alone.
      axis_types: "auto" (the compiler chooses layouts of intermediates) or "explicit" (layouts
        are part of the type), or JAX's `AxisType`; one for all axes, one for each, or a dict.
      devices: JAX devices or their ids, in mesh order; or a platform, "tpu", "gpu" or
        "cpu", for all of its devices. None: all of `jax.devices()`.
      order: "wires": placed as above, even if `devices` lists them; "given": as listed.
        None: as listed, unless one of the next three asks for a placement.
      across: name → how much of that axis spans slices (or processes), over the slow network;
        sizes in `axes` are totals. None: as much of the first axes as there are slices.
      compatible_with, allow_split_physical_axes: as in `planning.place`; but "jax" is the order
        of the installed JAX.
      timeout_s: deadline in seconds; None: SHOAL_TIMEOUT_S (600). The earliest deadline
        ends the wait for all.
      lane: the lane; see `barrier`.

    Returns:
      The mesh; equal meshes are the same object. `Mesh.of` gives its planning value, with `text`,
      `coords`, `submesh` and `host_mesh`.

    Raises:
      UsageError: the sizes do not multiply to the number of devices (the nearest shape that does
        is named), several -1, unknown devices, or whatever `place` or `Mesh` refuses. On every
        process, as long as all pass the same arguments.
      DivergenceError: on all that arrived: arguments or devices differ; shows the first difference.
      DeviceStartError: on the caller: its devices did not start, or it has none of this platform
        (NoDevicesError). The others get PeerFailedError.
      DeadlineError: on all that arrived: a process did not arrive in time.
      ProcessLostError: on all that arrived: a process is dead or unreachable.
      PeerFailedError: on all that arrived: a process raised an exception, in this call or
        elsewhere, or left the job.
      InitializeError: this process is one of several, and has not joined them.

    Example:
      >>> import shoal
      >>> shoal.make_mesh({"data": -1, "model": 1}).axis_names
      ('data', 'model')
    """
    request = OrderRequest(order, across, compatible_with, allow_split_physical_axes)
    named = axes if axis_names is None else _named(axes, axis_names)
    return jax_mesh(_made(named, devices, request, timeout_s, lane, axis_types=axis_types))


@refused_for_all(_fail)
def planned_mesh(axes: object, *, devices: Iterable[jax.Device | int], label: str) -> Mesh:
    """Return the planning value of a mesh of listed devices, with a label: for facades."""
    return _made(
        axes, devices, request=OrderRequest("given"), timeout_s=None, lane="main", label=label
    )


@refused_for_all(_fail)
def mesh_of_rings(axes: Iterable[tuple[str, int]], rings: Rings, *, label: str) -> Mesh:
    """Return the mesh of all TPU devices in the order of DTensor's rings, as `make_mesh` does."""
    request = OrderRequest(compatible_with="dtensor", rings=rings)
    return _made(axes, devices="tpu", request=request, timeout_s=None, lane="main", label=label)


def _made(
    axes: object, devices: object, request: OrderRequest, timeout_s: object, lane: str, **named: Any
) -> Mesh:
    here = _client(devices)
    selection = _find(here, devices, timeout_s, lane)
    group = owners_of(here, selection.devices, selection.limit_s)
    meets = len(group) > 1 and here.process in group
    with here.call("make_mesh", lane, group) if meets else contextlib.nullcontext():
        if selection.problem is not None:
            raise selection.problem
        chosen = _ordered(axes, selection, request, **named)
        if meets:
            _agree(here, selection, chosen, group, lane)
    if _LOG.isEnabledFor(logging.DEBUG):
        me = ThisProcess(here.process, here.hosts)
        _LOG.debug("%s: make_mesh (%s): %r: %s", me, callsite(), chosen.mesh, chosen.why)
    return registered(chosen.mesh)


class _Selection(NamedTuple):
    """The devices for a mesh, or why there are none: raised in the call, for peers to learn of."""

    devices: list[jax.Device]
    is_listed: bool  # did the caller list them one by one?
    limit_s: float  # until the deadline of the call
    problem: BaseException | None = None
    present: Sequence[jax.Device] = ()  # all of the job


def _client(devices: object) -> JobClient:
    """Return this process's job client; a process without one is a job of its own.

    That is the case before `initialize`, after `shutdown` and in a fork; a mesh whose devices all
    belong to this process needs no peers.
    """
    try:
        return client()
    except InitializeError:
        # Before the first `initialize`, ids are not yet those of the job.
        if devices is None or isinstance(devices, str) or not has_joined():
            raise
        return alone()


def _find(here: JobClient, devices: object, timeout_s: object, lane: object) -> _Selection:
    """Return the devices that `devices=` names; initialize them if necessary."""
    platform = devices if isinstance(devices, str) else None
    is_listed = devices is not None and platform is None
    limit_s, present = _ENOUGH_S, []
    try:
        limit_s = _limit(timeout_s)
        if lane is None:
            raise_all("make_mesh", ["lane must be a string"])
        raise_all("make_mesh", lane_problems(lane))
        if platform is not None and platform not in _PLATFORMS:
            known = ", ".join(map(repr, _PLATFORMS))
            raise UsageError(
                f"make_mesh: devices={platform!r} is neither a list nor one of {known}"
            )
        if platform is not None and platform == described_platform():
            platform = "cpu"  # devices that stand for them
        present = start_devices(here, platform, limit_s, device_start())
        chosen, problem = _listed(devices, present) if is_listed else (present, None)
    except BaseException as error:
        # Losses of peers are known to all; any other error here is raised in the call.
        if isinstance(error, ShoalError) and not isinstance(error, UsageError | DeviceStartError):
            raise
        return _Selection([], is_listed, limit_s, error)
    if here.num_processes == 1 and any(
        device.process_index != jax.process_index() for device in chosen
    ):
        client()  # raises the reason why there is no job client
    return _Selection(chosen, is_listed, limit_s, problem, present)


def described_platform() -> str:
    """Return the platform that the job's CPU devices stand for; "" if for none."""
    text = settings.text("SHOAL_TOPOLOGY")
    return parse(text).platform if text else ""


def _limit(timeout_s: object) -> float:
    """Return the seconds until the deadline; an invalid one is refused before anything starts."""
    limit_s = settings.timeout("make_mesh", timeout_s, "SHOAL_TIMEOUT_S")
    if limit_s > sys.float_info.max:
        raise UsageError(f"make_mesh: timeout_s={timeout_s!r} must be a finite number of seconds")
    return float(limit_s)


def _ordered(axes: object, selection: _Selection, request: OrderRequest, **named: Any) -> Order:
    """Return the mesh; problems with it are reported here, not at the first array."""
    pairs = _pairs(axes)
    raise_all("make_mesh", order_problems(request, is_listed=selection.is_listed))
    kinds = sorted({device.platform for device in selection.devices})
    if len(kinds) > 1:
        raise UsageError(f"make_mesh: devices of {len(kinds)} kinds: {', '.join(kinds)}")
    try:
        filled = _filled(pairs, len(selection.devices), not selection.is_listed)
    except UsageError as error:
        error.args = (f"{error}{_more_cpus(pairs, selection.devices)}",)
        raise
    kind = kinds[0] if kinds else jax.default_backend()
    named |= {"given": selection.is_listed, "present": selection.present}
    named["described"] = settings.text("SHOAL_TOPOLOGY")
    names = [name for name, _ in filled]
    named["axis_types"] = _kinds(named.get("axis_types", "auto"), names)
    chosen = ordered(filled, selection.devices, request, kind=kind, **named)
    jax_mesh(chosen.mesh)
    return chosen


def _view(devices: Sequence[jax.Device], kind: str) -> View:
    """Return the devices as this process sees them, and what its own devices report."""
    ids = {device.id for device in devices}
    own = [device for device in jax.local_devices(backend=kind) if device.id in ids]
    return View(jax.process_index(), devices, own)


def _agree(
    here: JobClient, selection: _Selection, chosen: Order, group: tuple[int, ...], lane: str
) -> None:
    """Meet the processes that own the devices; return if all of them make this mesh."""
    agree_on_devices(
        here,
        chosen.mesh,
        _view(selection.devices, chosen.mesh.kind),
        options=_options(chosen.request, chosen.mesh),
        site=callsite(),
        group=None if len(group) == here.num_processes else group,
        lane=lane,
        timeout_s=selection.limit_s,
    )


def _options(request: OrderRequest, mesh: Mesh) -> list[str]:
    """Return the other options that must be equal."""
    named = {name: value for name, value in request._asdict().items() if value is not None}
    if isinstance(named.get("across"), Mapping):  # the order of entries is irrelevant
        entries = sorted(named["across"].items())
        named["across"] = {axis: _plain(amount) for axis, amount in entries}
    lines = [f"{name}={value!r}" for name, value in named.items()]
    described = settings.text("SHOAL_TOPOLOGY")
    if described:
        lines.append(f"SHOAL_TOPOLOGY={described!r}")
    explicit = [axis for axis, kind in mesh.axis_types.items() if kind == "explicit"]
    return [*lines, f"explicit axes {', '.join(explicit)}"] if explicit else lines


def _plain(amount: float) -> float:
    return int(amount) if float(amount).is_integer() else float(amount)


def _named(sizes: Any, names: Any) -> list[tuple[str, int]]:
    """Return the axes that are given in JAX's form: sizes, and names."""
    try:
        return list(zip(names, sizes, strict=True))
    except (TypeError, ValueError):
        raise UsageTypeError(
            f"make_mesh: {sizes!r} and {names!r} must be as many sizes as names"
        ) from None


def _kinds(given: Any, names: Sequence[str]) -> Any:
    """Return the axis types as `Mesh` takes them, for JAX's `AxisType`s and tuples of them."""

    def text(kind: Any) -> Any:
        return kind.name.lower() if isinstance(kind, AxisType) else kind

    if isinstance(given, Mapping):
        return {name: text(kind) for name, kind in given.items()}
    if not isinstance(given, Sequence) or isinstance(given, str):
        return text(given)
    if len(given) != len(names):
        raise UsageError(
            f"make_mesh: axis_types={given!r} must be one for each axis: {', '.join(names)}"
        )
    return dict(zip(names, map(text, given), strict=True))


def _pairs(axes: object) -> list[tuple[str, int]]:
    try:
        items = axes.items() if isinstance(axes, Mapping) else axes
        pairs = [(name, size) for name, size in items]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UsageTypeError(
            f"make_mesh: axes={axes!r} must be a dict of name: size, pairs of them, or sizes and "
            "then names"
        ) from None
    wrong = [
        f"axis {name!r}: size {size!r} must be an integer"
        for name, size in pairs
        if as_integer(size) is None
    ]
    raise_all("make_mesh", wrong, wrong_type=True)
    pairs = [(name, as_integer(size) or 0) for name, size in pairs]
    raise_all(
        "make_mesh",
        [
            f"axis {name!r}: size {size} must be at least 1, or -1 for the remaining factor"
            for name, size in pairs
            if size < 1 and size != -1
        ],
    )
    return pairs


def _listed(
    devices: object, present: Iterable[jax.Device]
) -> tuple[list[jax.Device], UsageError | None]:
    """Return the devices given by object or id, and what is wrong with others."""
    try:
        many = () if isinstance(devices, bytes | bytearray) else getattr(devices, "flat", devices)
        named = list(many)  # type: ignore[call-overload]
    except TypeError:
        raise UsageTypeError(f"make_mesh: devices={devices!r} must be a list") from None
    if not named:
        raise UsageError(f"make_mesh: devices={devices!r} names no device")
    by_id = {device.id: device for device in present}
    problems: list[str] = []
    chosen = []
    for device in named:
        device_id = as_integer(device)
        if isinstance(device, jax.Device):
            chosen.append(device)
        elif device_id is None:
            problems.append(f"{device!r} must be a device or the id of one")
        elif device_id not in by_id:
            known = ", ".join(map(str, sorted(by_id)[:16])) + (", …" if len(by_id) > 16 else "")
            problems.append(f"no device has the id {device}; there are {known}")
        else:
            chosen.append(by_id[device_id])
    try:
        raise_all("make_mesh", problems)
    except UsageError as error:  # the owners of the other devices learn of it
        return chosen, error
    return chosen, None


def _filled(pairs: list[tuple[str, int]], count: int, all_devices: bool) -> list[tuple[str, int]]:
    """Return the axes with -1 replaced, if they multiply to `count`."""
    free = [name for name, size in pairs if size == -1]
    fixed = math.prod(size for _, size in pairs if size != -1)
    shown = "{" + ", ".join(f"{name!r}: {size}" for name, size in pairs) + "}"
    if len(free) > 1:
        names = ", ".join(map(repr, free))
        raise UsageError(f"make_mesh({shown}): {names} are all -1; only one can be")
    if (fixed == count and not free) or (free and count and count % fixed == 0):
        return [(name, count // fixed if size == -1 else size) for name, size in pairs]
    near = _nearest_shape([size for _, size in pairs], count)
    fits = ", ".join(f"{name!r}: {size}" for (name, _), size in zip(pairs, near, strict=False))
    fewer = all_devices and fixed < count and not free
    slack = f", or name fewer: devices=jax.devices()[:{fixed}]" if fewer else ""
    verb = "does not divide" if free else "is not"
    truth = f"the sizes multiply to {fixed}, which {verb} the number of devices, {count}"
    advice = f"{{{fits}}} would fit" if near else "name axes"
    raise UsageError(f"make_mesh({shown}): {truth}; {advice}{slack}")


def _more_cpus(pairs: list[tuple[str, int]], devices: Sequence[jax.Device]) -> str:
    """Return how to get the devices for a mesh, where processes have their one CPU device."""
    wanted = math.prod(abs(size) for _, size in pairs)
    processes = len({device.process_index for device in devices})
    if any(device.platform != "cpu" for device in devices) or jax.local_device_count("cpu") > 1:
        return ""
    if not len(devices) < wanted <= _MOST_CPUS or wanted % processes:
        return ""
    return f"\n{virtual_cpus(wanted // processes)}"


def virtual_cpus(count: int) -> str:
    """Return how a process gets that many CPU devices."""
    return (
        f"for {count} CPU devices in a process, call shoal.initialize(virtual_devices={count}) "
        "at the start"
    )


def _nearest_shape(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the shape of `count` positions that differs from `sizes` by the smallest factors."""

    def distance(shape: Sequence[int]) -> tuple[int, float]:
        fixed_sizes = [(size, was) for size, was in zip(shape, sizes, strict=True) if was != -1]
        changed = sum(size != was for size, was in fixed_sizes)
        return changed, sum(abs(math.log(size) - math.log(was)) for size, was in fixed_sizes)

    divisors = [size for size in range(1, count + 1) if count % size == 0]
    shapes = itertools.islice(_shapes(len(sizes), count, divisors), _MOST_SHAPES)
    return min(shapes, key=distance, default=())


def _shapes(rank: int, count: int, divisors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every shape of `rank` sizes, out of `divisors`, that multiply to `count`."""
    if rank == 1:
        yield (count,)
    elif rank:
        for first in (size for size in divisors if count % size == 0):
            yield from ((first, *rest) for rest in _shapes(rank - 1, count // first, divisors))


# Order the devices of a new mesh, and explain the order.

T = TypeVar("T")


class OrderRequest(NamedTuple):
    """The ordering arguments of `make_mesh`; None: not given."""

    order: str | None = None  # "wires" or "given"
    across: Mapping[str, int] | None = None
    compatible_with: str | None = None
    allow_split_physical_axes: bool | None = None
    rings: Rings | None = None

    @property
    def needs_placement(self) -> bool:
        """Does it request anything that only a placed mesh can have?"""
        return any(value is not None for value in self[1:])


class Order(NamedTuple):
    """The devices of a mesh, in order."""

    mesh: Mesh
    topology: Topology | None  # None: the order is the caller's
    request: OrderRequest

    @property
    def why(self) -> str:
        """The recognized topology, the chosen order, and its hops, for the debug log."""
        if self.topology is None:
            return "in the order given by devices= (order='wires' would place them)"
        processes = counted(len(self.mesh.process_indices), "process", "processes")
        recognized = f"{self.topology.text}, {processes}"
        if self.request.compatible_with is not None:
            chosen = f"in the order that compatible_with={self.request.compatible_with!r} asks for"
        elif isinstance(self.topology, Torus | Slices):
            chosen = "placed to match the interconnect, the last axis on the shortest links"
        else:
            chosen = "process after process, for no links are known"
        distances = [
            f"{axis} has hops of {counted(hops.longest, 'link')} at most"
            + (f", over {hops.slices} slices" if hops.slices > 1 else "")
            for axis, hops in hops_of(self.topology, self.mesh).items()
        ]
        return "; ".join([f"{recognized}: {chosen}", *distances])


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
    request: OrderRequest,
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
      request: the caller's ordering arguments.
      given: did the caller list the devices?
      present: all devices of the job, whose links are known.
      described: the text of the topology that the devices stand for, if they do.
      named: `kind`, `label`, `axis_types` of the mesh.

    Raises:
      UsageError: as `topology.from_devices` and `placement.place`, in the name of `make_mesh`.
    """
    process_of = {device.id: device.process_index for device in devices}
    if request.order == "given" or (
        given and request.order is None and not request.needs_placement
    ):
        ids, topology = [device.id for device in devices], None
    else:
        if described:
            topology = _as_make_mesh(lambda: stands_for(described, devices))
        else:
            around = _around(devices, present)
            topology = _as_make_mesh(lambda: from_devices(devices, within=around))
        wanted = {name: value for name, value in request._asdict().items() if name != "order"}
        asks_jax = isinstance(request.compatible_with, str) and request.compatible_with == "jax"
        if asks_jax and not described:  # described: the devices only stand for those of the order
            wanted["compatible_with"] = partial(_jax_order, devices)
        placed = _as_make_mesh(lambda: place(topology, pairs, **wanted))
        ids = placed.device_ids.ravel().tolist()
    owners = [process_of[device_id] for device_id in ids]
    return Order(Mesh(pairs, device_ids=ids, processes=owners, **named), topology, request)


def _jax_order(
    devices: Sequence[Any],
    topology: Topology,
    sizes: Sequence[int],
    outer: Sequence[int] | None,
    allow_split: bool,
) -> NDArray[np.int64]:
    """Return the ids in the order of the installed JAX, whose versions differ. See `place`."""
    from jax.experimental import mesh_utils

    options: dict[str, Any] = {"allow_split_physical_axes": allow_split}
    try:
        if outer is None:
            grid = mesh_utils.create_device_mesh(sizes, devices, **options)
        else:
            inner = [size // part for size, part in zip(sizes, outer, strict=True)]
            options["process_is_granule"] = not isinstance(topology, Slices)
            grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, **options)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"JAX {jax.__version__} makes no mesh of {sizes} of these devices: {error}\n"
            "use shoal's order: leave compatible_with= out"
        ) from None
    return np.array([device.id for device in grid.ravel()]).reshape(sizes)


def _around(devices: Sequence[Any], present: Sequence[Any]) -> Sequence[Any] | None:
    """Return the job's devices around these; None where they are of another platform."""
    known = {device.id for device in present if device.platform == devices[0].platform}
    return present if all(device.id in known for device in devices) else None


def _as_make_mesh(call: Callable[[], T]) -> T:
    """Call a planning function; its errors are raised in the name of `make_mesh`."""
    try:
        return call()
    except UsageError as error:
        text = str(error)
        for name in ("place: ", "from_devices: "):
            text = text.removeprefix(name)
        message = text if text.startswith("make_mesh") else f"make_mesh: {text}"
        raise type(error)(message, problems=error.problems) from None


def order_problems(request: OrderRequest, *, is_listed: bool) -> list[str]:
    """Return what is wrong with `order`, by itself and with the other arguments."""
    split = request.allow_split_physical_axes
    if split is not None:
        wrong = not_flags(allow_split_physical_axes=split)
        if wrong:
            return wrong
    if request.order is not None and str(request.order) not in ("wires", "given"):
        return [f"order={request.order!r} must be 'wires' or 'given'"]
    if request.order != "given":
        return []
    if not is_listed:
        return ["order='given' needs a list of devices=, in mesh order"]
    if request.needs_placement:
        names = [name for name, value in request._asdict().items() if value is not None][1:]
        return [f"order='given' leaves nothing for {', '.join(names)} to choose"]
    return []
