"""The mapping between JAX's process indices, which may have another order, and the job's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.errors import InitializeError
from shoal.runtime.jax_service.jax_runtime import look_up, own_index, publish

_PROCESS = "shoal/process"  # a process's index in the job, by its index in JAX


def checked(numbers: Mapping[int, int], own: int, process: int) -> dict[int, int]:
    """Return the job's index of each process by JAX's index, if the mapping is one to one.

    Args:
      numbers: the job's index that each process published, by its index in JAX.
      own: JAX's index of this process.
      process: the job's index of this process.

    Raises:
      InitializeError: two processes have one index, in JAX or in the job.

    >>> checked({1: 0, 0: 1}, 1, 0)
    {1: 0, 0: 1}
    """
    if numbers.get(own, process) != process or len({*numbers.values()}) < len(numbers):
        shown = ", ".join(f"{jax} is process {ours}" for jax, ours in sorted(numbers.items()))
        raise InitializeError(
            f"JAX and this job count processes differently: by JAX's index {shown}, and this one "
            f"is process {process} with JAX's index {own}; each index must be one process's"
        )
    return dict(numbers)


def processes_of(owners: Iterable[int], process: int, *, timeout_s: float) -> dict[int, int]:
    """Return, for each of `owners` (indices in JAX), its index in the job; all of them call this.

    Args:
      process: this process's index in the job, published to the others.

    Raises:
      NothingPublishedError: one of them did not publish its index in time.
      InitializeError: two processes have one index.
    """
    own = own_index()
    publish(f"{_PROCESS}/{own}", str(process))
    numbers = {owner: int(look_up(f"{_PROCESS}/{owner}", timeout_s=timeout_s)) for owner in owners}
    return checked(numbers, own, process)
