"""Match a target with a checkpoint, and explain what it lacks. Without JAX.

A `LeafRequest` is a leaf to restore. All mismatches are reported at once, before anything is read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import numpy as np

from shoal.arguments import check_flags
from shoal.checkpoint.format.records import LeafRecord, Manifest
from shoal.checkpoint.planning.casting import is_lossless, wrong_number
from shoal.checkpoint.planning.renaming import governing, renames, subtrees
from shoal.checkpoint.tree.dtypes import dtype_of
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.checkpoint.tree.names import ROOT
from shoal.checkpoint.tree.nodes import branch_names
from shoal.errors import RestoreMismatchError, UsageError, UsageTypeError, nearest, with_article
from shoal.plan.patterns import Selection, escaped, leaving_out
from shoal.runtime.rules.spec_lines import SpecLine

HELD = ("array", "key")  # kinds of leaves that can be placed on devices
_MOST_LISTED, _MOST_KEPT = 50, 8
_MOST_GUESSED = 10  # names to suggest for
_WORD = "target"  # as `only`: all leaves of the target, whatever else was saved
_KINDS = {"none": "None", "per_process": "a PerProcess"}  # of leaves that stand for no other

Rename = Mapping[str, str] | Callable[[str], str]
Dtype = Literal["exact", "safe", "any"]
Form = Literal["tree", "dicts", "flat"]
Mode = Literal["auto", "direct", "exchange"]


class RestoreOptions(TypedDict, total=False):
    """The keywords of `restore` that its relatives take as well; it documents them."""

    only: str | Iterable[str] | None
    rename: Rename | None
    missing_ok: bool
    dtype: Dtype
    form: Form
    mode: Mode
    max_host_bytes: int | None
    merge: Callable[[list[Any]], Any] | None


OPTIONS = tuple(RestoreOptions.__annotations__)


class TargetOptions(NamedTuple):
    """How to interpret a target."""

    only: tuple[str, ...] | None = None  # patterns; None: all
    rename: Rename | None = None
    missing_ok: bool = False  # patterns and prefixes may take nothing
    dtype: str = "exact"

    def stored_name(self, name: str) -> str:
        """Return the name in the checkpoint of a leaf of the target."""
        if self.rename is None:
            return name
        if callable(self.rename):
            renamed = self.rename(name)
            if not isinstance(renamed, str):
                raise UsageTypeError(f"restore: rename({name!r}) returned {renamed!r}, not a name")
            return renamed
        prefix = governing(self.rename, name)
        if prefix is None:
            return name
        rest = ""
        if name != (prefix or ROOT):
            rest = name[len(prefix) :].lstrip("/")
        return f"{self.rename[prefix]}/{rest}".strip("/") or ROOT

    def is_word(self, names: Iterable[str]) -> bool:
        """Return whether `only` is "target", and no leaf is called so."""
        return self.only == (_WORD,) and _WORD not in names

    def selection(self, own: Sequence[str], others: Sequence[str] = ()) -> Selection:
        """Return which of the names `only` takes: `own` of the target, or `others`."""
        names = [*own, *others]
        return Selection(own if self.is_word(names) else self.only, names)

    def idle(self, selection: Selection, names: Sequence[str]) -> list[str]:
        """Return a line for each pattern of `only` and prefix of `rename` that takes nothing.

        Args:
          selection: of `only`.
          names: the leaves of the target.
        """
        if self.missing_ok:
            return []
        lines = [] if self.only is None else [f"only={line}" for line in selection.idle()]
        if not isinstance(self.rename, Mapping):
            return lines
        nodes = {node for name in names for node in _prefixes(name)} | {""}
        used = {governing(self.rename, name) for name in names}
        for index, prefix in enumerate(sorted(self.rename.keys() - used)):
            detail = f"longer prefixes take all leaves below {prefix!r}"
            if prefix not in nodes:
                detail = f"no leaf of the target is {prefix!r}, or below it"
                detail += nearest(prefix, sorted(nodes)) if index < _MOST_GUESSED else ""
            lines.append(f"rename={{{prefix!r}: {self.rename[prefix]!r}}}: {detail}")
        return lines


def _prefixes(name: str) -> list[str]:
    """Return a name and the names of all nodes above it.

    >>> _prefixes("a/b/c")
    ['a', 'a/b', 'a/b/c']
    """
    parts = name.split("/")
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


def _top(name: str, above: Collection[str]) -> str:
    """Return the highest node above a leaf, or the leaf, that is not `above` others.

    >>> _top("opt/0/mu", {"opt", "params"})
    'opt/0'
    """
    return next((node for node in _prefixes(name) if node not in above), name)


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
    is_free: bool | None = None  # JAX may move it (*uncommitted*); None: the placement decides
    is_function: bool = False  # a function: it may be a placement, or a leaf by chance
    is_none: bool = False
    is_number: bool = False  # as a target, for a number or an array of rank 0
    no_array: str = ""  # what it is instead of a target for arrays, and what to pass
    own: PerProcess | None = None  # a per-process value, whose classes are used
    text: str = ""  # must be equal on all processes
    hint: str = ""  # what to write instead, if nothing like it was saved

    @property
    def line(self) -> str:
        """One line to compare between processes: `w: float32[8,4] as data, - @ data=8`."""
        kind = f"key<{self.impl}>" if self.impl else self.dtype or "any"
        dims = "*" if self.shape is None else ",".join(map(str, self.shape))
        return SpecLine(path=self.name, dtype=str(kind), shape=f"[{dims}]", layout=self.text).packed


class LeafRequest(NamedTuple):
    """A leaf to restore."""

    leaf: int  # its number in the manifest
    place: Any  # None: on the host
    dtype: np.dtype[Any] | None  # dtype to cast to; None: as stored
    like: PerProcess | None = None  # has the classes of a per-process value; None: unknown
    is_free: bool = False  # JAX may move it from there (*uncommitted*)


class Fit(NamedTuple):
    """Where a leaf belongs."""

    place: Any  # None: on the host
    is_free: bool = False
    problem: str = ""


@dataclass(frozen=True)
class LeafRequests:
    """All leaves to restore, and where they belong in the target."""

    all: tuple[LeafRequest, ...]
    by_target: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For each restored leaf of the target, its requests in `all`: several for subtrees."""
    below: Mapping[int, str] = field(default_factory=dict)
    """The leaves of the target that stand for a subtree, and its name in the checkpoint."""


