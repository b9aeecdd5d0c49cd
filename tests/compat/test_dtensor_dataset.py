"""`dtensor.DTensorDataset` in one process: which elements it takes, and where their rows lie."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import shoal
from shoal.compat import dtensor
from shoal.compat.dtensor import DTensorDataset, Layout

U = dtensor.UNSHARDED
ROWS = np.arange(20, dtype=np.float32).reshape(10, 2)


class Iterable:
    """A dataset that can only be iterated, as TensorFlow's."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("dataset", [ROWS, [*ROWS], Iterable(ROWS)])
@pytest.mark.parametrize(
    ("dims", "specs"),
    [
        ({"batch": 4, "h": 2}, ["batch", "h"]),
        ({"h": 4, "batch": 2}, ["batch", U]),  # the batch dim is not the first: corrupt there
        ({"batch": 4}, ["batch", U]),  # fewer devices than there are: corrupt there
    ],
)
def test_rows_are_where_they_belong(dataset, dims, specs):
    size = int(np.prod([*dims.values()]))
    mesh = dtensor.create_mesh(dims, devices=[f"CPU:{n}" for n in range(size)])
    rows = Layout(specs, mesh)
    batches = DTensorDataset(
        dataset, mesh=mesh, layouts=rows, global_batch_size=4, batch_dim="batch", prefetch=2
    )
    spec = batches.element_spec
    assert (spec.shape, spec.dtype) == ((4, 2), np.float32)
    for _ in range(2):
        found = [*batches]
        np.testing.assert_array_equal(np.concatenate(found), ROWS[:8])
        for batch in found:
            dtensor.check_layout(batch, rows)
            assert batch.sharding == spec.sharding
    dtensor.barrier(mesh, "after the loop")  # which is canceled there


def test_trees_and_batches_that_are_made_already():
    mesh = dtensor.create_mesh({"batch": 2, "h": 4})
    layouts = {"x": Layout(["batch", U], mesh), "y": Layout(["batch"], mesh)}
    pairs = [{"x": row, "y": np.int32(n)} for n, row in enumerate(ROWS)]
    wanted = [np.arange(4), np.arange(4, 8)]
    made = [
        {"x": ROWS[n : n + 2], "y": np.arange(n, n + 2, dtype=np.int32)} for n in range(0, 10, 2)
    ]
    for dataset, is_batched in [(pairs, False), (Iterable(pairs), False), (made, True)]:
        batches = DTensorDataset(
            dataset, mesh=mesh, layouts=layouts, global_batch_size=4, batch_dim="batch",
            dataset_already_batched=is_batched,
        )  # fmt: skip
        assert batches.element_spec["x"].shape == (4, 2)
        iterator = iter(batches)
        assert iterator.element_spec == batches.element_spec
        found = [*iterator]
        for batch, numbers in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(batch["y"], numbers)
            np.testing.assert_array_equal(batch["x"], ROWS[numbers])
    few = DTensorDataset(ROWS, mesh=mesh, layouts=layouts["x"], global_batch_size=12)
    assert [*few] == []


def batches_of(dataset, ranks, **options):
    """Return what element_spec and the batches say, and the values of the batches."""
    mesh = dtensor.create_mesh({"x": 2, "y": 4})
    layouts = jax.tree.map(lambda rank: Layout(["x", U][:rank], mesh), ranks)
    made = DTensorDataset(dataset, mesh=mesh, layouts=layouts, global_batch_size=4, **options)
    found = [*made]
    for batch in found:
        jax.tree.map(
            lambda spec, array: (
                np.testing.assert_equal((array.shape, array.dtype), (spec.shape, spec.dtype))
            ),
            made.element_spec, batch,
        )  # fmt: skip
    return made.element_spec, jax.tree.map(lambda *parts: np.concatenate(parts), *found)


NUMBERS = [0.1 * n for n in range(9)]
LABELS = np.arange(9, dtype=np.int16)


