"""Match a target with a checkpoint. Without JAX.

A *wish* is a leaf to restore. All mismatches are reported at once, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.checkpoint.format.records import LeafRecord, Manifest
from shoal.checkpoint.planning.casting import is_lossless
from shoal.checkpoint.restoring.missing import Missing, Spare, problem_lines
from shoal.checkpoint.restoring.numbers import wrong_number
from shoal.checkpoint.tree.dtypes import dtype_of
from shoal.checkpoint.tree.names import ROOT
from shoal.errors import RestoreMismatch, UsageError, UsageTypeError, nearest
from shoal.plan import patterns

OPTIONS = ("only", "rename", "dtype", "form", "mode", "most_bytes", "merge")
DTYPES = ("exact", "safe", "any")
FORMS = ("tree", "dicts", "names")
HELD = ("array", "key")  # kinds of leaves that can be placed on devices
_MOST_LISTED = 50

Rename = Mapping[str, str] | Callable[[str], str]


class TargetOptions(NamedTuple):
    """How to interpret a target."""

    only: tuple[str, ...] | None = None  # patterns; None: all
    rename: Rename | None = None
    dtype: str = "exact"

    def takes(self, name: str) -> bool:
        """Is this leaf to be restored?"""
        return self.only is None or any(patterns.matches(one, name) for one in self.only)

    def stored_name(self, name: str) -> str:
        """Return the name in the checkpoint of a leaf of the target."""
        if self.rename is None:
            return name
        if callable(self.rename):
            return self.rename(name)
        for prefix in sorted(self.rename, key=len, reverse=True):
            if name == (prefix or ROOT):
                return self.rename[prefix] or ROOT
            if name.startswith(f"{prefix}/") or prefix == "":
                rest = name[len(prefix) :].lstrip("/")
                return f"{self.rename[prefix]}/{rest}".lstrip("/")
        return name


class TargetLeaf(NamedTuple):
    """The requirements of one leaf of a target."""

    name: str
    place: Any = None  # placement, opaque here; None: host memory
    shape: tuple[int, ...] | None = None  # None: as stored
    dtype: np.dtype[Any] | None = None  # None: as stored; arrays only
    impl: str = ""  # generator of PRNG keys
    is_layout: bool = False  # only a layout; may stand for a whole subtree
    has_dims: bool = False  # has a rank, unlike a mesh or function
    is_array: bool = False  # must be an array or a key
    is_function: bool = False  # a function: it may be a placement, or a leaf by chance
    text: str = ""  # must be equal on all processes
    hint: str = ""  # what to write instead, if nothing like it was saved

    @property
    def line(self) -> str:
        """One line to compare between processes."""
        said = f" {self.dtype or self.impl}{list(self.shape)}" if self.shape is not None else ""
        return f"{self.name}:{said} {self.text}".rstrip()


class Wish(NamedTuple):
    """A leaf to restore."""

    leaf: int  # its number in the manifest
    place: Any  # None: on the host
    dtype: np.dtype[Any] | None  # dtype to cast to; None: as stored


@dataclass(frozen=True)
class Wishes:
    """All leaves to restore, and where they belong in the target."""

    wishes: tuple[Wish, ...]
    by_target: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For each leaf of the target that is restored, its wishes: several for a whole subtree."""
    below: Mapping[int, str] = field(default_factory=dict)
    """The leaves of the target that stand for a subtree, and its name in the checkpoint."""


def options_of(
    operation: str, only: object, rename: object, dtype: object, *, has_target: bool
) -> TargetOptions:
    """Check the options of a restore.

    Raises:
      UsageError: one is wrong.
    """
    if isinstance(only, str):
        only = (only,)
    if only is not None:
        if not isinstance(only, Iterable):
            raise UsageTypeError(f"{operation}: only={only!r} must be patterns such as 'params/**'")
        only = tuple(only)
        if not all(isinstance(one, str) and one for one in only):
            raise UsageTypeError(f"{operation}: only={only!r} must be patterns such as 'params/**'")
        only = tuple(sorted(only))  # the order of a set differs between processes
        if wrong := [one for one in only if not patterns.is_pattern(one)]:
            raise UsageError(
                f"{operation}: only={wrong!r}: the characters in [ ] are not a valid range"
            )
    if rename is not None and not has_target:
        raise UsageError(f"{operation}: rename= maps names of a target, but no target was given")
    if isinstance(rename, Mapping):
        rename = dict(rename)
        if not all(isinstance(one, str) for pair in rename.items() for one in pair):
            raise UsageTypeError(f"{operation}: rename= must map prefixes of names to others")
    elif rename is not None and not callable(rename):
        raise UsageTypeError(f"{operation}: rename={rename!r} must be a mapping or a function")
    return TargetOptions(only, rename, option_value(operation, "dtype", dtype, DTYPES))