def options_of(operation: str, options: RestoreOptions, *, has_target: bool) -> TargetOptions:
    """Check the options of a restore that interpret its target.

    Raises:
      UsageError: one is wrong.
    """
    only, rename = options.get("only"), options.get("rename")
    missing_ok = options.get("missing_ok", False)
    if isinstance(only, str):
        only = (only,)
    if only is not None:
        if not isinstance(only, Iterable):
            raise UsageTypeError(f"{operation}: only={only!r} must be patterns such as 'params/**'")
        only = tuple(only)
        if not all(isinstance(pattern, str) and pattern for pattern in only):
            raise UsageTypeError(f"{operation}: only={only!r} must be patterns such as 'params/**'")
        only = tuple(sorted(only))  # the order of a set differs between processes
    if rename is not None and not has_target:
        raise UsageError(f"{operation}: rename= maps names of a target, but no target was given")
    if isinstance(rename, Mapping):
        rename = dict(rename)
        if not all(isinstance(name, str) for pair in rename.items() for name in pair):
            raise UsageTypeError(f"{operation}: rename= must map prefixes of names to others")
    elif rename is not None and not callable(rename):
        raise UsageTypeError(f"{operation}: rename={rename!r} must be a mapping or a function")
    check_flags(operation, missing_ok=missing_ok)
    policy = option_value(operation, "dtype", options.get("dtype", "exact"), get_args(Dtype))
    return TargetOptions(only, rename, missing_ok, policy)


def option_value(operation: str, name: str, value: object, known: Sequence[str]) -> str:
    """Return the value of an option.

    Raises:
      UsageError: it is not one of the known values.
    """
    if not isinstance(value, str) or value not in known:
        options = ", ".join(map(repr, known))
        raise UsageError(
            f"{operation}: {name}={value!r} is not one of {options}{nearest(value, known)}"
        )
    return value


