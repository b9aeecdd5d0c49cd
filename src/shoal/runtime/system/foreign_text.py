"""Texts that others wrote, a program, Python or another process: each as one printable line."""

from __future__ import annotations

ANNOUNCES = "Traceback (most recent call last):"
_HEADS = ("Traceback", "+ Exception Group Traceback")
_LINKS = (  # printed by Python between two exceptions of a chain, with blank lines around
    ["The above exception was the direct cause of the following exception:"],
    ["During handling of the above exception, another exception occurred:"],
)
_MAX_LINE = 800  # characters of a headline
_MOST_WORD = 40  # characters of a word that is not cut


def headline_of(text: str) -> str:
    """Return the one line that explains why a process is gone.

    >>> headline_of("Traceback (most recent call last):\\n  File ...\\nValueError: no\\ndata")
    'ValueError: no'
    """
    lines = text.strip().splitlines() or [""]
    if not is_traceback(lines[0]):
        return one_line(lines[0]).strip()
    # Take the last of a chain; a message may quote yet another traceback.
    begin = max(i for i in range(len(lines)) if lines[i - 2 : i - 1] in _LINKS or i == 0)
    filled = (line for line in map(_without_bar, lines[begin + 1 :]) if line.strip())
    return one_line(next((line for line in filled if line[0] not in " \t+"), lines[-1])).strip()


def particulars_of(text: str) -> str:
    """Return the text after the headline: the traceback, or nothing."""
    text = text.strip("\n")
    first, _, rest = text.partition("\n")
    if not rest or (is_traceback(rest) and not is_traceback(first)):
        return rest
    return text


def one_line(text: str, limit: int = _MAX_LINE) -> str:
    """Return an untrusted text as one printable line of bounded length; short words stay whole.

    >>> one_line("no space left on the device", 20)
    'no space left on...'
    """
    line = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    if len(text) <= limit:
        return line.rstrip()
    end = limit - 3
    space = line.rfind(" ", 0, end + 1)
    if max(0, end - _MOST_WORD - 1) < space and line[:space].strip():
        end = space
    return line[:end].rstrip() + "..."


def text_of(value: object) -> str:
    """Return `str(value)`; never raises."""
    try:
        return str(value)
    except BaseException:  # noqa: BLE001 (it may raise anything)
        kind = "exception str()" if isinstance(value, BaseException) else "str()"
        return f"<{kind} failed>"


def is_traceback(line: str) -> bool:
    """Return whether a line, or a text, begins as Python begins a traceback."""
    return line.strip().startswith(_HEADS)


def _without_bar(line: str) -> str:
    """Return a line of a group's traceback without the bar that marks it."""
    return line.lstrip().removeprefix("| ") if line.lstrip().startswith("| ") else line
