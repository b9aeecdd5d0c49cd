"""The hosts of a Slurm step, from its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

LOCAL_COUNT = "tasks of this node"  # stands in the environment like a variable
_PER_NODE, _NODE = "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
_BINDING = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")


def completed(env: Mapping[str, str], problems: list[str]) -> Mapping[str, str]:
    """Return the environment, with the number of tasks of this node if it is known."""
    counts = counts_of_nodes(env.get(_PER_NODE, ""))
    node = env.get(_NODE, "").strip()
    if node.isascii() and node.isdigit() and int(node) < len(counts):
        return {**env, LOCAL_COUNT: str(counts[int(node)])}
    return env


def counts_of_nodes(listed: str) -> list[int]:
    """Return the tasks of each node, from Slurm's short form; [] if it is malformed.

    >>> counts_of_nodes("4(x2),1")
    [4, 4, 1]
    """
    counts: list[int] = []
    for part in listed.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def binds_gpus(env: Mapping[str, str]) -> bool:
    """Return whether Slurm shows each task only its own GPUs.

    >>> binds_gpus({"SLURM_GPUS_PER_TASK": "1"}), binds_gpus({"SLURM_GPU_BIND": "none"})
    (True, False)
    """
    if "gpu" in env.get("SLURM_TRES_PER_TASK", ""):
        return True
    given = (env.get(name, "").strip() for name in _BINDING)
    return any(value not in ("", "none") for value in given)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("n[007-010,12],m1")
    'n007'
    """
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodes.strip())
    return "".join(part or "" for part in match.groups()) if match else ""