def check_names(operation: str, options: Iterable[str]) -> None:
    """Raise a TypeError, as Python does, for an unknown option."""
    for name in options:
        if name not in OPTIONS:
            names = ", ".join(OPTIONS)
            raise UsageTypeError(
                f"{operation}: there is no {name}=, but {names}{nearest(name, OPTIONS)}"
            )


def all_of(manifest: Manifest, options: TargetOptions) -> LeafRequests:
    """Return requests for all leaves that `only` takes, as stored, on the host.

    Raises:
      RestoreMismatchError: one of its patterns takes none.
    """
    names = [leaf.name for leaf in manifest.leaves]
    if options.is_word(names):
        raise mismatch([f"only={_WORD!r} takes what the target has, but no target was given"])
    selection = options.selection(names)
    problems = options.idle(selection, ())
    if problems:
        raise mismatch(problems)
    taken = [index for index, name in enumerate(names) if name in selection.names]
    return LeafRequests(tuple(LeafRequest(index, None, None) for index in taken))


def match(
    manifest: Manifest,
    target: Sequence[TargetLeaf],
    options: TargetOptions,
    fit: Callable[[TargetLeaf, LeafRecord, np.dtype[Any] | None], Fit],
) -> LeafRequests:
    """Find each leaf of a target in the checkpoint.

    Args:
      fit: returns where a leaf that is an array or a key belongs, and any problem with that.

    Raises:
      RestoreMismatchError: leaves are missing, unexpected, or do not fit; names all.
    """
    matching = _Matching(manifest, options, fit, target)
    for index, leaf in enumerate(target):
        matching.find(index, leaf)
    matching.finish()
    return LeafRequests(tuple(matching.requests), matching.by_target, matching.below)


