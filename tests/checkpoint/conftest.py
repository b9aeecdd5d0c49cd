"""Where the tests of checkpoints save: on a disk and in a bucket, with one process and two."""

from __future__ import annotations

import itertools

import pytest

from checkpoint.bucket import servers
from collectives.thread_jobs import run_all
from shoal import Bucket
from shoal.runtime.client.in_process import LocalJob

NAMES = (f"bucket-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server():
    with servers.moto() as address:
        yield address


@pytest.fixture(params=["disk", "moto"])
def place(request, tmp_path):
    """A new place for a checkpoint or a history."""
    if request.param == "disk":
        return tmp_path / "saved"
    address, name = request.getfixturevalue("server"), next(NAMES)
    servers.make_bucket(address, name)
    return Bucket(f"s3://{name}/saved", **servers.options(address))


@pytest.fixture(params=[1, 2])
def job(request):
    """Run a function on each process."""
    return lambda function: run_all(LocalJob(request.param), function)
