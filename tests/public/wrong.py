"""What an argument of each kind must not be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

__all__ = ["ANY", "MESH", "ROWS", "WRONG"]

MESH = Mesh({"data": 4, "model": 2})
ROWS = Layout(MESH, "data", None)

_OTHER = (object(), 1.5, b"x", {1, 2}, [1, 2], {"a": 1}, (), np.array([1, 2]), math.nan)
_SECONDS = (True, "2", -1, object(), b"x", {1, 2}, [1, 2], {"a": 1}, (), np.array([1, 2]), math.nan)
_AMOUNTS = (
    3, True, "data=2", [3], {1, 2}, object(),
    {"nope": 2}, {3: 2}, {"data": "2"}, {"data": -1}, {"data": None}, {"data": True},
)  # fmt: skip

_KINDS: dict[str, tuple[Any, ...]] = {
    "int": (True, "2", *_OTHER),
    "count": (True, "2", -1, *_OTHER),
    "bool": ("yes", 1, 0, *_OTHER),
    "seconds": (0, *_SECONDS),
    "wait": _SECONDS,  # 0 asks whether it is over
    "text": (3, True, *_OTHER),
    "name": (3, True, "", *_OTHER),
    "choice": (3, True, "nope", "", *_OTHER),
    "processes": (3, True, "0", [], [0, 0], [5], [-1], [True], [None], ["0"], [0.0], [[0]]),
    "path": (3, True, "", "a\0b", *(one for one in _OTHER if not isinstance(one, bytes))),
    "shape": (3, True, "84", (8,), (-8, 4), (8.0, 4), ("8", 4), (True, 4), (None, 4), {8, 4}, 1.5),
    "mesh": (3, True, "data=4", ROWS, *_OTHER),
    "layout": (3, True, "data", ("data", None), *_OTHER),
    "layouts": (3, True, [ROWS, ROWS], {"a": ROWS}, object(), 1.5, b"x"),
    "topology": (3, True, "v5e:2x4", MESH, *_OTHER),
    "axis": (3, True, "", "nope", ("nope",), ("data", "data"), ((),), *_OTHER),
    "dim": (3, True, "", "nope", ("nope",), ("data", "data"), (("data",),), object(), 1.5, b"x"),
    "amounts": _AMOUNTS,
    "order": (3, True, "01", [0, 0.5], ["a"], [None], [-1] * 16, [99] * 16, object()),
    "call": (3, True, "x", *_OTHER),
    "array": (3, True, "x", object(), 1.5, b"x", {1, 2}, [1, 2], math.nan),
    "user": (3, True, "x", [1], object(), {3: 4}, {"a": object()}),
    "metrics": (3, True, "x", [1], {3: 4}, {"a": object()}, {"a": "1"}, {"a": True}, {"a": 1j}),
    "other": (3, True, "x", *(one for one in _OTHER if not isinstance(one, tuple))),
}

# "kind?" may be left out; of the others, None is wrong, too.
WRONG = {
    **{f"{kind}?": values for kind, values in _KINDS.items()},
    **{kind: (None, *values) for kind, values in _KINDS.items()},
}

# What may be right or wrong, and must not end in an error of Python's own.
ANY = (
    None, 3, True, "x", -1, object(), [], {}, [object()], {1, 2}, {"nope": 1},
    np.array([object()], dtype=object),
)  # fmt: skip
