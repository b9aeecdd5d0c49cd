"""Requests that fail on their way to a server: nothing is lost, and the next run goes on."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from datetime import timedelta

import numpy as np
import pytest

import shoal
from checkpoint.bucket import servers
from checkpoint.bucket.fault_proxy import (
    FLIPPED,
    KINDS,
    OF_ANSWERS,
    REQUESTS,
    WRONG,
    Away,
    Fault,
    proxy,
)
from checkpoint.bucket.test_faults import saves_the_next
from shoal import Bucket
from shoal.checkpoint.at import store_at
from shoal.checkpoint.bucket import transport
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store import saved_steps
from shoal.errors import ShoalError
from shoal.runtime.client.in_process import LocalJob

# The suite harms two requests of a run, other ones by each kind of fault, and half of the kinds on
# each Python. `make test-buckets` harms every request by each, in several shares.
PART, SHARES = int(sys.version_info >= (3, 12)), 9
EACH = [(kind, KINDS.index(kind) % 36, 36) for kind in KINDS[PART::2]]
EVERY = [(kind, first, SHARES) for kind in KINDS for first in range(SHARES)]
SOMETIMES = (*OF_ANSWERS, "conflict", "error in body")  # not at every request
DEADLINE_S = 30
QUICK = {
    "client_options": {"read_timeout": timedelta(seconds=0.3)},
    "retry_config": {
        "max_retries": 2,
        "retry_timeout": timedelta(seconds=5),
        "backoff": {"init_backoff": timedelta(milliseconds=5),
                    "max_backoff": timedelta(milliseconds=20), "base": 2},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with servers.moto() as address, proxy(address) as server:
        server.address = address
        yield server


def tree_of(step):
    """Return a tree whose file is uploaded in two parts."""
    return {"w": np.full((100, 200), step, np.float32), "step": step}


def one():
    return LocalJob(1).clients[0]


def open_run(where, address, keep=1, *, is_quick=False, **options):
    """Open a run. `is_quick`: with faults; else a slow machine is none."""
    more = QUICK if is_quick else {}
    place = Bucket(where, **servers.options(address), **more)
    return shoal.Checkpoints(place, keep=keep, client=one(), **options)


def run(where, address, saved):
    """Save two steps, of which one is kept, and restore."""
    with open_run(where, address, is_quick=True, asynchronous=False) as ckpts:
        _, first = ckpts.resume(None, tree_of(0))
        for step in range(first, first + 2):
            ckpts.save(step, tree_of(step))
            saved.append(step)
        assert np.array_equal(ckpts.restore(step)["w"], tree_of(step)["w"])


def check(where, address, saved):
    """The next run goes on."""
    with open_run(where, address, lease_s=0.001) as ckpts:
        first = saves_the_next(ckpts, saved, tree_of)
    with open_run(where, address) as ckpts:
        assert ckpts.all_steps() == (first,)


@pytest.fixture(scope="module", autouse=True)
def small_and_quick():
    """Upload in small parts, and repeat writes at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.checkpoint.bucket.transport.PART_BYTES", 64 << 10)
        patch.setattr("shoal.checkpoint.bucket.register._PAUSE_S", 1e-3)
        yield


@pytest.fixture(scope="module")
def bucket(server):
    servers.make_bucket(server.address, "faults")
    return "s3://faults"


@pytest.fixture(scope="module")
def total(server, bucket):
    """The number of requests of a run without faults."""
    server.fault = Fault()
    run(f"{bucket}/whole", server.url, [])
    return len(server.fault.requests)


@pytest.mark.parametrize(
    ("kind", "first", "every"),
    [*EACH, *(pytest.param(*one, marks=pytest.mark.buckets) for one in EVERY)],
)
def test_fault_at_any_request_leaves_a_consistent_bucket(server, bucket, total, kind, first, every):
    assert total > 30
    fired = 0
    for at in range(1 + first, total + 1, every):
        where = f"{bucket}/{secrets.token_hex(6)}"
        server.fault, saved, began = Fault(kind, at), [], time.monotonic()
        with contextlib.suppress(ShoalError):
            run(where, server.url, saved)
        assert time.monotonic() - began < DEADLINE_S
        fired += server.fault.fired
        server.fault.is_over.set()
        check(where, server.address, saved)
    print(f"{kind}: {fired} faults fired in {total} requests")
    assert fired or kind in SOMETIMES


