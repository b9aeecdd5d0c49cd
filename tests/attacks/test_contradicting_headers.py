"""Data files whose bytes are hashed as they are, and whose headers say something else."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import ml_dtypes
import numpy as np
import pytest

from checkpoint import hand_written
from shoal.checkpoint.blocks.reader import verify_files
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.format.fields import Fields
from shoal.checkpoint.format.json_files import decode_commit
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.errors import CorruptCheckpointError

TREE = {
    "w": np.arange(6000, dtype=np.float32).reshape(60, 100),
    "b": np.ones(7, ml_dtypes.bfloat16),
    "bits": np.ones((3, 5), ml_dtypes.int4),
    "none": np.zeros((0, 3), np.int8),
    "one": np.float64(3) * np.ones(()),
    "text": np.array(["ab", "c"]),
    "c": np.ones((2, 2), np.complex128),
    "long": "x" * 70_000,
    "own": PerProcess([{"row": 0}, {"row": 1}]),
}


def meddled(path, monkeypatch, change):
    """Write a checkpoint with headers that were changed before anything was hashed."""
    lay_out = hand_written.lay_out

    def changed(*arguments, **options):
        plan = lay_out(*arguments, **options)
        files = tuple(dataclasses.replace(one, header=change(one.header)) for one in plan.files)
        return dataclasses.replace(plan, files=files)

    monkeypatch.setattr(hand_written, "lay_out", changed)
    hand_written.write(path, TREE, hand_written.grid(2, 2), processes=2)


def test_consistent_headers_verify(tmp_path, monkeypatch):
    meddled(tmp_path, monkeypatch, lambda header: header)
    assert verify_files(open_checkpoint(LocalStore(tmp_path))) == []


def longer(header):
    return (len(header) - 8 + 4096).to_bytes(8, "little") + header[8:] + b" " * 4096


def odd(header):
    return (len(header) - 8 + 8).to_bytes(8, "little") + header[8:] + b" " * 8


def replaced(old, new):
    def change(header):
        assert len(old) == len(new)
        return header.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced(b'"F32"', b'"I32"'), r"says that 'w#0,0' is I32\[30, 50\] at .* it is F32\["),
        (replaced(b"[30,50]", b"[50,30]"), r"is F32\[50, 30\] .* index it is F32\[30, 50\]"),
        (longer, r"'b#0' is BF16\[3\] at bytes 20,224 to .* it is BF16\[3\] at bytes 16,128 to"),
        (odd, "its header has 4,104 bytes, no multiple of 4096"),
        (replaced(hand_written.ATTEMPT.encode(), b"f" * 12), "is not of attempt 00000000000a"),
        (replaced(b'"w#', b'"v#'), "lacks the entry 'w#0,0', which the index has there"),
        (replaced(b'"own#p', b'"own#q'), "lacks the entry 'own#p0'"),
        (replaced(b'"__metadata__"', b'"__metadatA__"'), "entry '__metadatA__' that is invalid"),
    ],
)  # fmt: skip
def test_header_that_contradicts_the_index_is_reported(tmp_path, monkeypatch, change, words):
    meddled(tmp_path, monkeypatch, change)
    checkpoint = open_checkpoint(LocalStore(tmp_path))
    found = verify_files(checkpoint)
    assert found
    assert len(found) <= len(checkpoint.index.files)
    with pytest.raises(CorruptCheckpointError, match=words):
        raise CorruptCheckpointError("\n".join(found))
    assert checkpoint.index.files[0].name in found[0]


def test_two_swapped_leaves_are_reported(tmp_path, monkeypatch):
    """Of one dtype and size: every hash is right, and other readers would mix them up."""
    lay_out = hand_written.lay_out

    def changed(*arguments, **options):
        plan = lay_out(*arguments, **options)
        swap = {b'"p"': b'"q"', b'"q"': b'"p"'}
        (file,) = plan.files
        pieces = [swap.get(one, one) for one in _split(file.header)]
        files = (dataclasses.replace(file, header=b"".join(pieces)),)
        return dataclasses.replace(plan, files=files)

    monkeypatch.setattr(hand_written, "lay_out", changed)
    hand_written.write(tmp_path, {"p": np.zeros(4), "q": np.ones(4)})
    assert restore(tmp_path)["q"].tolist() == [1.0] * 4, "the index counts"
    (told,) = verify_files(open_checkpoint(LocalStore(tmp_path)))
    assert "says that 'p' is F64[4] at bytes 4,128 to 4,160" in told


def _split(header):
    """Cut a header around its names."""
    first, p, rest = header.partition(b'"p"')
    middle, q, last = rest.partition(b'"q"')
    return [first, p, middle, q, last]


def sealed(path, old, new):
    """Change what COMMIT says, with the right hash."""
    text = (path / "COMMIT").read_bytes()
    body = text[: text[:-1].rindex(b"\n") + 1]
    assert body.count(old) == 1
    body = body.replace(old, new)
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1E+999", "NaN", "Infinity", "-Infinity"])
def test_metric_that_is_not_a_json_number_raises_corrupt_checkpoint(tmp_path, number):
    hand_written.write(tmp_path, {"w": np.ones(3)})
    data = sealed(tmp_path, b'"metrics": {}', b'"metrics": {"loss": %s}' % number.encode())
    with pytest.raises(CorruptCheckpointError, match="COMMIT is not valid JSON"):
        decode_commit(data)
    (tmp_path / "COMMIT").write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        restore(tmp_path)


@pytest.mark.parametrize("number", ["1e308", "-1.5", "5e-324", "1e-999", "0.0"])
def test_large_and_small_numbers_are_metrics(tmp_path, number):
    hand_written.write(tmp_path, {"w": np.ones(3)})
    data = sealed(tmp_path, b'"metrics": {}', b'"metrics": {"loss": %s}' % number.encode())
    assert decode_commit(data).metrics == {"loss": json.loads(number)}


def test_fields_of_the_user_hold_no_infinite_numbers_either(tmp_path):
    from shoal.checkpoint.format.header import strict_json

    with pytest.raises(CorruptCheckpointError, match="1e400 is larger than any number"):
        Fields(strict_json(b'{"user": {"lr": 1e400}}', "x"), "x").free("user")
