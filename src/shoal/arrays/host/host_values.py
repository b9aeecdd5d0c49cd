"""Which values can become arrays, and of which dtype: nothing is narrowed silently."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.arguments import SCALARS, no_fixed_bits
from shoal.errors import with_article
from shoal.plain_forms import array_form

X64 = "turn 64-bit values on: JAX_ENABLE_X64=1 or jax.config.update('jax_enable_x64', True)"

_ON_HOST = "keep it on the host: broadcast, allgather and save take it"
NO_ARRAYS = (np.longdouble, np.clongdouble)  # JAX has no 80-bit or 128-bit floats


def is_key(value: Any) -> bool:
    """True for an array of PRNG keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def cannot_hold(value: Any) -> str:
    """Return why a value cannot become an array, or an empty string."""
    if isinstance(value, jax.Array):
        return deleted(value)
    if type(value) in SCALARS:
        return _does_not_fit(value)
    if isinstance(value, np.ma.MaskedArray):
        return "is a masked array, and the mask would be lost; fill it first"
    if not isinstance(value, np.ndarray | np.generic):
        form = array_form(value) or "a numpy array, a scalar or a jax.Array"
        return f"is {with_article(type(value).__name__)}; give {form}"
    dtype = value.dtype
    numeric = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    if not numeric or dtype.kind in "mM" or dtype.newbyteorder("=") in NO_ARRAYS:
        stays = "" if no_fixed_bits(dtype) else f"; {_ON_HOST}"
        return f"has dtype {dtype}, which arrays on devices cannot have{stays}"
    return ""


def deleted(array: jax.Array) -> str:
    """Return why an array is no longer usable, or an empty string."""
    if isinstance(array, jax.core.Tracer) or not array.is_deleted():
        return ""
    return "was deleted (donated or released); use the result instead"


def without_values(array: jax.Array) -> str:
    """Return why an array has no values that could be read, or an empty string."""
    if why := deleted(array):
        return why
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.spec.unreduced:
        return ""
    axes = ", ".join(sorted(sharding.spec.unreduced))
    return f"is unreduced over {axes}: devices hold terms of a sum; relayout it to a whole layout"


def narrowed(value: Any) -> str:
    """Return the change if JAX would silently narrow a value's dtype, or ""."""
    if isinstance(value, jax.Array) or not isinstance(value, np.ndarray | np.generic):
        return ""
    own = value.dtype.newbyteorder("=")  # byte order is not a narrowing
    kept = jax.dtypes.canonicalize_dtype(own)
    return "" if kept == own else f"{own} would become {kept}"


def unfit(value: Any) -> str:
    """Return why a value cannot become an array of its own dtype, or an empty string."""
    if why := cannot_hold(value):
        return why
    return f"{change}; cast, or {X64}" if (change := narrowed(value)) else ""


def fitted(value: Any) -> Any:
    """Return a value in the dtype that JAX would use, if no element changes; else unchanged.

    float0 arrays, the tangents of integers, become zeros of bool.

    >>> fitted(np.array([1.5, np.nan])).dtype, fitted(np.array(0.1)).dtype
    (dtype('float32'), dtype('float64'))
    """
    if getattr(value, "dtype", None) == jax.dtypes.float0:
        return np.zeros(value.shape, np.bool_)
    if cannot_hold(value) or not narrowed(value):
        return value
    with np.errstate(all="ignore"):
        fits = value.astype(jax.dtypes.canonicalize_dtype(value.dtype.newbyteorder("=")))
        return fits if np.array_equal(fits.astype(value.dtype), value, equal_nan=True) else value


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
    except OverflowError:
        return f"is {value}, which does not fit {dtype}"
    grew = np.isfinite(complex(value)) and not np.isfinite(became)
    return f"is {value}, which does not fit {dtype}" if grew else ""
