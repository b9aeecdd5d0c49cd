"""A mixin that gives an object holding an array the operators and attributes of `jax.Array`."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

__all__ = ["ArrayOperators"]

_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul",
    "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert", "int", "float", "complex", "bool", "index")


def _called(name: str) -> Callable[..., Any]:
    """Return the function of an operator: `operator.add`, `divmod`, `float`, …"""
    builtins = {function.__name__: function for function in (divmod, int, float, complex, bool)}
    call: Callable[..., Any] = builtins.get(name) or getattr(operator, f"__{name}__")
    return call


def _forward(name: str) -> Callable[..., Any]:
    call = _called(name)
    return lambda self, other: call(self.__jax_array__(), _array(other))


def _backward(name: str) -> Callable[..., Any]:
    call = _called(name)
    return lambda self, other: call(_array(other), self.__jax_array__())


def _alone(name: str) -> Callable[..., Any]:
    call = _called(name)
    return lambda self: call(self.__jax_array__())


class ArrayOperators:
    """Operators and attributes of the array that a subclass's `__jax_array__` returns.

    Results are JAX arrays. As for arrays, `==` compares items.
    """

    __slots__ = ()
    __array_ufunc__ = None  # so that NumPy's operators defer to these

    @abstractmethod
    def __jax_array__(self) -> jax.Array:
        """Return the array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = np.array(self.__jax_array__(), dtype, copy=copy)
        return array

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the array, such as `T`, `at` or `sum`."""
        kind = type(self).__name__
        if name.startswith("_"):
            raise AttributeError(f"{kind} has no attribute {name!r}", name=name, obj=self)
        try:
            return getattr(self.__jax_array__(), name)
        except AttributeError as error:
            detail = f"neither {kind} nor jax.Array has an attribute {name!r}{self._instead(name)}"
            raise AttributeError(detail, name=name, obj=self) from error

    def _instead(self, name: str) -> str:
        """Return what to write instead of a predecessor's attribute, as the end of a sentence."""
        return ""

    def __getitem__(self, index: Any) -> Any:
        return self.__jax_array__()[index]

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__jax_array__())

    def __round__(self, digits: int | None = None) -> Any:
        array = self.__jax_array__()
        return round(array) if digits is None else round(array, digits)

    def __contains__(self, item: Any) -> bool:
        return item in self.__jax_array__()

    def __format__(self, spec: str) -> str:
        return format(self.__jax_array__(), spec) if spec else str(self)

    for _name in _BINARY:
        locals()[f"__{_name}__"] = _forward(_name)
        locals()[f"__r{_name}__"] = _backward(_name)
    for _name in _COMPARISONS:
        locals()[f"__{_name}__"] = _forward(_name)
    for _name in _UNARY:
        locals()[f"__{_name}__"] = _alone(_name)
    del _name


def _array(value: Any) -> Any:
    return value.__jax_array__() if isinstance(value, ArrayOperators) else value
