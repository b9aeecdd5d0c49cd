"""Texts of a failure made safe to print, and cut to a number of columns.

What comes from a program may hold anything. `printable` escapes what a terminal would obey,
`without_secrets` hides credentials. All that cuts a text cuts it in the middle where it can, and
leaves a mark: `dots`, which is `…` or, where a stream takes ASCII only, `...`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.runtime.failures.process_text import listed

HIDDEN = "(hidden)"
MESSAGE_HEAD, MESSAGE_TAIL = 240, 80  # characters of a message that are kept
_LEAST_GAIN = 10  # letters by which a mark must be shorter than what it stands for

_URL_USER = re.compile(r"""(?<=://)[^\s/'"]*@""")
_BEARER = re.compile(r"\b(Bearer|Basic) +[A-Za-z0-9._~+/=-]{8,}")
_ASSIGNED = re.compile(
    r"""(?<![\w-])([\w-]{1,100})(["']?\]?\s{0,3}[:=]\s{0,3}|["']\s{0,3},\s{0,3})"""
    rf"""(?!{re.escape(HIDDEN)}|\$\()(?=(b?"(?:[^"\\]|\\.)*"|b?'(?:[^'\\]|\\.)*'|[^\s,;&)\]}}]+))"""
)
# In a command: `--token VALUE`, `-u user:VALUE`; also as a list of texts.
_OPTION = re.compile(r"(?<!\S)--([\w-]{1,100}) {1,3}(?![-$(])(\S+)")
_LOGIN = re.compile(r"""(?<![\w-])(-u|--user)(["']?,?\s{1,3}["']?[^\s:'"]+:)[^\s'"]+""")
_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSWORD|KEY")
_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|(^|[_-])token$|(api|access|auth|private)[_-]?(key|token)", re.IGNORECASE
)
_SECRET_LEAF = re.compile(r"secret|passw(or)?d|token(?!s|i)|(?<![a-z])key(?![a-z])", re.IGNORECASE)
_TIME = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?"
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_LOG_PREFIX = re.compile(
    r"[DIWEF]\d{4,8} \d\d:\d\d:\d+\.\d+ +\d+ [^\s:]+:\d+\] "  # glog and absl, also in Python
    rf"|{_TIME}: [DIWEF] [^\s:]+:\d+\] "  # TensorFlow's absl
    rf"|{_LEVEL}:(?:{_TIME}:)?[\w.]+:(?:\d+:)? ?"  # logging, and as JAX sets it up
    rf"|{_TIME} - [\w.]+ - {_LEVEL} - "  # logging, as its manual sets it up
)
_WORD_LETTERS = 40  # a longer one is a path, a value or the like


class MessageParts(NamedTuple):
    """A message, or its beginning and its end."""

    head: list[str]
    left_out: str = ""  # "118 lines, 9,204 characters"; empty: nothing
    tail: str = ""


