"""The same devices in the orders of two meshes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.plan.mesh import Mesh

IntArray = NDArray[np.int64]


def in_one_order(here: Mesh, there: Mesh) -> bool:
    """Return whether two meshes, whatever their axes, list the same devices in the same order.

    >>> in_one_order(Mesh({"x": 2, "y": 2}), Mesh({"z": 4}))
    True
    """
    return bool(np.array_equal(here.device_ids.ravel(), there.device_ids.ravel()))


def positions(here: Mesh, there: Mesh) -> IntArray:
    """Return the position in `there` of each device of `here`, in the order of the latter.

    >>> positions(Mesh({"x": 3}), Mesh({"y": 3}, device_ids=[2, 0, 1]))
    array([1, 2, 0])
    """
    ids = there.device_ids.ravel()
    order = np.argsort(ids, kind="stable")
    positions_here: IntArray = order[np.searchsorted(ids[order], here.device_ids.ravel())]
    return positions_here