def option_value(operation: str, name: str, value: object, known: Sequence[str]) -> str:
    """Return the value of an option.

    Raises:
      UsageError: it is not one of the known values.
    """
    if not isinstance(value, str) or value not in known:
        words = ", ".join(map(repr, known))
        raise UsageError(
            f"{operation}: {name}={value!r} is not one of {words}{nearest(value, known)}"
        )
    return value


def check_names(operation: str, options: Iterable[str]) -> None:
    """Raise a TypeError, as Python does, for an unknown option."""
    for name in options:
        if name not in OPTIONS:
            words = ", ".join(OPTIONS)
            raise UsageTypeError(
                f"{operation}: there is no {name}=, but {words}{nearest(name, OPTIONS)}"
            )


def all_of(manifest: Manifest, options: TargetOptions) -> Wishes:
    """Return wishes for all leaves that `only` takes, as stored, on the host.

    Raises:
      RestoreMismatch: it takes none.
    """
    taken = [n for n, leaf in enumerate(manifest.leaves) if options.takes(leaf.name)]
    if not taken and options.only and manifest.leaves:
        raise _no_such(options, [leaf.name for leaf in manifest.leaves])
    return Wishes(tuple(Wish(number, None, None) for number in taken))


def match(
    manifest: Manifest,
    target: Sequence[TargetLeaf],
    options: TargetOptions,
    fit: Callable[[TargetLeaf, LeafRecord, np.dtype[Any] | None], tuple[Any, str]],
) -> Wishes:
    """Find each leaf of a target in the checkpoint.

    Args:
      fit: returns the placement of a leaf that is an array or a key, and any problem with it.

    Raises:
      RestoreMismatch: leaves are missing, unexpected, or do not fit; names all.
    """
    matching = _Matching(manifest, options, fit)
    for number, one in enumerate(target):
        if one.is_layout or options.takes(one.name):
            matching.find(number, one)
    matching.rest(target)
    matching.finish()
    return Wishes(tuple(matching.wishes), matching.by_target, matching.below)


