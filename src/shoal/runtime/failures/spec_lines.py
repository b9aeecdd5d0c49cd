"""What must be equal about a call, line by line: facts until a line is shown.

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
        if not fields or what not in _WORDS or len(fields) >= len(cls._fields):
            return None
        return cls(what, *fields)

    @property
    def packed(self) -> str:
        """The line as it is compared and sent."""
        return BETWEEN.join(self)

    @property
    def said(self) -> str:
        """The line as people read it, without its path."""
        if self.what != "leaf":
            return _WORDS[self.what] + self.value
        words = [self.kind, self.dtype + self.shape]
        if self.layout:
            words.append(f"as {self.layout}")
        if self.value and self.shape:
            words.append("=")
        if self.value:
            words.append(self.given)
        text = " ".join(filter(None, words))
        if self.digest and not self.value:
            return ": ".join(filter(None, (text, f"values {self.digest}")))
        return text

    @property
    def given(self) -> str:
        """The value, and its digest, as far as they are known."""
        return ", digest ".join(filter(None, (self.value, self.digest)))


_WORDS = {"leaf": "", "tree": "tree: ", "mesh": "mesh: ", "end": "no more leaves"}
END = SpecLine("end").packed


def shown_line(line: str) -> str:
    r"""Return a line as people read it; of one that is cut, what is left.

    >>> shown_line(SpecLine(path="['w']", dtype="float32", shape="[3,4]", layout="(x, -)").packed)
    "['w']: float32[3,4] as (x, -)"
    >>> shown_line("source=0")
    'source=0'
    """
    one = SpecLine.of(line)
    if one is None:
        return " ".join(filter(None, line.split(BETWEEN)))
    if not one.path:
        return one.said
    return f"{one.path}: {one.said}"


def with_value(line: str, value: str) -> str:
    """Return a leaf's line with its value: "= [1, 2]", or a digest."""
    if not value:
        return line
    one = SpecLine.of(line) or SpecLine(path=line)
    if value.startswith("= "):
        return one._replace(value=value[2:]).packed
    return one._replace(digest=value).packed


def with_layouts(lines: Iterable[str], layouts: Sequence[str]) -> tuple[str, ...]:
    """Return lines of leaves, perhaps followed by others, with layouts where these are not empty.

    >>> one = SpecLine(path="['w']", dtype="float32", shape="[3]").packed
    >>> [*map(shown_line, with_layouts([one, one, END], ["", "(x)"]))]
    ["['w']: float32[3]", "['w']: float32[3] as (x)", 'no more leaves']
    """
    found = [*lines]
    for number, layout in enumerate(layouts):
        if not layout:
            continue
        one = SpecLine.of(found[number])
        if one is not None:
            found[number] = one._replace(layout=layout).packed
    return tuple(found)


def with_origin(line: str, layout: str) -> str:
    """Return a leaf's line with the layout that it has before the call."""
    one = SpecLine.of(line)
    if one is None:
        return line
    return one._replace(layout=f"{one.layout} from {layout}").packed
