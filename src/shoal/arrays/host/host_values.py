"""Which host values can become arrays on devices, and of which dtype.

Unless JAX's 64-bit values are on, 64-bit dtypes are narrowed, as by `jnp.asarray`; but a value that
does not fit is an error, and floats that are rounded are said.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from shoal.arguments import SCALARS, no_fixed_bits
from shoal.conversion_hints import advice, array_form
from shoal.errors import DtypeWarning, UsageError, with_article
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.jax_service.own_programs import own_programs
from shoal.runtime.process import has_strict_dtypes
from shoal.runtime.system.callsite import Caller

X64 = "turn 64-bit values on: JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)"

_WIDE_BYTES = 8  # of an element: JAX may narrow it
_MOST_NAMED = 3  # leaves, in a warning
_ON_HOST = "keep it on the host: broadcast, allgather and save take it"
NO_ARRAYS = (np.longdouble, np.clongdouble)  # JAX has no 80-bit or 128-bit floats

_NOT_ALWAYS = (ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn)  # some versions of JAX lack them


def is_key(value: Any) -> bool:
    """True for an array of PRNG keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def cannot_hold(value: Any, verb: str = "pass") -> str:
    """Return why a value cannot become an array, or an empty string.

    Args:
      verb: what the caller does with the array instead: "pass" or "return".
    """
    if isinstance(value, jax.Array):
        return deleted(value)
    if type(value) in SCALARS:
        return _does_not_fit(value)
    if isinstance(value, np.ma.MaskedArray):
        return "is a masked array, and the mask would be lost; fill it first"
    if not isinstance(value, np.ndarray | np.generic):
        return f"is {with_article(type(value).__name__)}; {_instead(value, verb)}"
    dtype = value.dtype
    numeric = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    if not numeric or dtype.kind in "mM" or not _is_known(dtype.newbyteorder("=")):
        stays = "" if no_fixed_bits(dtype) else f"; {_ON_HOST}"
        return f"has dtype {dtype}, which arrays on devices cannot have{stays}"
    return ""


@lru_cache(maxsize=256)
def _is_known(dtype: np.dtype[Any]) -> bool:
    """Return whether JAX, of this version, has a numeric dtype on devices."""
    if dtype not in _NOT_ALWAYS:
        return dtype not in NO_ARRAYS
    try:
        with jax.transfer_guard("allow"):
            jax.device_put(np.zeros((), dtype))
    except (jax.errors.JaxRuntimeError, TypeError):
        return False
    return True


def _instead(value: Any, verb: str) -> str:
    """Return what to give in place of a value that is no array."""
    form = array_form(value)
    if form:
        return f"{verb} {form}"
    if callable(value):
        instead = advice(value, verb, "placed")
        if instead:
            return instead
    return f"{verb} a numpy array, a scalar or a jax.Array"


def not_placed(value: Any) -> str:
    """Return why a value that is no `jax.Array` cannot be moved."""
    what = with_article(type(value).__name__)
    return cannot_hold(value) or f"{what} is not on devices yet; put places host values"


def deleted(array: jax.Array) -> str:
    """Return why an array is no longer usable, or an empty string."""
    if isinstance(array, jax.core.Tracer) or not array.is_deleted():
        return ""
    return "was deleted (donated or released); use the result instead"


def without_values(array: jax.Array) -> str:
    """Return why an array has no values that could be read, or an empty string."""
    why = deleted(array)
    if why:
        return why
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.spec.unreduced:
        return ""
    axes = ", ".join(sorted(sharding.spec.unreduced))
    return (
        f"is unreduced over {axes}: devices hold terms of a sum; relayout it to a layout "
        "without pending sums"
    )


def narrowed(value: Any) -> tuple[str, str] | None:
    """Return a value's dtype and the narrower one that JAX would give it; None: it keeps its own.

    >>> narrowed(np.float64(1)), narrowed(np.float32(1))
    (('float64', 'float32'), None)
    """
    if isinstance(value, jax.Array) or not isinstance(value, np.ndarray | np.generic):
        return None
    if value.dtype.itemsize < _WIDE_BYTES:
        return None
    own = value.dtype.newbyteorder("=")  # byte order is not a narrowing
    kept = device_dtype(own)
    return None if kept == own else (str(own), str(kept))


def unfit(value: Any) -> str:
    """Return why a value cannot become an array, or an empty string.

    A mapped file is not read: its values are checked where they are cut (`device_form`).
    """
    why = cannot_hold(value)
    if why:
        return why
    change = narrowed(value)
    if change is None:
        return ""
    if has_strict_dtypes():
        return f"{' would become '.join(change)}; cast, or {X64}"
    return "" if is_mapped(value) else _too_large(value)


