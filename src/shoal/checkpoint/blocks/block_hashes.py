"""Hash the blocks of a file as they are written and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.checkpoint.blocks.image import Bytes
from shoal.checkpoint.format.records import BLOCK_BYTES
from shoal.hashing import block_hash, block_hasher


def digests(parts: Sequence[Bytes]) -> Iterator[int]:
    """Yield the hash of each block of the concatenation of several buffers."""
    state, room = block_hasher(), BLOCK_BYTES
    for part in parts:
        at = 0
        while at < len(part):
            run = part[at : at + room].data
            at += len(run)
            if len(run) == BLOCK_BYTES:
                yield block_hash(run)
                continue
            state.update(run)
            room -= len(run)
            if not room:
                yield state.intdigest()
                state, room = block_hasher(), BLOCK_BYTES
    if room < BLOCK_BYTES:
        yield state.intdigest()
