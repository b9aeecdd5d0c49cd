"""Processes in a sentence: `processes 0, 2-4`."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.runtime.rules.point import Ranges, ranges_of


def listed(processes: Iterable[int], most: int | None = None) -> str:
    """Return processes as text; after `most` ranges, how many more there are.

    >>> listed([7]), listed([0, 2, 3, 4]), listed([0, 2, 4, 6], most=3)
    ('process 7', 'processes 0, 2-4', 'processes 0, 2, 4 and 1 more')
    """
    return listed_ranges(ranges_of(sorted(processes)), most)


def listed_ranges(ranges: Ranges, most: int | None = None) -> str:
    """Return `listed` of the processes in inclusive ranges, in order."""
    if not ranges:
        return "no process"
    noun = "process" if is_one(ranges) else "processes"
    return f"{noun} {_numbers(ranges, most)}"


def is_one(ranges: Ranges) -> bool:
    """Return whether ranges hold one process."""
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def numbers_of(processes: Iterable[int], most: int | None = None) -> str:
    """Return `listed` without its noun: `0, 2-4`."""
    return _numbers(ranges_of(sorted(processes)), most)


def _numbers(ranges: Ranges, most: int | None) -> str:
    shown = ranges if most is None else ranges[:most]
    left = sum(last - first + 1 for first, last in ranges[len(shown) :])
    return ", ".join(map(range_text, shown)) + (f" and {left} more" if left else "")


def range_text(ends: tuple[int, int]) -> str:
    """Return `0-2`, or `5` if both ends are the same."""
    first, last = ends
    return f"{first}" if first == last else f"{first}-{last}"
