"""Tokens of the text forms of meshes and layouts: names, numbers, runs of ids.

A name that is a plain word stands for itself; any other is quoted as a JSON string, so that every
name survives the round trip. Long rows of ids are written as runs: `0..3,8..11`, `7..0`, `5x4`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UsageError

_WORD = r"[A-Za-z_][A-Za-z0-9_.]*"
_TOKEN = re.compile(rf'\s*("(?:[^"\\]|\\.)*"|{_WORD}|\d+|\.\.|[-+,=@|:()])', re.ASCII)

_MOST_LISTED = 1 << 24  # upper bound on expanded ids


def quote(name: str) -> str:
    """Return `name` as written in a text form."""
    import json

    return name if re.fullmatch(_WORD, name, re.ASCII) else json.dumps(name)


def runs_to_text(ids: ArrayLike) -> str:
    """Write ids as runs of step 1 or -1.

    Example:
      >>> runs_to_text([0, 1, 2, 3, 9, 8, 7, 5])
      '0..3,9..7,5'
    """
    values = np.asarray(ids, dtype=np.int64)
    parts = []
    for start, stop in _runs(values):
        first, last = values[start], values[stop - 1]
        parts.append(f"{first}..{last}" if stop - start > 1 else f"{first}")
    return ",".join(parts)


def _runs(values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut into the longest pieces, left to right, whose steps are all +1 or all -1."""
    steps = np.diff(values)
    changes = [*(np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(steps)]
    start, edge = 0, 0
    while start < len(values):
        while edge < len(changes) - 1 and changes[edge] <= start:
            edge += 1
        is_run = start < len(steps) and abs(steps[start]) == 1
        stop = max(changes[edge], start + 1) + 1 if is_run else start + 1
        yield start, stop
        start = stop


def _expand(firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of runs: [0, 9], [2, 7] → [0, 1, 2, 9, 8, 7]."""
    counts = np.abs(lasts - firsts) + 1
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ids: NDArray[np.int64] = np.repeat(np.sign(lasts - firsts), counts) * steps
    ids += np.repeat(firsts, counts)
    return ids


def repeats_to_text(values: ArrayLike) -> str:
    """Write values as counts of repeats.

    Example:
      >>> repeats_to_text([0, 0, 0, 1, 2, 2])
      '0x3,1,2x2'
    """
    row = np.asarray(values, dtype=np.int64)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(row)) + 1, [len(row)]])
    counts = np.diff(edges)
    firsts = row[edges[:-1]]
    return ",".join(
        f"{value}x{count}" if count > 1 else f"{value}"
        for value, count in zip(firsts.tolist(), counts.tolist(), strict=True)
    )


class Words:
    """A tokeniser for one text form; every error shows the text and the position."""

    def __init__(self, text: str, kind: str) -> None:
        if not isinstance(text, str):
            raise UsageError(f"{kind}.parse takes the text of a {kind}, not {text!r}")
        self._text, self._kind = text, kind
        self._words: list[tuple[str, int]] = []
        place, end = 0, len(text.rstrip())
        while place < end:
            match = _TOKEN.match(text, place)
            if match is None:
                raise self._error(place, "no word of a text form begins here")
            self._words.append((match[1], match.start(1)))
            place = match.end()
        self._at = 0

    def peek(self) -> str:
        """The next token, or "" at the end."""
        return self._words[self._at][0] if self._at < len(self._words) else ""

    def take(self) -> str:
        """Consume and return the next token."""
        word = self.peek()
        self._at += 1
        return word

    def skip(self, word: str) -> bool:
        """Consume `word` if it is next."""
        if self.peek() != word:
            return False
        self._at += 1
        return True

    def expect(self, word: str) -> None:
        """Consume `word`, which must be next."""
        if not self.skip(word):
            raise self.error(f"{word!r} expected")

    def name(self) -> str:
        """A name, plain or quoted."""
        import json

        word = self.peek()
        if word.startswith('"'):
            try:
                name = json.loads(word)
            except ValueError:
                raise self.error("bad quoted name") from None
            self._at += 1
            return str(name)
        if not re.fullmatch(_WORD, word, re.ASCII):
            raise self.error("a name expected")
        return self.take()

    def integer(self) -> int:
        """A number of at most 64 bits, not negative."""
        if not self.peek().isdigit():
            raise self.error("a number expected")
        return self._number(self.peek())

    def _number(self, digits: str) -> int:
        """Consume the next word; return its value, given its digits."""
        if len(digits) > 19 or int(digits) >= 1 << 63:
            raise self.error("a number below 2^63 expected")
        self._at += 1
        return int(digits)

    def runs(self, limit: int) -> NDArray[np.int64]:
        """The ids of `runs_to_text`; at most `limit` of them."""
        limit = min(limit, _MOST_LISTED)
        firsts: list[int] = []
        lasts: list[int] = []
        total = 0
        while True:
            firsts.append(self.integer())
            lasts.append(self.integer() if self.skip("..") else firsts[-1])
            total += abs(lasts[-1] - firsts[-1]) + 1
            if total > limit:
                raise self.error(f"more than {limit} ids")
            if not self.skip(","):
                return _expand(np.array(firsts), np.array(lasts))

    def repeats(self, limit: int) -> tuple[list[int], list[int]]:
        """The values of `repeats_to_text` and their counts, in all at most `limit`."""
        values: list[int] = []
        counts: list[int] = []
        total = 0
        while True:
            values.append(self.integer())
            # `0x3` reads as the number 0 and the word x3
            repeat = re.fullmatch(r"x(\d+)", self.peek(), re.ASCII)
            counts.append(self._number(repeat[1]) if repeat else 1)
            total += counts[-1]
            most = min(limit, _MOST_LISTED) if len(counts) > 1 else limit
            if total > most:
                raise self.error(f"more than {most} values")
            if not self.skip(","):
                return values, counts

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at < len(self._words):
            raise self.error("end of the text expected")

    def error(self, wanted: str) -> UsageError:
        """Return an error about the next token."""
        at_end = self._at >= len(self._words)
        return self._error(len(self._text) if at_end else self._words[self._at][1], wanted)

    def _error(self, place: int, wanted: str) -> UsageError:
        shown = self._text if len(self._text) <= 200 else self._text[:200] + "…"
        return UsageError(
            f"{self._kind}.parse({shown!r}): {wanted} at character {place}, "
            f"found {self._text[place : place + 12]!r}"
        )
