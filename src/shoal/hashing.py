"""Every digest, named after its purpose; each is part of a format on disk or on the wire.

========================  =====================  =================================================
`short_digest`            BLAKE2b, 8 bytes       text, where a chance of 2^-64 is small enough
`call_digest`             BLAKE2b, 16 bytes      what must be equal on all processes
`quick_digest`            XXH3, 8 bytes          values; collides by chance, not by intent
`content_digest`          XXH3, 16 bytes         the same, where many are compared
`block_hash`              XXH3, as an integer    a block of a checkpoint's file
`seal`                    SHA-256, 32 bytes      a checkpoint's own records
========================  =====================  =================================================

xxhash is imported on use: the service processes of a job have only the standard library.

Source: RFC 7693 (BLAKE2), FIPS 180-4 (SHA-256), https://xxhash.com (XXH3).
"""

from __future__ import annotations

from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import xxhash

Data: TypeAlias = bytes | memoryview
SHORT_BYTES = 8  # of a `short_digest` and of a `quick_digest`
SEAL_BYTES = 32


def short_digest(data: Data) -> bytes:
    """Return a digest of SHORT_BYTES of an encoded text."""
    return blake2b(data, digest_size=SHORT_BYTES).digest()


def call_digest(data: Data) -> bytes:
    """Return a digest of 16 bytes of what one call, or all so far, must have in common."""
    return blake2b(data, digest_size=16).digest()


def quick_digest(data: Data) -> bytes:
    """Return a digest of SHORT_BYTES of a value's bytes, at about the speed of reading them."""
    import xxhash

    return xxhash.xxh3_64_digest(data)


def content_digest(data: Data) -> bytes:
    """Return a digest of 16 bytes of a value's bytes, at about the speed of reading them."""
    import xxhash

    return xxhash.xxh3_128_digest(data)


def block_hash(block: Data) -> int:
    """Return the hash of a block in one contiguous buffer."""
    import xxhash

    return xxhash.xxh3_64_intdigest(block)


def block_hasher() -> xxhash.xxh3_64:
    """Return a hasher to `update` with a block's pieces; its `intdigest` is the block's hash."""
    import xxhash

    return xxhash.xxh3_64()


def seal(data: Data) -> bytes:
    """Return the digest of SEAL_BYTES that ends a record, or that another record keeps of it."""
    return sha256(data).digest()
