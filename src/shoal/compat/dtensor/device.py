"""TensorFlow's single device for all meshes: the methods that programs used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shoal.colour import collective, local, logically_collective
from shoal.compat.dtensor import moves
from shoal.compat.dtensor.layout import Layout, check_dtensor_mesh
from shoal.compat.dtensor.mesh import Mesh
from shoal.compat.dtensor.meshes import barrier
from shoal.compat.dtensor.refused import NotPossible
from shoal.runtime.process import registered

__all__ = ["DTensorDevice", "_dtensor_device", "_global_barrier", "reset_dtensor_device"]


@dataclass(frozen=True)
class DTensorDevice:
    """The result of `_dtensor_device`. It is stateless: meshes are in the process's record."""

    @property
    def name(self) -> str:
        """TensorFlow's name for it."""
        return moves.device_name()

    def _register_mesh(self, mesh: Mesh) -> None:
        """Look up the devices of a mesh, and register its name; may be repeated."""
        registered(check_dtensor_mesh(mesh).shoal_mesh)

    @logically_collective("shapes and dtypes of pieces, and the layout,")
    def pack(self, tensors: Sequence[Any], layout: Layout) -> jax.Array:
        """Assemble one array from pieces: `dtensor.pack`.

        Logically collective: shapes and dtypes of pieces, and the layout, must be equal.
        """
        return moves.pack(tensors, layout)

    @local
    def unpack(self, dtensor: Any) -> list[jax.Array]:
        """Return the pieces of an array: `dtensor.unpack`.

        Local.
        """
        return moves.unpack(dtensor)

    @local
    def fetch_layout(self, dtensor: Any) -> Layout | None:
        """Return the layout of an array: `dtensor.fetch_layout`.

        Local.
        """
        return moves.fetch_layout(dtensor)

    @local
    def is_dtensor(self, tensor: Any) -> bool:
        """Return whether a value is an array on a mesh: `dtensor.is_dtensor`.

        Local.
        """
        return moves.is_dtensor(tensor)


_DEVICE = DTensorDevice()


@local
def _dtensor_device() -> DTensorDevice:
    """Return the single device.

    Local.
    """
    return _DEVICE


@local
def reset_dtensor_device(is_async: bool) -> None:
    """Refuse: there is nothing to reset; `shutdown_accelerator_system` forgets the meshes.

    Local.
    """
    raise NotPossible(
        "dtensor.reset_dtensor_device: there is no separate DTensor device here; "
        "shutdown_accelerator_system() (shoal.shutdown) forgets the meshes"
    )


@collective("the mesh's processes")
def _global_barrier(mesh: Mesh, last_op_name: str) -> None:
    """Wait until all devices of a mesh have finished: `barrier`, by its first name.

    Collective over the mesh's processes.
    """
    barrier(mesh, last_op_name)
