"""Patterns over the names of leaves, in checkpoints and tables of layouts: `params/**`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache

from shoal.errors import closest

_SPECIAL = re.compile(r"[*?[]")
_MOST_COMPARED = 1000  # names that are candidates for a suggestion
_MOST_GUESSED = 10  # patterns for which one is looked for


class Selection:
    """The names that patterns take together, as `only=` of a restore says.

    A pattern that is itself one of the names takes that name alone: `w[0]` of a tree that has such
    a leaf is no pattern. With "!" before it, a pattern leaves out what it matches; patterns that
    all leave out take everything else.

    >>> sorted(Selection(["params/**", "!**/b"], ["params/w", "params/b", "step"]).names)
    ['params/w']
    >>> Selection(["params", "step"], ["params/w", "params/b", "step"]).idle()
    ["'params' takes no leaf; did you mean 'params/**'? 'params' is a directory of 2 leaves"]
    """

    def __init__(self, patterns: Sequence[str] | None, names: Iterable[str]) -> None:
        """`patterns`: None: all names."""
        self._known = known = dict.fromkeys(names)
        if patterns is None:  # "**" may be the name of a leaf
            self._in: dict[str, set[str]] = {}
            self._out: dict[str, set[str]] = {}
            self.names = frozenset(known)
            return
        self._out = {text: taken(text[1:], known) for text in patterns if self._leaves_out(text)}
        self._in = {text: taken(text, known) for text in patterns if text not in self._out}
        chosen: set[str] = set()
        if self._in:
            chosen = chosen.union(*self._in.values())
        elif self._out:
            chosen = {*known}
        self.names = frozenset(chosen.difference(*self._out.values()))

    def _leaves_out(self, text: str) -> bool:
        return text.startswith("!") and text not in self._known

    def without(self, names: Collection[str]) -> list[str] | None:
        """Return the patterns that take others than these names; None if nothing is left.

        Not for a selection of all names.
        """
        gone = frozenset(names)
        left = [text for text, matched in self._in.items() if not matched <= gone]
        if self._in and not left:
            return None
        return [*left, *self._out]

    def idle(self) -> list[str]:
        """Return a line for each pattern that takes nothing: why, and what may have been meant."""
        lines: list[str] = []
        for text, matched in [*self._in.items(), *self._out.items()]:
            if not matched:
                sign = "!" if text in self._out else ""
                is_guessed = len(lines) < _MOST_GUESSED
                meant = near(text.removeprefix(sign), self._known, sign) if is_guessed else ""
                verb = "leaves out" if sign else "takes"
                lines.append(f"{text!r} {verb} no leaf{meant}")
        for text, matched in self._in.items():
            if matched and self.names.isdisjoint(matched):
                others = " and ".join(
                    repr(o) for o, left_out in self._out.items() if matched & left_out
                )
                lines.append(f"{text!r} takes nothing but what {others} leaves out")
        return lines


def taken(pattern: str, names: Collection[str]) -> set[str]:
    """Return the names that a pattern takes: the one that it is, else all that it matches.

    >>> sorted(taken("w[01]", ["w0", "w1"])), sorted(taken("w[01]", ["w0", "w[01]"]))
    (['w0', 'w1'], ['w[01]'])
    """
    if pattern in names:
        return {pattern}
    if not _SPECIAL.search(pattern):  # a name that is not there: thousands cost thousands of steps
        return set()
    return {name for name in names if matches(pattern, name)} if is_pattern(pattern) else set()


def escaped(name: str) -> str:
    """Return a pattern that matches this name alone.

    >>> escaped("w[0]"), matches(escaped("w[0]"), "w[0]"), matches(escaped("w[0]"), "w0")
    ('w[[]0]', True, False)
    """
    return _SPECIAL.sub(r"[\g<0>]", name)


def leaving_out(name: str, names: Collection[str]) -> str:
    """Return the pattern that leaves out this leaf alone, of a tree with leaves of these names.

    >>> leaving_out("w", ["v", "w"]), leaving_out("w", ["!w", "w"])
    ('!w', '![w]')
    """
    text = f"!{name}"
    return text if text not in names else f"!{escaped(name[:-1])}[{name[-1]}]"


def near(pattern: str, names: Collection[str], sign: str = "") -> str:
    """Return what may have been meant by a pattern that takes none of the names; "" if unknown.

    Args:
      sign: "!" if the pattern stood behind it.

    >>> near("parms/**", ["params/w"]), near("w", ["params/w"])
    ("; did you mean 'params/**'?", "; did you mean '**/w'?")
    """
    if not is_pattern(pattern):
        return "; the characters in [ ] are not a valid range"
    for text in (pattern.rstrip("/"), *_variants(pattern, names)):
        if text != pattern and taken(text, names):
            return f"; did you mean {sign + text!r}?"
        count = sum(name.startswith(f"{text}/") for name in names)
        if text and count:
            leaves = "1 leaf" if count == 1 else f"{count} leaves"
            below = f"{sign}{escaped(text)}/**"
            return f"; did you mean {below!r}? {text!r} is a directory of {leaves}"
    if re.search(r"\.[*+]|[\\^$|()]", pattern):
        return (
            "; patterns are not regular expressions: '*' matches part of one component, '**' any "
            "number of components, as in '**/kernel'"
        )
    close = closest(pattern, [*names][:_MOST_COMPARED])
    if close is not None:
        return f"; did you mean {sign + close!r}?"
    return next((f"; leaves have names such as {name!r}" for name in names), "")


def _variants(pattern: str, names: Collection[str]) -> Iterator[str]:
    """Return what is often written instead of a pattern, the likeliest first."""
    yield re.sub(r"(/\*)+$", "/**", pattern)
    yield f"**/{pattern}"
    yield "/".join(re.findall(r"[^\[\]'\".]+", pattern))  # ['params']['w'], params.w
    yield _corrected(pattern, names)


def _corrected(pattern: str, names: Collection[str]) -> str:
    """Return a pattern with each component that no name has replaced by the most similar one."""
    paths = [name.split("/") for name in [*names][:_MOST_COMPARED]]
    parts, is_anywhere = pattern.split("/"), False
    for index, part in enumerate(parts):
        is_anywhere = is_anywhere or part == "**"
        matching = [path for path in paths if is_anywhere or len(path) > index]
        here = {
            component for path in matching for component in (path if is_anywhere else [path[index]])
        }
        fitting = {component for component in here if part == "**" or matches(part, component)}
        if not fitting:
            chosen = closest(part, sorted(here))
            if chosen is None:
                return ""
            fitting, parts[index] = {chosen}, escaped(chosen)
        paths = [path for path in matching if is_anywhere or path[index] in fitting]
    return "/".join(parts)


def matches(pattern: str, name: str) -> bool:
    """Does a pattern match this name?

    `*` and `?` match characters of one component, `[ab]` for one of them, and a component `**`
    for any number of components, none included.

    >>> matches("params/**", "params/layers/0/w"), matches("params/*", "params/layers/0/w")
    (True, False)
    >>> matches("**/w", "w"), matches("opt/[mn]u/?", "opt/mu/w")
    (True, True)
    """
    return _compiled(pattern).fullmatch(f"{name}/") is not None


def is_pattern(text: str) -> bool:
    """Is it a valid pattern? `[z-a]` is not a range."""
    try:
        _compiled(text)
    except re.error:
        return False
    return True


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    r"""Return an expression for names that have a "/" behind each of their components.

    >>> _compiled("a/**/b").pattern
    'a/(?:[^/]*+/)*b/'
    """
    return re.compile(_joined(pattern.split("/"), "**", _component, "(?:[^/]*+/)*"))


def _component(part: str) -> str:
    tokens = re.findall(r"\[[^\]]+\]|.", part, re.DOTALL)
    return _joined(tokens, "*", _character, "[^/]*") + "/"


def _joined(tokens: Sequence[str], star: str, expression: Callable[[str], str], skip: str) -> str:
    """Return the expression of tokens, of which a star matches any number of what the rest match.

    All tokens but stars match one character, or one component: what stands between two stars has
    one length. So its first place leaves the most to the tokens behind it, and no later place
    need be tried: an atomic group, as in `fnmatch.translate`. Otherwise `*a*a*a*b` would take time
    exponential in the number of stars.
    """
    runs: list[list[str]] = [[]]
    for token in tokens:
        if token == star:
            runs.append([])
        else:
            runs[-1].append(expression(token))
    first, *others = ["".join(run) for run in runs]
    if not others:
        return first
    between = "".join(f"(?>{skip}?{run})" for run in others[:-1] if run)
    return f"{first}{between}{skip}{others[-1]}"


def _character(token: str) -> str:
    if token == "?":
        return "[^/]"
    if len(token) == 1:
        return re.escape(token)
    inner = token[1:-1]
    is_negated = inner.startswith("!") and len(inner) > 1
    sign = "^" if is_negated else ""
    body = "".join(c if c == "-" else re.escape(c) for c in inner[len(sign) :])
    return f"(?!/)[{sign}{body}]"  # otherwise [!a] would match "/", and so would [+-9]
