"""torch_xla names without a counterpart on JAX: using one raises, and names the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from shoal.colour import local
from shoal.compat.torch_xla.errors import NoMeaningHere
from shoal.tracebacks import at_caller

__all__ = [
    "MpDeviceLoader",
    "ParallelLoader",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "SpmdFullyShardedDataParallel",
    "prime_optimizer",
    "send_cpu_data_to_device",
]


class _LeftOut:
    """A class that cannot be instantiated."""

    way: str

    @at_caller
    def __new__(cls, *args: Any, **options: Any) -> NoReturn:
        raise NoMeaningHere(f"torch_xla {cls.__name__} {cls.way}")


@local
class ParallelLoader(_LeftOut):
    """Raise a NotImplementedError, which is a UsageError as well: `shoal.feed` loads.

    Local.
    """

    way = (
        "(shoal.feed): write shoal.feed(loader, layouts), which prefetches, with a layout for each "
        "part of a batch where input_sharding= had a ShardingSpec"
    )


@local
class MpDeviceLoader(ParallelLoader):
    """Raise as `ParallelLoader`.

    Local.
    """


@local
class SpmdFullyShardedDataParallel(_LeftOut):
    """Raise a NotImplementedError, which is a UsageError as well: layouts shard parameters.

    Local.
    """

    way = (
        "(shoal.match_layouts): parameters are arguments here; mark_sharding each by fsdp."
        "_prepare_spmd_partition_spec, or pass shoal.match_layouts rules by path"
    )


@local
class SPMDSavePlanner(_LeftOut):
    """Raise a NotImplementedError, which is a UsageError as well: `shoal.save` plans.

    Local.
    """

    way = "(shoal.save): torch's planners are not needed; CheckpointManager or shoal.save saves"


@local
class SPMDLoadPlanner(_LeftOut):
    """Raise a NotImplementedError, which is a UsageError as well: `shoal.restore` plans.

    Local.
    """

    way = (
        "(shoal.restore): torch's planners are not needed; CheckpointManager or shoal.restore "
        "restores"
    )


@local
def prime_optimizer(optimizer: Any) -> NoReturn:
    """Raise a NotImplementedError, which is a UsageError as well: its state is a tree.

    Local.
    """
    raise NoMeaningHere(
        "torch_xla prime_optimizer (shoal.restore): the optimizer's state is an ordinary tree; "
        "create it by the optimizer's init, and restore into it"
    )


@local
def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> NoReturn:
    """Raise a NotImplementedError, which is a UsageError as well: `shoal.put` places.

    Local.
    """
    raise NoMeaningHere(
        "torch_xla send_cpu_data_to_device (shoal.put): write shoal.put(tree, layouts), or "
        "ShardingSpec.apply for each array"
    )
