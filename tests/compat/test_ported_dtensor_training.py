"""What TensorFlow's own tests of DTensor say of variables, checkpoints and datasets."""

from __future__ import annotations

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.compat import dtensor
from shoal.compat.dtensor import UNSHARDED, DTensorCheckpoint, DTensorDataset, DVariable, Layout

U = UNSHARDED


def numbers(*shape):
    return np.random.default_rng(len(shape)).uniform(1, 9, shape).astype(np.float32)


def check(found, wanted, layout):
    """Check values and layout."""
    np.testing.assert_array_equal(found, wanted)
    assert dtensor.fetch_layout(found) == layout


# ---- Variables.


def test_a_variable_of_a_host_value_needs_a_layout():
    with pytest.raises(ValueError, match="Neither layout nor DTensor initial value are provided"):
        DVariable(1.0)


def test_a_variable_cannot_have_another_layout_than_its_value(line):
    x = dtensor.relayout([5, 6, 7, 8], Layout([U], line))
    with pytest.raises(ValueError, match="Conflicting layout are provided"):
        DVariable(x, layout=Layout(["x"], line))


def test_a_variable_is_laid_out_like_an_array(line):
    layout = Layout([U], line)
    v = DVariable(dtensor.relayout([5.0], layout))
    check(dtensor.relayout(v, layout), [5], layout)


def test_assignments_keep_the_layout_of_a_variable(line):
    for value, specs in (([5.0], [U]), (2.0, []), ([1.0, 2.0], ["x"])):
        layout = Layout(specs, line)
        x = dtensor.relayout(value, layout)
        v = DVariable(initial_value=x)
        dtensor.check_layout(v, layout)
        np.testing.assert_array_equal(v.numpy(), value)
        v = v.assign_add(x)
        dtensor.check_layout(v, layout)
        np.testing.assert_array_equal(v.numpy(), 2 * np.array(value))


@pytest.mark.differs("`DVariable` inside `jit`")
def test_a_function_returns_what_is_assigned_outside(line):
    layout = Layout([], line)
    v = DVariable(dtensor.relayout(1.0, layout))
    for call in (lambda x: v.assign(x * 2), lambda x: DVariable(x, layout=layout)):
        with pytest.raises(RuntimeError, match="must be called eagerly"):
            jax.jit(call)(np.float32(1))
    value, total = jax.jit(lambda x: (x * 2, x * 2 + x))(np.float32(1))
    v.assign(value)
    dtensor.check_layout(v, layout)
    assert (float(v.numpy()), float(total)) == (2, 3)


def test_a_variable_of_a_whole_number_has_its_value(line):
    v = DVariable(dtensor.relayout(np.int32(1), Layout([], line)))
    assert (int(v.numpy()), v.dtype) == (1, np.int32)


def test_variables_are_trained_as_on_one_device(wide):
    start = {"k": numbers(3, 3, 1, 1), "w": numbers(64, 8), "b": numbers(8)}
    layouts = {"k": Layout([U] * 4, wide), "w": Layout([U, "y"], wide), "b": Layout(["y"], wide)}
    variables = {
        name: DVariable(dtensor.relayout(dtensor.copy_to_mesh(value, layouts[name]), layouts[name]))
        for name, value in start.items()
    }
    plain = {name: jnp.asarray(value) for name, value in start.items()}

    @jax.jit
    def step(own, images):
        def loss(own):
            dims = ("NHWC", "HWIO", "NHWC")
            found = jax.lax.conv_general_dilated(
                images, own["k"], (1, 1), "SAME", dimension_numbers=dims
            )
            return jnp.mean(found.reshape(len(images), -1) @ own["w"] + own["b"][None])

        return jax.value_and_grad(loss)(own)

    for seed in range(3):
        images = np.random.default_rng(seed).normal(size=(4, 8, 8, 1)).astype(np.float32)
        split = dtensor.copy_to_mesh(images, Layout.batch_sharded(wide, "x", rank=4))
        loss, found = step({name: v.read_value() for name, v in variables.items()}, split)
        wanted_loss, wanted = step(plain, images)
        np.testing.assert_allclose(loss, wanted_loss, rtol=1e-4)
        for name, variable in variables.items():
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)
            variable.assign_sub(0.1 * found[name])
            plain[name] -= 0.1 * wanted[name]
    for name, variable in variables.items():
        dtensor.check_layout(variable, layouts[name])
        np.testing.assert_allclose(variable.numpy(), plain[name], atol=1e-4)


# ---- Checkpoints.


SPECS = [["x", U], [U, "x"], ["x", "y"], [U, U]]
VALUES = [numbers(4, 8), -numbers(2, 4)]


