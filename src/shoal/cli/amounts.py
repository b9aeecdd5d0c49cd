"""Parse amounts of bytes and speeds on the command line."""

from __future__ import annotations

import math
import re

from shoal.errors import UsageError

_AMOUNT = re.compile(r"(\d+(?:\.\d*)?(?:[eE]\d+)?)\s*([kKMGT]i?)?(B|bit)?(/s)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def read_bytes(text: str, what: str) -> int:
    """Parse a number of bytes.

    >>> read_bytes("64MiB", "--bytes"), read_bytes("1e6", "--bytes"), read_bytes("2 kB", "--bytes")
    (67108864, 1000000, 2000)
    """
    found = _AMOUNT.fullmatch(text.strip())
    if not found or found[3] == "bit" or found[4]:
        raise UsageError(f"{what} {text!r} must be bytes, such as 64MiB, 1GB or 4096")
    number = _number(found)
    if not number.is_integer() or number >= 1 << 63:
        raise UsageError(f"{what} {text!r} must be a whole number of bytes, below 2**63")
    return int(number)


def read_speed(text: str, what: str) -> float:
    """Parse a speed, in bytes per second.

    >>> read_speed("50GB/s", "--link"), read_speed("400Gbit/s", "--network")
    (50000000000.0, 50000000000.0)
    """
    found = _AMOUNT.fullmatch(text.strip())
    if not found or not found[4] or not found[3]:  # "Gb" is ambiguous: refused
        raise UsageError(f"{what} {text!r} must be a speed, such as 50GB/s or 400Gbit/s")
    return _number(found) / (8 if found[3] == "bit" else 1)


def _number(found: re.Match[str]) -> float:
    prefix = (found[2] or "").upper()
    unit = 1024.0 if prefix.endswith("I") else 1000.0
    return float(found[1]) * math.pow(unit, _POWERS[prefix[:1]])
