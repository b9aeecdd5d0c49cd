"""What `shoal.save` writes, read by the reader that was written from the page alone."""

import json
from pathlib import Path

import jax
import jsonschema
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from golden import plain_reader
from shoal.arrays.make_mesh import make_mesh
from shoal.arrays.placing.put import put
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.plan.layout import Layout

SCHEMA = Path(__file__).parents[2] / "docs" / "checkpoint-format.schema.json"
SMALL = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
OTHERS = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4",
    "S3", "U2", "M8[ns]", "m8[D]",
]  # fmt: skip


def some(dtype, shape=(8, 3)):
    """Return values of any dtype; of those narrower than a byte, every one."""
    dtype = np.dtype(dtype)
    if dtype in SMALL or dtype.kind not in "SUMm":
        return (np.arange(24) % 7).reshape(shape).astype(np.float32).astype(dtype)
    return np.arange(24).reshape(shape).astype(dtype)


@pytest.fixture
def saved(tmp_path):
    mesh = make_mesh({"a": 4, "b": 2})
    on_devices = [np.float32, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint2, np.complex64]
    tree = {
        "host": {
            np.dtype(dtype).str + np.dtype(dtype).name: some(dtype) for dtype in OTHERS + SMALL
        },
        "cut": {np.dtype(d).name: put(some(d), Layout(mesh, "a", None)) for d in on_devices},
        "everywhere": put(some(np.int32), Layout(mesh, None, None)),
        "empty": [put(np.zeros((8, 0), np.int8), Layout(mesh, "a", None)), np.zeros((0, 2))],
        "keys": jax.random.split(jax.random.key(3), 4),
        "plain": [1, 10**30, -0.0, float("inf"), 1j, True, None, b"\0", "\n", "x" * 70_000],
        "own": PerProcess({"seen": np.arange(3), "row": 5}),
        "": {1: 1, "1": 2, "a/b": 3, "a.b": 4, "a": {"b": 5}, (1, "x"): 6, None: 7, "": 8}
        | {"__metadata__": 9, "\ud800": 10, 1.5: 11},
        "~#": np.float32(2),
    }
    save(tmp_path / "model", tree, step=5, user={"lr": 0.5}, metrics={"loss": 2.0})
    return tmp_path / "model", tree


def test_every_value_is_found_by_the_page(saved):
    path, tree = saved
    commit, manifest, found = plain_reader.read(path)
    schema = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    schema.validate(manifest)
    schema.validate(commit)
    assert (commit["step"], manifest["user"]) == (5, {"lr": 0.5})
    for group in ("host", "cut"):
        for key, value in tree[group].items():
            wanted = np.asarray(value)
            wanted = wanted.astype(wanted.dtype.newbyteorder("="), copy=False)
            again = found[f"{group}/{key}"]
            assert (again.dtype, again.shape) == (wanted.dtype, wanted.shape)
            assert again.tobytes() == wanted.tobytes()
    assert found["everywhere"].tolist() == some(np.int32).tolist()
    assert [found["empty/0"].shape, found["empty/1"].shape] == [(8, 0), (0, 2)]
    assert found["keys"].tolist() == jax.random.key_data(tree["keys"]).tolist()
    plain = [found[f"plain/{number}"] for number in range(10)]
    assert repr(plain) == repr(tree["plain"])
    assert found["own"][0]["row"] == 5
    names = ["~i1", "1", "a~1b", "a.b", "a/b", "~T~i1~,x~.", "~n", "~e", "~m", "~ud800", "~d1.5"]
    assert [found[f"~e/{name}"] for name in names] == list(range(1, 12))
    assert found["~0~2"] == np.float32(2)


def test_the_safetensors_library_finds_whole_leaves_by_name(saved):
    path, tree = saved
    (file,) = path.glob("data-*")
    with safetensors.safe_open(file, "np") as opened:
        names = set(opened.keys())
        assert np.array_equal(opened.get_tensor("everywhere"), tree["everywhere"])
    assert {"host/<f4float32", "cut/float32", "own#p0", "keys", "empty/0"} <= names