def pair(layout):
    return [DVariable(dtensor.copy_to_mesh(value, layout)) for value in VALUES]


@pytest.mark.parametrize("how", ["save", "write"])
@pytest.mark.parametrize("specs", SPECS)
def test_variables_come_back_from_a_checkpoint(wide, tmp_path, specs, how):
    layout = Layout(specs, wide)
    a, b = pair(layout)
    checkpoint = DTensorCheckpoint(wide, a=a, b=b)
    path = getattr(checkpoint, how)(tmp_path)
    for variable, value in ((a, VALUES[0]), (b, VALUES[1])):
        variable.assign(dtensor.copy_to_mesh(np.zeros_like(value), layout))
    checkpoint.restore(path)
    for variable, value in ((a, VALUES[0]), (b, VALUES[1])):
        check(variable.read_value(), value, layout)


@pytest.mark.parametrize("specs", SPECS)
def test_variables_come_back_in_another_layout(wide, tmp_path, specs):
    a, b = pair(Layout(specs, wide))
    path = DTensorCheckpoint(wide, a=a, b=b).save(tmp_path / "c")
    other = Layout(["x", "y"], wide)
    zeros = [DVariable(np.zeros_like(value), layout=other) for value in VALUES]
    DTensorCheckpoint(wide, a=zeros[0], b=zeros[1]).restore(path)
    for variable, value in zip(zeros, VALUES, strict=True):
        check(variable.read_value(), value, other)


class Model:
    """A model with a replicated and a split variable."""

    def __init__(self, replicated, split):
        self.r, self.s = DVariable(replicated), DVariable(split)


@pytest.mark.parametrize("specs", [["x", U], [U, "x"]])
def test_a_training_loop_goes_on_from_its_latest_checkpoint(wide, tmp_path, specs):
    whole, split = Layout([U, U], wide), Layout(specs, wide)
    starts = [dtensor.copy_to_mesh(v, one) for v, one in zip(VALUES, (whole, split), strict=True)]
    latest = None
    for epoch in range(3):
        model = Model(*starts)
        checkpoint = DTensorCheckpoint(wide, model=model)
        checkpoint.restore(latest)
        check(model.r.read_value(), VALUES[0] + np.float32(epoch), whole)
        check(model.s.read_value(), VALUES[1] + np.float32(epoch), split)
        model.r.assign_add(np.ones((4, 8), np.float32))
        model.s.assign_add(dtensor.copy_to_mesh(np.ones((2, 4), np.float32), split))
        latest = checkpoint.save(tmp_path / "c")
        assert latest.endswith(f"c-{epoch + 1}")
        for variable in (model.r, model.s):
            variable.assign(np.zeros(variable.shape, np.float32))


def test_a_restore_from_no_path_does_nothing(wide):
    v = DVariable(np.float32(3), layout=Layout([], wide))
    DTensorCheckpoint(wide, v=v).restore(None)
    assert float(v.numpy()) == 3


# ---- Datasets.


class Rows:
    """A dataset that can be iterated from its beginning, and counts the elements it has given."""

    def __init__(self, made):
        self.made, self.count = made, 0

    def __iter__(self):
        for row in self.made():
            self.count += 1
            yield row


@pytest.fixture(scope="module")
def cube():
    return dtensor.create_mesh({"batch": 2, "height": 2, "width": 2})


IMAGE, LABEL = numbers(4, 4, 3), np.float32([7])
FOUR, TWO = ["batch", U, U, U], ["batch", U]


def endless(element):
    return Rows(lambda: itertools.repeat(element))


def test_a_layout_of_too_low_a_rank_is_refused(cube):
    with pytest.raises(ValueError, match="Expected layout with rank 4"):
        DTensorDataset(
            endless(IMAGE), global_batch_size=8, mesh=cube,
            layouts=Layout(["batch", "height", "width"], cube), batch_dim="batch",
        )  # fmt: skip


def test_batches_come_in_order_and_end(cube):
    rows, layout = numbers(12, 4, 4, 3), Layout(FOUR, cube)
    batches = DTensorDataset(
        Rows(lambda: iter(rows)),
        global_batch_size=4,
        mesh=cube,
        layouts=layout,
        batch_dim="batch",
    )
    iterator = iter(batches)
    for start in (0, 4, 8):
        check(next(iterator), rows[start : start + 4], layout)
    dtensor.barrier(cube)
    with pytest.raises(StopIteration):
        next(iterator)
    assert sum(1 for _ in batches) == 3
    total = sum(np.asarray(batch) for batch in batches)
    np.testing.assert_allclose(total, rows[:4] + rows[4:8] + rows[8:], rtol=1e-6)


