"""Batch sources: an iterable of a process's own rows, or rows indexed by number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from shoal.arrays.bridge.leaf_layouts import path_text
from shoal.arrays.host.host_values import as_numpy, deleted
from shoal.errors import UsageError, UsageTypeError, raise_all, with_article

Numbers = NDArray[np.int64]
Read = Callable[[Numbers], Any]


class ReaderState(NamedTuple):
    """The state that a reader reported right after a batch was read."""

    is_known: bool = False  # does the reader have a state?
    value: Any = None
    error: Exception | None = None  # raised by the reader instead of its state


class IterableSource:
    """An iterable of batches of this process's own rows."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.state = ReaderState()
        self._iterable: Iterable[Any] | None = iterable
        self._iterator: Iterator[Any] | None = None

    def read(self) -> tuple[Any] | None:
        """Return the next batch in a 1-tuple; None at the end."""
        if self._iterable is None:
            return None
        if self._iterator is None:
            self._iterator = iter(self._iterable)
        for batch in self._iterator:
            self.state = _state_of(self._iterator, self._iterable)
            return (batch,)
        self.close()
        return None

    def close(self) -> None:
        """Release the underlying iterator."""
        self._iterable = self._iterator = None


def _state_of(*readers: object) -> ReaderState:
    """Return the state of the first object that has one, as in grain or torchdata.

    A copy, since the reader continues. An error is kept for the caller of `reader_state`.
    """
    for reader in readers:
        for name in ("get_state", "state_dict"):
            state = getattr(reader, name, None)
            if callable(state):
                try:
                    return ReaderState(True, copy.deepcopy(state()))
                except Exception as error:  # noqa: BLE001 - raised by `Feed.reader_state`
                    return ReaderState(True, None, error)
    return ReaderState()


class IndexedSource:
    """Rows indexed by number.

    Args:
      read: row numbers [n] → a tree of arrays of n rows.
      order: the row numbers, in feeding order.
    """

    def __init__(self, read: Read, order: Sequence[int] | Numbers) -> None:
        self._read = read
        self.order = order
        self.total = len(order)

    def read(self, first: int, own: Sequence[slice]) -> Any:
        """Return rows of the batch that begins at position `first` of the order: those of `own`.

        Past the end of the order the last row is repeated.
        """
        pieces = [np.arange(piece.start, piece.stop) for piece in own]
        places = np.minimum(np.concatenate(pieces) + first, self.total - 1)
        if isinstance(self.order, range):
            numbers = np.asarray(self.order.start + self.order.step * places, np.int64)
        else:
            numbers = np.asarray(self.order, np.int64)[places]
        try:
            rows = self._read(numbers)
        except StopIteration as error:  # which would silently end the caller's loop
            raise UsageError(
                "feed: the reader raised StopIteration; order= sets the end"
            ) from error
        for path, leaf in jax.tree_util.tree_flatten_with_path(rows)[0]:
            if np.ndim(leaf) and len(leaf) != len(numbers):
                name = jax.tree_util.keystr(path) or "the array"
                text = f"{name}: the reader gave {len(leaf)} rows for {len(numbers)} numbers"
                raise UsageError(f"feed: {text}")
        return rows


def by_number(source: Any, order: object) -> IndexedSource:
    """Return a reader of rows from a function, columns, or a sequence of samples.

    Raises:
      UsageError: it is none of these, columns have different lengths, or the order is invalid.
    """
    read, count = _reader(source)
    if order is None:
        if count is None:
            raise UsageError(
                "feed: a function does not say how many rows there are: pass order=, their numbers "
                "in order, such as order=range(1000)"
            )
        return IndexedSource(read, range(count))
    if isinstance(order, range):
        numbers: range | Numbers = order
        ends = (min(order[0], order[-1]), max(order[0], order[-1])) if order else (0, -1)
    else:
        numbers = _numbers(order)
        ends = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, -1)
    if ends[0] < 0 or (count is not None and ends[1] >= count):
        known = "" if count is None else f"; there are rows 0..{count - 1}"
        raise UsageError(f"feed: order= has the row numbers {ends[0]} to {ends[1]}{known}")
    return IndexedSource(read, numbers)


def _numbers(order: Any) -> Numbers:
    numbers = np.asarray(order)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise UsageTypeError(
            "feed: order= must be a sequence of row numbers, such as a permutation, not "
            f"{numbers.dtype}{list(numbers.shape)}"
        )
    return numbers.astype(np.int64)


def _reader(source: Any) -> tuple[Read, int | None]:
    """Return a function that reads rows by number, and the number of rows if known."""
    if not isinstance(source, list) and not hasattr(source, "__getitem__") and callable(source):
        return source, None
    columns = [] if isinstance(source, list) else jax.tree.leaves(source)
    if columns and all(map(_is_column, columns)):
        _refuse_deleted(source)
        counts = {len(column) for column in columns}
        if len(counts) != 1:
            text = ", ".join(map(str, sorted(counts)))
            raise UsageError(f"feed: columns must have equally many rows; these have {text}")
        return lambda numbers: _rows_of_all(source, numbers), counts.pop()
    is_sequence = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if is_sequence and len(columns) < 2 and not isinstance(source, Mapping):
        return lambda numbers: _stacked([source[n] for n in numbers.tolist()]), len(source)
    raise UsageTypeError(
        "feed: batch= reads rows by index: from a function of row numbers, from arrays (one, or a "
        f"tuple or dict of them), or from samples with a length; not from "
        f"{with_article(type(source).__name__)}"
    )


def _is_column(value: Any) -> bool:
    """True for NumPy arrays and array-likes with the same indexing, on disk or in memory."""
    has_rows = bool(getattr(value, "shape", ())) and hasattr(value, "__getitem__")
    return has_rows and hasattr(value, "dtype")


def _refuse_deleted(source: Any) -> None:
    problems = [
        f"{path_text(path)}: {why}"
        for path, leaf in jax.tree_util.tree_flatten_with_path(source)[0]
        if isinstance(leaf, jax.Array) and (why := deleted(leaf))
    ]
    raise_all("feed", problems)


def _rows_of_all(columns: Any, numbers: Numbers) -> Any:
    try:
        return jax.tree.map(lambda column: _rows(column, numbers), columns)
    except RuntimeError:
        _refuse_deleted(columns)  # those that the program has deleted since
        raise


def _rows(column: Any, numbers: Numbers) -> Any:
    """Return rows of a column, each read once and in ascending order, which suits files."""
    first = int(numbers[0]) if len(numbers) else 0
    if np.array_equal(numbers, np.arange(first, first + len(numbers))):
        return column[first : first + len(numbers)]
    if isinstance(column, np.ndarray):
        return column[numbers]
    distinct, where = np.unique(numbers, return_inverse=True)
    return np.asarray(column[distinct])[where]


def _stacked(samples: list[Any]) -> Any:
    try:
        return jax.tree.map(lambda *parts: np.stack([as_numpy(part) for part in parts]), *samples)
    except RuntimeError:
        _refuse_deleted(samples)
        raise