@pytest.mark.parametrize("wrap", [list, Iterable])
def test_numbers_of_python_have_the_dtypes_that_the_spec_says(wrap):
    spec, found = batches_of(wrap(NUMBERS), 1)
    assert spec.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32(NUMBERS[:8]))
    spec, found = batches_of(wrap([[n, n] for n in range(9)]), 2)
    assert spec.dtype == np.int32
    np.testing.assert_array_equal(found, np.stack([np.arange(8)] * 2, 1))
    spec, found = batches_of(wrap([(True, [n]) for n in NUMBERS]), (1, 2))
    assert [one.dtype for one in spec] == [bool, np.float32]
    np.testing.assert_array_equal(found[1][:, 0], np.float32(NUMBERS[:8]))
    batched = [NUMBERS[:4], NUMBERS[4:8]]
    _, found = batches_of(wrap(batched), 1, dataset_already_batched=True)
    np.testing.assert_array_equal(found, np.float32(NUMBERS[:8]))
    for later in (0.5, 1 << 40):
        with pytest.raises(shoal.UsageError, match=r"dtensor\.DTensorDataset: .*int32"):
            batches_of(wrap([1] * 4 + [later] * 4), 1)
    with pytest.raises(TypeError, match="an element is int32, the first float32; cast it"):
        batches_of(wrap([np.float32(1)] * 4 + [np.int32(1)] * 4), 1)


@pytest.mark.parametrize("kind", [np.asarray, list])
def test_arrays_side_by_side_are_a_dataset(kind):
    pair = (kind(NUMBERS[:9]), kind([*LABELS]))
    if kind is np.asarray:
        pair = (np.float32(NUMBERS), LABELS)
    spec, found = batches_of(pair, (1, 1))
    np.testing.assert_array_equal(found[0], np.float32(NUMBERS[:8]))
    np.testing.assert_array_equal(found[1], LABELS[:8])
    assert [one.dtype for one in spec] == [np.float32, np.int16]
    _, named = batches_of({"n": pair[0], "more": [pair[1]]}, {"n": 1, "more": [1]})
    np.testing.assert_array_equal(named["more"][0], LABELS[:8])
    with pytest.raises(ValueError, match=r"equally many rows, not \[8, 9\]"):
        batches_of((pair[0], pair[1][:8]), (1, 1))
    with pytest.raises(ValueError, match="layouts have the structure"):
        batches_of(pair, {"n": 1})


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"tf_data_service_config": 1}, NotImplementedError, "no service is needed"),
        ({"global_batch_size": 5}, ValueError, "does not divide into 4 shards"),
        ({"global_batch_size": 0}, ValueError, "does not divide"),
        ({"batch_dim": "h"}, ValueError, "batch_dim h was specified but at least one layout"),
        ({"layouts": {"x": 3}}, TypeError, r"must be a dtensor\.Layout"),
        ({"dataset": [{"x": ROWS[0]}]}, ValueError, "layouts have the structure"),
        ({"dataset": [[[1.0], [1.0, 2.0]]]}, ValueError, "layouts have the structure"),
        ({"dataset": [None]}, ValueError, "layouts have the structure"),
        ({"dataset": ["text"]}, ValueError, "an element is 'text': only numbers"),
        ({"dataset": [ROWS]}, ValueError, "Expected layout with rank 3, got 2"),
        ({"dataset": []}, ValueError, "no elements"),
        ({"dataset": iter(ROWS)}, TypeError, "read only once"),
        ({"dataset": 3}, TypeError, "not iterable"),
        (
            {"dataset": [ROWS], "dataset_already_batched": True},
            ValueError,
            "got 10 but expected 2",
        ),
        ({"mesh": None}, TypeError, "not a valid Mesh"),
        ({"mesh": "other"}, ValueError, "is on another mesh"),
    ],
)
def test_datasets_that_are_refused(changed, kind, words):
    mesh = dtensor.create_mesh({"batch": 4, "h": 2})
    named = {
        "dataset": ROWS, "mesh": mesh, "layouts": Layout(["batch", U], mesh),
        "global_batch_size": 8, "batch_dim": "batch", **changed,
    }  # fmt: skip
    if named["mesh"] == "other":
        named["mesh"] = dtensor.create_mesh({"batch": 8})
    with pytest.raises(kind, match=words):
        DTensorDataset(named.pop("dataset"), **named)
