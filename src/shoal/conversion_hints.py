"""What to give in place of an object that can be neither sent nor saved: its plain form.

Classes of other libraries are recognized by name, so that none is imported.
"""

from __future__ import annotations

import io
import sys
from collections import UserString, deque
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AnySet
from dataclasses import is_dataclass
from datetime import date, time, timedelta, tzinfo
from enum import Enum
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any

_ARRAYS = (
    "its .detach().cpu().numpy()",
    "its .numpy()",
    "its .to_numpy()",
    "jax.ref.get(…) of it",
    "np.asarray(…) of it",
)
_REGISTER = "jax.tree_util.register_dataclass"
_AS_DICT = "dataclasses.asdict(…) of it"
_COLUMNS = "the .to_numpy() of each of its columns"
_READ = "the number of items read so far"
_LEFT_OUT = "leave it out"
_NO_STATE = f"{_LEFT_OUT}, and make it anew"
_PLACED = f"{_LEFT_OUT}: restore and put take layouts"
_INSTRUCTIONS = (_LEFT_OUT, _NO_STATE, _PLACED)  # no verb comes before them

# By library and class, the first base that is listed; before all general rules.
_KNOWN: Mapping[tuple[str, str], str] = {
    ("numpy", "Generator"): "its .bit_generator.state",
    ("numpy", "BitGenerator"): "its .state",
    ("numpy", "RandomState"): "its .get_state(legacy=False)",
    ("numpy", "SeedSequence"): "its .state",
    ("numpy", "dtype"): "its .name",
    ("random", "SystemRandom"): _NO_STATE,
    ("random", "Random"): "its .getstate()",
    ("decimal", "Decimal"): "str(…) of it",
    ("fractions", "Fraction"): "str(…) of it",
    ("uuid", "UUID"): "str(…) of it",
    ("ipaddress", "_BaseAddress"): "str(…) of it",
    ("ipaddress", "_BaseNetwork"): "str(…) of it",
    ("re", "Pattern"): "its .pattern",
    ("argparse", "Namespace"): "vars(…) of it",
    ("itertools", "count"): _READ,
    ("itertools", "cycle"): _READ,
    ("itertools", "repeat"): _READ,
    ("builtins", "slice"): "its .start, .stop and .step",
    ("builtins", "bytearray"): "bytes(…) of it",
    ("builtins", "memoryview"): "bytes(…) of it",
    ("mmap", "mmap"): "bytes(…) of it",
    ("torch", "Tensor"): _ARRAYS[0],
    ("torch", "Module"): "its .state_dict(), as arrays",
    ("torch", "Optimizer"): "its .state_dict(), as arrays",
    ("torch", "Generator"): "its .get_state().numpy()",
    ("tensorflow", "Tensor"): _ARRAYS[1],
    ("tensorflow", "Variable"): _ARRAYS[1],
    ("pandas", "DataFrame"): _COLUMNS,
    ("pandas", "Series"): _ARRAYS[2],
    ("pandas", "Index"): _ARRAYS[2],
    ("polars", "DataFrame"): _COLUMNS,
    ("polars", "Series"): _ARRAYS[2],
    ("pyarrow", "Table"): _COLUMNS,
    ("ml_collections", "ConfigDict"): "its .to_dict()",
    ("omegaconf", "Container"): "OmegaConf.to_container(…) of it",
    ("pydantic", "BaseModel"): "its .model_dump()",
    ("flax", "Module"): "its variables or nnx.state(…), not the module",
    ("haiku", "Module"): "its parameters, not the module",
    ("scipy", "spmatrix"): "the .data, .indices and .indptr of its .tocsr()",
    ("scipy", "sparray"): "the .data, .indices and .indptr of its .tocsr()",
    ("jax", "Ref"): _ARRAYS[3],
    ("jax", "Sharding"): _PLACED,
    ("jax", "Mesh"): _PLACED,
    ("jax", "PartitionSpec"): _PLACED,
    ("jaxlib", "PartitionSpec"): _PLACED,
    ("jaxlib", "Sharding"): _PLACED,
    ("jaxlib", "Device"): "its .id",
    ("shoal", "Layout"): "its .text, which Layout.parse reads",
    ("shoal", "Mesh"): "its .text, which Mesh.parse reads",
    ("shoal", "Feed"): "its .state(), which feed(start=…) takes",
}