def test_the_spec_of_batches_has_their_shape(cube):
    layout = Layout(FOUR, cube)
    batches = DTensorDataset(
        endless(IMAGE), global_batch_size=8, mesh=cube, layouts=layout, batch_dim="batch"
    )
    assert batches.element_spec.shape == (8, 4, 4, 3)
    iterator = iter(batches)
    assert iterator.element_spec.shape == (8, 4, 4, 3)
    check(next(iterator), np.stack([IMAGE] * 8), layout)


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("tree", [lambda a, b: (a, b), lambda a, b: {"images": a, "labels": b}])
def test_elements_may_be_trees_and_batched_already(cube, tree, is_batched):
    own = 8 // cube.dim_size("batch")
    one = (np.stack([IMAGE] * own), np.stack([LABEL] * own)) if is_batched else (IMAGE, LABEL)
    layouts = tree(Layout(FOUR, cube), Layout(TWO, cube))
    batches = DTensorDataset(
        endless(tree(*one)), global_batch_size=8, mesh=cube, layouts=layouts,
        batch_dim="batch", dataset_already_batched=is_batched,
    )  # fmt: skip
    wanted = tree(np.stack([IMAGE] * 8), np.stack([LABEL] * 8))
    jax.tree.map(check, next(iter(batches)), wanted, layouts)


def test_batches_of_the_wrong_size_are_refused(cube):
    with pytest.raises(ValueError, match="got 16 but expected 4"):
        DTensorDataset(
            endless(np.stack([IMAGE] * 16)), global_batch_size=8, mesh=cube,
            layouts=Layout(FOUR, cube), batch_dim="batch", dataset_already_batched=True,
        )  # fmt: skip


@pytest.mark.differs("`DTensorDataset` of batches whose last is smaller")
def test_a_smaller_batch_at_the_end_is_dropped(cube):
    made = [np.arange(n, min(n + 4, 14), dtype=np.int32) for n in range(0, 14, 4)]
    batches = DTensorDataset(
        made, global_batch_size=8, mesh=cube, layouts=Layout(["batch"], cube),
        batch_dim="batch", dataset_already_batched=True,
    )  # fmt: skip
    (found,) = batches
    np.testing.assert_array_equal(found, np.arange(8))


@pytest.mark.differs("`DTensorDataset(prefetch=)`")
@pytest.mark.parametrize(("prefetch", "ahead"), [(None, 1), (2, 2)])
def test_elements_are_read_when_batches_are_wanted(cube, prefetch, ahead):
    rows = np.arange(32, dtype=np.int32)
    dataset, layout = Rows(lambda: iter(rows)), Layout(["batch"], cube)
    batches = DTensorDataset(
        dataset, global_batch_size=4, mesh=cube, layouts=layout, batch_dim="batch",
        prefetch=prefetch,
    )  # fmt: skip
    iterator = iter(batches)
    assert dataset.count == 1  # the first, for its shape
    for number in range(8):
        check(next(iterator), rows[4 * number : 4 * number + 4], layout)
        wanted, until = 1 + min(32, 4 * (number + 1 + ahead)), time.monotonic() + 10
        while dataset.count < wanted and time.monotonic() < until:
            time.sleep(0.001)
        assert dataset.count == wanted
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize(
    "specs",
    [
        [U, U, U, U],
        ["batch", U, U, U],
        [U, "height", "width", U],
        [U, "width", "height", U],
        ["batch", "height", "width", U],
        ["batch", "width", "height", U],
    ],
)
def test_batches_have_any_layout(cube, specs, is_default):
    def first():
        layouts = (Layout(specs, cube), Layout([specs[0], U], cube))
        batches = DTensorDataset(
            endless((IMAGE, LABEL)), global_batch_size=8, mesh=cube, layouts=layouts,
            batch_dim="batch" if "batch" in specs else None,
        )  # fmt: skip
        return next(iter(batches)), layouts

    found, layouts = dtensor.default_mesh(cube)(first)() if is_default else first()
    check(found[0], np.stack([IMAGE] * 8), layouts[0])
    check(found[1], np.stack([LABEL] * 8), layouts[1])


def test_the_batch_dim_must_split_the_rows_of_all_layouts(cube):
    layouts = (Layout([U, "height", "width", U], cube), Layout(TWO, cube))
    with pytest.raises(ValueError, match="batch_dim batch was specified but at least one layout"):
        DTensorDataset(
            endless((IMAGE, LABEL)), global_batch_size=8, mesh=cube, layouts=layouts,
            batch_dim="batch",
        )  # fmt: skip
