"""Digests are part of formats: of files, of what travels, of what is printed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shoal import hashing

# Of b"abc": BLAKE2b and SHA-256 as b2sum and sha256sum print them, XXH3 as xxhsum does.
OF_ABC = {
    hashing.short_digest: "d8bb14d833d59559",
    hashing.call_digest: "cf4ab791c62b8d2b2109c90275287816",
    hashing.quick_digest: "78af5f94892f3950",
    hashing.content_digest: "06b05ab6733a618578af5f94892f3950",
    hashing.seal: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
}


@pytest.mark.parametrize("digest", OF_ABC)
def test_a_digest_stays_what_it_is(digest):
    assert digest(b"abc").hex() == OF_ABC[digest]
    assert digest(memoryview(b"abc")) == digest(b"abc")


def test_their_sizes():
    assert {len(hashing.short_digest(b"")), len(hashing.quick_digest(b""))} == {hashing.SHORT_BYTES}
    assert len(hashing.seal(b"")) == hashing.SEAL_BYTES


@given(st.lists(st.binary(max_size=300)))
def test_a_block_in_pieces_has_the_hash_of_the_block(pieces):
    hasher = hashing.block_hasher()
    for piece in pieces:
        hasher.update(piece)
    whole = b"".join(pieces)
    assert hasher.intdigest() == hashing.block_hash(whole)
    assert hashing.block_hash(whole) == int.from_bytes(hashing.quick_digest(whole), "big")
