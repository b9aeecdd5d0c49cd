"""The mapping between JAX's process indices, which may have another order, and the job's."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import InitializeError


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
