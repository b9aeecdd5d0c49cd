"""Bytes over the links of a small torus, counted hop by hop in plain Python."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np


def ways(torus, source, target):
    """Return the shortest paths between two chips, dim by dim, as (part, links) pairs.

    A link is (dim, chip it leaves, +1 or -1); of two directions as short each gets half.
    """
    paths = [(Fraction(1), [], tuple(source[:-1]))]
    for dim, size in enumerate(torus.shape):
        grown = []
        for part, path, at in paths:
            steps = target[dim] - at[dim]
            choices = [steps]
            if torus.wrap[dim]:
                around = steps - size if steps > 0 else steps + size
                shortest = min(abs(steps), abs(around))
                choices = sorted({s for s in (steps, around) if abs(s) == shortest})
                choices = [0] if steps == 0 else choices
            for choice in choices:
                row, here = list(path), list(at)
                for _ in range(abs(choice)):
                    way = 1 if choice > 0 else -1
                    row.append((dim, tuple(here), way))
                    here[dim] = (here[dim] + way) % size
                grown.append((part / len(choices), row, tuple(here)))
        paths = grown
    assert all(at == tuple(target[:-1]) for *_, at in paths)
    return [(part, path) for part, path, _ in paths]


def send(loads, torus, source, target, num_bytes):
    """Add what a message brings to each link."""
    for part, path in ways(torus, source, target):
        for link in path:
            loads[link] += part * num_bytes


def busiest(loads):
    """Return the bytes over the busiest link."""
    return max(loads.values(), default=0)


def chips_of(torus, mesh, axis):
    """Return the x, y, z and core of each device, in order [groups][members]."""
    at = {int(n): cell for cell, n in np.ndenumerate(torus.device_ids)}
    ids = np.moveaxis(mesh.device_ids, mesh.axis_names.index(axis), -1)
    return [[at[int(n)] for n in row] for row in ids.reshape(-1, ids.shape[-1])]


def apart(torus, source, target):
    """Return the links of the longest of the shortest paths; another core is one more."""
    longest = max(len(path) for _, path in ways(torus, source, target))
    return longest + abs(source[-1] - target[-1])


def permuted(torus, groups, num_bytes):
    """Count a permute, and its hops one after the other."""
    loads, steps = Counter(), 0
    for group in groups:
        for number, chip in enumerate(group):
            target = group[(number + 1) % len(group)]
            send(loads, torus, chip, target, num_bytes)
            steps = max(steps, apart(torus, chip, target))
    return busiest(loads), steps


def all_to_all(torus, groups, num_bytes):
    """Count an all-to-all, and the hops of its longest way."""
    loads, steps = Counter(), 0
    for group in groups:
        for one, other in itertools.product(group, group):
            send(loads, torus, one, other, Fraction(num_bytes, len(group)))
            steps = max(steps, apart(torus, one, other))
    return busiest(loads), steps


def ring_gather(torus, groups, num_bytes):
    """Count an all-gather in rings: half of every shard is passed on either way, n - 1 times.

    Whole shards go half the way round in as many hops.
    """
    loads, longest = Counter(), 0
    members = len(groups[0])
    half = Fraction(num_bytes, 2 * members)
    for group in groups:
        for number, chip in enumerate(group):
            for way in (1, -1):
                target = group[(number + way) % members]
                longest = max(longest, apart(torus, chip, target))
                for _ in range(members - 1):
                    send(loads, torus, chip, target, half)
    return busiest(loads), members // 2 * longest


def line_loads(torus, groups, dim, as_ring):
    """Count the shards over the busiest link where all lines along a dim gather, and the hops."""
    loads, steps = Counter(), 0
    for group in groups:
        lines = {}
        for chip in group:
            lines.setdefault((*chip[:dim], *chip[dim + 1 :]), []).append(chip)
        for row in map(sorted, lines.values()):
            if as_ring:
                ring_along(loads, torus, row, dim)
                ahead = [b[dim] - a[dim] for a, b in itertools.pairwise([*row, row[0]])]
                steps = max(steps, *(len(row) // 2 * (gap % torus.shape[dim]) for gap in ahead))
            else:
                ends_along(loads, row, dim)
                steps = max(steps, row[-1][dim] - row[0][dim])
    return busiest(loads), steps


def ring_along(loads, torus, row, dim):
    """Pass half of each chip's shard right round the ring, and half left round."""
    size = torus.shape[dim]
    for number, chip in enumerate(row):
        for way in (1, -1):
            here, last = list(chip), row[(number - way) % len(row)]
            while tuple(here) != last:
                loads[dim, tuple(here[:-1]), way] += Fraction(1, 2)
                here[dim] = (here[dim] + way) % size


def ends_along(loads, row, dim):
    """Pass each chip's shard to both ends of its line."""
    for chip, (way, end) in itertools.product(row, ((1, row[-1]), (-1, row[0]))):
        here = list(chip)
        while tuple(here) != end:
            loads[dim, tuple(here[:-1]), way] += 1
            here[dim] += way


def bucket_gather(torus, groups, num_bytes):
    """Count an all-gather of boxes, dim by dim, by the best mix of all orders of the dims."""
    rank = len(torus.shape)
    counts = [len({chip[dim] for chip in groups[0]}) for dim in range(rank)]
    wide = [dim for dim in range(rank) if counts[dim] > 1]
    members = len(groups[0])
    shards = {}  # the lightest way to gather along each dim
    for dim in wide:
        modes = [False, True] if torus.wrap[dim] else [False]
        shards[dim] = min(line_loads(torus, groups, dim, mode) for mode in modes)
    table = []
    for order in itertools.permutations(wide):
        # Devices of a chip share what they have last, and over no link.
        gathered, loads = 1, {}
        for dim in order:
            loads[dim] = shards[dim][0] * Fraction(gathered, members)
            gathered *= counts[dim]
        table.append([float(loads[dim]) for dim in wide])
    cores = members // int(np.prod([counts[dim] for dim in wide]))
    steps = sum(steps for _, steps in shards.values()) + cores - 1
    return (num_bytes * game_value(np.array(table)) if wide else 0), steps


def game_value(table):
    """Return the least over mixes of rows of the largest column: the value of a matrix game.

    One of the square parts of the table gives it (L. Shapley and R. Snow, 1950).
    """
    best = table.max(axis=1).min()
    for size in range(2, min(table.shape) + 1):
        for rows in itertools.combinations(range(len(table)), size):
            for columns in itertools.combinations(range(table.shape[1]), size):
                part = table[np.ix_(rows, columns)]
                if abs(np.linalg.det(part)) < 1e-9:
                    continue
                mix = np.linalg.solve(part.T, np.ones(size))
                if (mix >= -1e-12).all():
                    best = min(best, (mix / mix.sum() @ table[list(rows)]).max())
    return best