def warn_of_narrowing(
    operation: str, named: Iterable[tuple[str, Any]], caller: Caller | None = None
) -> None:
    """Warn once per call site of floats that are rounded: of (name, value), all of them fit.

    Args:
      caller: the call site, of a call in another thread; None: that of this one.
    """
    changes = [
        f"{name}: {' becomes '.join(change)}"
        for name, value in named
        if (change := narrowed(value)) and value.dtype.kind in "fc"
    ]
    if not changes:
        return
    more = len(changes) - _MOST_NAMED
    shown = [*changes[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])]
    where = caller or Caller.here()
    warnings.warn_explicit(
        f"{operation}: {'; '.join(shown)} on devices (said once "
        f"per line of the program); cast, or {X64}; SHOAL_STRICT_DTYPES=1 makes it an error",
        DtypeWarning,
        *where,
    )


def device_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a host value on devices."""
    if dtype.itemsize < _WIDE_BYTES and dtype.isnative:  # nearly always; JAX takes its time
        return dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))


def device_form(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array as devices hold it, in byte order and dtype; slice first: this may copy.

    Raises:
      UsageError: a value of a mapped file does not fit. Those of others have been checked.
    """
    kept = device_dtype(array.dtype)
    if array.dtype == kept:
        return array
    if is_mapped(array) and kept.itemsize < array.dtype.itemsize:
        why = _too_large(array)
        if why:
            raise UsageError(f"a mapped file {why}")
    with np.errstate(over="ignore"):  # numbers that are infinite already
        return array.astype(kept)


def as_array(value: Any) -> jax.Array:
    """Return a host value that fits as a `jax.Array`, which shares no memory with it."""
    if isinstance(value, jax.Array):
        return value
    with own_programs(), jax_runtime.explicit_transfers():
        return jnp.asarray(np.array(device_form(as_numpy(value))))


def stand_in(value: Any) -> jax.Array:
    """Return what stands for a value on devices where a program is only traced for its shapes."""
    if isinstance(value, jax.Array):
        return value
    array = value if hasattr(value, "dtype") else as_numpy(value)
    is_plain = isinstance(array.dtype, np.dtype)  # unlike that of keys
    return jnp.zeros(array.shape, device_dtype(array.dtype) if is_plain else array.dtype)


def is_mapped(array: Any) -> bool:
    """Return whether the memory of an array is a mapped file.

    Its class does not tell: `copy` and `astype` of a `numpy.memmap` make one in ordinary memory.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return isinstance(owner, mmap.mmap)


def _too_large(array: np.ndarray[Any, Any] | np.generic) -> str:
    """Return which finite value of an array has no counterpart in its dtype on devices, or ""."""
    kept = device_dtype(array.dtype)
    array = np.asarray(array)
    parts = (array.real, array.imag) if array.dtype.kind == "c" else (array,)
    for part in parts:
        if not part.size:
            continue
        extreme = _extreme(part, kept)
        if extreme is not None:
            return f"holds {extreme}, which does not fit {kept}; cast, or {X64}"
    return ""


def _extreme(part: np.ndarray[Any, Any], kept: np.dtype[Any]) -> Any:
    """Return the least or the greatest of some real numbers if it does not fit, else None."""
    if kept.kind in "iu":
        least, most = np.iinfo(kept).min, np.iinfo(kept).max
        return next((n for n in (part.min(), part.max()) if not least <= n <= most), None)
    ends = [np.fmin.reduce(part, axis=None), np.fmax.reduce(part, axis=None)]  # without NaNs
    if np.isinf(ends).any():
        finite = part[np.isfinite(part)]
        ends = [finite.min(), finite.max()] if finite.size else []
    with np.errstate(over="ignore"):
        small = np.asarray(ends).astype(np.finfo(kept).dtype)
    return next((n for n, became in zip(ends, small, strict=True) if np.isinf(became)), None)


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return a value as an array, without a copy; Python numbers get JAX's default dtypes."""
    if type(value) in SCALARS:
        return np.asarray(value, dtype=_default_dtype(value))
    return np.asarray(value)


def native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in this machine's byte order; slice first, since this may copy."""
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def _default_dtype(value: complex) -> np.dtype[Any]:
    return np.dtype(jax.dtypes.canonicalize_dtype(type(value)))


def _does_not_fit(value: complex) -> str:
    dtype = _default_dtype(value)
    try:
        with np.errstate(over="ignore"):
            became = np.asarray(value, dtype=dtype)
        fits = bool(np.isfinite(became)) or not np.isfinite(complex(value))
    except OverflowError:
        fits = False
    # Python refuses to print an int of more than 4300 digits.
    bits = value.bit_length() if isinstance(value, int) else 0
    shown = f"an int of {bits} bits" if bits > 256 else str(value)
    return "" if fits else f"is {shown}, which does not fit {dtype}"
