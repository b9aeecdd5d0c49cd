"""Processes in a sentence: `processes 0, 2-4`."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.runtime.wire.frames import ranges_of


def listed(processes: Iterable[int], most: int | None = None) -> str:
    """Return processes as text; after `most` ranges, how many more there are.

    >>> listed([7]), listed([0, 2, 3, 4]), listed([0, 2, 4, 6], most=3)
    ('process 7', 'processes 0, 2-4', 'processes 0, 2, 4 and 1 more')
    """
    numbers = sorted(processes)
    if not numbers:
        return "no process"
    noun = "process" if len(numbers) == 1 else "processes"
    return f"{noun} {numbers_of(numbers, most)}"


def numbers_of(processes: Iterable[int], most: int | None = None) -> str:
    """Return `listed` without its noun: `0, 2-4`."""
    numbers = sorted(processes)
    ranges = ranges_of(numbers)
    shown = ranges if most is None else ranges[:most]
    left = len(numbers) - sum(last - first + 1 for first, last in shown)
    return ", ".join(map(range_text, shown)) + (f" and {left} more" if left else "")


def range_text(ends: tuple[int, int]) -> str:
    """Return `0-2`, or `5` if both ends are the same."""
    first, last = ends
    return f"{first}" if first == last else f"{first}-{last}"
