"""The API of `jax.experimental.multihost_utils`, with shoal's guarantees.

Change `from jax.experimental import multihost_utils` to `from shoal.compat import multihost_utils`.
Calls at different places of the program count as the same call, as there. Differences:
docs/coming-from/multihost_utils.md. Never imports the original; knows no other facade.
"""

from __future__ import annotations

from shoal.compat.multihost_utils.errors import ProcessFailureError as ProcessFailureError
from shoal.compat.multihost_utils.errors import SpreadArrayError as SpreadArrayError
from shoal.compat.multihost_utils.errors import UnequalError as UnequalError
from shoal.compat.multihost_utils.living import live_devices as live_devices
from shoal.compat.multihost_utils.parts import (
    global_array_to_host_local_array as global_array_to_host_local_array,
)
from shoal.compat.multihost_utils.parts import (
    host_local_array_to_global_array as host_local_array_to_global_array,
)
from shoal.compat.multihost_utils.points import (
    reached_preemption_sync_point as reached_preemption_sync_point,
)
from shoal.compat.multihost_utils.points import sync_global_devices as sync_global_devices
from shoal.compat.multihost_utils.values import assert_equal as assert_equal
from shoal.compat.multihost_utils.values import broadcast_one_to_all as broadcast_one_to_all
from shoal.compat.multihost_utils.values import process_allgather as process_allgather

__all__ = [
    "ProcessFailureError",
    "SpreadArrayError",
    "UnequalError",
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "live_devices",
    "process_allgather",
    "reached_preemption_sync_point",
    "sync_global_devices",
]
