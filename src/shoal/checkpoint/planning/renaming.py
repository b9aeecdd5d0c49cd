"""Find subtrees that have another name in the checkpoint, and the `rename=` that maps them.

Missing leaves are matched with unexpected ones: first whole subtrees from the root down, by the
names below them; then the remaining leaves one by one, by common suffixes of their names. Only what
fits one place is matched, and only if nothing else fits there: one of two moments of an optimizer
would be loaded as the other. Pairs with the same last component are lifted to their parents, unless
a leaf below was found already::

    enc/0/w  enc/1/w  enc/new      encoder/0/w  encoder/1/w      → {"enc": "encoder"}
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice

Path = tuple[str, ...]
Shapes = Mapping[str, tuple[int, ...] | None]  # by name of the leaf; None: any

_MOST_PAIRS = 8
_MOST_COMPARED = 16  # candidates with the same suffix
_MOST_WORK = 300_000  # leaf visits: limits the search among thousands of similar names


def renames(missing: Shapes, unexpected: Shapes, found: Iterable[str]) -> dict[str, str]:
    """Return prefixes of names in the target → prefixes in the checkpoint, that find leaves.

    Args:
      missing: the leaves of the target that the checkpoint lacks.
      unexpected: the leaves of the checkpoint that the target lacks.
      found: the other leaves of the target; no renamed prefix contains one of them.

    >>> saved = {"encoder/0/w": (2,), "encoder/1/w": (2,), "head": (3,)}
    >>> renames({"enc/0/w": (2,), "enc/1/w": (2,), "enc/new": ()}, saved, ["step"])
    {'enc': 'encoder'}
    """
    matching = _PrefixPairs(missing, unexpected, found)
    if missing and unexpected:
        matching.whole(())
        matching.leaves()
    matching.lift()
    names = Counter(matching.governing(path) for path in matching.target)
    chosen = sorted(matching.pairs)
    if len(chosen) > _MOST_PAIRS:  # a function expresses it better
        chosen = [prefix for prefix in chosen if names[prefix] * _MOST_PAIRS > len(missing)]
    return {"/".join(prefix): "/".join(matching.pairs[prefix]) for prefix in chosen}


def governing(rename: Iterable[str], name: str) -> str | None:
    """Return the longest prefix of a name, at whole components; None if there is none.

    >>> governing(["", "enc", "enc/0"], "enc/0/w"), governing(["enc"], "encoder/w")
    ('enc/0', None)
    """
    fitting = (p for p in rename if p == "" or name == p or name.startswith(f"{p}/"))
    return max(fitting, key=len, default=None)


def subtrees(unexpected: Iterable[str], leaves: Iterable[str]) -> list[str]:
    """Return the largest subtrees of a checkpoint that share no leaf with the target.

    >>> subtrees(["a/b/w", "a/b/x", "c/w"], ["a/b/w", "a/b/x", "a/d", "c/w"])
    ['a/b', 'c']
    """
    odd = {_path(name) for name in unexpected}
    wanted = {
        path[:end] for name in leaves if (path := _path(name)) not in odd for end in _ends(path)
    }
    tops = {
        next((path[:n] for n in _ends(path) if n and path[:n] not in wanted), ()) for path in odd
    }
    return sorted("/".join(path) for path in tops - odd if path)


class _PrefixPairs:
    """The pairs of prefixes found so far."""

    def __init__(self, missing: Shapes, unexpected: Shapes, found: Iterable[str]) -> None:
        self.target = {_path(name): shape for name, shape in missing.items()}
        self.stored = {_path(name): shape for name, shape in unexpected.items()}
        self.fixed = {path[:end] for name in found for path in [_path(name)] for end in _ends(path)}
        self.free = set(self.stored)
        self.work = 0
        self.pairs: dict[Path, Path] = {}
        self.left: list[Path] = []  # leaves of the target without a pair
        self.below: defaultdict[Path, list[Path]] = defaultdict(list)
        self.ending = _by_ending(self.stored)
        self.wanted = _by_ending(self.target)
        for path in self.target:
            for end in _ends(path):
                self.below[path[:end]].append(path)

    def whole(self, prefix: Path) -> None:
        """Find a prefix in the checkpoint that contains all that is missing below this one."""
        names = self.below[prefix]
        if prefix in self.target or self.work > _MOST_WORK:
            self.left += names or [prefix]
            return
        if prefix not in self.fixed:
            other = self._whole(prefix, names)
            if other is not None:
                self._pair(prefix, other, names)
                return
        for child in sorted({path[: len(prefix) + 1] for path in names}):
            self.whole(child)

    def _whole(self, prefix: Path, names: list[Path]) -> Path | None:
        ends = [path[len(prefix) :] for path in names]
        rarest = min(ends, key=lambda end: len(self.ending.get(end, ())))
        some = islice(self.ending.get(rarest, ()), _MOST_COMPARED)
        fitting = [
            place
            for place in (path[: -len(rarest)] for path in some)
            if all(self._fits((*prefix, *end), (*place, *end)) for end in ends)
        ]
        if len(fitting) == 1 and self._is_only(prefix, fitting[0], ends):
            return fitting[0]
        return None

    def leaves(self) -> None:
        """Match the remaining leaves by longest common suffix."""
        for path in self.left:
            for begin in range(len(path) if self.work <= _MOST_WORK else 0):
                end = path[begin:]
                some = islice(self.ending.get(end, ()), _MOST_COMPARED)
                fitting = [place for place in some if self._fits(path, place)]
                if not fitting:
                    continue
                if len(fitting) == 1 and self._is_only(
                    path[:begin], fitting[0][: -len(end)], [end]
                ):
                    self._pair(path, fitting[0], [path])
                break

    def _is_only(self, prefix: Path, place: Path, ends: list[Path]) -> bool:
        """Return whether nothing else that is missing fits a place, below another prefix."""
        rarest = min(ends, key=lambda end: len(self.wanted.get(end, ())))
        some = islice(self.wanted.get(rarest, ()), _MOST_COMPARED)
        return not any(
            other != prefix
            and all(
                (*other, *end) in self.target and self._fits((*other, *end), (*place, *end))
                for end in ends
            )
            for other in (path[: -len(rarest)] for path in some)
        )

    def lift(self) -> None:
        """Rename parents instead of children where that renames all paired children."""
        while True:
            parents: defaultdict[Path, defaultdict[Path, list[Path]]]
            parents = defaultdict(lambda: defaultdict(list))  # its pair → its paired children
            for path, other in self.pairs.items():
                if path and other and path[-1] == other[-1] and self._can_be(path[:-1], other[:-1]):
                    parents[path[:-1]][other[:-1]].append(path)
            if not parents:
                return
            for parent, others in parents.items():
                other = max(sorted(others), key=lambda place: len(others[place]))
                for child in others[other]:
                    del self.pairs[child]
                self.pairs[parent] = other

    def _can_be(self, prefix: Path, other: Path) -> bool:
        return prefix not in self.fixed and self.pairs.get(prefix, other) == other

    def governing(self, path: Path) -> Path | None:
        """Return the prefix whose pair finds a leaf; None if none does."""
        for end in reversed([*_ends(path), len(path)]):
            other = self.pairs.get(path[:end])
            if other is not None:
                return path[:end] if (*other, *path[end:]) in self.stored else None
        return None

    def _fits(self, path: Path, other: Path) -> bool:
        self.work += 1
        if other not in self.free:
            return False
        wanted, stored = self.target[path], self.stored[other]
        return wanted is None or stored is None or wanted == stored

    def _pair(self, prefix: Path, other: Path, names: Iterable[Path]) -> None:
        self.pairs[prefix] = other
        self.free -= {(*other, *path[len(prefix) :]) for path in names}


def _path(name: str) -> Path:
    return tuple(name.split("/"))


def _ends(path: Path) -> range:
    """Return the lengths of the proper prefixes of a path."""
    return range(len(path))


def _by_ending(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return the paths by each of their endings."""
    by_ending: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        for begin in range(len(path)):
            by_ending[path[begin:]].append(path)
    return by_ending
