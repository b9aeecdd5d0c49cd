"""What may be fed: batches in turn, rows by number; and what may not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.arrays.bridge.use_mesh import use_mesh
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

MESH = Mesh({"data": 4, "model": 2})
ROWS = {"x": Layout(MESH, "data", "model"), "n": Layout(MESH, "data")}
DATA = {"x": np.arange(88, dtype=np.float32).reshape(44, 2), "n": np.arange(44, dtype=np.int32)}
SHAPE = jax.ShapeDtypeStruct((44, 2), np.float32)


def test_every_indexed_source_is_read_by_number():
    samples = [(np.float32(n), {"label": n}) for n in range(9)]
    with use_mesh(MESH):
        columns = (np.arange(9, dtype=np.float32), {"label": np.arange(9, dtype=np.int32)})
        names = (("data",), {"label": "data"})
        sources = {
            "samples": samples,
            "columns": columns,
            "on devices": jax.tree.map(jnp.asarray, columns),
            "function": lambda rows: jax.tree.map(lambda c: c[rows], columns),
        }
        for name, source in sources.items():
            for order in (
                None,
                [8, 0, 3, 3, 1, 2, 7, 7],
                range(8, -1, -1),
                np.arange(9, dtype="u1"),
            ):
                if name == "function" and order is None:
                    continue
                labels = [np.asarray(b[1]["label"]).tolist() for b in shoal.feed(
                    source, names, batch=4, order=order)]  # fmt: skip
                wanted = list(range(9) if order is None else order)
                assert labels == [wanted[:4], wanted[4:8]], name


def test_files_are_read_in_ascending_order_and_once():
    class File:
        """What is on disk: it wants ascending numbers, without two alike."""

        shape, dtype = (9,), np.dtype(np.float32)

        def __len__(self):
            return 9

        def __getitem__(self, rows):
            if isinstance(rows, slice):
                return np.arange(9, dtype=np.float32)[rows]
            assert (np.diff(rows) > 0).all(), rows
            return np.asarray(rows, np.float32)

    order = [8, 0, 3, 3, 1, 2, 7, 7]
    batches = [np.asarray(b).tolist() for b in shoal.feed(File(), ROWS["n"], batch=4, order=order)]
    assert batches == [order[:4], order[4:]]
    assert len(list(shoal.feed(File(), ROWS["n"], batch=8))) == 1


def test_values_without_dims_and_lists_as_torch_gives_them():
    rows = (ROWS["x"], Layout(MESH))
    batches = list(shoal.feed([[DATA["x"][:8], 3], [DATA["x"][8:16], 4]], rows))
    assert [int(step) for _, step in batches] == [3, 4]
    np.testing.assert_array_equal(np.asarray(batches[1][0]), DATA["x"][8:16])


class Tensor:
    """An array of another library."""

    def __init__(self, value, fails=False):
        self.value, self.fails = value, fails

    def __array__(self, dtype=None, copy=None):
        if self.fails:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.value


def test_arrays_of_other_libraries():
    (batch,) = shoal.feed([{"x": Tensor(DATA["x"][:8]), "n": Tensor(DATA["n"][:8])}], ROWS)
    np.testing.assert_array_equal(np.asarray(batch["x"]), DATA["x"][:8])
    with pytest.raises(UsageError, match=r"is a Tensor .* NumPy cannot read .can't convert cuda:0"):
        next(shoal.feed([Tensor(None, fails=True)], ROWS["n"]))


def test_a_data_loader_of_torch():
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(
        torch.arange(20, dtype=torch.float32).reshape(10, 2), torch.arange(10, dtype=torch.int32)
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    rows = (ROWS["x"], ROWS["n"])
    in_turn = [np.asarray(n).tolist() for _, n in shoal.feed(loader, rows)]
    by_number = [np.asarray(n).tolist() for _, n in shoal.feed(dataset, rows, batch=4)]
    assert in_turn == by_number == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": DATA["x"][:8]}, r"\['n'\]: a layout, but no leaf"),
        ({"x": DATA["x"][:8], "n": DATA["n"][:4]}, r"equally many rows \(dim 0\): \['n'\] has 4"),
        ({"x": DATA["x"][:8, 0], "n": DATA["n"][:8]}, r"\['x'\]: shape \(8,\) has rank 1"),
        ({"x": "text", "n": DATA["n"][:8]}, r"\['x'\]"),
        ({"x": DATA["x"][:8], "n": np.array(["a"] * 8)}, r"\['n'\]: has dtype <U1"),
        ({"x": np.ones((8, 3), np.float32), "n": DATA["n"][:8]}, r"dim 1 of \(8, 3\) has size 3"),
        (
            {"x": DATA["x"][:8], "n": jax.random.split(jax.random.key(0), 8)},
            r"feed jax\.random\.key_data\(keys\)",
        ),
        ({"x": DATA["x"][:6], "n": DATA["n"][:6]}, "the first batch must be whole: 6 rows of"),
    ],
)
def test_batches_that_are_none(batch, words):
    with pytest.raises(UsageError, match=words):
        next(shoal.feed([batch], ROWS))


@pytest.mark.parametrize(
    ("source", "options", "kind", "words"),
    [
        (DATA, {}, UsageTypeError, "a dict is not an iterable of batches: pass batch="),
        (
            DATA["n"],
            {"layouts": ROWS["n"]},
            UsageTypeError,
            "an ndarray is not an iterable of batches",
        ),
        (len, {}, UsageTypeError, "a function of row numbers is not an iterable"),
        (3, {}, UsageTypeError, "3 is not an iterable of batches"),
        (3, {"batch": 8}, UsageTypeError, "not from an int"),
        (SHAPE, {"batch": 8}, UsageTypeError, "not from a ShapeDtypeStruct"),
        ({"x": SHAPE}, {"batch": 8}, UsageTypeError, "not from a dict"),
        ({"x": "abc"}, {"batch": 8}, UsageTypeError, "not from a dict"),
        (len, {"batch": 8}, UsageError, "does not say how many rows there are: pass order="),
        (DATA, {"batch": 6}, UsageError, r"6 rows, which 4 shards \(data=4\) do not divide; 4 or"),
        (
            DATA,
            {"batch": 48},
            UsageError,
            "44 rows do not fill one batch of 48; remainder='pad'",
        ),
        (
            DATA,
            {"batch": 8, "remainder": "error"},
            UsageError,
            "44 rows fill 5 batches of 8 and leave 4",
        ),
        (DATA, {"batch": 8, "order": [[1]]}, UsageTypeError, "must be a sequence of row numbers"),
        (DATA, {"batch": 8, "order": [0.5]}, UsageTypeError, "must be a sequence of row numbers"),
        (DATA, {"batch": 8, "order": [44]}, UsageError, r"44 to 44; there are rows 0\.\.43"),
        (DATA, {"batch": 8, "order": range(-1, 9)}, UsageError, "has the row numbers -1 to 8"),
        ({"x": DATA["x"], "n": DATA["n"][1:]}, {"batch": 8}, UsageError, "these have 43, 44"),
        ([], {"order": [1]}, UsageError, "order= is for rows read by row index: pass batch="),
        (
            [],
            {"remainder": "dorp"},
            UsageError,
            "remainder='dorp' is not one of drop, pad, error; did you mean",
        ),
        ([], {"prefetch": 0}, UsageError, "prefetch=0 must be at least 1"),
        ([], {"start": -1}, UsageError, "start=-1 must be at least 0"),
        ([], {"start": True}, UsageTypeError, "start=True must be a whole number"),
        (
            [],
            {"start": {"rows": 3}},
            UsageError,
            r"number of rows, or what the state\(\) of a feed",
        ),
        ([], {"start": {"rows": 0.5, "order": 0}}, UsageTypeError, r"start\['rows'\]=0.5 must be"),
        ([], {"skip": 1}, UsageTypeError, "skip=1 must be True, False or None"),
        (DATA, {"batch": 8, "skip": True}, UsageError, "skip= is for iterables"),
        (DATA, {"batch": True}, UsageTypeError, "batch=True must be a whole number"),
        ([], {"check_values": 1}, UsageTypeError, "check_values=1 must be True or False"),
        ([], {"timeout_s": 0}, UsageError, "timeout_s=0 must be a positive number"),
        ([], {"lane": ""}, UsageError, "lane must not be empty"),
        ([], {"layouts": lambda path, leaf: None}, UsageTypeError, "cannot be resolved before"),
        ([], {"layouts": {}}, UsageError, r"on the same axes of one mesh, not none"),
        ([], {"layouts": ("data",)}, UsageError, "feed: .*needs a mesh"),
        (
            [],
            {"layouts": {"x": ROWS["x"], "n": Layout(MESH, "model")}},
            UsageError,
            r"same axes of one mesh, not Layout\(.*\) and Layout\(",
        ),
    ],
)
def test_arguments_that_are_wrong(source, options, kind, words):
    options = {"layouts": ROWS, **options}
    with pytest.raises(kind, match=words):
        shoal.feed(source, **options)
