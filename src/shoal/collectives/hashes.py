"""Digests of values, and access to single items where digests differ.

A digest is xxh3-128 (XXH3, https://xxhash.com) of the digests of fixed-size blocks, so several
threads share the work, and contiguous values are not copied. It is fast, not cryptographic: it
detects accidents, not forgery.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shoal.collectives.leaves import Array, LeafSpec, buffer_of
from shoal.hashing import content_digest, quick_digest
from shoal.plan.shards import Box, boxes
from shoal.runtime.rules.first_difference import ItemsInOrder
from shoal.runtime.system.local_devices import num_cores
from shoal.runtime.system.threads import in_threads

_BLOCK_BYTES = 4 << 20
_THREADS = 4  # enough to nearly saturate memory bandwidth
_AROUND = 40  # characters of context shown in a message


class FlatItems:
    """An array as a flat sequence of items in C order, readable in ranges. `ItemsInOrder`.

    Args:
      shape: of the whole.
      dtype: of the items read; a piece may have another byte order.
      pieces: (index of its first item, the array) of each; together they fill the whole.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        pieces: Sequence[tuple[Sequence[int], Array]],
    ) -> None:
        self.shape, self.dtype, self._pieces = tuple(shape), dtype, pieces
        self._run = None
        if len(pieces) == 1:
            whole = pieces[0][1]
            if whole.flags.c_contiguous and whole.dtype == dtype:
                self._run = whole.reshape(-1)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def read(self, low: int, high: int) -> Array:
        """Return the bytes of the items low ≤ i < high; without a copy if contiguous."""
        if self._run is not None:
            return self._run[low:high].view(np.uint8)
        high = min(high, len(self))
        out = np.empty(high - low, self.dtype)
        offset = 0
        for box in boxes(self.shape, low, high):
            sizes = [end - first for first, end in box]
            stop = offset + math.prod(sizes)
            self._fill(out[offset:stop].reshape(sizes), box)
            offset = stop
        return out.view(np.uint8)

    def _fill(self, target: Array, box: Box) -> None:
        for starts, piece in self._pieces:
            within, out = [], []
            for (first, end), start, size in zip(box, starts, piece.shape, strict=True):
                low, high = max(first, start), min(end, start + size)
                within.append(slice(low - start, max(low, high) - start))
                out.append(slice(low - first, max(low, high) - first))
            target[tuple(out)] = piece[tuple(within)]

    def digest(self, low: int, high: int) -> bytes:
        """See `Items.digest`."""
        return quick_digest(self.read(low, high).data)

    def show(self, index: int) -> str:
        """Return an item: its printed form, a tab, its bits."""
        bits = self.read(index, index + 1)
        item = bits.view(self.dtype)[0]
        if isinstance(item, str | bytes):
            return f"{_ends(ascii(item))}\t{quick_digest(bits.data).hex()}"
        try:
            shown = str(item)
        except (ValueError, OverflowError):  # NumPy cannot print every datetime64
            shown = str(bits.view(np.int64)[0])
        return f"{shown}\t{_hex(bits.tobytes())}"


class TextItems:
    """Text or bytes; an item is shown with its context. `ItemsInOrder`."""

    def __init__(self, value: str | bytes) -> None:
        self._value = value

    def __len__(self) -> int:
        return len(self._value)

    def digest(self, low: int, high: int) -> bytes:
        """See `Items.digest`."""
        part = self._value[low:high]
        if isinstance(part, str):
            part = part.encode("utf-8", "surrogatepass")
        return quick_digest(part)

    def show(self, index: int) -> str:
        """Return an item's context, and its position from the end."""
        begin = max(0, index - _AROUND)
        part = self._value[begin : index + _AROUND]
        more = "..." if index + _AROUND < len(self._value) else ""
        return ("..." if begin else "") + ascii(part) + more + f"\tlength {len(self._value)}"


class WholeValue:
    """A value compared as a whole. `ItemsInOrder`."""

    def __init__(self, value: object, bits: bytes) -> None:
        self._value, self._bits = value, bits

    def __len__(self) -> int:
        return 1

    def digest(self, low: int, high: int) -> bytes:
        """See `Items.digest`."""
        return quick_digest(self._bits if low < high else b"")

    def show(self, index: int) -> str:
        """Return its printed form, a tab, its bits."""
        if isinstance(self._value, int) and self._value.bit_length() > 256:
            digest = quick_digest(self._bits).hex()
            return f"an int of {self._value.bit_length()} bits (digest {digest})\t"
        return f"{self._value!r}\t{_hex(self._bits)}"


class Digests:
    """The digests of several values. `ItemsInOrder`."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def digest(self, low: int, high: int) -> bytes:
        """See `Items.digest`."""
        return quick_digest(b"".join(self._digests[low:high]))

    def show(self, index: int) -> str:
        """See `Items.show`."""
        return self._digests[index].hex()


def items_of(leaf: LeafSpec, value: Any) -> ItemsInOrder:
    """Return the items of a Python value."""
    if isinstance(value, str | bytes):
        return TextItems(value)
    return WholeValue(value, bytes(buffer_of(leaf, value)))


def digest_of(items: ItemsInOrder) -> bytes:
    """Return a 16-byte digest of the bits; a few threads share the work."""
    if not isinstance(items, FlatItems):
        return _joined([items.digest(0, len(items)), b"%d" % len(items)])
    step = max(1, _BLOCK_BYTES // max(1, items.dtype.itemsize))
    starts = range(0, len(items), step)
    digests: dict[int, bytes] = {}

    def blocks(share: Iterator[int]) -> None:
        for start in share:
            digests[start] = content_digest(items.read(start, start + step).data)

    if len(starts) > 1:
        in_threads(blocks, starts, min(_THREADS, num_cores()))
    else:
        blocks(iter(starts))
    return _joined(digests[start] for start in starts)


def digest_of_all(digests: Sequence[bytes]) -> bytes:
    """Return the digest of a list of digests."""
    return _joined(digests)


def _joined(digests: Any) -> bytes:
    return content_digest(b"".join(digests))


def _ends(text: str) -> str:
    """Return a text, or if it is long, its two ends."""
    return text if len(text) <= 4 * _AROUND else f"{text[: 2 * _AROUND]}…{text[-2 * _AROUND :]}"


def _hex(bits: bytes) -> str:
    return "0x" + bits[::-1].hex()
