"""Pytest plugin for tests in several processes. Enable with `-p shoal.testing.pytest_plugin`.

Or put `pytest_plugins = ["shoal.testing.pytest_plugin"]` into the outermost conftest.py. Then ::

    @pytest.mark.processes(3, devices=2)
    def test_all_arrive():
        shoal.barrier("here")

runs the body in each of three processes, after `shoal.initialize()`; the test fails if any of them
does, with the traceback of the first that did. The marker takes the arguments of `Cluster`.
The test's own arguments (fixtures, parameters) must be plain values: numbers, text, paths, lists of
them.

The fixture `cluster` is for tests that observe from outside: a function that makes a `Cluster`,
which ends with the test. The marker `cuts` skips a test where processes cannot be cut off; under
CI as root it fails instead, so that a missing run does not go unnoticed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.errors import ShoalError, UsageError
from shoal.testing.cluster import Cluster
from shoal.testing.ended import raise_first
from shoal.testing.network import why_no_cuts

__all__ = ["cluster", "pytest_configure", "pytest_pyfunc_call", "pytest_runtest_setup"]

_SKIPS = "Skipped"

pytest.register_assert_rewrite("shoal.testing.store_contract")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for line in (
        "processes(n, devices=1, ...): run the body of the test in each of n processes",
        "cuts: the test disconnects processes, which needs Linux, root and pyroute2",
    ):
        config.addinivalue_line("markers", line)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need cuts where unsupported; fail where a skip would go unnoticed."""
    mark = item.get_closest_marker("processes")
    if item.get_closest_marker("cuts") is None and not (mark and mark.kwargs.get("network")):
        return
    why = why_no_cuts()
    if why:
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(f"CI must run this test, but {why}", pytrace=False)
        pytest.skip(why)


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Return a function that makes a `Cluster`; all of them end with the test."""
    made: list[Cluster] = []

    def make(processes: int, **options: Any) -> Cluster:
        made.append(Cluster(processes, **options))
        return made[-1]

    yield make
    for made_cluster in made:
        made_cluster.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `processes` in processes; None if it is not."""
    mark = pyfuncitem.get_closest_marker("processes")
    if mark is None:
        return None
    # A parameter with a default is not a fixture.
    given = pyfuncitem.funcargs
    names = [name for name in inspect.signature(pyfuncitem.obj).parameters if name in given]
    problem = ""
    try:
        with _cluster_of(mark) as cluster:
            cluster.start(pyfuncitem.obj, *(given[name] for name in names))
            ended = cluster.wait()
        skips = [process for process in ended if process.kind == _SKIPS]
        if skips:
            pytest.skip(skips[0].error.strip().splitlines()[-1])
        raise_first(ended)
    except ShoalError as error:
        problem = str(error)
    if problem:  # outside the handler, or pytest would show it twice, as the error's context
        pytest.fail(problem, pytrace=False)
    return True


def _cluster_of(mark: pytest.Mark) -> Cluster:
    try:
        return Cluster(*mark.args, **mark.kwargs)
    except TypeError as error:
        shown = ", ".join([*map(repr, mark.args), *(f"{k}={v!r}" for k, v in mark.kwargs.items())])
        raise UsageError(f"@pytest.mark.processes({shown}): {error}") from None
