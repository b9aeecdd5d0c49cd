"""torch's CPU tensors as NumPy arrays; never imports torch: a program that passes a tensor has."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from shoal.errors import UsageTypeError

__all__ = ["dtype_of", "fill", "host_form", "is_module", "is_tensor"]

_BITS = {1: "uint8", 2: "int16", 4: "int32"}
"""Integers as which dtypes pass that torch cannot exchange with NumPy, by bytes of an element."""


def is_tensor(value: Any) -> bool:
    """True for a `torch.Tensor`, which a parameter of a module is, too."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_module(value: Any) -> bool:
    """True for a `torch.nn.Module`."""
    return isinstance(value, getattr(sys.modules.get("torch.nn"), "Module", ()))


def host_form(value: Any) -> Any:
    """Return a torch tensor as a NumPy array on the same memory; other values unchanged.

    Gradients are not followed. What is placed on devices from it is a copy, as of any host value.

    Raises:
      UsageTypeError: a tensor that is not dense on the CPU, or of a dtype that JAX does not have.
    """
    if not is_tensor(value):
        return value
    torch = sys.modules["torch"]
    kind = type(value).__name__
    if hasattr(value, "full_tensor"):
        raise UsageTypeError(f"a torch {kind} holds one shard; pass its full_tensor()")
    if value.device.type != "cpu":
        where = f"must be on the CPU, not on {value.device}"
        raise UsageTypeError(f"a torch {kind} {where}; pass its .cpu()")
    if value.is_quantized:
        raise UsageTypeError(f"a torch {kind} that is quantized; pass its .dequantize()")
    if value.is_nested:
        raise UsageTypeError(f"a torch {kind} that is nested; pass its parts, or a padded tensor")
    if value.layout is not torch.strided:
        raise UsageTypeError(f"a torch {kind} that is not dense; pass its .to_dense()")
    dense = value.detach().resolve_conj().resolve_neg()
    dtype = dtype_of(value.dtype)
    if dtype.isbuiltin == 1:
        return dense.numpy()
    return dense.view(getattr(torch, _BITS[dtype.itemsize])).numpy().view(dtype)


def fill(tensor: Any, values: Any) -> None:
    """Copy values, of the tensor's shape and dtype, into a torch tensor, as torch does in place."""
    torch = sys.modules["torch"]
    array = np.array(values)
    if array.dtype.isbuiltin == 1:
        source = torch.from_numpy(array)
    else:
        source = torch.from_numpy(array.view(_BITS[array.dtype.itemsize])).view(tensor.dtype)
    with torch.no_grad():
        tensor.copy_(source)


def dtype_of(dtype: Any) -> Any:
    """Return the NumPy dtype of one of torch's; other values unchanged.

    Raises:
      UsageTypeError: NumPy and ml_dtypes have no such dtype.
    """
    if not isinstance(dtype, getattr(sys.modules.get("torch"), "dtype", ())):
        return dtype
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise UsageTypeError(f"JAX has no dtype {dtype}; convert with tensor.to(…)") from None
