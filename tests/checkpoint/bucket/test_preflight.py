"""What is wrong with a bucket is said before a job needs it."""

from __future__ import annotations

import time

import pytest

from shoal import Bucket
from shoal.checkpoint.bucket import preflight
from shoal.checkpoint.bucket.objects import MemoryObjects
from shoal.errors import StorageError

BUCKET = Bucket("s3://bucket/run", skip_signature=True, region="us-east-1")
ALL = ["list", "write", "read", "conditions of writes", "delete"]


def examined(objects, monkeypatch):
    monkeypatch.setattr(preflight, "objects_of", lambda bucket: objects)
    return preflight.examine(BUCKET)


def test_a_bucket_as_it_should_be(monkeypatch):
    objects = MemoryObjects()
    facts, problems = examined(objects, monkeypatch)
    assert problems == []
    assert (facts["rights"], facts["conditions"]) == (ALL, "kept")
    assert facts["credentials"] == "the option skip_signature="
    assert objects.listed() == ([], [])


def without(right):
    """Return a bucket for whose user one right is missing."""

    def refuse(self, *arguments):
        raise StorageError(f"cannot {right} memory://bucket: 403 Forbidden\nno right to do that")

    return type("Without", (MemoryObjects,), {right: refuse})()


@pytest.mark.parametrize(
    ("right", "names", "rest"),
    [
        ("listed", "listed", [one for one in ALL if one != "list"]),
        ("put", "put", ["list"]),
        ("read", "read", ["list", "write", "delete"]),
        ("remove", "remove", [one for one in ALL if one != "delete"]),
        ("put_over", "put_over", ["list", "write", "read", "delete"]),
    ],
)
def test_a_right_that_is_missing(right, names, rest, monkeypatch):
    facts, problems = examined(without(right), monkeypatch)
    assert facts.get("rights") == rest
    assert problems[0].words == f"cannot {names} memory://bucket: 403 Forbidden"
    assert problems[0].advice.startswith("no right to do that")


def test_a_clock_that_is_off(monkeypatch):
    slow = MemoryObjects(clock=lambda: time.time() - 1000)
    facts, problems = examined(slow, monkeypatch)
    assert facts["clock_ahead_s"] == pytest.approx(-1000, abs=30)
    assert [one.words for one in problems] == [
        "the clock of the bucket is -1000 s from that of this host"
    ]
