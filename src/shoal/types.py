"""The classes of what calls of `shoal` return or take, for annotations.

`def report(info: shoal.types.CheckpointInfo)`. Programs get instances from the calls, and make none
of their own. What planning and preemption return is in `shoal.planning` and `shoal.preemption`.
Each class is loaded when it is first used: some need JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.arrays.feeding.feed import Feed as Feed
    from shoal.arrays.moving.plan_relayout import RelayoutPlan as RelayoutPlan
    from shoal.arrays.traced.explain_program import Movement as Movement
    from shoal.arrays.traced.explain_program import ProgramReport as ProgramReport
    from shoal.checkpoint.history.checkpoint_info import CheckpointInfo as CheckpointInfo
    from shoal.checkpoint.history.checkpoint_info import SavedLeaf as SavedLeaf
    from shoal.checkpoint.restoring.read_strategy import Costs as Costs
    from shoal.checkpoint.restoring.read_strategy import RestorePlan as RestorePlan
    from shoal.checkpoint.restoring.target import RestoreOptions as RestoreOptions
    from shoal.checkpoint.tree.flatten import UnknownNode as UnknownNode
    from shoal.runtime.job_status import JobStatus as JobStatus
    from shoal.runtime.rules.point import Member as Member

_LAZY = {
    "CheckpointInfo": "shoal.checkpoint.history.checkpoint_info",
    "Costs": "shoal.checkpoint.restoring.read_strategy",
    "Feed": "shoal.arrays.feeding.feed",
    "JobStatus": "shoal.runtime.job_status",
    "Member": "shoal.runtime.rules.point",
    "Movement": "shoal.arrays.traced.explain_program",
    "ProgramReport": "shoal.arrays.traced.explain_program",
    "RelayoutPlan": "shoal.arrays.moving.plan_relayout",
    "RestoreOptions": "shoal.checkpoint.restoring.target",
    "RestorePlan": "shoal.checkpoint.restoring.read_strategy",
    "SavedLeaf": "shoal.checkpoint.history.checkpoint_info",
    "UnknownNode": "shoal.checkpoint.tree.flatten",
}

__all__ = [
    "CheckpointInfo",
    "Costs",
    "Feed",
    "JobStatus",
    "Member",
    "Movement",
    "ProgramReport",
    "RelayoutPlan",
    "RestoreOptions",
    "RestorePlan",
    "SavedLeaf",
    "UnknownNode",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shoal.types' has no attribute {name!r}")
    import importlib

    import shoal.runtime.system.interrupts as interrupts

    load = interrupts.interrupts_delivered(importlib.import_module)  # as in shoal/__init__.py
    globals()[name] = value = getattr(load(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__]
