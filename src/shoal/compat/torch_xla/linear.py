"""Linear maps that do not merge leading dims, and barriers for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from types import MethodType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.arrays.host.host_values import as_array, unfit
from shoal.arrays.traced.fence import fence
from shoal.arrays.traced.linear import linear
from shoal.colour import traced
from shoal.compat.members import members_of
from shoal.compat.torch_xla.errors import NoMeaningHere, SpmdTypeError, stands_for
from shoal.compat.torch_xla.sharded import value_of
from shoal.compat.torch_xla.tensors import dtype_of, is_module
from shoal.tracebacks import at_caller

__all__ = [
    "EinsumLinear",
    "XLAPatchedLinear",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "xla_patched_nn_linear_forward",
]


class XLAPatchedLinear:
    """`shoal.compat.linear` in the form of torch's `autograd.Function`.

    >>> XLAPatchedLinear.apply(jnp.ones((2, 3, 4)), jnp.ones((5, 4))).shape
    (2, 3, 5)
    """

    @staticmethod
    @stands_for("shoal.compat.linear")
    def apply(input: Any, weight: Any, bias: Any = None) -> jax.Array:
        """Return `input @ weight.T + bias` over the last dim; its derivatives are JAX's."""
        return linear(*map(value_of, (input, weight, bias)))

    @staticmethod
    @stands_for("shoal.compat.linear")
    def forward(ctx: SimpleNamespace, input: Any, weight: Any, bias: Any = None) -> jax.Array:
        """Return the same, and keep in `ctx` what `backward` needs."""
        given = (input, weight) if bias is None else (input, weight, bias)
        y, ctx.back = jax.vjp(linear, *map(_kept, given))
        return y

    @staticmethod
    def backward(ctx: SimpleNamespace, grad_output: Any) -> tuple[Any, Any, Any]:
        """Return the cotangents of input, weight and bias."""
        cotangents = ctx.back(value_of(grad_output))
        return cotangents if len(cotangents) == 3 else (*cotangents, None)


def _kept(value: Any) -> Any:
    """Return a value for later: `backward` computes from it, whatever becomes of a tensor."""
    value = value_of(value)
    if isinstance(value, np.ndarray) and not unfit(value):
        return as_array(value)
    return value


@traced
@stands_for("shoal.compat.linear")
def xla_patched_nn_linear_forward(m: Any, input: Any) -> jax.Array:
    """Return the linear map of a module's `weight` and `bias` (`shoal.compat.linear`).

    Traced.

    Args:
      m: an object with `weight` [out, in] and `bias` [out] or None.
      input: [..., in].

    Raises:
      UsageError: ranks, sizes or dtypes do not fit.
    """
    return linear(*map(value_of, (input, m.weight, m.bias)))


@jax.tree_util.register_pytree_node_class
class EinsumLinear:
    """A linear map with parameters of its own; a pytree of `weight` [out, in] and `bias` [out].

    Args:
      in_features, out_features: the sizes.
      bias: whether it has one.
      device: None; `mark_sharding` places parameters.
      dtype: JAX's or torch's; None: float32.
      key: initializes the parameters, as torch's layer does; None: seeded by NumPy's global
        generator, which processes must seed equally, as with `torch.manual_seed`.

    >>> layer = EinsumLinear(4, 2, key=jax.random.key(0))
    >>> jax.grad(lambda layer: layer(jnp.ones((3, 4))).sum())(layer).bias.tolist()
    [3.0, 3.0]
    """

    in_features: int
    out_features: int
    weight: Any
    bias: Any

    def __init__(self, *args: Any, key: Any = None, **kwargs: Any) -> None:
        self._draw(key, *args, **kwargs)

    def _draw(
        self, key: Any, in_features: int, out_features: int, bias: bool = True,
        device: None = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        if device is not None:
            raise SpmdTypeError(
                "torch_xla EinsumLinear (shoal.compat.linear): no device; put places"
            )
        key = jax.random.key(np.random.randint(1 << 31)) if key is None else key
        keys, bound = jax.random.split(key), 1 / math.sqrt(max(in_features, 1))
        dtype = jnp.float32 if dtype is None else dtype_of(dtype)
        draw = partial(jax.random.uniform, dtype=dtype, minval=-bound, maxval=bound)
        self.in_features, self.out_features = in_features, out_features
        self.weight = draw(keys[0], (out_features, in_features))
        self.bias = draw(keys[1], (out_features,)) if bias else None

    def forward(self, input: Any) -> jax.Array:
        """Return the linear map of [..., in]."""
        return xla_patched_nn_linear_forward(self, input)

    __call__ = forward

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, int]]:
        """Return the parameters and the sizes."""
        return (self.weight, self.bias), (self.in_features, self.out_features)

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, int], leaves: tuple[Any, Any]) -> EinsumLinear:
        """Return a layer of these parameters."""
        layer = object.__new__(cls)
        layer.in_features, layer.out_features = sizes
        layer.weight, layer.bias = leaves
        return layer


