"""Who writes which box of which leaf, and where in its files. Decided alike by all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.checkpoint.format import Chunks, IntArray

__all__ = ["FilePlan", "Held", "PartPlan", "plan_parts"]


class Held(NamedTuple):
    """What is known of one leaf with data: its distinct boxes, and who holds each."""

    leaf: int  # number in the manifest
    name: str
    dtype: str
    stored_shape: tuple[int, ...]
    origin: IntArray  # [boxes, rank]
    extent: IntArray  # [boxes, rank]
    holders: tuple[tuple[int, ...], ...]  # the processes that hold each box, in order


@dataclass(frozen=True, eq=False)
class FilePlan:
    """One data file before its values are known."""

    header: bytes  # length, JSON and padding: a multiple of PAGE_BYTES
    num_bytes: int  # of the whole file
    rows: tuple[int, ...]  # of the part's chunks, in the order in which they lie in the file


@dataclass(frozen=True, eq=False)
class PartPlan:
    """What one process writes."""

    process: int
    files: tuple[FilePlan, ...]
    chunks: Chunks  # `file` counts this process's own files from 0

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(one.num_bytes for one in self.files)


def plan_parts(
    held: Sequence[Held], process: int, attempt: str, *, max_file_bytes: int
) -> PartPlan:
    """Return what `process` writes; every process decides by the same rule from the same `held`.

    It is impossible that an element is written twice or not at all, or by who does not hold it.
    """
    raise NotImplementedError
