"""The meshes of a job, each registered once, with its mesh of host CPU devices."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.plan.mesh import Mesh

_MOST = 256  # bounds the memory of a program that makes meshes in a loop


class Registered(NamedTuple):
    """A mesh, and its host mesh: one CPU device for each of its devices."""

    mesh: Mesh
    host: Mesh


class Meshes:
    """The meshes that `make_mesh` returned in this process, oldest first. Thread-safe.

    >>> from shoal.plan.mesh import Mesh
    >>> meshes = Meshes()
    >>> one, other = (meshes.register(Mesh({"x": 4}, kind="tpu")) for _ in range(2))
    >>> one is other, one.host.kind, len(meshes.all())
    (True, 'cpu', 1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Mesh, Registered] = {}
        self.held: dict[str, object] = {}  # process-wide values of facades, such as a default mesh

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
