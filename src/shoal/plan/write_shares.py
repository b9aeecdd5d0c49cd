"""Assign each box of an array to a process that writes it: a holder, balancing the bytes.

Boxes held by the same processes form a class. If the classes share no process, as on every mesh
whose processes are sub-grids, each class is dealt out by itself: largest box first, back and forth
over its processes, which is as even as boxes of one size permit. If classes overlap, the boxes are
assigned one by one, largest first, to the least loaded holder (R. L. Graham, *Bounds on
multiprocessing timing anomalies*, SIAM J. Appl. Math. 17, 1969), and among equals to the one with
the fewest other boxes to choose from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def choose_writers(holders: IntArray, size: NDArray[Any]) -> IntArray:
    """Return the process that writes each box [boxes].

    Args:
      holders: the processes of the devices that hold each box [boxes, replicas].
      size: elements, bytes or share of each box [boxes].

    Example:
      >>> choose_writers(np.array([[0, 1], [0, 1], [2, 2]]), np.array([9, 4, 9]))
      array([0, 1, 2])
    """
    lowest: IntArray = holders.min(axis=1)
    if holders.shape[1] == 1 or (holders == lowest[:, None]).all():
        return lowest
    if holders.max() > 4 * holders.size:  # tables are indexed by process: number them anew
        names, labels = np.unique(holders, return_inverse=True)
        return np.asarray(names[choose_writers(labels.reshape(holders.shape), size)])
    writer = _share_classes(holders, lowest, size)
    return _least_loaded(holders, size) if writer is None else writer


def _share_classes(holders: IntArray, lowest: IntArray, size: NDArray[Any]) -> IntArray | None:
    """Deal each class to its processes, or return None where classes overlap.

    Classes that share no process are distinguished by their lowest process. This holds if every
    process has boxes of one lowest process only, and every box is held by its whole class.
    """
    kind = np.full(int(holders.max()) + 1, -1, dtype=np.int64)
    kind[holders] = lowest[:, None]
    if (kind[holders] != lowest[:, None]).any():
        return None
    members = np.flatnonzero(kind >= 0)
    members = members[np.argsort(kind[members], kind="stable")]
    counts = np.bincount(kind[members])
    ranked = np.sort(holders, axis=1)
    if ((ranked[:, 1:] != ranked[:, :-1]).sum(axis=1) + 1 != counts[lowest]).any():
        return None
    begin = np.cumsum(counts) - counts
    by_size = np.argsort(-size, kind="stable")
    place = np.empty_like(lowest)
    place[by_size] = _rank_in_class(lowest[by_size])
    lap, step = np.divmod(place, counts[lowest])
    forth = lap % 2 == 0
    chosen: IntArray = members[begin[lowest] + np.where(forth, step, counts[lowest] - 1 - step)]
    return chosen


def _rank_in_class(kinds: IntArray) -> IntArray:
    """For each entry, the number of equal ones before it: [5, 7, 5, 5] → [0, 0, 1, 2]."""
    order = np.argsort(kinds, kind="stable")
    ranked = kinds[order]
    is_first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    begin = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    rank = np.empty_like(kinds)
    rank[order] = np.arange(len(kinds)) - begin
    return rank


def _least_loaded(holders: IntArray, size: NDArray[Any]) -> IntArray:
    """Assign each box, fewest holders and then largest first, to its least loaded holder."""
    candidates = [sorted(set(row)) for row in holders.tolist()]
    # the load so far; ties are broken by the number of boxes that it may still receive
    load = {process: [0.0, 0] for row in candidates for process in row}
    for row in candidates:
        for process in row:
            load[process][1] += 1
    writer = np.empty(len(size), dtype=np.int64)
    choice = np.array([len(row) for row in candidates])
    for box in np.lexsort((-size, choice)).tolist():
        chosen = min(candidates[box], key=load.__getitem__)
        load[chosen][0] += float(size[box])
        for process in candidates[box]:
            load[process][1] -= 1
        writer[box] = chosen
    return writer
