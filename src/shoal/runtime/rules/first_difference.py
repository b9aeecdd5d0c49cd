"""Find where versions of a long sequence first differ, without sending the sequences.

One process for each version, its representative, cuts its sequence into the same pieces and sends
a digest of each; the first piece that differs is cut again. A round carries at most 64 digests, so
a sequence of n items takes log64(n) rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Protocol

from shoal.errors import ShoalError
from shoal.hashing import SHORT_BYTES, short_digest
from shoal.runtime.rules.spec_lines import BETWEEN

MAX_GROUPS_SHOWN = 8  # versions compared; which process holds which is known anyway
_PIECES = 64
_WIDTH = 400  # characters of a line in a message: a leaf's whole path, and what it is
_BEFORE = 200  # of each field before the one that differs
ENDED = "(nothing: it ends before)"

Meet = Callable[[bytes], Mapping[int, bytes]]  # one round: send bytes, get those of all


class OutOfStepError(ShoalError):
    """The processes are not in the same round."""


def highest(answers: Mapping[int, bytes], representatives: Sequence[int]) -> int:
    """Return the highest of the numbers that the representatives sent."""
    try:
        return max(int(answers[process]) for process in representatives)
    except (ValueError, LookupError) as error:
        raise OutOfStepError(f"no numbers: {error}") from None


class ItemsInOrder(Protocol):
    """A long sequence of items."""

    def __len__(self) -> int:
        """The number of items."""

    def digest(self, low: int, high: int) -> bytes:
        """Return SHORT_BYTES of the items low ≤ i < high; indices beyond the end are ignored."""

    def show(self, index: int) -> str:
        """Return an item as text."""


class TextLines:
    """A text, line by line. `ItemsInOrder`."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def digest(self, low: int, high: int) -> bytes:
        """See `ItemsInOrder.digest`."""
        lines = self._lines[low:high]
        text = "\n".join([str(len(lines)), *lines])
        return short_digest(_bytes(text))

    def show(self, index: int) -> str:
        """See `ItemsInOrder.show`."""
        return self._lines[index] if index < len(self._lines) else ""


class Text:
    """A line, character by character; a character is shown with its context. `ItemsInOrder`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    def digest(self, low: int, high: int) -> bytes:
        """See `ItemsInOrder.digest`."""
        return short_digest(_bytes(self._text[low:high]))

    def show(self, index: int) -> str:
        """See `ItemsInOrder.show`."""
        return _around(self._text, index)


def first_difference(versions: Iterable[Sequence[object]]) -> int | None:
    """Return the first index at which not all are equal; a version that has ended differs.

    >>> first_difference([["a", "b"], ["a", "c"], ["a"]])
    1
    """
    rows = zip_longest(*versions)
    return next((index for index, row in enumerate(rows) if len(set(row)) > 1), None)


def excerpts(lines: Sequence[str]) -> list[str]:
    """Return excerpts of lines that differ, around the first character that does."""
    begin = first_difference(lines) or 0
    return [_around(line, begin) for line in lines]


def find_first(meet: Meet, mine: ItemsInOrder | None, representatives: Sequence[int]) -> int | None:
    """Return the first item that differs between the representatives.

    All members call this together and return the same. None: no difference was found.

    Args:
      meet: one round.
      mine: this process's items; None if it is not a representative.
      representatives: the processes whose items are compared.
    """
    answers = meet(b"" if mine is None else b"%d" % len(mine))
    low, high = 0, highest(answers, representatives)
    while high - low > 1:
        pieces = min(_PIECES, high - low)
        cuts = [low + (high - low) * n // pieces for n in range(pieces + 1)]
        brought = b"" if mine is None else b"".join(mine.digest(*cut) for cut in pairwise(cuts))
        answers = meet(brought)
        versions = [_digests(answers[process]) for process in representatives]
        piece = first_difference(versions)
        if piece is None:
            return None
        low, high = cuts[piece], cuts[piece + 1]
    return low if high > low else None


def find_line(
    meet: Meet, mine: Sequence[str] | None, representatives: Sequence[int]
) -> tuple[int, dict[int, str]] | None:
    """Return the first line that differs: its index, and each representative's line.

    `find_first` finds the line, and then the character in it.
    """
    index = find_first(meet, None if mine is None else TextLines(mine), representatives)
    if index is None:
        return None
    line = None if mine is None else TextLines(mine).show(index)
    character = find_first(meet, None if line is None else Text(line), representatives) or 0
    shown = ""
    if mine is not None and line is not None:
        shown = Text(line).show(character) if index < len(mine) else ENDED
    answers = meet(_bytes(shown))
    return index, {
        process: answers[process].decode(errors="replace") for process in representatives
    }


def _around(text: str, index: int) -> str:
    """Return the text around a character; of a packed line, also the fields before it.

    What is left out depends only on what comes before `index`, so that texts that differ there have
    different excerpts.
    """
    fields = text[:index].split(BETWEEN)[:-1]
    if fields:
        shown = [field if len(field) <= _BEFORE else f"...{field[-_BEFORE:]}" for field in fields]
        start = sum(map(len, fields)) + len(fields)
        return BETWEEN.join([*shown, _around(text[start:], index - start)])
    begin = 0 if index < _WIDTH * 3 // 4 else index - _WIDTH // 3
    end = begin + _WIDTH
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def _digests(joined: bytes) -> list[bytes]:
    return [joined[at : at + SHORT_BYTES] for at in range(0, len(joined), SHORT_BYTES)]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