class _Matching:
    """The matches found so far, and the problems."""

    def __init__(
        self,
        manifest: Manifest,
        options: TargetOptions,
        fit: Callable[..., Fit],
        target: Sequence[TargetLeaf],
    ) -> None:
        self.leaves, self.options, self.fit = manifest.leaves, options, fit
        self.branches = branch_names(manifest.tree)
        self.number_of = {leaf.name: index for index, leaf in enumerate(manifest.leaves)}
        self.requests: list[LeafRequest] = []
        self.by_target: dict[int, tuple[int, ...]] = {}
        self.below: dict[int, str] = {}
        self.problems: list[str] = []
        self.missing: list[Missing] = []
        self.wrong_kind: list[str] = []  # None or a PerProcess on one side only
        self.kinds: dict[str, list[str]] = {"unexpected": [], "wrong_shape": [], "wrong_dtype": []}

        self.names = [leaf.name for leaf in target]
        self.stored = [options.stored_name(name) for name in self.names]
        self.found = list(map(self._found, target, self.stored))
        self.used = {leaf for matches in self.found for leaf in matches.values()}
        others = self._others()
        own: list[str] = []  # for a leaf that stands for a subtree, the leaves found there
        for name, matches in zip(self.names, self.found, strict=True):
            own += [*matches] or [name]
        self.selection = options.selection(own, others)
        self.known = {*own, *others}
        self.kinds["unexpected"] = [name for name in others if name in self.selection.names]

    def _found(self, target: TargetLeaf, stored: str) -> dict[str, int]:
        """Return the leaves in the checkpoint of one leaf of the target, by their names in it."""
        if stored in self.number_of and (target.name != ROOT or not target.is_layout):
            return {target.name: self.number_of[stored]}
        if not target.is_layout:
            return {}
        start = "" if stored == ROOT else f"{stored}/"
        before = "" if target.name == ROOT else f"{target.name}/"
        return {
            before + name[len(start) :]: index
            for name, index in self.number_of.items()
            if name.startswith(start)
        }

    def _others(self) -> list[str]:
        """Return the leaves in the checkpoint that the target lacks."""
        back = {*self.stored}
        if self.options.only is not None:  # names that `only` leaves out belong to the target
            back.update(self.names)
        spare = (leaf.name for n, leaf in enumerate(self.leaves) if n not in self.used)
        return [name for name in spare if name not in back]

    def find(self, index: int, target: TargetLeaf) -> None:
        """Take the leaves of one leaf of the target that `only` takes."""
        stored, matches = self.stored[index], self.found[index]
        is_whole = target.name in self.selection.names
        if stored in self.number_of and target.name in matches:
            if is_whole:
                self._take(index, target, [*matches.values()])
            return
        is_empty = target.is_layout and stored in self.branches  # a node without leaves
        if matches or is_empty:
            taken = [leaf for name, leaf in matches.items() if name in self.selection.names]
            if taken or not matches:
                self.below[index] = stored
                self._take(index, target, taken)
        elif is_whole:
            detail = Missing(target.name, stored, target.shape, target.is_layout, target.hint)
            self.missing.append(detail)

    def _take(self, index: int, target: TargetLeaf, leaves: Sequence[int]) -> None:
        first = len(self.requests)
        for leaf in leaves:
            self.requests.append(self._request(target, leaf))
        self.by_target[index] = tuple(range(first, len(self.requests)))

    def _request(self, target: TargetLeaf, leaf: int) -> LeafRequest:
        record = self.leaves[leaf]
        if record.kind not in HELD:
            name = self.options.stored_name(target.name)  # otherwise it stands for a subtree
            if target.has_dims and record.name == name != ROOT and record.kind != "none":
                detail = f"was saved as {record.kind}, which is not an array"
                detail += f"; pass any {record.kind} in place of the layout"
                self._wrong("wrong_dtype", target, detail)
            if target.is_array:
                return self._number(target, leaf)
            self._same_kind(target, record)
            return LeafRequest(leaf, None, None, target.own)
        self._same_kind(target, record)
        if self._is_no_target(target, record):
            return LeafRequest(leaf, None, None)
        if target.shape is not None and target.shape != record.shape:
            detail = f"has shape {record.shape} as saved, not {target.shape}"
            self._wrong("wrong_shape", target, detail)
            return LeafRequest(leaf, None, None)
        dtype = self._dtype(target, record)
        fit = self._fit(target, record, dtype)
        stored = dtype_of(record.dtype)
        is_kept = dtype is None or dtype == stored  # `in (None,)` would be true of float64
        return LeafRequest(leaf, fit.place, None if is_kept else dtype, is_free=fit.is_free)

    def _is_no_target(self, target: TargetLeaf, record: LeafRecord) -> bool:
        """Report a leaf of the target that stands for no array, such as a device.

        A number stands for a number, also for one that was saved as an array: `step=0`.
        """
        is_one = record.kind == "array" and not record.shape
        if not target.no_array or (target.is_number and is_one):
            return False
        saved = f"{with_article(record.kind)} of shape {record.shape}"
        detail = f"was saved as {saved}, but the target {target.no_array}"
        self._wrong("wrong_dtype", target, detail)
        return True

    def _same_kind(self, target: TargetLeaf, record: LeafRecord) -> None:
        """Report a leaf that would have another structure, or another class, than the target's."""
        # A layout may stand for None, which is a subtree without leaves; a function in a tree may
        # be a leaf that was not saved.
        own_name = self.options.stored_name(target.name) if target.is_function else ROOT
        may_be_empty = target.is_layout and (target.name == ROOT or record.name != own_name)
        if may_be_empty or target.is_array:
            return
        wanted = ""
        if target.is_none:
            wanted = "none"
        elif target.own is not None:
            wanted = "per_process"
        if wanted == record.kind or (not wanted and record.kind != "none"):
            return
        saved = _KINDS.get(record.kind, with_article(record.kind))
        detail = f"was saved as {saved}; pass {saved} in place of {_KINDS.get(wanted, 'it')}"
        if target.is_none and record.kind == "array":
            detail += ", or P() to replicate it"
        self._wrong("wrong_dtype", target, detail)
        self.wrong_kind.append(target.name)

    def _number(self, target: TargetLeaf, leaf: int) -> LeafRequest:
        """Return the request for an array where a number was saved, such as a step."""
        record, dtype = self.leaves[leaf], target.dtype
        kind, detail = wrong_number(record, target.shape or (), dtype, self.options.dtype)
        if kind:
            self._wrong(kind, target, detail)
            return LeafRequest(leaf, None, None)
        fit = self._fit(target, record, dtype)
        return LeafRequest(leaf, fit.place, dtype, is_free=fit.is_free)

    def _fit(self, target: TargetLeaf, record: LeafRecord, dtype: np.dtype[Any] | None) -> Fit:
        fit = self.fit(target, record, dtype)
        if fit.problem:
            self.problems.append(f"{record.name}: {fit.problem}")
        return fit

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
            needed = "safe" if is_lossless(stored, target.dtype) else "any"
            detail += f"; dtype={needed!r} casts it"
        else:
            detail += "; the cast may lose something: dtype='any' does it"
        self._wrong("wrong_dtype", target, detail)
        return None

    def _wrong(self, kind: str, target: TargetLeaf, detail: str) -> None:
        self.kinds[kind].append(target.name)
        self.problems.append(f"{target.name}: {detail}")

    def _unmatched(self) -> Unmatched:
        """Describe leaves that only the target or only the checkpoint has."""
        options, missing = self.options, {leaf.name for leaf in self.missing}
        spare = [leaf for n, leaf in enumerate(self.leaves) if n not in self.used]
        shapes = {leaf.name: leaf.shape for leaf in spare}
        dtypes = {leaf.name: leaf.dtype or leaf.kind for leaf in spare}
        return problem_lines(
            self.missing,
            spare=Spare(shapes, dtypes, list(self.number_of), self.kinds["unexpected"]),
            found=[name for name in self.names if name not in missing],
            rename=None if callable(options.rename) else options.rename or {},
            stored_name=lambda rename, name: options._replace(rename=rename).stored_name(name),
        )

    def finish(self) -> None:
        """Raise if there are any problems."""
        unmatched = self._unmatched()
        self.problems += unmatched.lines
        self.problems += self.options.idle(self.selection, self.names)
        if self.problems:
            kept = [*unmatched.missing, *self.wrong_kind]
            is_common = len(unmatched.unexpected) > 1 or (kept and self.options.is_word(self.known))
            remedy = self._in_both(unmatched, kept) if is_common else self._keeping(kept)
            missing = [leaf.name for leaf in self.missing]
            raise mismatch(self.problems, remedy, missing=missing, **self.kinds)

    def _in_both(self, unmatched: Unmatched, kept: Sequence[str]) -> str:
        """Return the `only=` that takes what both have; "" if a `rename=` would find more."""
        both = self.selection.names.difference(kept, unmatched.unexpected)
        if not both or ROOT in both or len(unmatched.missing) < len(self.missing):
            return ""
        is_whole = not kept and self.options.only is None
        word = ""
        if is_whole and _WORD not in self.known:
            word = f"only={_WORD!r}"
        above = {node for name in self.known - both for node in _prefixes(name)}
        tops = dict.fromkeys(_top(name, above) for name in sorted(both))
        only = [top if top in both else f"{escaped(top)}/**" for top in tops]
        text = f"only={only[0]!r}" if len(only) == 1 else f"only={only!r}"
        if len(only) > _MOST_KEPT:
            text, word = word or "only='NAME/**', for each NAME that both have,", ""
        what = "both have" if kept else "the target has"
        return f"{' or '.join(filter(None, [text, word]))} restores what {what}"

    def _keeping(self, names: Sequence[str]) -> str:
        """Return the `only=` under which such leaves stay as the target has them."""
        kept = [] if self.options.only is None else self.selection.without(names)
        if not names or ROOT in names or kept is None:
            return ""
        own = {*self.names}
        above = {node for name in own.difference(names) for node in _prefixes(name)}
        tops = dict.fromkeys(_top(name, above) for name in names)
        known = own.union(self.number_of)
        out = [leaving_out(top, known) if top in own else f"!{escaped(top)}/**" for top in tops]
        if len(out) > _MOST_KEPT:
            return "only='!NAME/**' keeps what the target has at NAME"
        only = [*kept, *out]
        text = repr(only[0] if len(only) == 1 else only)
        return f"only={text} keeps what the target has there"


