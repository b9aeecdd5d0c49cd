"""Validate fields of untrusted JSON by name and type."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from shoal.checkpoint.format.records import FEATURES, LARGEST, VERSION
from shoal.checkpoint.tree.plain_values import json_excerpt
from shoal.conversion_hints import plain_form
from shoal.errors import CorruptCheckpointError, UnsupportedCheckpointError, raise_all, with_article

FORMAT = "shoal-checkpoint"
_ATTEMPT = re.compile("[0-9a-f]{12}", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}", re.ASCII)
_DEEPEST = 100  # nesting of the user's lists and objects


class Fields:
    """One JSON object of a file."""

    def __init__(self, found: Any, file: str, where: str = "") -> None:
        self.file = file
        self.where = f", {where}" if where else ""
        if type(found) is not dict:
            self.refuse("is not an object")
        self.found: dict[str, Any] = found

    def refuse(self, what: str) -> NoReturn:
        raise CorruptCheckpointError(f"{self.file}{self.where} {what}", file=self.file)

    def expect(self, key: str, is_right: bool, what: str) -> None:
        if not is_right:
            self.refuse(f"has {key!r} that is {what}: {json_excerpt(self.found.get(key))}")

    def only(self, known: frozenset[str]) -> None:
        """Reject unknown keys."""
        extra = self.found.keys() - known
        if extra:
            self.refuse(f"has unknown keys: {[key[:100] for key in sorted(extra)[:5]]}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.found.get(key, default)
        self.expect(key, is_text(value), "no text")
        return str(value)

    def size(self, key: str) -> int:
        value = self.found.get(key)
        self.expect(key, type(value) is int and 0 <= value < LARGEST, "no size")
        return int(value)  # type: ignore[arg-type]

    def sizes(self, key: str) -> tuple[int, ...]:
        value = self.found.get(key, [])
        right = type(value) is list and all(type(v) is int and 0 <= v < LARGEST for v in value)
        self.expect(key, right, "not a list of sizes")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.found.get(key, [])
        right = type(value) is list and all(map(is_text, value))
        self.expect(key, right, "not a list of texts")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.found.get(key, {})
        self.expect(key, type(value) is dict, "no object")
        return dict(value)

    def free(self, key: str) -> dict[str, Any]:
        """Return a free-form object of the user's."""
        value = self.mapping(key)
        problems: list[str] = []
        _check_json(value, key, _DEEPEST, problems)
        if problems:
            self.refuse(f"has {problems[0][:200]}")
        return value

    def step(self) -> int | None:
        value = self.found.get("step")
        self.expect("step", value is None or is_step(value), "none")
        return value

    def attempt(self) -> str:
        value = self.text("attempt")
        self.expect("attempt", bool(_ATTEMPT.fullmatch(value)), "not 12 hex digits")
        return value

    def sha256(self, key: str) -> str:
        value = self.text(key)
        self.expect(key, bool(_SHA256.fullmatch(value)), "no SHA-256")
        return value


def is_step(value: Any) -> bool:
    """Is it a valid step number?"""
    return type(value) is int and abs(value) < LARGEST


def is_text(value: Any) -> bool:
    """Is it a str that can be encoded? JSON may contain lone surrogates."""
    if type(value) is not str:
        return False
    try:
        return value.isascii() or bool(value.encode())  # the first is quick
    except UnicodeEncodeError:
        return False


def head(kind: str) -> dict[str, Any]:
    """Return the fields that every file begins with."""
    return {"format": FORMAT, "file": kind, "version": list(VERSION)}


def check_version(fields: Fields, kind: str) -> bool:
    """Reject other formats, later versions and unknown features; are all keys known?

    Raises:
      CorruptCheckpointError, UnsupportedCheckpointError.
    """
    fields.expect("format", fields.text("format") == FORMAT, f"not {FORMAT!r}")
    version = fields.sizes("version")
    fields.expect("version", len(version) == 2, "not two numbers")
    required = fields.texts("required")
    unknown = [feature[:100] for feature in sorted(set(required) - FEATURES)[:5]]
    if unknown or version[0] != VERSION[0]:
        raise UnsupportedCheckpointError(
            f"{fields.file} has version {version[0]}.{version[1]}"
            + (f" and needs {', '.join(unknown)}" if unknown else "")
            + f"; this shoal reads {VERSION[0]}.{VERSION[1]}: use a newer one",
            features=unknown or [f"version {version[0]}.{version[1]}"],
        )
    fields.expect("file", fields.text("file") == kind, f"not {kind!r}")
    return tuple(version) <= VERSION


def check_json(value: Any, operation: str) -> None:
    """Reject values that would not survive a round trip through JSON.

    Raises:
      UsageError: names every offender.
    """
    problems: list[str] = []
    _check_json(value, "", _DEEPEST, problems)
    raise_all(operation, problems)


def _check_json(value: Any, where: str, depth: int, problems: list[str]) -> None:
    kind = type(value)
    if not depth:
        problems.append(f"{where}: is nested deeper than {_DEEPEST}")
    elif kind is list:
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]", depth - 1, problems)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                problems.append(f"{where}: has the key {key!r}; keys of JSON are str")
            else:
                _check_json(key, f"{where}: the key {key!r}", 1, problems)
                _check_json(item, f"{where}[{key!r}]", depth - 1, problems)
    elif why := _why_no_json(value):
        problems.append(f"{where}: {why}")


def _why_no_json(value: Any) -> str:
    kind = type(value)
    if kind is str:
        if not is_text(value):
            return "holds a lone surrogate, which is not valid text"
    elif kind is float:
        if value - value != 0:
            return f"is {value}, which JSON does not have"
    elif kind is int:
        if abs(value) >= 1 << 63:
            return "is an int of more than 63 bits; pass text"
    elif value is not None and kind is not bool:
        form = _json_form(value) or "None, bool, int, float, str, lists or dicts of these"
        return f"is {with_article(kind.__name__)}; pass {form}"
    return ""


def _json_form(value: Any) -> str:
    """Return what to give for a value that JSON does not have; "" if unknown."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "its .hex()"
    if isinstance(value, complex):
        return "its .real and .imag"
    if isinstance(value, tuple):
        return "list(…) of it"
    if callable(getattr(value, "tolist", None)):  # arrays and scalars of NumPy and JAX
        return "its .tolist()"
    form = plain_form(value)
    if "np." in form or form.startswith("leave"):
        return ""
    return form
