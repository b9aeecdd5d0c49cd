"""What must be equal about a call, line by line, as facts.

A line about a leaf is compared, hashed and sent with its fields apart. Other lines are texts:
options such as "source=0".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

BETWEEN = "\x01"  # fields; in no path or dtype, and no space for `strip` and `splitlines`


class SpecLine(NamedTuple):
    """A line with fields, each empty if it has none."""

    what: str = "leaf"  # | "tree" | "mesh" | "end": opposite the first extra leaf of another
    path: str = ""  # of the leaf
    kind: str = ""  # "array", "key", where a dtype leaves it open
    dtype: str = ""  # "float32", "key<fry>", or the type of a Python value: "int"
    shape: str = ""  # "[3,4]"
    layout: str = ""  # "(data, -)"
    value: str = ""  # as shown, or the whole text of a tree or mesh
    digest: str = ""  # of the value

    @classmethod
    def of(cls, line: str) -> SpecLine | None:
        """Return the fields of a packed line, perhaps cut at its end; None: it has none."""
        what, *fields = line.split(BETWEEN)
        if not fields or what not in _KINDS or len(fields) >= len(cls._fields):
            return None
        return cls(what, *fields)

    @property
    def packed(self) -> str:
        """The line as it is compared and sent."""
        return BETWEEN.join(self)


_KINDS = ("leaf", "tree", "mesh", "end")
END = SpecLine("end").packed


def with_value(line: str, value: str) -> str:
    """Return a leaf's line with its value: "= [1, 2]", or a digest."""
    if not value:
        return line
    spec = SpecLine.of(line) or SpecLine(path=line)
    if value.startswith("= "):
        return spec._replace(value=value[2:]).packed
    return spec._replace(digest=value).packed


def with_layouts(lines: Iterable[str], layouts: Sequence[str]) -> tuple[str, ...]:
    """Return lines of leaves, perhaps followed by others, with layouts where these are not empty.

    >>> one = SpecLine(path="['w']", dtype="float32", shape="[3]").packed
    >>> [line.split(BETWEEN)[5:6] for line in with_layouts([one, one], ["", "(x)"])]
    [[''], ['(x)']]
    """
    packed = [*lines]
    for index, layout in enumerate(layouts):
        if not layout:
            continue
        spec = SpecLine.of(packed[index])
        if spec is not None:
            packed[index] = spec._replace(layout=layout).packed
    return tuple(packed)


def with_origin(line: str, layout: str) -> str:
    """Return a leaf's line with the layout that it has before the call."""
    spec = SpecLine.of(line)
    if spec is None:
        return line
    return spec._replace(layout=f"{spec.layout} from {layout}").packed
