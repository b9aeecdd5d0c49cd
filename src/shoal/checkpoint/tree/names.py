"""Names of leaves: a one-to-one mapping between paths in a tree and lines of text.

A path is a tuple of *keys*: a dict's own key, the decimal text of an index, the name of a field.
The name joins their components with "/". The component of a str key is its text, with "~", "/",
"#", control characters and lone surrogates escaped; those of other keys begin with "~" and a
letter::

    'w'  w       'a/b'  a~1b      ''     ~e      1     ~i1      None      ~n
    'a.b'  a.b   'a~b'  a~0b      True   ~t      1.5   ~d1.5    b'\x00'  ~b00

An entry of a data file has the name of its leaf if it is the whole leaf, else the name, "#" and its
origin in the leaf; a per-process value has "#p" and the process. The escapes extend JSON Pointer's
"~0" and "~1" (RFC 6901).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, TypeAlias

from shoal.errors import UsageError, UsageTypeError, WrongType

Key: TypeAlias = Any  # str, int, float, bool, bytes, None, or a tuple of these
Path: TypeAlias = tuple[Key, ...]

ROOT = "~"  # the name of a tree that is a single leaf
_DEEPEST = 16  # nesting of tuples used as keys
_RESERVED = "__metadata__"  # a reserved key of safetensors
_PLAIN_INTS = 1 << 63  # larger ones are written in hex: Python limits long decimals
_ESCAPES = {"~": "~0", "/": "~1", "#": "~2"}
# Lone surrogates cannot be encoded; control characters and line ends would garble output.
_ODD = "~/#\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_TO_ESCAPE = re.compile(f"[{_ODD}]")
_INNER = re.compile("(?:[^~]|~[^,.T])*")  # a component within a tuple
_PLAIN = re.compile(f"[^{_ODD}]+")
_TOKEN = re.compile(f"~(?:[012]|u([0-9a-f]{{4}}))|[^{_ODD}]")


def component(key: Key) -> str:
    """Return the text of one key.

    Raises:
      UsageTypeError: keys of that type are not supported.
    """
    # 1, 1.0 and True are equal: a cache by value would confuse them
    if type(key) is str:
        return _of_str(key)
    return _of_other(key, _DEEPEST)


def key_of(text: str) -> Key:
    """Return the key of a component.

    Raises:
      UsageError: it is not a valid component.
    """
    if _PLAIN.fullmatch(text) and text != _RESERVED:
        return text
    key = _key(text)
    if key is _NONE_SUCH or component(key) != text:
        raise UsageError(f"{text[:100]!r} is not part of a name")
    return key


def name_of(path: Path) -> str:
    """Return the name of the leaf at a path."""
    if not path:
        return ROOT
    return "/".join([component(key) for key in path])


def path_of(name: str) -> Path:
    """Return the path of a name; an index comes back as its text.

    Raises:
      UsageError: it is not a valid name.
    """
    if name == ROOT:
        return ()
    return tuple(key_of(text) for text in name.split("/"))


def entry(name: str, origin: Sequence[int] | None) -> str:
    """Return the entry name of a box of a leaf; of the whole leaf if `origin` is None."""
    if origin is None:
        return name
    return f"{name}#{','.join(map(str, origin))}"


def entry_of_process(name: str, process: int) -> str:
    """Return the entry name of a per-process value."""
    return f"{name}#p{process}"


_NONE_SUCH = object()


@lru_cache(maxsize=1 << 15)
def _of_str(key: str) -> str:
    if not key:
        return "~e"
    if key == _RESERVED:
        return "~m"
    return _TO_ESCAPE.sub(_escape, key)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return _ESCAPES.get(character) or f"~u{ord(character):04x}"


def _of_other(key: Key, depth: int) -> str:
    kind = type(key)
    if key is None:
        return "~n"
    if kind is bool:
        return "~t" if key else "~f"
    if kind is int:
        if -_PLAIN_INTS <= key < _PLAIN_INTS:
            return f"~i{key}"
        return f"~x{key:x}"
    if kind is float:
        if key != key:  # NaNs by their bits: there are many
            return f"~q{struct.pack('>d', key).hex()}"
        return f"~d{key!r}"
    if kind is bytes:
        return f"~b{key.hex()}"
    if kind is tuple:
        if not depth:
            raise UsageError(f"has a key of more than {_DEEPEST} tuples in tuples")
        inner = (_of_str(part) if type(part) is str else _of_other(part, depth - 1) for part in key)
        return "~T" + "~,".join(inner) + "~."
    raise _no_key(key)


def _no_key(key: Key) -> UsageError:
    what = f"has a key of type {type(key).__name__}"
    if isinstance(key, Enum):
        what += ", an enum; take its .name or .value"
    return UsageTypeError(
        f"{what}; keys are str, int, float, bool, bytes, None or tuples of these",
        problems=[WrongType(what)],
    )


def _key(text: str) -> Key:
    """Return the key of a component, or a key with another component if it is invalid."""
    if text[:1] != "~" or text[1:2] in "012u":
        return _str_key(text)
    tag, rest = text[1], text[2:]
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if tag == "T":
        key, end = _tuple_key(text, 0, _DEEPEST)
        if end != len(text):
            return _NONE_SUCH
        return key
    return _number_key(tag, rest)


_CONSTANTS = {"~e": "", "~m": _RESERVED, "~t": True, "~f": False, "~n": None}


def _str_key(text: str) -> Key:
    parts, end = [], 0
    while end < len(text):
        match = _TOKEN.match(text, end)
        if not match:
            return _NONE_SUCH
        token, end = match.group(), match.end()
        if match.group(1):
            parts.append(chr(int(match.group(1), 16)))
        elif len(token) > 1:
            parts.append("~/#"[int(token[1])])
        else:
            parts.append(token)
    return "".join(parts) or _NONE_SUCH


def _number_key(tag: str, rest: str) -> Key:
    try:
        if tag == "i" and len(rest) <= 20:
            return int(rest)
        if tag == "x":
            return int(rest, 16)
        if tag == "d":
            return float(rest)
        if tag == "q" and len(rest) == 16:
            return struct.unpack(">d", bytes.fromhex(rest))[0]
        if tag == "b":
            return bytes.fromhex(rest)
    except ValueError:
        pass
    return _NONE_SUCH


def _tuple_key(text: str, begin: int, depth: int) -> tuple[Key, int]:
    """Return the tuple that begins there, and its end."""
    keys: list[Key] = []
    end = begin + 2
    if not depth:
        return _NONE_SUCH, end
    if text.startswith("~.", end):
        return (), end + 2
    while True:
        if text.startswith("~T", end):
            key, end = _tuple_key(text, end, depth - 1)
        else:
            last = end
            match = _INNER.match(text, end)
            if match:
                last = match.end()
            key, end = _key(text[end:last]), last
        keys.append(key)
        if key is _NONE_SUCH or text[end : end + 2] not in ("~,", "~."):
            return _NONE_SUCH, end
        end += 2
        if text[end - 2 : end] == "~.":
            return tuple(keys), end
