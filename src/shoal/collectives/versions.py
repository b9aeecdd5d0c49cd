"""Group processes by their version of a value that should be equal, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.runtime.rules.first_difference import MAX_GROUPS_SHOWN


def groups_of(versions: Mapping[int, bytes | str]) -> list[list[int]]:
    """Return the groups of processes that agree; the first process's group first.

    >>> groups_of({0: "a", 1: "b", 2: "a"})
    [[0, 2], [1]]
    """
    groups: dict[bytes | str, list[int]] = {}
    for process in sorted(versions):
        groups.setdefault(versions[process], []).append(process)
    return list(groups.values())


def representatives_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the first process of each group, for as many groups as a message shows."""
    return [group[0] for group in groups[:MAX_GROUPS_SHOWN]]


def version_rows(
    shown: Sequence[str], groups: Sequence[Sequence[int]]
) -> list[tuple[str, Sequence[int]]]:
    """Return each group's version of the first differing item, with the group's processes.

    A group that agrees with another there but differs later is marked, so that all texts are
    distinct. Groups without a representative share a row.

    >>> version_rows(["1", "2", "1"], [[0, 3], [1], [2]])
    [('1', [0, 3]), ('2', [1]), ('1 (differs later)', [2])]
    """
    again = [list(shown[:n]).count(text) for n, text in enumerate(shown)]
    later = " (differs later)"
    marks = ["", later, *(f" (differs later, {n})" for n in range(2, len(shown)))]
    rows = [(text + marks[n], group) for text, n, group in zip(shown, again, groups, strict=False)]
    if rest := groups[len(shown) :]:
        versions = "1 more version" if len(rest) == 1 else f"{len(rest)} more versions"
        rows.append((versions, sorted(p for group in rest for p in group)))
    return rows