def advice(value: Any, verb: str, done: str, *, can_register: bool = False) -> str:
    """Return what to do instead of sending or saving a value; "" if unknown.

    Args:
      verb: "save" or "pass". done: "saved" or "sent".
      can_register: would registering its class with JAX help?

    >>> advice({1, 2}, "pass", "sent"), advice(len, "save", "saved")
    ('pass a sorted list of it', 'functions cannot be saved; leave it out')
    """
    form = plain_form(value)
    if form or not callable(value):
        phrase = form
        if form and form not in _INSTRUCTIONS:
            phrase = f"{verb} {form}"
        is_open = can_register and form == _AS_DICT
        return f"decorate it with @{_REGISTER}, or {phrase}" if is_open else phrase
    if str(getattr(value, "__module__", "")).partition(".")[0] == "optax":
        return f"functions cannot be {done}; {verb} the state that its init returned"
    if "equinox" in sys.modules:  # its modules hold functions beside arrays
        return f"functions cannot be {done}; {verb} eqx.partition(tree, eqx.is_array)[0]"
    return f"functions cannot be {done}; {_LEFT_OUT}"


def plain_form(value: Any) -> str:
    """Return the plain form of a value, which may be an instruction; "" if unknown.

    >>> plain_form(range(3)), plain_form(SimpleNamespace(a=1)), plain_form(object())
    ('list(…) of it', 'vars(…) of it', '')
    """
    if isinstance(value, type):
        return f"its name, or {_LEFT_OUT}"
    if isinstance(value, Enum):
        return "its .name or .value"
    for base in type(value).__mro__[:-1]:
        library = base.__module__.partition(".")[0]
        form = _KNOWN.get((library, base.__name__))
        if form:
            return form
    if is_dataclass(value):
        return _AS_DICT
    for kinds, form in _GENERAL:
        if isinstance(value, kinds):
            return form
    return _by_methods(value)


def array_form(value: Any) -> str:
    """Return how a value becomes an array of NumPy, as `plain_form`; "" if it does not.

    >>> import array, collections
    >>> array_form(array.array("i", [1])), array_form(collections.deque([1, 2])), array_form({1})
    ('np.asarray(…) of it', 'np.asarray(…) of it', '')
    """
    form = plain_form(value)
    if form in _ARRAYS:
        return form
    is_text = isinstance(value, str | bytes | bytearray | memoryview | UserString)
    if isinstance(value, Sequence | deque) and not is_text:
        return "np.asarray(…) of it"
    return ""


# By type, the first that fits.
_GENERAL: tuple[tuple[Any, str], ...] = (
    (PurePath, "str(…) of it"),
    (date | time, "its .isoformat()"),
    (timedelta, "its .total_seconds()"),
    (tzinfo | UserString | BaseException, "str(…) of it"),
    (SimpleNamespace, "vars(…) of it"),
    (dict, "dict(…) of it"),
    (list, "list(…) of it"),
    (tuple, "tuple(…) of it"),
    (bool, "bool(…) of it"),
    (int, "int(…) of it"),
    (float, "float(…) of it"),
    (complex, "complex(…) of it"),
    (str, "str(…) of it"),
    (bytes, "bytes(…) of it"),
    (type({}.keys()) | type({}.items()) | ValuesView, "list(…) of it"),
    (AnySet, "a sorted list of it"),
    (Mapping, "dict(…) of it"),
    (ModuleType, "its .__name__"),
    (io.IOBase, _NO_STATE),
)


def _by_methods(value: Any) -> str:
    """Return the plain form of a value by what it can do."""
    kind = type(value)
    if hasattr(kind, "__attrs_attrs__"):
        return "attrs.asdict(…) of it"
    for method in ("state_dict", "get_state"):  # readers of torchdata and grain, among others
        if callable(getattr(kind, method, None)):
            return f"its .{method}()"
    if hasattr(kind, "__array__") or _is_buffer(value):
        return "np.asarray(…) of it"
    if hasattr(kind, "__dlpack__"):
        return "np.from_dlpack(…) of it"
    if isinstance(value, Iterator):
        return f"list(…) of it, or {_READ}"
    if isinstance(value, Sequence | deque):
        return "list(…) of it"
    if kind.__module__ in ("_thread", "threading"):
        return _NO_STATE
    return ""


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    except TypeError:
        return False
    return True
