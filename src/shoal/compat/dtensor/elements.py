"""Elements of a dataset, as trees of arrays of one structure and of the same dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from shoal.compat.dtensor.numbers import array_from, numbers_in
from shoal.errors import UsageError, UsageTypeError

__all__ = ["Elements"]

_OPERATION = "DTensorDataset"


class Elements:
    """The elements of a dataset, in order, as trees with the structure of the layouts.

    Python numbers, and lists of them, become arrays of the first element's dtypes.

    Args:
      dataset: a list, an iterable, an array; or a tree of arrays, whose rows side by side are the
        elements.
      layouts: a tree like an element.

    Raises:
      UsageError: there is no first element, or its structure is not that of the layouts.
    """

    def __init__(self, dataset: Any, layouts: Any) -> None:
        self._treedef = jax.tree.structure(layouts)
        self._dtypes: list[Any] = [None] * self._treedef.num_leaves
        first = _first(dataset)
        if hasattr(dataset, "dtype") or self._parts(first) is None:
            dataset = _columns(self._treedef, dataset, self._parts(dataset))
            first = next(iter(dataset))
        self._dataset = dataset
        self.first = self._arrays(first)
        self._dtypes = [array.dtype for array in jax.tree.leaves(self.first)]

    def rows(self, size: int) -> dict[str, Any] | None:
        """Return the source from which `shoal.feed` reads rows by number, for batches of this size.

        None: they can only be read in order, or there are fewer.
        """
        data = self._dataset
        has_numbers = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not has_numbers or len(data) < size:
            return None
        if isinstance(data, _Columns) and all(hasattr(one, "dtype") for one in data.columns):
            return {"source": data.tree(), "batch": size}
        return {"source": self._read, "order": range(len(data)), "batch": size}

    def __iter__(self) -> Iterator[Any]:
        return map(self._arrays, self._dataset)

    def _read(self, numbers: Iterable[Any]) -> Any:
        """Return elements by their numbers, stacked."""
        rows = [self._arrays(self._dataset[int(number)]) for number in numbers]
        return jax.tree.map(lambda *parts: np.stack(parts), *rows)

    def _parts(self, tree: Any) -> list[Any] | None:
        """Return a tree's parts at the layouts' positions, or None if its structure differs."""
        try:
            return [*self._treedef.flatten_up_to(tree)]
        except (ValueError, TypeError):
            return None

    def _arrays(self, element: Any) -> Any:
        pairs = zip(self._parts(element) or (), self._dtypes, strict=False)
        arrays = [_array(part, dtype) for part, dtype in pairs]
        if len(arrays) < self._treedef.num_leaves or any(array is None for array in arrays):
            own = jax.tree.structure(element)
            detail = f"layouts have the structure {self._treedef}, elements {own}"
            if own == self._treedef:
                detail = f"an element is {element!r}: only numbers become arrays"
            raise UsageError(f"dtensor.{_OPERATION}: {detail}")
        return jax.tree.unflatten(self._treedef, arrays)


class _Columns:
    """Arrays whose rows are the elements."""

    def __init__(self, treedef: Any, columns: list[Any]) -> None:
        self._treedef, self.columns = treedef, columns

    def tree(self) -> Any:
        return jax.tree.unflatten(self._treedef, self.columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, number: int) -> Any:
        return jax.tree.unflatten(self._treedef, [column[number] for column in self.columns])

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


def _columns(treedef: Any, dataset: Any, columns: list[Any] | None) -> Any:
    """Return a dataset as its columns, if it consists of arrays; else unchanged."""
    if not columns or not all(hasattr(one, "__getitem__") for one in columns):
        return dataset
    sizes = sorted({len(column) for column in columns})
    if len(sizes) > 1:
        detail = f"arrays must have equally many rows, not {sizes}"
        raise UsageError(f"dtensor.{_OPERATION}: {detail}")
    return _Columns(treedef, columns)


def _array(part: Any, dtype: Any) -> np.ndarray[Any, Any] | None:
    """Return a part of an element as an array of a dtype (None: its own); None if impossible."""
    array = numbers_in(part)
    if array is None:
        return None
    if not hasattr(part, "dtype"):
        return array_from(_OPERATION, part, dtype)
    if dtype is not None and array.dtype != dtype:
        raise UsageTypeError(
            f"dtensor.{_OPERATION}: an element is {array.dtype}, the first {dtype}; cast it"
        )
    return array


def _first(dataset: Any) -> Any:
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise UsageTypeError(f"dtensor.{_OPERATION}: {dataset!r} is not a dataset: not iterable")
    rows = iter(dataset)
    if rows is dataset:
        raise UsageTypeError(
            f"dtensor.{_OPERATION}: an iterator can be read only once; give an iterable such as a "
            "list, or use shoal.feed, which takes iterators"
        )
    for first in rows:
        return first
    raise UsageError(f"dtensor.{_OPERATION}: the dataset has no elements")
