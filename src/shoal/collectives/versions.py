"""Group processes by their version of a value that should be equal, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.runtime.failures.comparison import ShownSide, shown_first
from shoal.runtime.rules.first_difference import MAX_GROUPS_SHOWN


def groups_of(versions: Mapping[int, bytes | str]) -> list[list[int]]:
    """Return the groups of processes that agree: those that a message shows first.

    >>> groups_of({0: "a", 1: "b", 2: "a"})
    [[1], [0, 2]]
    """
    groups: dict[bytes | str, list[int]] = {}
    for process in sorted(versions):
        groups.setdefault(versions[process], []).append(process)
    return shown_first(groups.values(), MAX_GROUPS_SHOWN)


def representatives_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the first process of each group, for as many groups as a message shows."""
    return [group[0] for group in groups[:MAX_GROUPS_SHOWN]]


def version_rows(
    shown: Sequence[str], groups: Sequence[Sequence[int]], call: ShownSide
) -> list[ShownSide]:
    """Return each group's version of the first differing item, with the group's processes.

    A group that agrees with another there but differs later is marked, so that all texts are
    distinct. Groups without a representative share a row.

    >>> [row[:2] for row in version_rows(["1", "2", "1"], [[0, 3], [1], [2]], ShownSide(()))]
    [([0, 3], '1'), ([1], '2'), ([2], '1 (differs later)')]
    """
    again = [list(shown[:n]).count(text) for n, text in enumerate(shown)]
    later = " (differs later)"
    marks = ["", later, *(f" (differs later, {n})" for n in range(2, len(shown)))]
    rows = [
        call._replace(processes=group, said=text + marks[n])
        for text, n, group in zip(shown, again, groups, strict=False)
    ]
    rest = groups[len(shown) :]
    if rest:
        versions = "1 more version" if len(rest) == 1 else f"{len(rest)} more versions"
        who = sorted(p for group in rest for p in group)
        rows.append(call._replace(processes=who, said=versions, groups=len(rest)))
    return rows
