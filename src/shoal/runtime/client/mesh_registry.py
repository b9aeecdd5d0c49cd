"""The meshes over the devices of a job, each once, with the CPU mesh beside it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.plan.mesh import Mesh

_MOST = 256  # a program that makes meshes without end does not keep them all


class Registered(NamedTuple):
    """A mesh, and its twin of CPU devices: one beside each of its devices."""

    mesh: Mesh
    host: Mesh


class Meshes:
    """What `make_mesh` returned in this process, oldest first. Safe to use in several threads.

    >>> from shoal.plan.mesh import Mesh
    >>> meshes = Meshes()
    >>> one, other = (meshes.register(Mesh({"x": 4}, kind="tpu")) for _ in range(2))
    >>> one is other, one.host.kind, len(meshes.all())
    (True, 'cpu', 1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Mesh, Registered] = {}
        self.held: dict[str, object] = {}  # of facades: a mesh for the whole process, and the like

    def register(self, mesh: Mesh) -> Registered:
        """Return the entry of a mesh: the same one for equal meshes."""
        new = Registered(mesh, mesh.host_mesh())
        with self._lock:
            entry = self._known.setdefault(mesh, new)
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
            return entry

    def all(self) -> tuple[Registered, ...]:
        """Return all entries, oldest first."""
        with self._lock:
            return tuple(self._known.values())
