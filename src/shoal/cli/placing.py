"""The placement options of `shoal mesh` and `shoal plan`."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated

import typer

from shoal.errors import UsageError, nearest
from shoal.plan.mesh import Mesh
from shoal.plan.orders.compatible import LIBRARIES
from shoal.plan.placement import place
from shoal.plan.topology import Topology

_ORDERS = ("shoal", *LIBRARIES, "given")

Across = Annotated[
    str | None,
    typer.Option(help="Factors of axes across slices, or hosts: 'data=2'."),
]
Weights = Annotated[
    str | None,
    typer.Option(help="Bytes that each device reduces over an axis per step: 'model=4GiB'."),
]
Order = Annotated[
    str | None,
    typer.Option(help=f"Order of the devices: {', '.join(_ORDERS[:-1])}; or given, as AXES is."),
]


def placed(
    topology: Topology,
    grid: Mesh,
    *,
    order: str | None = None,
    across: str | None = None,
    weights: str | None = None,
) -> Mesh:
    """Return the mesh placed on a topology, unless it lists its device ids itself.

    Raises:
      UsageError: an option is wrong, or only valid for a placed mesh.
    """
    if order is not None and order not in _ORDERS:
        raise UsageError(
            f"--order {order!r} is not one of {', '.join(_ORDERS)}{nearest(order, _ORDERS)}"
        )
    if order == "given" or (order is None and not grid.is_iota):
        for option, value in (("--across", across), ("--weights", weights)):
            if value is not None:
                raise UsageError(f"{option} places devices, but this mesh lists its device ids")
        return grid
    if not grid.is_iota:
        raise UsageError(
            f"--order {order} places devices, and the mesh {grid.text!r} lists its device ids: "
            "pass its axes only, or --order given"
        )
    return place(
        topology,
        grid.axes,
        across=None if across is None else _read_across(across),
        weights=None if weights is None else _read_weights(weights),
        compatible_with=order if order in LIBRARIES else None,
    )


def pairs_of_json(text: str, what: str) -> list[tuple[str, int]]:
    """Parse a dict as pairs, so that a repeated name is found."""
    try:
        pairs: list[tuple[str, int]] = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} {text!r} is not JSON: {error}") from None
    return pairs


def _read_across(text: str) -> dict[str, int]:
    if text.lstrip().startswith("{"):
        return dict(Mesh(pairs_of_json(text, "--across")).axes)
    try:
        grid = Mesh.parse(text)
    except UsageError as error:
        raise UsageError(f"--across {text!r} must be axes, such as 'data=2': {error}") from None
    if "|" in text:
        raise UsageError(f"--across {text!r} must be axes only, such as 'data=2'")
    return dict(grid.axes)


def _read_weights(text: str) -> dict[str, float]:
    """Parse `model=4GiB data=1GiB`, with or without commas, or JSON."""
    if text.lstrip().startswith("{"):
        return dict(pairs_of_json(text, "--weights"))
    weights: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        name, equals, amount = word.partition("=")
        if not equals or name in weights:
            raise UsageError(
                f"--weights {text!r} must be axes with bytes, each once, such as 'data=1GiB "
                "model=4GiB'"
            )
        weights[name] = read_bytes(amount, f"--weights {name}")
    return weights


# ---- Parse amounts of bytes and speeds on the command line.


_AMOUNT = re.compile(r"(\d+(?:\.\d*)?(?:[eE]\d+)?)\s*([kKMGT]i?)?(B|bit)?(/s)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def read_bytes(text: str, what: str) -> int:
    """Parse a number of bytes.

    >>> read_bytes("64MiB", "--bytes"), read_bytes("1e6", "--bytes"), read_bytes("2 kB", "--bytes")
    (67108864, 1000000, 2000)
    """
    match = _AMOUNT.fullmatch(text.strip())
    if not match or match[3] == "bit" or match[4]:
        raise UsageError(f"{what} {text!r} must be bytes, such as 64MiB, 1GB or 4096")
    num_bytes = _number(match)
    if not num_bytes.is_integer() or num_bytes >= 1 << 63:
        raise UsageError(f"{what} {text!r} must be a whole number of bytes, below 2**63")
    return int(num_bytes)


def read_speed(text: str, what: str) -> float:
    """Parse a speed, in bytes per second.

    >>> read_speed("50GB/s", "--link"), read_speed("400Gbit/s", "--network")
    (50000000000.0, 50000000000.0)
    """
    match = _AMOUNT.fullmatch(text.strip())
    if not match or not match[4] or not match[3]:  # "Gb" is ambiguous: refused
        raise UsageError(f"{what} {text!r} must be a speed, such as 50GB/s or 400Gbit/s")
    return _number(match) / (8 if match[3] == "bit" else 1)


def _number(match: re.Match[str]) -> float:
    prefix = (match[2] or "").upper()
    unit = 1024.0 if prefix.endswith("I") else 1000.0
    return float(match[1]) * math.pow(unit, _POWERS[prefix[:1]])
