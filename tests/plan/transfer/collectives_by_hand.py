"""The collectives of a plan, carried out on NumPy arrays, device by device."""

import itertools
import math

import numpy as np

from shoal.plan.layout import Layout
from shoal.plan.shards import region
from shoal.plan.transfer.blocks import exchange_rounds
from shoal.plan.transfer.move_steps import pairs


def all_layouts(mesh, rank):
    """Return every layout of a rank."""
    layouts = []
    for count in range(len(mesh.axis_names) + 1):
        for axes in itertools.permutations(mesh.axis_names, count):
            for places in itertools.combinations_with_replacement(range(rank), count):
                dims = [[] for _ in range(rank)]
                for axis, dim in zip(axes, places, strict=True):
                    dims[dim].append(axis)
                layouts.append(Layout(mesh, *map(tuple, dims)))
    return list(dict.fromkeys(layouts))


def numbered(shape):
    """Return an array whose items all differ."""
    return np.arange(math.prod(shape)).reshape(shape)


def shards(layout, whole):
    """Return what each device holds, by id."""
    return {d: whole[region(layout, whole.shape, d)] for d in layout.mesh.device_ids.ravel()}


def least_bytes(source, target, shape, item_bytes):
    """Return what the device that lacks most must receive: counted item by item."""
    whole = numbered(shape)
    held, wanted = shards(source, whole), shards(target, whole)
    lacks = [len(np.setdiff1d(wanted[d], held.get(d, ()))) for d in wanted]
    return max(lacks) * item_bytes


def carried_out(steps, held, shape):
    """Return what each device holds after the steps; and how many items each has received."""
    received = dict.fromkeys(held, 0)
    for step in steps:
        held, more = _KINDS[step.kind](step, held, shape)
        for device, count in more.items():
            received[device] += count
    return held, received


def groups(step):
    """Yield the devices of each group, in the order of its axes."""
    mesh = step.before.mesh
    places = [mesh.axis_names.index(axis) for axis in step.axes]
    ids = np.moveaxis(mesh.device_ids, places, range(-len(places), 0))
    yield from ids.reshape(-1, math.prod(mesh.axes[axis] for axis in step.axes)).tolist()


def _slice(step, held, _shape):
    new = {}
    for group in groups(step):
        for place, device in enumerate(group):
            new[device] = np.split(held[device], len(group), step.dim)[place]
    return new, {}


def _all_gather(step, held, _shape):
    new, received = {}, {}
    for group in groups(step):
        for device in group:
            new[device] = np.concatenate([held[each] for each in group], step.dim)
            received[device] = new[device].size - held[device].size
    return new, received


def _all_to_all(step, held, _shape):
    new, received = {}, {}
    for group in groups(step):
        parts = {d: np.split(held[d], len(group), step.to_dim) for d in group}
        for place, device in enumerate(group):
            new[device] = np.concatenate([parts[each][place] for each in group], step.dim)
            received[device] = new[device].size - parts[device][place].size
    return new, received


def _reduce_scatter(step, held, _shape):
    new, received = {}, {}
    for group in groups(step):
        total = sum(held[each] for each in group)
        for place, device in enumerate(group):
            new[device] = np.split(total, len(group), step.dim)[place]
            received[device] = held[device].size // len(group) * (len(group) - 1)
    return new, received


def _all_reduce(step, held, _shape):
    new, received = {}, {}
    for group in groups(step):
        for device in group:
            new[device] = sum(held[each] for each in group)
            received[device] = 2 * (held[device].size // len(group) * (len(group) - 1))
    return new, received


def _permute(step, held, _shape):
    ids = step.before.mesh.device_ids.ravel().tolist()
    new = dict(held)
    sends = pairs(step.before, step.after)
    assert len({a for a, _ in sends}) == len({b for _, b in sends}) == len(sends)
    for sender, receiver in sends:
        new[ids[receiver]] = held[ids[sender]]
    return new, {ids[receiver]: held[ids[receiver]].size for _, receiver in sends}


def _exchange(step, held, shape):
    """Each block comes by a send, or was there; a device may send only what it holds."""
    ids = step.before.mesh.device_ids.ravel().tolist()
    counts = [(step.before.num_shards(d), step.after.num_shards(d)) for d in range(len(shape))]
    sides = [size // max(pair) for size, pair in zip(shape, counts, strict=True)]
    old = {d: np.full(shape, np.nan) for d in ids}
    for device in ids:
        old[device][region(step.before, shape, device)] = held[device]
    new = {d: old[d].copy() for d in ids}
    received = dict.fromkeys(ids, 0)
    for sends in exchange_rounds(step.before, step.after):
        assert len({s for s, _, _ in sends}) == len({r for _, r, _ in sends}) == len(sends)
        for sender, receiver, block in sends:
            box = tuple(slice(b * n, (b + 1) * n) for b, n in zip(block, sides, strict=True))
            assert np.isnan(new[ids[receiver]][box]).all()
            new[ids[receiver]][box] = old[ids[sender]][box]
            received[ids[receiver]] += math.prod(sides)
    found = {d: new[d][region(step.after, shape, d)] for d in ids}
    assert not any(np.isnan(values).any() for values in found.values())
    return {d: values.astype(int) for d, values in found.items()}, received


_KINDS = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "permute": _permute,
    "exchange": _exchange,
}
