"""What every store promises, on each store."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
from types import SimpleNamespace

import pytest

from checkpoint.bucket import gcs_stub, servers
from checkpoint.forgetful_file_system import Disk
from shoal import Bucket
from shoal.checkpoint.at import store_at
from shoal.checkpoint.bucket.object_store import ObjectStore
from shoal.checkpoint.bucket.objects import MemoryObjects
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.saving.save import save
from shoal.errors import StepAlreadyCommittedError
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.store_contract import StoreContract

LONGER = pytest.mark.buckets  # for make test-buckets, which installs what is missing
IS_NEWEST = sys.version_info >= (3, 12)  # each Python tries one of the servers
STORES = [
    "disk", "disk in memory", "bucket in memory",
    pytest.param("moto", marks=[LONGER] if IS_NEWEST else []),
    pytest.param("GCS stub", marks=[] if IS_NEWEST else [LONGER]),
    pytest.param("SeaweedFS", marks=LONGER),
    pytest.param("Azurite", marks=LONGER),
]  # fmt: skip


class Clock:
    """The clock of a store in memory."""

    def __init__(self):
        self.now, self.disk = 1000.0, SimpleNamespace(now=0.0)

    def advance(self, seconds):
        self.now += seconds
        self.disk.now += seconds


@pytest.fixture(scope="module")
def servers_here():
    """Start a server when it is first needed; end all of them at the end."""
    with contextlib.ExitStack() as running:
        known = {}

        def start(name):
            if name not in known:
                known[name] = running.enter_context(servers.SERVERS[name]())
            return known[name]

        yield start


def bucket_on(name, address):
    """Return a place in a new bucket of a server."""
    new = f"bucket-{secrets.token_hex(6)}"
    if name == "GCS stub":
        return Bucket(f"gs://{new}/some/run", **gcs_stub.options(address))
    if name == "Azurite":
        servers.make_container(address, new)
        return Bucket(f"az://{new}/some/run", **servers.azure_options(address))
    servers.make_bucket(address, new)
    return Bucket(f"s3://{new}/some/run", **servers.options(address))


@pytest.fixture(params=STORES)
def kind(request):
    return request.param


@pytest.fixture
def new_place(kind, tmp_path, servers_here):
    """Return a function that returns a new place, where `Checkpoints` takes it."""
    return lambda: bucket_on(kind, servers_here("moto" if kind == "moto" else kind))


class TestStores(StoreContract):
    """The contract."""

    @pytest.fixture
    def clock(self, kind):
        return Clock() if "in memory" in kind else None

    @pytest.fixture
    def root(self, kind, clock, tmp_path, new_place):
        if kind == "disk":
            return LocalStore(tmp_path / "run")
        if kind == "disk in memory":
            clock.disk = disk = Disk()
            return LocalStore(
                disk.folder(str(tmp_path / "run"))
            )  # a save checks that it may write there
        if kind == "bucket in memory":
            return ObjectStore(MemoryObjects(clock=lambda: clock.now))
        return store_at(new_place(), "")


@pytest.mark.parametrize("kind", ["moto", pytest.param("SeaweedFS", marks=LONGER)], indirect=True)
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=LONGER) for n in range(1, 20))])
def test_twenty_jobs_save_one_step_at_once(kind, turn, new_place):
    """Each with a job client and a store of its own: one commits, the others hear which."""
    place, start, outcomes = new_place(), threading.Barrier(20), {}

    def run(number):
        own = store_at(place, "").step(turn)
        start.wait(60)
        try:
            save.on(LocalJob(1).clients[0], own, {"n": number}, step=turn)
            outcomes[number] = None
        except StepAlreadyCommittedError as error:
            outcomes[number] = error.attempt

    threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    commit = store_at(place, "").step(turn).committed()
    assert sorted(outcomes) == list(range(20))
    assert [*outcomes.values()].count(None) == 1
    assert {*outcomes.values()} == {None, commit.attempt}
