"""Encode plain (non-array) values as JSON, exactly.

-0.0, NaN payloads, ints of any size and lone surrogates survive the round trip.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.arguments import PLAIN_KINDS
from shoal.checkpoint.tree import dtypes
from shoal.conversion_hints import advice
from shoal.errors import UsageError, WrongType, raise_all, with_article

LARGE_BYTES = 64 << 10  # longer str and bytes are stored in data files
_KINDS: Mapping[type, str] = {**PLAIN_KINDS, type(None): "none"}
_PLAIN_INTS = 1 << 63  # larger ones are written in hex: Python limits long decimals
_DEEPEST = 32  # nesting of plain values


def kind_of(value: Any) -> str | None:
    """Return the kind of a plain leaf: "int", …, "scalar" (of NumPy); None if it is not plain."""
    kind = _KINDS.get(type(value))
    if kind is None and isinstance(value, np.generic):
        return "scalar"
    return kind


def encode_value(value: Any) -> Any:
    """Encode a plain leaf as JSON.

    Raises:
      UsageTypeError: it is not plain, or a scalar of a dtype that cannot be stored.
    """
    kind = kind_of(value)
    if kind is None:
        raise_all("a value", [WrongType(remedy(value, can_register=False))])
    return _WRITE[kind or ""](value)


def decode_value(kind: str, encoded: Any) -> Any:
    """Decode a value of the given kind from JSON.

    Raises:
      UsageError: it is not a valid encoding.
    """
    read = _READ.get(kind)
    try:
        if read is not None:
            value = read(encoded)
            is_canonical = kind_of(value) == kind and encode_value(value) == encoded
            if is_canonical:
                return value
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError, struct.error):
        pass
    raise UsageError(f"{json_excerpt(encoded)} is not the text of any {kind}")


def json_excerpt(value: Any) -> str:
    """Return a short text of untrusted JSON, which may be long or deeply nested."""
    if type(value) in (list, dict):
        return f"{with_article(type(value).__name__)} of {len(value)}"
    return repr(value)[:80]


def bulk_of(value: Any) -> NDArray[np.uint8] | None:
    """Return the bytes of a long str or bytes, which go to data files; None if it is not long."""
    if type(value) is str and len(value) > LARGE_BYTES // 4:
        data = value.encode("utf-8", "surrogatepass")
    elif type(value) is bytes:
        data = value
    else:
        return None
    if len(data) <= LARGE_BYTES:
        return None
    return np.frombuffer(data, np.uint8)


def value_of_bulk(kind: str, data: NDArray[np.uint8]) -> str | bytes:
    """Decode a long str or bytes.

    Raises:
      UsageError: the bytes are not valid text.
    """
    content = data.tobytes()
    if kind == "bytes":
        return content
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as why:
        raise UsageError(f"its bytes are not valid text: {why}") from None


def _write_int(value: int) -> str:
    if -_PLAIN_INTS <= value < _PLAIN_INTS:
        return str(value)
    return hex(value)


def _read_int(encoded: Any) -> int:
    if "x" in encoded:
        return int(encoded, 16)
    return int(encoded[:20])


def _write_float(value: float) -> str:
    if value == value:
        return value.hex()
    return f"nan:{struct.pack('>d', value).hex()}"


def _read_float(encoded: Any) -> float:
    if encoded.startswith("nan:"):
        (value,) = struct.unpack(">d", bytes.fromhex(encoded[4:]))
        return float(value)
    return float.fromhex(encoded)


def _write_complex(value: complex) -> list[str]:
    return [_write_float(value.real), _write_float(value.imag)]


def _read_complex(encoded: Any) -> complex:
    real, imag = encoded
    return complex(_read_float(real), _read_float(imag))


def _write_str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which other JSON libraries reject
        return {"surrogatepass": _write_bytes(value.encode("utf-8", "surrogatepass"))}
    return value


def _read_str(encoded: Any) -> str:
    if type(encoded) is str:
        return encoded
    return _read_bytes(encoded["surrogatepass"]).decode("utf-8", "surrogatepass")


def _write_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _read_bytes(encoded: Any) -> bytes:
    return base64.b64decode(encoded, validate=True)


def _write_scalar(value: np.generic) -> dict[str, str]:
    # Text keeps its own length: arrays strip trailing zeros.
    if isinstance(value, np.str_):
        bits = value.encode("utf-32-le", "surrogatepass")
        return {"dtype": f"U{len(value)}", "bits": bits.hex()}
    if isinstance(value, np.bytes_):
        return {"dtype": f"S{len(value)}", "bits": value.hex()}
    array = np.asarray(value)
    return {
        "dtype": dtypes.dtype_name(array.dtype),
        "bits": dtypes.pack_elements(array).tobytes().hex(),
    }


def _read_scalar(encoded: Any) -> Any:
    dtype, bits = dtypes.dtype_of(encoded["dtype"]), bytes.fromhex(encoded["bits"])
    if dtype.kind == "U":
        return np.str_(bits.decode("utf-32-le", "surrogatepass"))
    if dtype.kind == "S":
        return np.bytes_(bits)
    return dtypes.unpack_elements(bits, dtype, ())[()]


def _same(value: Any) -> Any:
    return value


_WRITE: Mapping[str, Callable[[Any], Any]] = {
    "bool": _same,
    "int": _write_int,
    "float": _write_float,
    "complex": _write_complex,
    "str": _write_str,
    "bytes": _write_bytes,
    "none": _same,
    "scalar": _write_scalar,
}
_READ: Mapping[str, Callable[[Any], Any]] = {
    "bool": _same,
    "int": _read_int,
    "float": _read_float,
    "complex": _read_complex,
    "str": _read_str,
    "bytes": _read_bytes,
    "none": _same,
    "scalar": _read_scalar,
}


def plain_json(value: Any) -> Any:
    """Encode the plain values, lists, tuples and dicts of a node's auxiliary data as JSON.

    None, bool, str and lists are themselves; anything else is an object with one key, its kind.

    Raises:
      UsageError: a value is not plain.
    """
    return _plain_json(value, _DEEPEST)


def plain_value(encoded: Any) -> Any:
    """Decode plain values from JSON.

    Raises:
      UsageError: it is not a valid encoding.
    """
    return _plain_value(encoded, _DEEPEST)


def _plain_json(value: Any, depth: int) -> Any:
    kind = type(value)
    if not depth:
        raise UsageError(f"its static data are nested deeper than {_DEEPEST}")
    if kind is list:
        return [_plain_json(item, depth - 1) for item in value]
    if kind is tuple:
        return {"tuple": [_plain_json(item, depth - 1) for item in value]}
    if kind is dict:
        pairs = value.items()
        return {"dict": [[_plain_json(item, depth - 1) for item in pair] for pair in pairs]}
    written = encode_value(value)
    if value is None or kind is bool or (kind is str and written is value):
        return written
    return {kind_of(value): written}


def _plain_value(encoded: Any, depth: int) -> Any:
    if encoded is None or type(encoded) in (bool, str):
        return encoded
    if not depth:
        raise UsageError(f"static data are nested deeper than {_DEEPEST}")
    if type(encoded) is list:
        return [_plain_value(item, depth - 1) for item in encoded]
    if type(encoded) is not dict or len(encoded) != 1:
        raise UsageError("static data that are not plain values")
    ((kind, inner),) = encoded.items()
    if kind not in ("tuple", "dict"):
        return decode_value(kind, inner)
    if type(inner) is not list:
        raise UsageError(f"static data whose {kind} is invalid")
    if kind == "tuple":
        return tuple([_plain_value(item, depth - 1) for item in inner])
    try:
        return {_plain_value(k, depth - 1): _plain_value(v, depth - 1) for k, v in inner}
    except (TypeError, ValueError) as why:
        raise UsageError(f"static data with an invalid dict: {why}") from None


# ---- Suggest what to save instead of a value that cannot be saved.


_KNOWN = "pass arrays, numbers, str, bytes, PRNG keys, None or PerProcess(…)"


def remedy(value: Any, *, can_register: bool = True, known: str = _KNOWN) -> str:
    """Return the type of a value, and what to save instead, as text.

    Args:
      can_register: would registering its class with JAX help?
      known: what to do if nothing is known of its type.

    >>> remedy({1, 2})
    'is a set; save a sorted list of it'
    >>> remedy(object())
    'is an object; pass arrays, numbers, str, bytes, PRNG keys, None or PerProcess(…)'
    """
    kind = type(value)
    advice_text = advice(value, "save", "saved", can_register=can_register) or known
    if isinstance(value, type):
        return f"is the class {value.__name__}; {advice_text}"
    if isinstance(value, Enum):
        return f"is {value}, of the enum {kind.__name__}; {advice_text}"
    if is_dataclass(value) and can_register and "decorate" in advice_text:
        return f"is a dataclass {kind.__name__} that JAX does not know; {advice_text}"
    what = kind.__name__
    if is_dataclass(value):
        what = f"dataclass {what}"
    return f"is {with_article(what)}; {advice_text}"
