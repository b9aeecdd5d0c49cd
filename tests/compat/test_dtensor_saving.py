"""What `shoal.compat.dtensor` saves and restores, in one process."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.compat import dtensor
from shoal.compat.dtensor import DTensorCheckpoint, DVariable, Layout
from shoal.compat.dtensor.saving import SliceOf, part_of, whole_of
from shoal.plan import patterns

U = dtensor.UNSHARDED


@pytest.fixture(scope="module")
def mesh():
    return dtensor.create_mesh({"x": 2, "y": 4})


def values(dtype=np.float32):
    return np.arange(32).reshape(8, 4).astype(dtype)


def test_what_is_saved_comes_back_in_any_layout(mesh, tmp_path):
    arrays = {
        f"{specs}": dtensor.copy_to_mesh(values(), Layout(list(specs), mesh))
        for specs in itertools.permutations([U, "x", "y"], 2)
    }
    path = tmp_path / "all"
    dtensor.name_based_save(mesh, path, arrays)
    line = dtensor.create_mesh({"z": 4}, devices=["CPU:6", "CPU:1", "CPU:2", "CPU:4"])
    target = dtensor.copy_to_mesh(np.zeros((8, 4), np.float32), Layout(["z", U], line))
    wanted = OrderedDict((name, target) for name in reversed(arrays))
    found = dtensor.name_based_restore(line, str(path), wanted)
    assert isinstance(found, OrderedDict)
    assert [*found] == [*wanted]
    for array in found.values():
        dtensor.check_layout(array, Layout(["z", U], line))
        np.testing.assert_array_equal(array, values())


def test_names_dtypes_and_kinds_of_targets(mesh, tmp_path):
    rows = Layout(["x", U], mesh)
    w = DVariable(values(), layout=rows)
    dtensor.enable_save_as_bf16([w])
    saved = {"a/b*[c]": w, "n": values(np.int32), "other?": values(np.float16)}
    dtensor.name_based_save(mesh, tmp_path / "a", saved)
    assert np.asarray(shoal.restore(tmp_path / "a")["a/b*[c]"]).dtype == ml_dtypes.bfloat16
    v = DVariable(np.zeros((8, 4), np.float32), layout=rows)
    found = dtensor.name_based_restore(mesh, tmp_path / "a", {"a/b*[c]": v, "other?": values()})
    np.testing.assert_array_equal(found["a/b*[c]"], values().astype(ml_dtypes.bfloat16))
    assert found["a/b*[c]"].dtype == np.float32
    assert not v.numpy().any()  # restored, not assigned
    for target, words in [
        ({"none": v}, "none"),
        ({"n": values(np.int32)[:4]}, "n"),
        ({"n": values(np.int8)}, "int8"),
    ]:
        with pytest.raises(shoal.errors.RestoreMismatchError, match=words) as told:
            dtensor.name_based_restore(mesh, tmp_path / "a", target)
        said = str(told.value)
        assert said.startswith("dtensor.name_based_restore: restore")
        assert said.count("only= is an option of shoal.restore") == said.count(" only='")
    with pytest.raises(shoal.errors.NotCommittedError):
        dtensor.name_based_restore(mesh, tmp_path / "b", {"n": v})
    with pytest.raises(shoal.errors.StepAlreadyCommittedError):
        dtensor.name_based_save(mesh, tmp_path / "a", saved)


@pytest.mark.parametrize(
    "wrong", ["text", None, 0, 1.5, True, object(), [1, 2], {"a": values()}, np.float32(1)]
)
def test_targets_that_are_no_arrays_are_refused(mesh, tmp_path, wrong):
    dtensor.name_based_save(mesh, tmp_path / "a", {"w": values(), "b": values()})
    with pytest.raises(ValueError, match=r"tensor must be a DTensor: .*'b' is an? ") as told:
        dtensor.name_based_restore(mesh, tmp_path / "a", {"w": values(), "b": wrong})
    assert not isinstance(told.value, TypeError)  # as in DTensor
    assert type(wrong).__name__ in str(told.value)


def test_names_are_looked_up_and_not_matched(mesh, tmp_path, monkeypatch):
    names = [f"block[{number}]/**/w*" for number in range(300)]
    dtensor.name_based_save(mesh, tmp_path / "a", dict.fromkeys(names, values()))
    monkeypatch.setattr(patterns, "_compiled", lambda text: pytest.fail(f"{text} was compiled"))
    found = dtensor.name_based_restore(mesh, tmp_path / "a", dict.fromkeys(names, values()))
    assert [*found] == names


def test_sharded_save_puts_slices_together(mesh, tmp_path):
    whole = dtensor.copy_to_mesh(values(), Layout(["x", "y"], mesh))
    halves = [dtensor.copy_to_mesh(values()[i : i + 4], Layout(["y", U], mesh)) for i in (0, 4)]
    returned = dtensor.sharded_save(
        mesh,
        str(tmp_path / "s"),
        ["whole", "cut", "cut", "same"],
        ["", "8 4 0,4:-", "8 4 4,4:0,4", "8 4 -:-"],
        [whole, *halves, whole],
    )
    assert returned is None
    for array in shoal.restore(tmp_path / "s").values():
        np.testing.assert_array_equal(array, values())


def test_numbers_and_lists_of_them_are_saved_as_arrays(mesh, tmp_path):
    given = {"f": 1.5, "l": [[1, 2], [3, 4]], "n": np.float64(0.1), "a": [np.ones(2), np.zeros(2)]}
    dtensor.sharded_save(mesh, tmp_path / "s", [*given], [""] * 4, [*given.values()])
    dtensor.name_based_save(mesh, tmp_path / "n", given)
    for path in (tmp_path / "s", tmp_path / "n"):
        found = {name: np.asarray(value) for name, value in shoal.restore(path).items()}
        assert {name: (str(one.dtype), one.shape) for name, one in found.items()} == {
            "f": ("float32", ()), "l": ("int32", (2, 2)),
            "n": ("float64", ()), "a": ("float64", (2, 2)),
        }  # fmt: skip
        for name, one in found.items():
            np.testing.assert_array_equal(one, given[name])
    target = dtensor.copy_to_mesh(np.zeros((2, 2), np.int32), Layout(["x", U], mesh))
    back = dtensor.name_based_restore(mesh, tmp_path / "n", {"l": target})
    np.testing.assert_array_equal(back["l"], given["l"])
    for wrong in (None, "text", {"a": 1}, [[1], [2, 3]], [1, "a"], object()):
        for call in (
            lambda value: dtensor.name_based_save(mesh, tmp_path / "w", {"a": value}),
            lambda value: dtensor.sharded_save(mesh, tmp_path / "w", ["a"], [""], [value]),
        ):
            with pytest.raises(TypeError, match=r"_save: 'a': .* is not an array, number or list"):
                call(wrong)
    with pytest.raises(ValueError, match="1099511627776 does not fit int32"):
        dtensor.name_based_save(mesh, tmp_path / "w", {"a": 1 << 40})
    for names, slices, tensors in [("a", [""], [1]), (["a"], "", [1]), (["a"], [""], 1)]:
        with pytest.raises(TypeError, match=r"dtensor.sharded_save: .* must be a list"):
            dtensor.sharded_save(mesh, tmp_path / "w", names, slices, tensors)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("names", "slices", "words"),
    [
        ([], [], "at least one"),
        (["a"], [], "0 shape_and_slices"),
        (["a"], ["8 4 0,2:-"], "not a slice of the shape"),
        (["a"], ["8 4 6,8:-"], "not a slice of the shape"),
        (["a"], ["8 4 -"], "not a shape and a slice with as many dims"),
        (["a"], ["rows"], "not a shape and slice"),
        (["a"], ["16 4 0,8:-"], "do not make up one array"),
        (["a", "a"], ["16 4 0,8:-", "16 4 4,8:-"], "do not make up one array"),
        (["a", "a"], ["", ""], "do not make up one array"),
        ([3], [""], "must be a string"),
    ],
)
def test_slices_that_are_refused(mesh, tmp_path, names, slices, words):
    with pytest.raises(ValueError, match=words):
        dtensor.sharded_save(mesh, tmp_path / "s", names, slices, [values()] * len(names))
    assert not (tmp_path / "s").exists()


@given(st.text(alphabet="0123 -,:x"), st.lists(st.integers(0, 3), max_size=3))
def test_no_slice_does_worse_than_a_usage_error(text, shape):
    try:
        part = part_of(text, shape)
    except shoal.UsageError:
        return
    assert part.sizes == tuple(shape)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_any_cut_of_an_array_is_put_together(rows, columns, data):
    whole = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    at = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    boxes = [
        ((b, d), (e - b, f - d))
        for b, e in ((0, at[0]), (at[0], rows))
        for d, f in ((0, at[1]), (at[1], columns))
    ]
    parts = [SliceOf(whole.shape, begins, sizes) for begins, sizes in boxes]
    pieces = [whole[b : b + h, d : d + w] for (b, d), (h, w) in boxes]
    np.testing.assert_array_equal(whole_of("a", parts, pieces), whole)
    if min(boxes[0][1]) > 0:
        with pytest.raises(shoal.UsageError, match="do not make up one array"):
            whole_of("a", parts[1:], pieces[1:])


def test_errors_of_the_disk_are_value_errors(mesh, tmp_path):
    """Where DTensor raised one of `tf.errors`."""
    path = tmp_path / "a"
    with pytest.raises(ValueError, match="name_based_restore") as missing:
        dtensor.name_based_restore(mesh, path, {"w": values()})
    assert isinstance(missing.value, shoal.errors.NotCommittedError)
    assert missing.value.path == str(path)
    dtensor.name_based_save(mesh, path, {"w": values()})
    with pytest.raises(ValueError, match="name_based_save") as taken:
        dtensor.name_based_save(mesh, path, {"w": values()})
    assert isinstance(taken.value, shoal.errors.StepAlreadyCommittedError)
    (data,) = path.glob("data-*")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.chmod(0o600)
    data.write_bytes(content)
    with pytest.raises(ValueError, match="name_based_restore") as damaged:
        dtensor.name_based_restore(mesh, path, {"w": values()})
    assert isinstance(damaged.value, shoal.errors.CorruptCheckpointError)
    assert damaged.value.file == data.name


def test_saving_refuses_invalid_arguments(mesh, tmp_path):
    for call in (dtensor.name_based_save, dtensor.name_based_restore):
        for wrong, kind in [({}, ValueError), ([3], TypeError), ({3: values()}, TypeError)]:
            with pytest.raises(kind, match=call.__name__):
                call(mesh, tmp_path / "a", wrong)
        with pytest.raises(TypeError, match="not a valid Mesh"):
            call("mesh", tmp_path / "a", {"a": values()})
        with pytest.raises(ValueError, match="must be called eagerly"):
            jax.jit(lambda x, call=call: call(mesh, tmp_path / "a", {"a": x}) or x)(values())


def test_a_checkpoint_of_objects(mesh, tmp_path):
    rows = Layout(["x", U], mesh)

    def model():
        made = SimpleNamespace(
            dense={"w": DVariable(values(), layout=rows)}, name="model",
            layers=[DVariable(jnp.ones(4) * n, layout=Layout(["y"], mesh)) for n in range(2)],
        )  # fmt: skip
        made.itself = made
        return made

    one = model()
    bias = DVariable(np.float32(3), layout=Layout([], mesh))
    checkpoint = DTensorCheckpoint(mesh, one, bias=bias, step=7)
    assert checkpoint.save(tmp_path / "c") == f"{tmp_path}/c-1"
    one.layers[1].assign_add(one.layers[1])
    path = checkpoint.save(tmp_path / "c")
    assert path.endswith("c-2")
    other, bias2 = model(), DVariable(np.float32(0), layout=Layout([], mesh))
    later = DTensorCheckpoint(mesh, root=other, bias=bias2)
    status = later.restore(path)
    assert status.assert_consumed() is status.expect_partial() is status
    np.testing.assert_array_equal(other.layers[1].numpy(), np.full(4, 2))
    assert float(bias2.numpy()) == 3
    assert later.save_counter == 2
    assert other.dense["w"].layout == rows
    with pytest.raises(shoal.errors.RestoreMismatchError, match="bias"):
        DTensorCheckpoint(mesh, root=other).read(path)
    for call, kind, words in [
        (lambda: DTensorCheckpoint(mesh, x=values()), ValueError, "no DVariable"),
        (lambda: DTensorCheckpoint(mesh, save_counter=bias), ValueError, "is reserved"),
        (lambda: DTensorCheckpoint(None, bias=bias), TypeError, "not a valid Mesh"),
        (lambda: later.save(tmp_path / "d", options=1), NotImplementedError, "options=1"),
    ]:
        with pytest.raises(kind, match=words):
            call()


class Slots:
    __slots__ = ("__private", "bias", "unset")

    def __init__(self, bias, private):
        self.bias, self.__private = bias, private


class Derived(Slots):
    """Has both: slots, and a dict of attributes."""


def test_variables_in_slots_are_saved(mesh, tmp_path):
    def made(value):
        layout = Layout([], mesh)
        one = Derived(*(DVariable(np.float32(value + n), layout=layout) for n in (0, 1)))
        one.scale, one.np, one.kind = DVariable(np.float32(value + 2), layout=layout), np, Slots
        return one

    first, other = made(1), made(0)
    path = DTensorCheckpoint(mesh, first).save(tmp_path / "c")
    assert {*shoal.restore(path)} == {"bias", "_Slots__private", "scale", "save_counter"}
    DTensorCheckpoint(mesh, other).restore(path)
    assert [float(other.bias), float(other._Slots__private), float(other.scale)] == [1, 2, 3]


def test_two_variables_of_one_name_are_an_error(mesh, tmp_path):
    v, w = (DVariable(np.float32(n), layout=Layout([], mesh)) for n in range(2))
    root = SimpleNamespace(v=v, sub={"a": v})
    words = "v= is given, but root.v exists already"
    with pytest.raises(ValueError, match=words):
        DTensorCheckpoint(mesh, root, v=w)
    with pytest.raises(ValueError, match="sub= is given"):
        DTensorCheckpoint(mesh, root, sub={"a": w})
    with pytest.raises(ValueError, match="sub= is given"):
        DTensorCheckpoint(mesh, root, sub={"a": v, "b": w})
    DTensorCheckpoint(mesh, root, v=v, sub={"a": v})  # as there: it is the same
    late = DTensorCheckpoint(mesh, root, more=w)
    root.more = v
    with pytest.raises(ValueError, match="more= is given"):
        late.save(tmp_path / "c")
    with pytest.raises(ValueError, match=r"two keys of one dict .* name '1': '1', and"):
        DTensorCheckpoint(mesh, a={1: v, "1": w})
    DTensorCheckpoint(mesh, a={1: v, "1": None})  # which is no variable
    with pytest.raises(ValueError, match="name a variable"):
        DTensorCheckpoint(mesh, v)
