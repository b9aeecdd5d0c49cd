"""The facts that must be equal on the launchers of all nodes: the program, and versions."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import socket
from collections.abc import Sequence
from importlib import metadata

from shoal.launch.nodes.messages import NodeCard
from shoal.launch.order import JobOrder, NodesOrder

_LETTERS = 300


def own_card(order: JobOrder, nodes: NodesOrder, attempt: int) -> NodeCard:
    """Return this launcher's card for the others."""
    return NodeCard(
        nodes.node,
        nodes.nodes,
        order.processes,
        socket.gethostname(),
        program_words(order.command),
        fingerprint(order.command),
        order.devices,
        versions(),
        -1 if order.shown is None else max(order.shown, default=-1),
        bool(nodes.token),
        order.restarts.options if order.restarts else "",
        attempt,
    )


def program_words(command: Sequence[str]) -> str:
    """Return the command as text; a script without its directory, which may differ."""
    text = shlex.join([*_named(command)])
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…"


def fingerprint(command: Sequence[str]) -> str:
    """Return a hash of the command and, of a script, of its content."""
    found = hashlib.sha256("\0".join(_named(command)).encode(errors="surrogateescape"))
    if command[0] != "-m" and os.path.isfile(command[0]):
        with open(command[0], "rb") as file:
            found.update(file.read())
    return found.hexdigest()


def versions() -> str:
    """Return the versions of Python, shoal and JAX, as text."""
    rows = ["Python " + ".".join(platform.python_version_tuple()[:2])]
    for name in ("shoal", "jax"):
        try:
            rows.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            rows.append(f"no {name}")
    return ", ".join(rows)


def _named(command: Sequence[str]) -> list[str]:
    if command[0] == "-m":
        return list(command)
    return [os.path.basename(os.path.abspath(command[0])), *command[1:]]
