"""Hash the blocks of a file as they are written and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from shoal.checkpoint.blocks.image import Bytes
from shoal.checkpoint.format.records import BLOCK_BYTES


def digests(parts: Sequence[Bytes]) -> Iterator[int]:
    """Yield the hash of each block of the concatenation of several buffers."""
    state, room = xxhash.xxh3_64(), BLOCK_BYTES
    for part in parts:
        at = 0
        while at < len(part):
            run = part[at : at + room].data
            at += len(run)
            if len(run) == BLOCK_BYTES:
                yield xxhash.xxh3_64_intdigest(run)
                continue
            state.update(run)
            room -= len(run)
            if not room:
                yield state.intdigest()
                state, room = xxhash.xxh3_64(), BLOCK_BYTES
    if room < BLOCK_BYTES:
        yield state.intdigest()
