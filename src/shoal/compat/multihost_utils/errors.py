"""The facade's errors: shoal's, and also instances of the types that JAX raises."""

from __future__ import annotations

import jax

from shoal.errors import DivergenceError, ProcessLostError, UsageError

__all__ = ["ProcessFailureError", "SpreadArrayError", "UnequalError"]


class UnequalError(DivergenceError, AssertionError):
    """Processes hold different values, or are at different points. Raised by `assert_equal` and
    `sync_global_devices`, on every process. Also an AssertionError."""


class SpreadArrayError(UsageError, RuntimeError):
    """An array is distributed over processes, but one process must hold all of it.
    Also a RuntimeError."""


class ProcessFailureError(ProcessLostError):
    """Processes died inside a `live_devices` block; `failed_devices` is the set of their devices.

    `lost` maps each of these processes to the reason, in words.
    """

    def __init__(self, failed_devices: set[jax.Device], message: str = "") -> None:
        super().__init__(message or f"Devices failed: {failed_devices}")
        self.failed_devices = failed_devices

    def __reduce__(self) -> tuple[object, ...]:  # devices of JAX cannot be pickled: their names
        known = {**vars(self), "failed_devices": {str(device) for device in self.failed_devices}}
        return type(self), (known["failed_devices"], str(self)), known