def mismatch(
    problems: Sequence[str], remedy: str = "", **kinds: Iterable[str]
) -> RestoreMismatchError:
    """Return the error that lists all problems."""
    count = len(problems)
    listed = [*problems[:_MOST_LISTED]]
    if count > len(listed):
        listed.append(f"and {count - len(listed)} more")
    text = problems[0] if count == 1 else f"{count} problems\n  - " + "\n  - ".join(listed)
    lines = [f"restore: the target does not match the checkpoint: {text}", remedy]
    detail = "\n".join([*filter(None, lines), "nothing was restored"])
    return RestoreMismatchError(detail, problems=problems, **kinds)


# ---- Explain which leaves of a target the checkpoint lacks, and suggest where it has them.


_MOST_COMPARED = 1000  # candidates for a name to suggest


class Missing(NamedTuple):
    """A leaf of the target that the checkpoint lacks."""

    name: str
    stored: str  # the name it would have in the checkpoint
    shape: tuple[int, ...] | None  # None: any
    is_layout: bool  # may stand for a subtree
    hint: str = ""


class Spare(NamedTuple):
    """The leaves of a checkpoint that the target does not use."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # "float32"; of what is no array "int"
    all_names: Sequence[str]  # of the checkpoint
    unexpected: Sequence[str]  # of those, the ones that `only` takes

    def shown(self, name: str) -> str:
        """Return a leaf as `params/w (float32[4,2])`."""
        dtype, shape = self.dtypes[name], self.shapes[name]
        return f"{name} ({dtype}[{','.join(map(str, shape))}])" if shape else f"{name} ({dtype})"


class Unmatched(NamedTuple):
    """Leaves that only the target or only the checkpoint has."""

    lines: list[str]  # one per problem
    missing: list[str]  # from the checkpoint; no `rename=` finds them
    unexpected: list[str]  # in the checkpoint; no `rename=` uses them


def problem_lines(
    missing: Sequence[Missing],
    spare: Spare,
    found: Sequence[str],
    rename: Mapping[str, str] | None,
    stored_name: Callable[[Mapping[str, str], str], str],
) -> Unmatched:
    """Return one line per problem, and one for each subtree that was renamed or is unexpected.

    Args:
      found: the leaves of the target that the checkpoint has.
      rename: as given by the user; None: it is a function.
      stored_name: maps a name in the target to the checkpoint, for a given `rename`.
    """
    pairs = {} if rename is None else _pairs(missing, spare, found)
    whole = {**(rename or {}), **pairs}
    taken = _taken(missing, spare, lambda name: stored_name(whole, name)) if pairs else {}
    if any(stored_name(whole, name) != stored_name(rename or {}, name) for name in found):
        pairs, taken = {}, {}
    lines = _renamed(pairs, taken, whole, spare)
    left = [leaf for leaf in missing if leaf.name not in taken]
    used = {name for names in taken.values() for name in names}
    unexpected = [name for name in spare.unexpected if name not in used]
    hints = _hints(left, unexpected or spare.all_names, spare)
    for leaf in left:
        where = f" (as {leaf.stored})" if leaf.stored != leaf.name else ""
        hint = hints.get(leaf.name, "")
        lines.append(f"{leaf.name}: is not in the checkpoint{where}{hint}")
    lines += _unexpected(unexpected, {*found, *(leaf.name for leaf in missing)}, spare)
    return Unmatched(lines, [leaf.name for leaf in left], unexpected)


def _hints(missing: Sequence[Missing], names: Sequence[str], spare: Spare) -> dict[str, str]:
    """Return, for missing leaves, what to write instead, or which of `names` may be meant.

    A name that several leaves resemble is suggested for none of them.
    """
    near: dict[str, str] = {}
    if len(missing) <= _MOST_GUESSED:
        known = names[:_MOST_COMPARED]
        above = sorted({node for name in known for node in _prefixes(name)[:-1]})
        near = {leaf.name: _hint(leaf, known, above, spare) for leaf in missing}
    uses = Counter(near.values())
    own = {leaf.name: f": {leaf.hint}" for leaf in missing if leaf.hint}
    return {name: hint for name, hint in near.items() if uses[hint] == 1} | own


def _unexpected(names: Sequence[str], target: Collection[str], spare: Spare) -> list[str]:
    """Describe leaves that the target lacks: a subtree of which it has nothing is one line."""
    detail = "in the checkpoint, not in the target"
    if len(names) == 1:
        (name,) = names
        only = leaving_out(name, {*target, *spare.all_names})
        return [f"{name}: is {detail}; only={only!r} leaves it out"]
    above = {node for name in target for node in _prefixes(name)}
    below: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        below[_top(name, above)].append(name)
    lines = []
    for top, leaves in below.items():
        if len(leaves) == 1:
            lines.append(f"{leaves[0]}: is {detail}")
        else:
            lines.append(f"{top}: {len(leaves)} leaves are {detail}")
    return lines


def _hint(leaf: Missing, known: Sequence[str], above: Sequence[str], spare: Spare) -> str:
    """Return which leaf of the checkpoint may be meant; "" where several may be.

    Of two moments of an optimizer the nearer name may be the wrong one.
    """
    fitting = [name for name in known if leaf.shape in (None, spare.shapes.get(name))]
    last = leaf.stored.rpartition("/")[2]
    if sum(name.rpartition("/")[2] == last for name in fitting) > 1:
        return ""
    return nearest(leaf.stored, [*fitting, *(above if leaf.is_layout else ())])


def _pairs(missing: Sequence[Missing], spare: Spare, found: Sequence[str]) -> dict[str, str]:
    """Return which prefixes have other names in the checkpoint."""
    pairs = renames({leaf.name: leaf.shape for leaf in missing}, spare.shapes, found)
    if not pairs and len(missing) == 1 and missing[0].is_layout:
        tops = subtrees(spare.shapes, spare.all_names)
        if len(tops) == 1:  # a layout does not show the leaves below it
            return {missing[0].name: tops[0]}
    return pairs


def _taken(
    missing: Sequence[Missing], spare: Spare, stored_name: Callable[[str], str]
) -> dict[str, list[str]]:
    """Return the leaves of the checkpoint that each leaf of the target would use."""
    taken = {}
    for leaf in missing:
        new = stored_name(leaf.name)
        below = [new] if new in spare.shapes else []
        if leaf.is_layout and not below:
            below = [name for name in spare.shapes if name.startswith(f"{new}/")]
        if below:
            taken[leaf.name] = below
    return taken


def _renamed(
    pairs: Mapping[str, str],
    taken: Mapping[str, Sequence[str]],
    whole: Mapping[str, str],
    spare: Spare,
) -> list[str]:
    """Describe the renamed subtrees, and the option that maps them.

    They were found by shapes and by parts of names. Both may mislead, so a dtype is shown.
    """
    leaves: defaultdict[str, list[str]] = defaultdict(list)
    for name in taken:
        ends = [prefix for prefix in pairs if not prefix or f"{name}/".startswith(f"{prefix}/")]
        leaves[max(ends, key=len)].append(name)
    counts = {prefix: sum(len(taken[name]) for name in names) for prefix, names in leaves.items()}
    lines = []
    for prefix, names in leaves.items():
        count = counts[prefix]
        first = taken[names[0]][0]
        if count == 1:
            lines.append(f"{names[0]}: is not in the checkpoint, which has {spare.shown(first)}")
            continue
        below = f"below {pairs[prefix]}" if pairs[prefix] else "at its root"
        leaves_below = "leaves below it" if prefix else "leaves"
        which = f"{count} {leaves_below} are not in the checkpoint"
        such = f"such leaves {below}, as {spare.shown(first)}"
        lines.append(f"{prefix or 'the tree'}: {which}, which has {such}")
    option = f"rename={dict(whole)}"
    if len(lines) > 1:
        return [*lines, f"all of these: {option} takes them"]
    what = "that" if sum(counts.values()) == 1 else "those"
    return [f"{line}: {option} takes {what}" for line in lines]
