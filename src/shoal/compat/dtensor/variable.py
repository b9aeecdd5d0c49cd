"""`dtensor.DVariable`: a mutable reference to an array on a mesh, with a fixed layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from shoal.colour import local
from shoal.compat.arguments import numpy_dtype, or_none, takes
from shoal.compat.array_operators import ArrayOperators
from shoal.compat.dtensor.layout import Layout, is_on_mesh, value_of
from shoal.compat.dtensor.moves import call_with_layout, check_layout, fetch_layout, relayout
from shoal.compat.dtensor.numbers import array_from
from shoal.compat.dtensor.refused import EagerOnly, NotPossible, check_eager
from shoal.errors import UsageError, UsageTypeError

__all__ = ["DVariable", "enable_save_as_bf16"]

_IN_PLACE = {"add": "assign_add", "sub": "assign_sub"}


def _in_place(name: str) -> Callable[..., Any]:
    def refused(self: DVariable, other: Any) -> Any:
        raise NotPossible(
            f"dtensor.DVariable: {self.name!r} cannot be changed by an operator such as +=, which "
            f"would put an array in its place; write v.{_IN_PLACE.get(name, 'assign')}(…)"
        )

    return refused


class Reference:
    """A hashable reference to a variable; equal for the same variable."""

    def __init__(self, variable: DVariable) -> None:
        self._variable = variable

    def deref(self) -> DVariable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._variable is self._variable

    def __hash__(self) -> int:
        return id(self._variable)


@local
class DVariable(ArrayOperators):
    """A variable that holds an array on a mesh; assignments keep its layout.

    Local.

    JAX functions accept it in place of its array: it is a pytree node of one leaf, and has the
    operators and attributes of an array. It cannot be assigned inside `jit`: return the new
    value, and assign it outside. It is unhashable; use `ref()` as the key of a dict.

    Args:
      initial_value: an array on a mesh; with `layout`, a host value, or a function that returns
        one, whose result is then created in the layout.
      args: `trainable`, by position as in TensorFlow.
      dtype: cast the value to this dtype; an array on a mesh must have it already.
      layout: the layout of the value; None: that of `initial_value`.
      kwargs: `name`, `trainable`, `shape` (which the value must have).

    Raises:
      UsageError: neither a layout nor an array on a mesh, or both and they differ.

    >>> from shoal.compat import dtensor
    >>> layout = dtensor.Layout(["x"], dtensor.create_mesh({"x": 8}))
    >>> v = DVariable(np.zeros(8, np.float32), layout=layout)
    >>> v.assign_add(np.ones(8, np.float32)).numpy().sum()
    np.float32(8.0)
    """

    @takes("dtensor.", dtype=or_none(numpy_dtype))
    def __init__(
        self, initial_value: Any, *args: Any, dtype: Any = None, layout: Layout | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        check_eager("DVariable", "make it outside, and pass its read_value()")
        trainable = args[0] if args else kwargs.pop("trainable", None)
        self.trainable = trainable is not False
        self.name = str(kwargs.pop("name", None) or "Variable")
        shape = kwargs.pop("shape", None)
        _no_others(kwargs)
        self._value: jax.Array = _initial(initial_value, dtype, layout)
        self._layout = layout or fetch_layout(self._value)
        self._saves_as_bf16 = False
        if shape is not None and tuple(shape) != self._value.shape:
            raise UsageError(f"dtensor.DVariable: shape={shape} is not {self._value.shape}")

    @property
    def layout(self) -> Layout:
        """The layout of its value, which never changes."""
        return self._layout  # type: ignore[return-value]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._value.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the value."""
        return self._value.dtype  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """The rank of the value."""
        return self._value.ndim  # type: ignore[no-any-return]

    @property
    def save_as_bf16(self) -> bool:
        """Is it saved as bfloat16? Only float32 can be; False for other dtypes."""
        return self._saves_as_bf16

    @save_as_bf16.setter
    def save_as_bf16(self, save_as_bf16: bool) -> None:
        self._saves_as_bf16 = bool(save_as_bf16) and self.dtype == np.float32

    def read_value(self) -> jax.Array:
        """Return the value, an array."""
        return self._value

    value = read_value

    def assign(self, value: Any, **_: Any) -> DVariable:
        """Replace the value, in the same layout; return the variable.

        Collective where values must move between processes, as `relayout` is.

        Raises:
          UsageError: its shape or dtype differs.
        """
        check_eager("DVariable.assign", "return the new value, and assign it outside")
        given = _concrete(value)
        if not isinstance(given, jax.Array | np.ndarray | np.generic):
            given = array_from("DVariable.assign", given, self.dtype)
        if given.shape != self.shape or given.dtype != self.dtype:
            raise UsageError(
                f"dtensor.DVariable.assign: {self.name!r} is {self.dtype}{list(self.shape)}, the "
                f"value {given.dtype}{list(given.shape)}"
            )
        self._value = relayout(given, self.layout)
        return self

    def assign_add(self, delta: Any, **_: Any) -> DVariable:
        """Add to the value; return the variable."""
        return self.assign(self._value + self._delta(delta))

    def assign_sub(self, delta: Any, **_: Any) -> DVariable:
        """Subtract from the value; return the variable."""
        return self.assign(self._value - self._delta(delta))

    def _delta(self, delta: Any) -> Any:
        value = value_of(delta)
        if np.ndim(value) and np.shape(value) != self.shape:
            raise UsageError(
                f"dtensor.DVariable: {self.name!r} has shape {list(self.shape)}, the operand "
                f"{list(np.shape(value))}"
            )
        if isinstance(value, jax.Array):
            return value
        host = array_from("DVariable", value, self.dtype)
        return relayout(host, self.layout) if host.ndim else host

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the whole value as a host array; an error if processes hold parts of it.

        Raises:
          UsageError: other processes hold parts of it: `shoal.allgather` fetches them.
        """
        if not self._value.is_fully_addressable and not self._value.is_fully_replicated:
            raise UsageError(
                f"dtensor.DVariable.numpy: other processes hold parts of {self.name!r}; "
                "shoal.allgather(read_value(), tiled=True) fetches them"
            )
        return np.asarray(self._value)

    def __jax_array__(self) -> jax.Array:
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    def __hash__(self) -> int:
        raise UsageTypeError(
            "dtensor.DVariable is unhashable, because == compares items; use v.ref() as the key"
        )

    def ref(self) -> Reference:
        """Return a hashable reference to this variable; its `deref()` is the variable."""
        return Reference(self)

    def _instead(self, name: str) -> str:
        is_scatter = name.startswith(("scatter_", "batch_scatter_"))
        return "; write v.assign(v.at[indices].add(updates)), or .set" if is_scatter else ""

    def __repr__(self) -> str:
        listed = ", ".join(self.layout.sharding_specs)
        return f"<DVariable {self.name!r} {self.dtype}{list(self.shape)}, layout ({listed})>"

    def __str__(self) -> str:
        """Return the same with the values, as far as this process holds them."""
        value = self._value
        if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
            return repr(self)
        return f"{repr(self)[:-1]}, value={np.array2string(np.asarray(value), threshold=100)}>"

    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
        locals()[f"__i{_name}__"] = _in_place(_name)
    del _name


def _flatten(variable: DVariable) -> tuple[tuple[Any], tuple[Any, ...]]:
    facts = (variable._layout, variable.name, variable.trainable, variable._saves_as_bf16)
    return (variable._value,), facts


def _unflatten(facts: tuple[Any, ...], values: Iterable[Any]) -> DVariable:
    variable = object.__new__(DVariable)
    variable._layout, variable.name, variable.trainable, variable._saves_as_bf16 = facts
    (variable._value,) = values
    return variable


jax.tree_util.register_pytree_node(DVariable, _flatten, _unflatten)


def _initial(value: Any, dtype: Any, layout: Layout | None) -> jax.Array:
    if callable(value):
        value = value() if layout is None else call_with_layout(value, layout)
    value = value_of(value)
    if is_on_mesh(value):
        _check_agreement(value, dtype, layout)
        return value
    if layout is None:
        raise UsageError(
            "dtensor.DVariable: Neither layout nor DTensor initial value are provided; pass layout="
        )
    if not isinstance(value, jax.Array | np.ndarray | np.generic) or dtype is not None:
        value = array_from("DVariable", value, dtype)
    return relayout(value, layout)


def _concrete(value: Any) -> Any:
    """Return a value that a variable may hold: not a tracer."""
    given = value_of(value)
    if isinstance(given, jax.core.Tracer):
        raise EagerOnly(
            "dtensor.DVariable.assign: a tracer must not outlive its transformation; return the "
            "value, and assign it outside"
        )
    return given


def _check_agreement(value: jax.Array, dtype: Any, layout: Layout | None) -> None:
    """Refuse a layout or a dtype that differs from the value's."""
    try:
        if layout is not None:
            check_layout(value, layout)
    except UsageError as error:
        detail = f"dtensor.DVariable: Conflicting layout are provided: {error}"
        raise UsageError(detail) from None
    if dtype is not None and np.dtype(dtype) != value.dtype:
        raise UsageTypeError(f"dtensor.DVariable: dtype={dtype} of a value of {value.dtype}")


def _no_others(given: dict[str, Any]) -> None:
    """Refuse arguments that apply only to TensorFlow's graphs."""
    odd = [name for name, value in given.items() if value is not None]
    if odd:
        raise NotPossible(
            f"dtensor.DVariable: {', '.join(odd)}: not supported: there are no graphs and no "
            "caching devices here; leave it out"
        )


@local
def enable_save_as_bf16(variables: Iterable[Any]) -> None:
    """Save the float32 DVariables of a list as bfloat16; others are unaffected.

    Local.
    """
    for variable in variables:
        if isinstance(variable, DVariable):
            variable.save_as_bf16 = True
