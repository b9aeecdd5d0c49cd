"""A mesh over the devices that this job has."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from shoal.arrays.devices import jax_mesh
from shoal.colour import collective
from shoal.errors import UsageError, UsageTypeError, raise_all
from shoal.plan.mesh import Mesh

__all__ = ["make_mesh"]


@collective("all processes")
def make_mesh(
    axes: Mapping[str, int] | Iterable[tuple[str, int]],
    *,
    devices: Iterable[jax.Device | int] | None = None,
    axis_types: str | Mapping[str, str] = "auto",
    name: str = "",
) -> Mesh:
    """Return a mesh over the devices of the job, in JAX's order.

    Collective over all processes.

    It is impossible that a device is left out unnoticed: fewer than there are must be named.

    Args:
      axes: name → size, in order, major first; a dict or pairs. One size may be -1: whatever is
        left.
      devices: which devices, in mesh order: JAX's devices, or their ids. The default is all of
        `jax.devices()`, in its order: process after process.
      axis_types: "auto" (the compiler chooses layouts of intermediates) or "explicit" (layouts
        are part of the type, as JAX's `AxisType`); or a dict for each axis.
      name: a label of yours; part of equality.

    Raises:
      UsageError: the sizes do not multiply to the number of devices (the nearest shape that does
        is named), several -1, unknown devices, or whatever `Mesh` refuses. On every process, as
        long as all pass the same arguments.

    Example:
      >>> import shoal
      >>> shoal.make_mesh({"data": -1, "model": 1}).axis_names
      ('data', 'model')
    """
    pairs = _pairs(axes)
    chosen = jax.devices() if devices is None else _devices(devices)
    kinds = sorted({device.platform for device in chosen})
    if len(kinds) > 1:
        raise UsageError(f"make_mesh: devices of {len(kinds)} kinds: {', '.join(kinds)}")
    mesh = Mesh(
        _filled(pairs, len(chosen), devices is None),
        device_ids=[device.id for device in chosen],
        processes=[device.process_index for device in chosen],
        kind=kinds[0] if kinds else jax.default_backend(),
        name=name,
        axis_types=axis_types,
    )
    jax_mesh(mesh)  # what JAX cannot use is refused here, not at the first array
    return mesh


def _pairs(axes: object) -> list[tuple[str, int]]:
    try:
        items = axes.items() if isinstance(axes, Mapping) else axes
        pairs = [(name, size) for name, size in items]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UsageTypeError(
            f"make_mesh: axes={axes!r} must be a dict of name: size, or pairs of them"
        ) from None
    wrong = [
        f"axis {name!r}: size {size!r} must be an integer"
        for name, size in pairs
        if isinstance(size, bool) or not hasattr(size, "__index__")
    ]
    raise_all("make_mesh", wrong, wrong_type=True)
    pairs = [(name, operator.index(size)) for name, size in pairs]
    raise_all(
        "make_mesh",
        [
            f"axis {name!r}: size {size} must be at least 1, or -1 for whatever is left"
            for name, size in pairs
            if size < 1 and size != -1
        ],
    )
    return pairs


def _devices(devices: Iterable[jax.Device | int]) -> list[jax.Device]:
    """Return the devices named, by themselves or by id."""
    try:
        named = list(getattr(devices, "flat", devices))
    except TypeError:
        raise UsageTypeError(f"make_mesh: devices={devices!r} must be a list") from None
    by_id = {device.id: device for device in jax.devices()}
    offences, chosen = [], []
    for device in named:
        if isinstance(device, jax.Device):
            chosen.append(device)
        elif isinstance(device, bool) or not hasattr(device, "__index__"):
            offences.append(f"{device!r} must be a device or the id of one")
        elif operator.index(device) not in by_id:
            known = ", ".join(map(str, sorted(by_id)[:16])) + (", …" if len(by_id) > 16 else "")
            offences.append(f"no device has the id {device}; there are {known}")
        else:
            chosen.append(by_id[operator.index(device)])
    raise_all("make_mesh", offences)
    return chosen


def _filled(pairs: list[tuple[str, int]], count: int, all_devices: bool) -> list[tuple[str, int]]:
    """Return the axes with -1 replaced, if they multiply to `count`."""
    free = [name for name, size in pairs if size == -1]
    fixed = math.prod(size for _, size in pairs if size != -1)
    shown = "{" + ", ".join(f"{name!r}: {size}" for name, size in pairs) + "}"
    if len(free) > 1:
        names = ", ".join(map(repr, free))
        raise UsageError(f"make_mesh({shown}): {names} are all -1; only one can be what is left")
    if (fixed == count and not free) or (free and count and count % fixed == 0):
        return [(name, count // fixed if size == -1 else size) for name, size in pairs]
    near = _nearest_shape([size for _, size in pairs], count)
    fits = ", ".join(f"{name!r}: {size}" for (name, _), size in zip(pairs, near, strict=False))
    fewer = all_devices and fixed < count and not free
    slack = f", or name fewer: devices=jax.devices()[:{fixed}]" if fewer else ""
    verb = "does not divide" if free else "is not"
    truth = f"the sizes multiply to {fixed}, which {verb} the number of devices, {count}"
    raise UsageError(
        f"make_mesh({shown}): {truth}; {f'{{{fits}}} would fit' if near else 'name axes'}{slack}"
    )


def _nearest_shape(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the shape of `count` positions that differs from `sizes` by the smallest factors."""

    def distance(shape: Sequence[int]) -> tuple[int, float]:
        asked = [(size, was) for size, was in zip(shape, sizes, strict=True) if was != -1]
        changed = sum(size != was for size, was in asked)
        return changed, sum(abs(math.log(size / was)) for size, was in asked)

    divisors = [size for size in range(1, count + 1) if count % size == 0]
    return min(_shapes(len(sizes), count, divisors), key=distance, default=())


def _shapes(rank: int, count: int, divisors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every shape of `rank` sizes, out of `divisors`, that multiply to `count`."""
    if rank == 1:
        yield (count,)
    elif rank:
        for first in (size for size in divisors if count % size == 0):
            yield from ((first, *rest) for rest in _shapes(rank - 1, count // first, divisors))
