"""Every predecessor's name: which facade has it, and what ours is called."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FACADES", "MULTIHOST_UTILS", "facades_of"]

MULTIHOST_UTILS: Mapping[str, str] = {
    "ProcessFailureError": "ProcessLostError",
    "assert_equal": "assert_same",
    "broadcast_one_to_all": "broadcast",
    "global_array_to_host_local_array": "to_host_local",
    "host_local_array_to_global_array": "from_host_local",
    "live_devices": "live",
    "process_allgather": "allgather",
    "reached_preemption_sync_point": "preempted",
    "sync_global_devices": "barrier",
}
"""Name in `shoal.compat.multihost_utils` → our own name in `shoal`."""

FACADES: Mapping[str, Mapping[str, str]] = {"shoal.compat.multihost_utils": MULTIHOST_UTILS}


def facades_of(name: str) -> str:
    """Return where a predecessor's name is and what ours is, in words; empty: it is none's.

    >>> facades_of("sync_global_devices")
    'it is shoal.compat.multihost_utils.sync_global_devices; ours is shoal.barrier'
    >>> facades_of("no_such_name")
    ''
    """
    found = [(facade, ours[name]) for facade, ours in FACADES.items() if name in ours]
    if not found:
        return ""
    theirs = " and ".join(f"{facade}.{name}" for facade, _ in found)
    ours = " and ".join(dict.fromkeys(f"shoal.{one}" for _, one in found))
    return f"it is {theirs}; ours is {ours}"
