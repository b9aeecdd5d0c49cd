"""All digests, named after their purpose; each is part of a format on disk or on the wire.

========================  =====================  =================================================
`short_digest`            BLAKE2b, 8 bytes       text, where a chance of 2^-64 is small enough
`call_digest`             BLAKE2b, 16 bytes      what must be equal between calls
`quick_digest`            XXH3, 8 bytes          values; detects accidents, not forgery
`content_digest`          XXH3, 16 bytes         the same, where many are compared
`block_hash`              XXH3, as an integer    a block of a checkpoint's file
`seal`                    SHA-256, 32 bytes      a checkpoint's own records
========================  =====================  =================================================

xxhash is imported on first use: the helper processes of a job need the standard library only.

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
    """Return the digest of a short text, SHORT_BYTES long."""
    return blake2b(data, digest_size=SHORT_BYTES).digest()


def call_digest(data: Data) -> bytes:
    """Return the 16-byte digest of facts that must be equal in a call, or in all calls so far."""
    return blake2b(data, digest_size=16).digest()


def quick_digest(data: Data) -> bytes:
    """Return the digest of a value's bytes, SHORT_BYTES long, at about memory speed."""
    import xxhash

    return xxhash.xxh3_64_digest(data)


def content_digest(data: Data) -> bytes:
    """Return the 16-byte digest of a value's bytes, at about memory speed."""
    import xxhash

    return xxhash.xxh3_128_digest(data)


def block_hash(block: Data) -> int:
    """Return the hash of a block in contiguous memory."""
    import xxhash

    return xxhash.xxh3_64_intdigest(block)


def block_hasher() -> xxhash.xxh3_64:
    """Return a state to `update` with a block's pieces; its `intdigest` is the block's hash."""
    import xxhash

    return xxhash.xxh3_64()


def seal(data: Data) -> bytes:
    """Return the digest that ends a record, or that another record holds of it; SEAL_BYTES long."""
    return sha256(data).digest()