def without_secrets(text: str) -> str:
    """Return a text with the credentials in it hidden.

    They are users and passwords in URLs, and the values of names such as `HF_TOKEN`,
    `AWS_SECRET_ACCESS_KEY`, `password` and `api_key`, also as options of a command.

    >>> without_secrets("cannot open https://me:pw@host/x with HF_TOKEN=hf_abc")
    'cannot open https://(hidden)@host/x with HF_TOKEN=(hidden)'
    >>> without_secrets("export HF_TOKEN=$(cat token)")  # a command, not its output
    'export HF_TOKEN=$(cat token)'
    """
    text = _URL_USER.sub(f"{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _LOGIN.sub(rf"\1\2{HIDDEN}", text)
    text = _OPTION.sub(_without_value, text)
    parts, end = [], 0
    for match in _ASSIGNED.finditer(text):  # a value may itself be a name, of the next value
        if match.start() >= end and _names_secret(match[1]):
            parts += [text[end : match.start(3)], HIDDEN]
            end = match.end(3)
    return "".join([*parts, text[end:]])


def _without_value(option: re.Match[str]) -> str:
    if _names_secret(option[1]):
        return f"--{option[1]} {HIDDEN}"
    return option[0]


def is_secret_leaf(path: str) -> bool:
    """Return whether the path of a leaf names a secret: `['api_key']`, `auth/password`."""
    names = re.findall(r"[\w-]+", path)
    return bool(_SECRET_LEAF.search(path)) or any(map(_is_secret_variable, names))


def _names_secret(name: str) -> bool:
    return _is_secret_variable(name) or _SECRET_NAME.search(name) is not None


def _is_secret_variable(name: str) -> bool:
    return name.isupper() and _SECRET_VARIABLE.search(name) is not None


def printable(text: str, *, only_ascii: bool = False, keeps_lines: bool = False) -> str:
    r"""Return a text with its control characters and direction marks escaped, tabs as spaces.

    Args:
      text: anything.
      only_ascii: escape all letters outside ASCII; an ellipsis becomes three dots.
      keeps_lines: leave newlines in it; otherwise they are escaped, too.

    >>> printable("a\tb\x1b[0m\n")
    'a b\\x1b[0m\\n'
    """
    if keeps_lines:
        lines = text.replace("\r\n", "\n").split("\n")
        return "\n".join(printable(line, only_ascii=only_ascii) for line in lines)
    if text.isprintable() and (text.isascii() or not only_ascii):
        return text
    escaped = (c for c in set(text) if not (c.isprintable() and (c.isascii() or not only_ascii)))
    return text.translate({ord(letter): _escape(letter) for letter in escaped})


def _escape(letter: str) -> str:
    if letter == "\t":
        return " "
    if letter == "…":
        return "..."
    code = ord(letter)
    if code <= 0xFF and not letter.isprintable():
        return ascii(letter)[1:-1]
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


def columns(text: str) -> int:
    """Return how many columns a terminal needs for a text: two for a wide letter."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(letter: str) -> int:
    if letter.isascii():
        return 1
    if unicodedata.category(letter) in ("Mn", "Me"):  # is drawn over the letter before it
        return 0
    if unicodedata.east_asian_width(letter) in "WF":
        return 2
    return 1


def beginning(text: str, limit: int) -> str:
    """Return as much of the beginning of a text as `limit` columns hold."""
    return text[: fitting(text, 0, limit)]


def ending(text: str, limit: int) -> str:
    """Return as much of the end of a text as `limit` columns hold."""
    return text[len(text) - fitting(text[::-1], 0, limit) :]


def fits(text: str, limit: int) -> bool:
    """Return whether `limit` columns hold a text."""
    if text.isascii():
        return len(text) <= limit
    return fitting(text, 0, limit) == len(text)


def fitting(text: str, start: int, limit: int) -> int:
    """Return the end of the longest part of a text from `start` that `limit` columns hold."""
    if text.isascii():
        return min(len(text), start + max(0, limit))
    used = 0
    for index in range(start, len(text)):
        used += _columns(text[index])
        if used > limit:
            return index
    return len(text)


def shortened(text: str, limit: int, dots: str = "…") -> str:
    """Return a text of at most `limit` columns: cut in the middle, with what is missing.

    The mark is the dots alone where little is missing: it would hide more than it counts. Words
    stay whole, but for a long one, and the first and the last.

    >>> shortened("process 1 cannot complete: process 0 left the job", 40)
    'process 1 cannot … 0 left the job'
    >>> shortened("/data/" + "x" * 2000 + "-0001", 48)
    '/data/xxxxxxxx… 1,983 characters …xxxxxxxxx-0001'
    >>> shortened("main.<locals>.train_step.<locals>.loss_fn", 38)
    'main.<locals>.train…p.<locals>.loss_fn'
    """
    if fits(text, limit):
        return text
    note = f"{dots} {len(text):,} characters {dots}"
    if limit < columns(note) + 16 or columns(text) - limit < columns(note) + _LEAST_GAIN:
        note = dots
    room = max(0, limit - columns(note))
    end, _ = _cut_between_words(text, fitting(text, 0, room - room // 2))
    _, start = _cut_between_words(text, len(text) - len(ending(text, room // 2)))
    head, tail = text[:end], text[start:]
    if note != dots:
        note = f"{dots} {len(text) - len(head) - len(tail):,} characters {dots}"
    return beginning(f"{head}{note}{tail}", limit)


def shortened_log(line: str, limit: int, dots: str = "…") -> str:
    """Return a line of a log in `limit` columns: without its prefix, then words of its middle.

    It stays whole, and takes a few columns more, where a mark would not be much shorter than the
    words.

    >>> shortened_log("I1125 10:31:02.345678 140234 train.py:33] step 120, loss 2.1", 40)
    'step 120, loss 2.1'
    """
    if fits(line, limit):
        return line
    text = line
    prefix = _LOG_PREFIX.match(line)
    if prefix:
        text = line[prefix.end() :]
    if fits(text, limit):
        return text
    note = f" {dots} {len(text):,} characters {dots} "
    room = max(0, limit - columns(note))
    end, _ = _cut_between_words(text, len(beginning(text, room - room // 2)))
    _, start = _cut_between_words(text, len(text) - len(ending(text, room // 2)))
    head, tail = text[:end].rstrip(), text[start:].lstrip()
    cut = f"{head} {dots} {len(text) - len(head) - len(tail):,} characters {dots} {tail}"
    if len(cut) + _LEAST_GAIN <= len(text):
        return cut
    return text


def _cut_between_words(text: str, offset: int) -> tuple[int, int]:
    """Return where a beginning of a text ends and where an end of it begins.

    The cut is at about `offset`. A long word is cut, and one at either end of the text.
    """
    low = max(text.rfind(space, 0, offset) for space in " \n") + 1
    high = min(f"{text} \n".find(space, offset) for space in " \n")
    is_short = high - low <= _WORD_LETTERS and low > 0 and high < len(text)
    if low < offset < high and is_short:
        return low, high
    return offset, offset


def path_end(path: str, limit: int, dots: str = "…") -> str:
    """Return a path of at most `limit` columns, which keeps its end.

    >>> path_end("/home/me/project/data/shard-00001.npy", 24)
    '…/data/shard-00001.npy'
    """
    if fits(path, limit):
        return path
    end = ending(path, max(0, limit - len(dots)))
    slash = end.find("/")
    if 0 <= slash < len(end) - 1:
        end = end[slash:]
    return beginning(dots + end, limit)


def values_from_difference(texts: Sequence[str], limit: int, dots: str = "…") -> list[str]:
    """Return texts of at most `limit` columns that show where they begin to differ.

    >>> values_from_difference(["x" * 90 + "ab, c", "x" * 90 + "b, c"], 20)
    ['…xxxxxxxxab, c', '…xxxxxxxxb, c']
    """
    if all(fits(text, limit) for text in texts):
        return list(texts)
    common = _common_beginning(texts)
    start = common - 8
    word = texts[0].rfind(" ", 0, max(0, start)) + 1
    if start - word <= limit // 4:
        start = word
    if start <= len(dots):
        return [shortened(text, limit, dots) for text in texts]
    differs = common - start + len(dots)
    return [_beginning_of_names(dots + text[start:], limit, dots, differs) for text in texts]


def _beginning_of_names(text: str, limit: int, dots: str, least: int = 0) -> str:
    """Return the beginning of code or of a value in `limit` columns, dots included where it is cut:
    not within a name or a number, unless that is long.

    Args:
      least: the number of letters that are shown, though they be a part of a name.
    """
    if fits(text, limit):
        return text
    most = fitting(text, 0, limit - len(dots))
    end = most
    while end > 0 and text[end - 1 : end + 1].isalnum():
        end -= 1
    if end <= least or most - end > _WORD_LETTERS:
        end = most
    return text[:end] + dots


def _common_beginning(texts: Sequence[str]) -> int:
    """Return how many letters texts begin with that are equal; none for a single text."""
    if len(texts) < 2:
        return 0
    pairs = enumerate(zip(min(texts), max(texts), strict=False))
    return next(
        (index for index, (letter, other) in pairs if letter != other), min(map(len, texts))
    )


def source_part(source: str, expression: Sequence[int], limit: int, dots: str = "…") -> str:
    """Return at most `limit` columns of a line of source, around an expression in it.

    Args:
      source: the line, without indentation.
      expression: the first and the last column of the expression; empty: unknown.
      limit: columns.
      dots: the mark of what is left out.

    >>> source_part("x = read(); y = load(path)", (16, 26), 20)
    '… y = load(path)'
    """
    if fits(source, limit):
        return source
    if len(expression) != 2 or not 0 <= expression[0] <= expression[1] <= len(source):
        return _beginning_of_names(source, limit, dots)
    before = source.rfind("; ", 0, expression[0])
    start = before + 2 if before >= 0 else 0
    after = source.find("; ", expression[1])
    end = after + 1 if after >= 0 else len(source)
    if columns(source[start:end]) > limit - 2 * len(dots) - 2:  # not the whole statement
        start = max(start, min(expression[0], end - limit + 2 * len(dots) + 2))
    head = tail = ""
    if start:
        head = f"{dots} "
    if end < len(source):
        tail = f" {dots}"
    if fits(head + source[start:end] + tail, limit):
        return head + source[start:end] + tail
    return _beginning_of_names(head + source[start:], limit, dots)


def capital(text: str) -> str:
    """Return a text with a capital first letter, the others as they are."""
    return text[:1].upper() + text[1:]


def sentence(line: str) -> str:
    """Return a line of a message as a sentence; an indented one as it is, for people to paste."""
    if line.startswith("  "):
        return line
    text = capital(line.strip())
    if line.endswith(":"):
        return text
    return f"{text}."


def as_one_line(lines: Iterable[str]) -> str:
    """Return lines as one, with a mark where one of them ends without any.

    >>> as_one_line(["save: 2 problems:", "  w: no array", "  b: no array", "pass arrays"])
    'save: 2 problems: w: no array; b: no array; pass arrays'
    """
    stripped = [" ".join(line.split()) for line in lines if line.strip()]
    marked = [line if line[-1] in ".:;," else f"{line};" for line in stripped[:-1]]
    return " ".join([*marked, *stripped[-1:]])


def first_sentence(message: str) -> str:
    """Return the first line of a message, and those that it announces, as one line.

    >>> first_sentence("save: process 1 did not call it\\nnothing of it is kept")
    'save: process 1 did not call it'
    >>> first_sentence("save: 2 problems:\\n  w: no array\\n  b: no array")
    'save: 2 problems: w: no array; b: no array'
    """
    lines = message.strip().splitlines()
    if lines and not lines[0].rstrip().endswith(":"):
        lines = lines[:1]
    return as_one_line(lines)


def process_ranges(processes: Iterable[int]) -> str:
    """Return processes as a report names them: five ranges, and how many more there are."""
    return listed(set(processes), most=5)


def message_parts(message: str, characters: int | None, *, is_whole: bool) -> MessageParts:
    r"""Return the lines of a message, blank ones left out, or its beginning and its end.

    Args:
      message: as far as it is known.
      characters: its true length, if more.
      is_whole: return all lines.
    """
    lines = [line.rstrip() for line in message.split("\n") if line.strip()]
    if is_whole or len(message) <= MESSAGE_HEAD:
        return MessageParts(lines)
    end, _ = _cut_between_words(message, MESSAGE_HEAD)
    head, rest = message[:end], message[end:]
    tail = rest.rstrip().rpartition("\n")[2].strip()
    if len(tail) > MESSAGE_TAIL:
        _, start = _cut_between_words(tail, len(tail) - MESSAGE_TAIL)
        tail = tail[start:].lstrip()
    left = max(characters or 0, len(message)) - len(head) - len(tail)
    count = rest.count("\n")
    note = f"{left:,} characters"
    if count > 1:
        note = f"{count:,} lines, {note}"
    if left < len(note) + 4 + _LEAST_GAIN:  # 4: the dots and spaces around it
        return MessageParts(lines)
    return MessageParts([line for line in head.split("\n") if line.strip()], note, tail)


def _after_component(text: str, start: int, end: int) -> int:
    """Return where a line ends that is part of a path: `params/dense/`, `['params']`."""
    separator = max(text.rfind("/", start, end), text.rfind("][", start, end))
    if separator > start:
        return separator + 1
    return end


def breaks(text: str, width: int, hanging: int, *, is_hard: bool) -> list[tuple[int, int]]:
    """Return the parts of a text, as slices, that fill lines of at most `width` columns.

    Lines break at spaces, or else between components of a path. Those after the first are `hanging`
    columns shorter.

    Args:
      text: one line.
      width: columns of a line.
      hanging: columns by which lines after the first are indented.
      is_hard: break a word that is longer than a line; otherwise the line is too long.
    """
    parts: list[tuple[int, int]] = []
    start, room, length = 0, width, len(text.rstrip(" "))
    while (end := fitting(text[:length], start, room)) < length:
        lead = len(text) - len(text[start:].lstrip(" "))
        offset = text.rfind(" ", lead, end + 1)
        if offset < 0 and is_hard:
            offset = max(_after_component(text, start, end), start + 1)
        elif offset < 0:
            offset = text.find(" ", end, length)
            if offset < 0:
                break
        parts.append((start, max(start, len(text[:offset].rstrip(" ")))))
        start = offset + len(text[offset:]) - len(text[offset:].lstrip(" "))
        room = max(1, width - hanging)
    parts.append((start, length))
    return parts