def test_a_server_that_is_busy_for_longer_than_ten_tries(server, bucket, monkeypatch):
    quick = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2)}
    monkeypatch.setitem(transport._RETRIES, "backoff", {**quick, "base": 2})
    server.fault = Fault("busy", 1, times=40)
    place = Bucket(f"{bucket}/busy", **servers.options(server.url))
    save.on(one(), place, tree_of(1))
    assert server.fault.fired == 40
    assert restore.on(one(), place)["step"] == 1


# The suite gives one wrong answer of each kind, `make test-buckets` gives each to every request.
ANSWERS = [*WRONG, FLIPPED]


@pytest.mark.parametrize(
    ("kind", "first", "every"),
    [
        *((kind, 5 * number + PART, 1000) for number, kind in enumerate(ANSWERS)),
        *(
            pytest.param(kind, first, SHARES, marks=pytest.mark.buckets)
            for kind in ANSWERS
            for first in range(SHARES)
        ),
    ],
)
def test_after_a_wrong_answer_no_step_is_lost_replaced_or_passed_over(
    server, bucket, total, kind, first, every
):
    fired = 0
    for at in range(1 + first, total + 1, every):
        where, saved = f"{bucket}/{secrets.token_hex(6)}", [0, 1]
        with open_run(where, server.address, keep=2, asynchronous=False) as ckpts:
            for step in saved:
                ckpts.save(step, tree_of(step))
        before = attempts(where, server.address)
        server.fault = Fault(kind, at)
        with (
            contextlib.suppress(ShoalError),
            open_run(where, server.url, keep=2, is_quick=True) as ckpts,
        ):
            state, step = ckpts.resume(None, tree_of(-1), skip_corrupt=True)
            assert (step, state["step"]) == (2, 1)
            ckpts.save(step, tree_of(step))
            ckpts.wait()
            saved.append(step)
            assert ckpts.restore(skip_corrupt=True)["step"] == 2
        fired += server.fault.fired
        after = attempts(where, server.address)
        assert after[1] == before[1]
        assert {1, *saved[2:]} <= {*after} <= {0, 1, 2}
        check(where, server.address, saved)
    print(f"{kind}: {fired} wrong answers in {total} requests")
    assert fired or kind == FLIPPED  # an answer may have no body


@pytest.fixture(scope="module", params=["moto", "SeaweedFS"])
def any_server(request):
    with servers.SERVERS[request.param]() as address, proxy(address) as server:
        server.address = address
        servers.make_bucket(address, "away")
        yield server


@pytest.mark.buckets
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["busy", "cut before"])
@pytest.mark.parametrize(
    ("request_", "seconds"),
    [*((one, 3) for one in REQUESTS), ("put-if-absent", 15), ("range", 60)],
)
def test_a_server_that_is_away_for_a_while_ends_nothing(any_server, request_, seconds, way):
    any_server.fault = Away(way, request_, seconds)
    where = f"s3://away/{secrets.token_hex(6)}"
    place = Bucket(where, **servers.options(any_server.url))
    with shoal.Checkpoints(place, keep=1, asynchronous=False, client=one()) as ckpts:
        for step in range(2):
            ckpts.save(step, tree_of(step))
        assert np.array_equal(ckpts.restore()["w"], tree_of(1)["w"])
        assert ckpts.all_steps() == (1,)
    assert any_server.fault.fired, "no such request was sent"


def attempts(where, address):
    """Return the attempts of the steps that are saved."""
    place = Bucket(where, **servers.options(address))
    return {one.step: one.commit.attempt for one in saved_steps.commits(store_at(place, ""))}


def test_restore_sends_as_many_requests_as_planned(server, bucket):
    server.fault = Fault()
    place = Bucket(f"{bucket}/planned", **servers.options(server.url))
    tree = {f"w{n}": np.full((1 << 10, 1 << 10), n, np.float32) for n in range(5)}  # 20 MiB
    save.on(one(), place, tree)
    for only in (None, "w3"):
        plan = shoal.plan_restore(place, only=only)
        server.fault = Fault()
        restore.on(one(), place, only=only)
        of_data = [request for request in server.fault.requests if "/data-" in request]
        assert len(of_data) == sum(one.num_requests for one in plan.processes) > 0
        assert len(server.fault.requests) == len(of_data) + 3  # COMMIT, manifest, index
        assert {request.split()[0] for request in server.fault.requests} == {"GET"}
