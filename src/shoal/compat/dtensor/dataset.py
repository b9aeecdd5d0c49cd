"""`dtensor.DTensorDataset`: batches of a dataset on a mesh, each process reading its own rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from shoal.arrays.bridge.sharding import sharding_of
from shoal.arrays.feeding.feed import feed
from shoal.arrays.feeding.local_rows import local_rows
from shoal.colour import logically_collective
from shoal.compat.arguments import or_none, takes, text, whole
from shoal.compat.dtensor.layout import Layout, check_dtensor_mesh
from shoal.compat.dtensor.mesh import Mesh
from shoal.compat.dtensor.numbers import array_from, numbers_in
from shoal.compat.dtensor.refused import NotPossible, prefix_errors
from shoal.errors import UsageError, UsageTypeError, raise_all

__all__ = ["DTensorDataset", "Elements"]


class Batches(Iterator[Any]):
    """One pass over a `DTensorDataset`."""

    def __init__(self, batches: Iterator[Any], spec: Any) -> None:
        self._batches, self.element_spec = batches, spec

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._batches)


@logically_collective("all arguments but the elements that other processes read")
class DTensorDataset:
    """Batches of a dataset as arrays on a mesh: `shoal.feed`.

    Logically collective: all arguments but the elements that other processes read must be equal.

    Every process passes the whole dataset, of which its own devices' rows are read. An incomplete
    batch at the end is dropped. Each iteration starts from the beginning.

    Args:
      dataset: the elements in order, iterable more than once: a list, a `tf.data.Dataset`, an
        object with `__iter__`; or an array, or a tuple or dict of arrays, whose rows are the
        elements. Of indexable data, only the rows that this process needs are read. All
        elements have the dtypes of the first; Python numbers get JAX's default dtypes.
      mesh: the mesh of all layouts.
      layouts: a tree of Layouts like an element; each has one more dim than its part: the rows.
      global_batch_size: rows of a batch over all processes.
      dataset_already_batched: elements are batches of `global_batch_size` over the size of
        `batch_dim` rows.
      batch_dim: the mesh dim that splits the rows; None: not checked.
      prefetch: number of batches to place on devices ahead of the program; None: 1.
      tf_data_service_config: refused: no service is needed with several processes.

    Raises:
      UsageError: names all problems, before anything but the first element is read.

    >>> from shoal.compat import dtensor
    >>> mesh = dtensor.create_mesh({"batch": 4, "x": 2})
    >>> rows = dtensor.Layout(["batch", dtensor.UNSHARDED], mesh)
    >>> images = np.arange(20, dtype=np.float32).reshape(10, 2)
    >>> batches = DTensorDataset(
    ...     images, mesh=mesh, layouts=rows, global_batch_size=4, batch_dim="batch")
    >>> [float(batch.sum()) for batch in batches]
    [28.0, 92.0]
    """

    @takes("dtensor.", global_batch_size=whole, batch_dim=or_none(text), prefetch=or_none(whole))
    def __init__(
        self, dataset: Any, *, mesh: Mesh, layouts: Any, global_batch_size: int,
        dataset_already_batched: bool = False, batch_dim: str | None = None,
        prefetch: int | None = None, tf_data_service_config: Any = None,
    ) -> None:  # fmt: skip
        _no_service(tf_data_service_config)
        self._layouts, self._size = jax.tree.map(_placed, layouts), global_batch_size
        self._is_batched, self._prefetch = dataset_already_batched, prefetch or 1
        self._elements = Elements(dataset, layouts)
        first = self._elements.first
        _check_layouts(check_dtensor_mesh(mesh), layouts, global_batch_size, batch_dim)
        _check_elements(first, layouts, dataset_already_batched)
        count = 1 if batch_dim is None else mesh.dim_size(batch_dim)
        _check_batches(first, global_batch_size // count if dataset_already_batched else None)
        self._spec = jax.tree.map(self._spec_of, first, self._layouts)

    def _spec_of(self, value: Any, layout: Any) -> jax.ShapeDtypeStruct:
        shape = (self._size, *value.shape[self._is_batched :])
        return jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding_of(layout))

    @property
    def element_spec(self) -> Any:
        """Shape, dtype and sharding of each array of a batch, as `jax.ShapeDtypeStruct`s."""
        return self._spec

    def __iter__(self) -> Batches:
        """Return an iterator of the batches of one pass over the dataset."""
        return Batches(self._batches(), self._spec)

    def _batches(self) -> Iterator[Any]:
        rows = None if self._is_batched else self._elements.rows(self._size)
        source = {"source": self._own_rows()} if rows is None else rows
        with prefix_errors("DTensorDataset"):
            batches = feed(layouts=self._layouts, prefetch=self._prefetch, **source)
        with prefix_errors("DTensorDataset"), batches:
            yield from batches

    def _own_rows(self) -> Iterator[Any]:
        """Yield this process's rows of each whole batch."""
        rows = iter(self._elements)
        if self._is_batched:
            rows = itertools.chain.from_iterable(map(_rows, rows))
        own = local_rows(jax.tree.leaves(self._layouts)[0], self._size)
        while True:
            batch = [*itertools.islice(rows, self._size)]
            if len(batch) < self._size:
                return
            mine = [row for piece in own for row in batch[piece]]
            yield jax.tree.map(lambda *parts: np.stack(parts), *mine)


