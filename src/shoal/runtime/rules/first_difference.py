"""Where versions of one long thing differ first, found without sending the things.

Those who speak for the versions cut them into the same pieces and bring a digest of each; the
first piece that differs is cut again. A round brings at most 64 digests, so a thing of n items
takes log64(n) rounds, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Protocol

from shoal.hashing import SHORT_BYTES, short_digest

MAX_SPEAKERS = 8  # so many versions are compared; who holds which is known without
_PIECES = 64
_WIDTH = 160  # characters of a line that a message shows
ENDED = "(nothing: it ends before)"

Meet = Callable[[bytes], Mapping[int, bytes]]  # one round: bring this, get everybody's


class ItemsInOrder(Protocol):
    """A long thing, as items in order."""

    def __len__(self) -> int:
        """How many items there are."""

    def digest(self, low: int, high: int) -> bytes:
        """Return SHORT_BYTES of the items low ≤ i < high; those beyond the end do not count."""

    def show(self, index: int) -> str:
        """Return an item in words."""


class TextLines:
    """A text, line by line. `ItemsInOrder`."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def digest(self, low: int, high: int) -> bytes:
        """See `Items.digest`."""
        lines = self._lines[low:high]
        text = "\n".join([str(len(lines)), *lines])
        return short_digest(_bytes(text))

    def show(self, index: int) -> str:
        """See `Items.show`."""
        return self._lines[index] if index < len(self._lines) else ""


class Text:
    """A line, character by character; what is shown is what stands around one. `ItemsInOrder`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    def digest(self, low: int, high: int) -> bytes:
        """See `Items.digest`."""
        return short_digest(_bytes(self._text[low:high]))

    def show(self, index: int) -> str:
        """See `Items.show`."""
        return _around(self._text, index)


def first_difference(versions: Iterable[Sequence[object]]) -> int | None:
    """Return the first index at which not all have the same; where one has ended, it differs.

    >>> first_difference([["a", "b"], ["a", "c"], ["a"]])
    1
    """
    rows = zip_longest(*versions)
    return next((index for index, row in enumerate(rows) if len(set(row)) > 1), None)


def excerpts(lines: Sequence[str]) -> list[str]:
    """Return what a message shows of lines that differ: around the first character that does."""
    begin = first_difference(lines) or 0
    return [_around(line, begin) for line in lines]


def find_first(meet: Meet, mine: ItemsInOrder | None, speakers: Sequence[int]) -> int | None:
    """Return the first item that differs between what the speakers have.

    All that meet call this together and return the same. None: nothing differs, not any more.

    Args:
      meet: one round.
      mine: what this process has; None if it is no speaker.
      speakers: the processes that have something to compare.
    """
    told = meet(b"" if mine is None else b"%d" % len(mine))
    low, high = 0, max(int(told[process]) for process in speakers)
    while high - low > 1:
        pieces = min(_PIECES, high - low)
        cuts = [low + (high - low) * n // pieces for n in range(pieces + 1)]
        brought = b"" if mine is None else b"".join(mine.digest(*cut) for cut in pairwise(cuts))
        told = meet(brought)
        versions = [_digests(told[process]) for process in speakers]
        piece = first_difference(versions)
        if piece is None:
            return None
        low, high = cuts[piece], cuts[piece + 1]
    return low if high > low else None


def find_line(
    meet: Meet, mine: Sequence[str] | None, speakers: Sequence[int]
) -> tuple[int, dict[int, str]] | None:
    """Return the first line that differs: its index, and what each speaker has there.

    As `find_first`, which finds the line, and then the character in it.
    """
    index = find_first(meet, None if mine is None else TextLines(mine), speakers)
    if index is None:
        return None
    line = None if mine is None else TextLines(mine).show(index)
    character = find_first(meet, None if line is None else Text(line), speakers) or 0
    shown = ""
    if mine is not None and line is not None:
        shown = Text(line).show(character) if index < len(mine) else ENDED
    told = meet(_bytes(shown))
    return index, {process: told[process].decode(errors="replace") for process in speakers}


def _around(text: str, index: int) -> str:
    """Return what stands around a character; where it begins depends on `index` alone, so that
    texts that differ there are shown as different."""
    begin = 0 if index < _WIDTH * 3 // 4 else index - _WIDTH // 3
    end = begin + _WIDTH
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def _digests(joined: bytes) -> list[bytes]:
    return [joined[at : at + SHORT_BYTES] for at in range(0, len(joined), SHORT_BYTES)]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
