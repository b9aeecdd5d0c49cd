"""Join the parts of all processes into the index of a checkpoint; metadata of data files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.checkpoint.format.records import (
    Index,
    Manifest,
    Part,
)
from shoal.checkpoint.format.table_files import (
    first_blocks,
)
from shoal.checkpoint.format.tiling import (
    check_index,
    check_places,
    join_chunks,
)
from shoal.errors import CorruptCheckpointError


def data_metadata(attempt: str) -> dict[str, str]:
    """Return the metadata in the header of a data file."""
    return {"format": "shoal-checkpoint", "attempt": attempt}


def join_parts(manifest: Manifest, parts: Sequence[Part]) -> Index:
    """Return the index of all parts, checked against the manifest; the same on every process.

    Raises:
      CorruptCheckpointError: a part is missing or of another attempt, or leaves are not tiled.
    """
    parts = sorted(parts, key=lambda part: part.process)
    there = [part.process for part in parts]
    if len(parts) != manifest.num_processes or there != list(range(len(parts))):
        raise CorruptCheckpointError(
            f"there are parts of the processes {there}, and there should be one of each of "
            f"{manifest.num_processes}"
        )
    wrong = [part.process for part in parts if part.attempt != manifest.attempt]
    if wrong:
        raise CorruptCheckpointError(f"the parts of processes {wrong} are of another attempt")
    files = tuple([one for part in parts for one in part.files])
    chunks = join_chunks(parts)
    block_hash = np.concatenate([np.zeros(0, np.uint64), *(part.block_hash for part in parts)])
    index = Index(manifest.attempt, files, chunks, first_blocks(files), block_hash)
    check_places(chunks, files, "the parts together")
    check_index(manifest, index, file="the parts together")
    return index