class _Matching:
    """The matches found so far, and the problems."""

    def __init__(self, manifest: Manifest, options: TargetOptions, fit: Callable[..., Any]) -> None:
        self.leaves, self.options, self.fit = manifest.leaves, options, fit
        self.number = {leaf.name: number for number, leaf in enumerate(manifest.leaves)}
        self.wishes: list[Wish] = []
        self.by_target: dict[int, tuple[int, ...]] = {}
        self.below: dict[int, str] = {}
        self.used: set[int] = set()
        self.problems: list[str] = []
        self.missing: list[Missing] = []
        self.names: list[str] = []  # of the target
        self.kinds: dict[str, list[str]] = {"unexpected": [], "wrong_shape": [], "wrong_dtype": []}

    def find(self, number: int, target: TargetLeaf) -> None:
        """Find one leaf of the target, or the leaves of a subtree."""
        stored = self.options.stored_name(target.name)
        if stored in self.number and (target.name != ROOT or not target.is_layout):
            if self.options.takes(target.name):
                self._take(number, target, [self.number[stored]])
            return
        below = []
        if target.is_layout:
            start = "" if stored == ROOT else f"{stored}/"
            below = [n for name, n in self.number.items() if name.startswith(start)]
        is_all = target.is_layout and stored == ROOT  # even if the tree has no leaves
        if not below and not is_all:
            if target.is_function and not self.options.takes(target.name):
                return  # part of the program, never saved
            detail = Missing(target.name, stored, target.shape, target.is_layout, target.hint)
            self.missing.append(detail)
            return
        before = "" if target.name == ROOT else f"{target.name}/"
        skip = 0 if stored == ROOT else len(stored) + 1
        taken = [n for n in below if self.options.takes(before + self.leaves[n].name[skip:])]
        self.used |= set(below)
        if taken or not below:
            self.below[number] = stored
            self._take(number, target, taken)

    def _take(self, number: int, target: TargetLeaf, leaves: Sequence[int]) -> None:
        first = len(self.wishes)
        for leaf in leaves:
            self.used.add(leaf)
            self.wishes.append(self._wish(target, leaf))
        self.by_target[number] = tuple(range(first, len(self.wishes)))

    def _wish(self, target: TargetLeaf, leaf: int) -> Wish:
        record = self.leaves[leaf]
        if record.kind not in HELD:
            name = self.options.stored_name(target.name)  # otherwise it stands for a subtree
            if target.has_dims and record.name == name != ROOT and record.kind != "none":
                detail = f"was saved as {record.kind}, which is not an array"
                detail += f"; give any {record.kind} in place of the layout"
                self._wrong("wrong_dtype", target, detail)
            return self._number(target, leaf) if target.is_array else Wish(leaf, None, None)
        if target.shape is not None and target.shape != record.shape:
            detail = f"has shape {record.shape} as saved, not {target.shape}"
            self._wrong("wrong_shape", target, detail)
            return Wish(leaf, None, None)
        dtype = self._dtype(target, record)
        place = self._place(target, record, dtype)
        stored = dtype_of(record.dtype)
        is_kept = dtype is None or dtype == stored  # `in (None,)` would be true of float64
        return Wish(leaf, place, None if is_kept else dtype)

    def _number(self, target: TargetLeaf, leaf: int) -> Wish:
        """Return the wish for an array where a number was saved, such as a step."""
        record, dtype = self.leaves[leaf], target.dtype
        kind, detail = wrong_number(record, target.shape or (), dtype, self.options.dtype)
        if kind:
            self._wrong(kind, target, detail)
            return Wish(leaf, None, None)
        return Wish(leaf, self._place(target, record, dtype), dtype)

    def _place(self, target: TargetLeaf, record: LeafRecord, dtype: np.dtype[Any] | None) -> Any:
        place, why = self.fit(target, record, dtype)
        if why:
            self.problems.append(f"{record.name}: {why}")
        return place

    def _dtype(self, target: TargetLeaf, record: LeafRecord) -> np.dtype[Any] | None:
        """Return the dtype of the result, if it is an array."""
        if record.kind == "key" or target.impl:
            kind = f"key<{record.impl}>" if record.kind == "key" else record.dtype
            wanted = f"key<{target.impl}>" if target.impl else str(target.dtype or kind)
            if kind != wanted:
                self._wrong("wrong_dtype", target, f"is {kind} as saved, not {wanted}")
            return None
        stored = dtype_of(record.dtype)
        if target.dtype is None or target.dtype == stored:
            return stored
        policy = self.options.dtype
        is_text = {stored.kind, target.dtype.kind} & {*"SUO"}  # may or may not parse as a number
        is_possible = stored.kind == target.dtype.kind or not is_text
        is_possible = is_possible and np.can_cast(stored, target.dtype, "unsafe")
        if (policy == "any" and is_possible) or (
            policy == "safe" and is_lossless(stored, target.dtype)
        ):
            return target.dtype
        detail = f"is {stored} as saved, not {target.dtype}"
        if not is_possible:
            detail += "; no cast exists"
        elif policy == "exact":
            safe = is_lossless(stored, target.dtype)
            detail += f"; dtype={'safe' if safe else 'any'!r} casts it"
        else:
            detail += "; the cast may lose something: dtype='any' does it"
        self._wrong("wrong_dtype", target, detail)
        return None

    def _wrong(self, kind: str, target: TargetLeaf, detail: str) -> None:
        self.kinds[kind].append(target.name)
        self.problems.append(f"{target.name}: {detail}")

    def rest(self, target: Sequence[TargetLeaf]) -> None:
        """Find the leaves in the checkpoint that the target lacks."""
        self.names = [one.name for one in target]
        names = set(self.names)
        back = {self.options.stored_name(name) for name in names}
        if self.options.only is not None:  # names that `only` leaves out belong to the target
            back |= names
        for number, leaf in enumerate(self.leaves):
            if number not in self.used and leaf.name not in back and self.options.takes(leaf.name):
                self.kinds["unexpected"].append(leaf.name)

    def _unmatched(self) -> list[str]:
        """Describe leaves that only the target or only the checkpoint has."""
        options, missing = self.options, {one.name for one in self.missing}
        spare = {leaf.name: leaf.shape for n, leaf in enumerate(self.leaves) if n not in self.used}
        return problem_lines(
            self.missing,
            Spare(spare, list(self.number), self.kinds["unexpected"]),
            [name for name in self.names if name not in missing],
            None if callable(options.rename) else options.rename or {},
            lambda rename, name: options._replace(rename=rename).stored_name(name),
        )

    def finish(self) -> None:
        """Raise if there are any problems."""
        if self.missing or self.kinds["unexpected"]:
            self.problems += self._unmatched()
        if self.problems:
            raise mismatch(self.problems, missing=[one.name for one in self.missing], **self.kinds)
        if self.options.only and self.leaves and not self.wishes:
            raise _no_such(self.options, list(self.number))


def mismatch(problems: Sequence[str], **kinds: Iterable[str]) -> RestoreMismatch:
    """Return the error that lists all problems."""
    count = len(problems)
    listed = [*problems[:_MOST_LISTED]]
    if count > len(listed):
        listed.append(f"and {count - len(listed)} more")
    text = problems[0] if count == 1 else f"{count} problems\n  - " + "\n  - ".join(listed)
    detail = f"restore: the target does not match the checkpoint: {text}\nnothing was restored"
    return RestoreMismatch(detail, problems=problems, **kinds)


def _no_such(options: TargetOptions, names: Sequence[str]) -> RestoreMismatch:
    only = options.only or ()
    near = nearest(only[0], names)
    detail = f"only={list(only)!r} takes none of the {len(names)} leaves{near}"
    return mismatch([detail], missing=only)
