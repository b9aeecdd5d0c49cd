"""JAX may count the processes of a job in an order of its own; shoal's numbers are the job's."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import InitializeError


def checked(numbers: Mapping[int, int], own: int, process: int) -> dict[int, int]:
    """Return the processes of the job by JAX's index of each, where both count one to one.

    Args:
      numbers: what the processes told.
      own: JAX's index of this process.
      process: what the job calls it.

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
