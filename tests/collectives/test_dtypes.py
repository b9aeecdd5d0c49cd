"""What checkpoints take as an array, broadcast, allgather and assert_same take, bit for bit."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import shoal
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.checkpoint.tree import dtypes
from shoal.collectives.allgather import allgather
from shoal.collectives.broadcast import broadcast
from shoal.collectives.leaves import LeafSpec, leaf_of
from shoal.collectives.same import assert_same
from shoal.errors import DivergenceError, UsageError, UsageTypeError
from shoal.runtime.client.in_process import LocalJob

SMALL = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
OTHERS = [
    "S5", "U7", ">U2", ">i4", ">f8", ">c16", ">M8[s]", "M8[ns]", "M8[25s]", "m8[D]", "m8[Y]",
    "V8", "(2,)i4", "i4,f4", [("a", "U3")], [("o", "O")], np.dtypes.StringDType(),
    np.dtypes.StringDType(na_object=None), [("float0", "V")],
]  # fmt: skip
ALL = [*map(np.dtype, np.typecodes["All"]), *SMALL, *map(np.dtype, OTHERS)]


def is_stored(dtype):
    try:
        dtypes.storage_of(dtype)
    except UsageTypeError:
        return False
    return True


TAKEN = [dtype for dtype in ALL if is_stored(dtype)]


def some(dtype, shape):
    """Return arrays of any bits that are valid."""
    count = int(np.prod(shape)) * (dtype.itemsize // 4 if dtype.kind == "U" else dtype.itemsize)
    drawn = np.random.default_rng(7).integers(1, 256, count)
    if dtype.kind == "U":
        order = ">" if dtype.byteorder == ">" else "<"
        return np.ndarray(shape, dtype, (drawn % 7 * 500).astype(f"{order}u4").tobytes())
    if dtype.kind == "b":
        return (drawn % 2).astype(bool).reshape(shape)
    return np.ndarray(shape, dtype, drawn.astype(np.uint8).tobytes())


def native_bits(array):
    dtype = array.dtype.newbyteorder("=")
    return dtype, array.shape, array.astype(dtype).tobytes()


def test_the_lists_are_equal():
    assert len(TAKEN) > 45
    for dtype in ALL:
        if dtype.subdtype:
            continue  # an array has no such dtype: its dims are the array's
        leaf = leaf_of("x", np.ndarray((2,), dtype))
        assert isinstance(leaf, LeafSpec) == is_stored(dtype), (dtype, leaf)


@pytest.mark.parametrize("dtype", TAKEN, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (4, 5)], ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype, shape):
    array = some(dtype, shape)
    given = {"a": array, "b": array.T, "c": array[::-1] if shape else array}

    def run(client):
        options = {"timeout_s": PATIENCE_S, "name": "x"}
        assert_same.on(client, given, **options)
        sent = broadcast.on(client, given, 0, **options)
        many = allgather.on(client, given, **options)
        tiled = allgather.on(client, given, tiled=True, **options)
        return sent, many, tiled

    for sent, many, tiled in run_all(LocalJob(2), run):
        for name, own in given.items():
            assert native_bits(sent[name]) == native_bits(own)
            assert native_bits(many[name])[0::2] == (
                native_bits(own)[0], 2 * native_bits(own)[2]
            )  # fmt: skip
            assert tiled[name].tobytes() == many[name].tobytes()
            assert sent[name].dtype == dtype.newbyteorder("=")
            assert sent[name].flags.writeable


@pytest.mark.parametrize("dtype", [one for one in TAKEN if one.itemsize], ids=str)
def test_a_difference_in_the_last_item_is_found(dtype):
    array = some(dtype, (2, 3))

    def run(client):
        own = array.copy()
        if client.process:
            raw = own.reshape(-1).view(np.uint8)
            raw[-dtype.itemsize if dtype.byteorder != ">" else -1] ^= 1
        assert_same.on(client, {"w": own}, timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(2), run):
        assert isinstance(error, DivergenceError), error
        assert "['w'][1, 2] = " in str(error)


@pytest.mark.parametrize(
    "value",
    [
        np.str_("a"), np.str_(""), np.str_("a\0\0"), np.str_("\ud800é"), np.bytes_(b"a\0"),
        np.bytes_(b""), np.datetime64("2020-01-02T03:04", "ns"), np.datetime64("NaT", "s"),
        np.timedelta64(-3, "D"), np.float32(-0.0), np.int64(-1), np.bool_(True),
        ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3),
    ],
    ids=repr,
)  # fmt: skip
def test_scalars_are_the_same_again(value):
    def run(client):
        assert_same.on(client, [value], timeout_s=PATIENCE_S)
        return broadcast.on(client, [value], timeout_s=PATIENCE_S)

    for (back,) in run_all(LocalJob(2), run):
        assert type(back) is type(value)
        assert np.asarray(back).dtype == np.asarray(value).dtype
        assert np.asarray(back).tobytes() == np.asarray(value).tobytes()
        if isinstance(value, str | bytes):
            assert str.__eq__(back, value) if isinstance(value, str) else bytes(back) == value


def test_large_text_is_streamed():
    text = np.array(["é" * 40, "b"] * 4000)

    def run(client):
        sent = broadcast.on(client, text, timeout_s=PATIENCE_S)
        return sent, allgather.on(client, text, tiled=True, timeout_s=PATIENCE_S)

    for sent, gathered in run_all(LocalJob(2), run):
        np.testing.assert_array_equal(sent, text)
        np.testing.assert_array_equal(gathered, np.concatenate([text, text]))


def test_texts_of_several_widths_are_named_by_their_width():
    def run(client):
        names = np.array(["a", "bc" * (1 + client.process)])
        allgather.on(client, {"host": names}, timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(2), run):
        assert isinstance(error, DivergenceError)
        assert "['host']: U2[2]" in str(error)
        assert "['host']: U4[2]" in str(error)
        assert "pass json.dumps(….tolist())" in str(error)


def test_lists_of_several_lengths_are_one_leaf_of_text():
    def run(client):
        names = ["a", "b"][: 1 + client.process]
        with pytest.raises(DivergenceError) as caught:
            allgather.on(client, {"hosts": names}, name="1", timeout_s=PATIENCE_S)
        texts = allgather.on(client, json.dumps(names), name="2", timeout_s=PATIENCE_S)
        return str(caught.value), [json.loads(text) for text in texts]

    for message, texts in run_all(LocalJob(2), run):
        assert "['hosts'][1]: str" in message
        assert "is one leaf: an array with tiled=True, or text by json.dumps(…)" in message
        assert texts == [["a"], ["a", "b"]]


def test_texts_that_print_alike_are_shown_with_their_bits_and_long_ones_in_few_words():
    def run(client):
        texts = np.array(["x" * 5000 + "ab"[client.process]])
        assert_same.on(client, texts, timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(2), run):
        assert isinstance(error, DivergenceError)
        assert len(str(error)) < 1000
        assert "x…x" in str(error)
        assert "xa'" in str(error)


REFUSED = {
    "object": (np.array([{}]), "whose elements are Python objects"),
    "strings": (np.array(["a"], np.dtypes.StringDType()), "whose elements have any length"),
    "fields": (np.zeros(2, "i4,f4"), "which has fields"),
    "raw": (np.zeros(2, "V8"), "which is raw memory"),
    "long": (np.zeros(2, np.longdouble), "convert it to float64"),
    "float0": (np.zeros(2, [("float0", "V")]), "the tangent of an integer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_dtypes_are_refused_with_the_same_reason_everywhere(case, tmp_path):
    value, words = REFUSED[case]
    calls = [
        lambda tree: shoal.save(tmp_path / "one", tree),
        shoal.broadcast,
        shoal.allgather,
        shoal.assert_same,
    ]
    reasons = set()
    for call in calls:
        with pytest.raises(UsageTypeError, match=words) as caught:
            call({"a": value})
        reasons.add(str(caught.value).rpartition("has dtype")[2])
    assert len(reasons) == 1, reasons


@pytest.mark.parametrize("value", [np.array(["a"]), np.zeros(2, "M8[s]"), np.str_("a")], ids=str)
def test_devices_hold_no_text_and_the_error_says_where_it_may_stay(value):
    mesh = shoal.make_mesh({"x": 1}, devices=[0])
    with pytest.raises(UsageError, match="keep it on the host: broadcast, allgather and save"):
        shoal.put({"a": value}, shoal.Layout(mesh))