def _placed(layout: Any) -> Any:
    if not isinstance(layout, Layout):
        raise UsageTypeError(f"dtensor.DTensorDataset: {layout!r} must be a dtensor.Layout")
    return layout.shoal_layout


def _rows(batch: Any) -> list[Any]:
    """Return the rows of a batch, each a tree of arrays."""
    leaves, treedef = jax.tree.flatten(batch)
    return [jax.tree.unflatten(treedef, row) for row in zip(*map(np.asarray, leaves), strict=True)]


def _no_service(config: Any) -> None:
    if config is not None:
        raise NotPossible(
            "dtensor.DTensorDataset: tf_data_service_config: no service is needed here, since "
            "each process reads its own rows; leave it out"
        )


def _check_layouts(mesh: Mesh, layouts: Any, size: int, batch_dim: str | None) -> None:
    problems = [
        _layout_problem(layout, mesh, size, batch_dim) for layout in jax.tree.leaves(layouts)
    ]
    raise_all("dtensor.DTensorDataset", [*filter(None, problems)])


def _layout_problem(layout: Layout, mesh: Mesh, size: int, batch_dim: str | None) -> str:
    """Return what is wrong with a layout, or ""."""
    if layout.mesh != mesh:
        return f"{layout} is on another mesh than {mesh}"
    if not layout.rank:
        return "a layout of rank 0 has no rows"
    if batch_dim not in (None, layout.sharding_specs[0]):
        return (
            f"batch_dim {batch_dim} was specified but at least one layout did not contain it "
            f"first: {layout.sharding_specs}"
        )
    count = layout.num_shards(0)
    is_even = size > 0 and size % count == 0
    return (
        "" if is_even else f"global_batch_size={size} does not divide into {count} shards of rows"
    )


def _check_elements(first: Any, layouts: Any, is_batched: bool) -> None:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(layouts), strict=True)
    ranks = [(np.ndim(value) + (not is_batched), layout.rank) for value, layout in pairs]
    wrong = [f"Expected layout with rank {own}, got {rank}" for own, rank in ranks if own != rank]
    raise_all("dtensor.DTensorDataset", wrong)


def _check_batches(first: Any, wanted: int | None) -> None:
    if wanted is None:
        return
    sizes = sorted({len(np.asarray(value)) for value in jax.tree.leaves(first)})
    if sizes != [wanted]:
        raise UsageError(
            "dtensor.DTensorDataset: per_replica_batch_size does not matched expected size based "
            f"on the mesh, got {', '.join(map(str, sizes))} but expected {wanted}."
        )


# ---- Elements of a dataset, as trees of arrays of one structure and of the same dtypes.


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
        if isinstance(data, _Columns) and all(hasattr(column, "dtype") for column in data.columns):
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

    def __getitem__(self, index: int) -> Any:
        return jax.tree.unflatten(self._treedef, [column[index] for column in self.columns])

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


def _columns(treedef: Any, dataset: Any, columns: list[Any] | None) -> Any:
    """Return a dataset as its columns, if it consists of arrays; else unchanged."""
    if not columns or not all(hasattr(column, "__getitem__") for column in columns):
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
            f"dtensor.{_OPERATION}: an iterator can be read only once; pass an iterable such as a "
            "list, or use shoal.feed, which takes iterators"
        )
    for first in rows:
        return first
    raise UsageError(f"dtensor.{_OPERATION}: the dataset has no elements")