def apply_xla_patch_to_nn_linear(module: Any) -> Any:
    """Give every linear layer of a module, itself included, the `forward` of `EinsumLinear`.

    Modules are patched in place and keep their parameters. A layer is an instance of a class named
    `Linear` with `weight` [out, in], `bias` and `forward`; a subclass with another name keeps
    its own `forward`.

    Args:
      module: an object whose `named_children()`, or else whose attributes (also in `__slots__`),
        lists, tuples and dicts hold its parts. Python modules, classes and functions are not
        searched.

    Returns:
      the module.
    """
    for part in _parts(module):
        if type(part).__name__ == "Linear" and all(
            hasattr(part, name) for name in ("weight", "bias", "forward")
        ):
            part.forward = MethodType(xla_patched_nn_linear_forward, part)
    return module


@at_caller
def apply_backward_optimization_barrier(m: Any) -> Any:
    """Make the backward pass wait, at a layer, for all of its gradients (`shoal.compat.fence`).

    Args:
      m: a function, whose parameters are arguments; a callable pytree; or a module with `forward`
        (its class's or its own), whose parameters are its attributes, and which is changed in
        place. Attributes that `forward` sets remain set.

    Returns:
      the function to call instead, a pytree with the same leaves, or the module.

    Raises:
      NotImplementedError: a torch module; it is a UsageError as well.

    >>> layer = apply_backward_optimization_barrier(EinsumLinear(4, 2, key=jax.random.key(0)))
    >>> "optimization_barrier" in jax.jit(jax.grad(lambda layer: layer(jnp.ones((3, 4))).sum())
    ...                                   ).lower(layer).as_text()
    True
    """
    if is_module(m):
        raise NoMeaningHere(
            "torch_xla apply_backward_optimization_barrier (shoal.compat.fence): a torch module "
            "computes torch's gradients; pass a function, whose parameters are arguments"
        )
    if not jax.tree_util.all_leaves([m]):
        return jax.tree_util.Partial(fence(_call, backward=True), m)
    if not hasattr(m, "forward"):
        return fence(m, backward=True)
    m.forward = MethodType(_fenced(_forward_of(m)), m)
    return m


def _call(m: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return m(*args, **options)


def _fenced(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that computes with parameters whose cotangents are fenced.

    While it runs the module holds the fenced parameters; only one thread runs it at a time.
    """
    lock = RLock()

    def with_parameters(held: dict[str, Any], m: Any, *args: Any, **options: Any) -> Any:
        with _holding(m, held):
            return forward(m, *args, **options)

    def fenced(m: Any, *args: Any, **options: Any) -> Any:
        with lock:
            held = {name: value for name, value in vars(m).items() if isinstance(value, jax.Array)}
            return fence(with_parameters, backward=True)(held, m, *args, **options)

    return fenced


@contextmanager
def _holding(m: Any, values: dict[str, Any]) -> Iterator[None]:
    """Replace a module's values during a block; values that the block sets remain."""
    before = {name: vars(m)[name] for name in values}
    vars(m).update(values)
    try:
        yield
    finally:
        kept = [name for name, value in values.items() if vars(m).get(name) is value]
        vars(m).update({name: before[name] for name in kept})


def _forward_of(m: Any) -> Callable[..., Any]:
    """Return the `forward` of a module, its own or its class's, as a function of the module."""
    forward = m.forward
    if isinstance(forward, MethodType) and forward.__self__ is m:
        return forward.__func__
    return lambda m, *args, **options: forward(*args, **options)


def _parts(module: Any) -> list[Any]:
    """Return a module and all of its parts, each once."""
    parts: dict[int, Any] = {}
    left = [module]
    while left:
        part = left.pop()
        if id(part) not in parts:
            parts[id(part)] = part
            left += reversed(_inner(part))
    return list(parts.values())


def _inner(module: Any) -> list[Any]:
    if hasattr(type(module), "named_children"):
        return [child for _, child in module.named_children()]
    return [part for _, part in members_of(module)]
