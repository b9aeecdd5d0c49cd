"""Compare what processes called or gave: the text and the facts of every divergence.

The error's message, its `sides` and its `difference` come from the same groups. The words that say
what is different, and what a call needs to be equal, are here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import DivergenceError, counted, with_article
from shoal.runtime.failures.process_text import listed, range_text
from shoal.runtime.failures.shortening import source_part
from shoal.runtime.rules.point import ranges_of
from shoal.runtime.rules.spec_lines import BETWEEN, SpecLine
from shoal.runtime.system.callsite import line_of, source_at, split_site
from shoal.runtime.system.foreign_text import one_line

if TYPE_CHECKING:
    from shoal.runtime.failures.facts import CallPlace, Difference, DivergenceSide

AMONG = " among "  # between a call and its processes: "relayout among processes 0-2"
_MOST_GROUPS = 4  # in a message: the smallest and the largest ones; the attributes hold all
_MOST_RANGES = 5  # of processes, in a row
_SOURCE = 48  # columns of a source line
_WHOLE = ("the value", "the array")  # paths of a tree that is one leaf
_OF_LEAVES = ("tree", "shape", "dtype")
_SAME_LEAVES = "needs the same tree, shapes and dtypes on every process."
_SAME_ARGUMENTS = "needs equal arguments on every process."
_SAME_CALLS = "All processes of a group must make the same collective calls, in the same order."
_SAME_LINES = (
    "All processes must make the same put, pack, create, from_host_local, relayout and feed calls, "
    "in the same order, at the same lines."
)
_PUT = "put needs equal values on every process; from_host_local joins each process's own rows."
_NEEDS = {  # by call and by what is different; "": by anything else
    ("", "call"): _SAME_CALLS,
    ("", "group"): "Every process of a group must pass the same processes=.",
    ("", "program"): (
        "Numbers of Python are compiled in: make them equal, or pass them as arguments."
    ),
    **dict.fromkeys(
        (("broadcast", "tree"), ("broadcast", "shape"), ("broadcast", "dtype")),
        f"broadcast {_SAME_LEAVES}\n"
        "Receivers can pass None: broadcast(x if process_index() == 0 else None).",
    ),
    ("barrier", ""): "A barrier needs the same name on every process.",
    ("assert_same", "value"): "It is the first leaf that differs; later ones were not compared.",
    ("check_replicas", "replica"): (
        "If a single device differs, suspect its hardware.\n"
        "Otherwise, a psum or pmean may be missing (shard_map with check_vma=False)."
    ),
    ("make_mesh", ""): "make_mesh needs the same axes, options and devices on every process.",
    ("save", "step"): (
        "save needs the same step on every process.\n"
        'If is_saving chose it, use Checkpoints(every="free") instead.'
    ),
    ("put", ""): _PUT,
    ("put", "value"): (
        f"{_PUT}\nTo compare only the tree, shapes, dtypes and layouts, pass "
        "put(..., check_values=False)."
    ),
    ("pack", ""): "pack needs the same tree, shapes, dtypes and layouts on every process.",
    ("relayout", ""): (
        "relayout needs the same tree, shapes, dtypes, layouts and options on every process."
    ),
    ("constrain", ""): (
        "constrain needs the same tree, shapes, dtypes, layouts and host values on every process."
    ),
    ("manual", ""): (
        "manual needs the same function, tree, shapes, dtypes, layouts and host values on every "
        "process."
    ),
    ("restore", ""): "restore needs the same target and options on every process.",
    ("resume", ""): "resume needs the same target and options on every process.",
    ("linear", ""): "linear needs the same shapes, dtypes and layouts on every process.",
    ("create", ""): (
        "create runs one program on all processes: its arguments must be equal on them; broadcast "
        "them first."
    ),
    ("from_host_local", ""): (
        "from_host_local needs the same tree, shapes, dtypes and layouts on every process."
    ),
    ("from_host_local", "shape"): (
        "from_host_local needs parts of the same shape on every process: leave out the rows that "
        "are left over, or let feed(…, remainder='pad') fill them up."
    ),
    ("from_host_local", "value"): (
        "from_host_local needs data that a layout does not split between processes to be equal on "
        "them: split them, or broadcast them first.\n"
        "To compare only the tree, shapes, dtypes and layouts, pass check_values=False."
    ),
    ("gradient of to_host_local", ""): (
        "The cotangents of data that several processes hold must be equal on them: each process "
        "must compute the same loss of it, or convert its own loss back with from_host_local."
    ),
}


_WORDS = {"leaf": "", "tree": "tree: ", "mesh": "mesh: ", "end": "no more leaves"}


def shown_line(line: str) -> str:
    r"""Return a line of `spec_lines` as people read it; of one that is cut, what is left.

    >>> shown_line(SpecLine(path="['w']", dtype="float32", shape="[3,4]", layout="(x, -)").packed)
    "['w']: float32[3,4] as (x, -)"
    >>> shown_line("source=0")
    'source=0'
    """
    spec = SpecLine.of(line)
    if spec is None:
        return " ".join(filter(None, line.split(BETWEEN)))
    if not spec.path:
        return _leaf_text(spec)
    return f"{spec.path}: {_leaf_text(spec)}"


def _leaf_text(leaf: SpecLine) -> str:
    """Return a line as people read it, without its path."""
    if leaf.what != "leaf":
        return _WORDS[leaf.what] + leaf.value
    parts = [leaf.kind, leaf.dtype + leaf.shape]
    if leaf.layout:
        parts.append(f"as {leaf.layout}")
    if leaf.value and leaf.shape:
        parts.append("=")
    if leaf.value:
        parts.append(_leaf_value(leaf))
    text = " ".join(filter(None, parts))
    if leaf.digest and not leaf.value:
        return ": ".join(filter(None, (text, f"values {leaf.digest}")))
    return text


def _leaf_value(leaf: SpecLine) -> str:
    """Return the value, and its digest, as far as they are known."""
    return ", digest ".join(filter(None, (leaf.value, leaf.digest)))


class ShownSide(NamedTuple):
    """One group of processes that made the same call with the same arguments."""

    processes: Sequence[int]
    said: str = ""  # a text, or a packed line; empty: the call is what differs
    call: str = ""  # "barrier"
    name: str = ""  # of the point, if it is shown
    site: str = ""  # "train.py:3 (main)"
    groups: int = 1  # that are taken together here
    leaf: str = ""  # the line of the leaf of which `said` shows one item

    @property
    def where(self) -> str:
        """The call and its call site: `barrier 'step' at train.py:3 (main)`."""
        what = " ".join(filter(None, (self.call, self.name and repr(self.name))))
        if not self.site:
            return what
        return f"{what} at {self.site}".strip()

    @property
    def text(self) -> str:
        """All of it, without the processes."""
        return ": ".join(filter(None, (self.where, shown_line(self.said))))


class Kind(NamedTuple):
    """What is different."""

    what: str = "value"  # call name step tree shape dtype value group program layout replica
    path: str = ""  # of the leaf


_VALUE = Kind()


def divergence_error(
    heading: str,
    sides: Iterable[ShownSide],
    *,
    kind: Kind = _VALUE,
    advice: str = "",
    intro: str = "",
    found_at: ShownSide | None = None,
    step: int | None = None,
    failed_since: str = "",
) -> DivergenceError:
    """Return the error that shows each group of processes, the smallest first.

    Args:
      heading: the first line.
      sides: the groups.
      kind: what is different.
      advice: what to do; the last line.
      intro: a line before the groups.
      found_at: the call at which earlier calls were compared.
      step: in which the earlier call was made.
      failed_since: the first call of those that failed in a row before: "call 3, barrier 'a'".
    """
    rows = sorted(sides, key=lambda side: (len(side.processes), [*side.processes]))
    is_one_call = len({side[2:5] for side in rows}) == 1 and all(side.said for side in rows)
    is_one_call = is_one_call and bool(rows[0].where)
    lines = [heading]
    if is_one_call:
        lines.append(f"  {rows[0].where}{_after(source_at(rows[0].site))}")
        indent = "    "
        shown = [shown_line(row.said) for row in rows]
        sources = [""] * len(rows)
    else:
        indent = "  "
        shown = [row.text for row in rows]
        sources = [source_at(row.site) for row in rows]
    if intro:
        lines.append(f"  {intro}")
    texts = [
        f"{indent}{process_label(row.processes)}: {text}{_after(source)}"
        for row, text, source in zip(rows, shown, sources, strict=True)
    ]
    lines += _few(rows, texts, indent)
    if found_at is not None:
        call = _only(row.call for row in rows if row.call)
        silent = "These calls send"
        if call:
            silent = f"{call} sends"
        place = found_at.where.replace(f" at {found_at.site}", f" ({line_of(found_at.site)})")
        lines.append(f"  {silent} nothing; the difference was found at {place}.")
    lines += filter(None, [failed_before(failed_since), advice])
    held: dict[str, tuple[int, ...]] = {}
    for row, text in zip(rows, shown, strict=True):
        held[text] = tuple(sorted({*held.get(text, ()), *row.processes}))
    difference = _difference(rows, kind, found_at, step, failed_since)
    return DivergenceError("\n".join(lines), sides=held, difference=difference)


def failed_before(failed_since: str) -> str:
    """Say since which call those of a group have failed; empty: none before this one has."""
    return failed_since and (
        f"Their calls have failed since {failed_since}. If one made a call more or less, "
        "live_processes() with the same processes= and lane= synchronizes them."
    )


def with_late(
    error: DivergenceError, process: int, like: int, shown: DivergenceError | None = None
) -> DivergenceError:
    """Return the error of a process that arrived later, with the facts of its side for the report.

    The message and the sides are those of the others.

    Args:
      like: a process of that side.
      shown: the error that shows that side, if it is another.
    """
    import dataclasses  # here, as the facts: the coordinator needs neither

    from shoal.runtime.failures.facts import Difference, ProcessSet

    difference = (shown or error).difference
    if isinstance(difference, Difference) and isinstance(error.difference, Difference):
        side = next(side for side in difference.sides if like in side.processes)
        late = dataclasses.replace(side, processes=ProcessSet([process]))
        error.difference = dataclasses.replace(error.difference, late=late)
    return error


def headline(kind: Kind, call: str, name: str = "") -> str:
    """Say what is different: `processes gave broadcast different shapes`."""
    if kind.what == "call":
        return "processes made different calls"
    if kind.what == "program":
        return "processes compiled different programs"
    if kind.what == "name":
        return f"processes gave {with_article(call)} different names"
    label = ShownSide((), call=call, name=name).where
    is_check = (call == "assert_same" and kind.what != "group") or kind.what == "replica"
    if is_check:
        return f"{label} found different {kind.what}s"
    return f"processes gave {label} different {kind.what}s"


def needs(call: str, what: str, *, is_silent: bool = False) -> str:
    """Say what a call needs to be equal on all processes.

    Args:
      call: "broadcast".
      what: what is different, see `Kind`.
      is_silent: whether the calls send nothing.
    """
    if what == "call" and is_silent:
        return _SAME_LINES
    call = call.partition(AMONG)[0]
    advice = _NEEDS.get((call, what)) or _NEEDS.get(("", what)) or _NEEDS.get((call, ""))
    if advice is not None:
        return advice
    if what == "name":
        return f"{call} needs the same name= on every process."
    if not call:
        return ""
    if what == "layout":
        return f"{call} needs the same layouts on every process."
    if what in _OF_LEAVES:
        return f"{call} {_SAME_LEAVES}"
    return f"{call} {_SAME_ARGUMENTS}"


def compare_lines(lines: Sequence[str], ended: str) -> tuple[Kind, list[str]]:
    """Return what is different between lines, and what each of them gave.

    >>> leaf = SpecLine(path="the value", dtype="int")
    >>> compare_lines([leaf.packed, leaf._replace(dtype="int32", shape="[]").packed], "")[0]
    Kind(what='dtype', path='')
    >>> compare_lines(["source=0", "source=1"], "")
    (Kind(what='value', path=''), ['source=0', 'source=1'])
    """
    specs = [SpecLine.of(line) for line in lines]
    known = [line for line in specs if line is not None]
    parts = {line.what for line in known}
    if ended in lines or parts & {"tree", "end"}:
        return Kind("tree"), [*lines]
    if "mesh" in parts:
        return Kind("layout"), [*lines]
    if all(line.startswith("step=") for line in lines):
        return Kind("step"), [*lines]
    if len(known) < len(lines):
        return Kind("value"), [*lines]
    if len({line.path for line in known}) > 1:
        return Kind("tree"), [*lines]
    path = known[0].path
    if path in _WHOLE:
        known = [line._replace(path="") for line in known]
        path = ""
    names = ["dtype"]
    if all(line.shape for line in known):
        names = ["shape", "dtype", "layout"]
    differing = (name for name in names if len({getattr(line, name) for line in known}) > 1)
    what = next(differing, "value")
    if what != "value":
        known = [line._replace(value="", digest="") for line in known]
    return Kind(what, path), [line.packed for line in known]


def shown_first(groups: Iterable[Sequence[int]], most: int) -> list[list[int]]:
    """Return groups of processes in the order in which `most` of them are shown: the smallest ones
    and the largest ones; of equal ones that of the lowest process first.

    >>> shown_first([[0, 3, 4], [1], [2, 5], [6]], 2)
    [[1], [0, 3, 4], [6], [2, 5]]
    """
    rows = sorted((sorted(group) for group in groups), key=lambda group: (len(group), group))
    if len(rows) <= most:
        return rows
    large = len(rows) - most // 2
    return [*rows[: most - most // 2], *rows[large:], *rows[most - most // 2 : large]]


def _few(rows: Sequence[ShownSide], texts: Sequence[str], indent: str) -> list[str]:
    """Return the rows of the smallest and the largest groups, and how many there are between."""
    single = [n for n, row in enumerate(rows) if row.groups == 1]
    if len(single) == len(rows) <= _MOST_GROUPS:
        return [*texts]
    half = _MOST_GROUPS // 2
    kept = single
    if len(single) > _MOST_GROUPS:
        kept = [*single[:half], *single[-half:]]
    left = [row for n, row in enumerate(rows) if n not in kept]
    groups, processes = (sum(counts) for counts in zip(
        *((row.groups, len(row.processes)) for row in left), strict=True
    ))  # fmt: skip
    more = counted(groups, "more group")
    of = counted(processes, "process", "processes")
    note = f"{indent}… {more}, {of}"
    first = [texts[n] for n in kept[:half]]
    return [*first, note, *(texts[n] for n in kept[half:])]


def process_label(processes: Sequence[int]) -> str:
    """Return the processes of a row; of many ranges only the first."""
    ranges = ranges_of(sorted(processes))
    if len(ranges) <= _MOST_RANGES:
        return listed(processes)
    return f"{len(processes)} processes ({range_text(ranges[0])} and others)"


def _after(source: str) -> str:
    """Return the source line as it stands after a call: its beginning, if it is long."""
    if not source:
        return ""
    line = one_line(source.expandtabs(1), len(source))
    return f"   {source_part(line, (), _SOURCE)}"


def _difference(
    rows: Sequence[ShownSide],
    kind: Kind,
    found_at: ShownSide | None,
    step: int | None,
    failed_since: str,
) -> Difference:
    """Return the facts for a report."""
    from shoal.runtime.failures.facts import Difference

    return Difference(
        what=kind.what,
        call=_only(row.call for row in rows if row.call),
        path=kind.path,
        name=_only(row.name for row in rows),
        sides=tuple(_side(row, kind) for row in rows),
        found_at=None if found_at is None else _place(found_at),
        step=step,
        failed_since=failed_since,
    )


def _only(texts: Iterable[str]) -> str:
    """Return the text that all of them are; "" if they differ, or there are none."""
    different = {*texts}
    if len(different) != 1:
        return ""
    return different.pop()


def _side(row: ShownSide, kind: Kind) -> DivergenceSide:
    """Return what a group gave; of a leaf, also what its line says of it."""
    from shoal.runtime.failures.facts import DivergenceSide, ProcessSet

    processes, place = ProcessSet(row.processes), _place(row)
    leaf = SpecLine.of(row.leaf or row.said)
    if leaf is None or leaf.what != "leaf":
        said = _without(kind.path, shown_line(row.said) or row.where)
        return DivergenceSide(processes=processes, place=place, said=said)
    said, value = _leaf_text(leaf), _leaf_value(leaf)
    if row.leaf:  # of which `row.said` shows one item
        said = value = _without(kind.path, row.said)
    shape = None
    if leaf.shape:
        sizes = filter(None, leaf.shape[1:-1].split(","))
        shape = tuple(int(size) if size.isdigit() else None for size in sizes)
    return DivergenceSide(
        processes=processes,
        place=place,
        said=said,
        path="" if kind.path else leaf.path,
        dtype=leaf.dtype,
        shape=shape,
        layout=leaf.layout,
        value=value,
    )


def _without(path: str, said: str) -> str:
    if not path:
        return said
    return said.removeprefix(f"{path}: ").removeprefix(f"{path} = ")


def _place(row: ShownSide) -> CallPlace | None:
    from shoal.runtime.failures.facts import CallPlace

    file, line = split_site(row.site)
    if not (row.call or row.name or file):
        return None
    return CallPlace(call=row.call, name=row.name, file=file, line=line, source=source_at(row.site))
