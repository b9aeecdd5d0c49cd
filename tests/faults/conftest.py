"""Cells run several at a time, for most of their time is waiting.

They are forks (see `Cluster`), where a second of computing a process would be most of its time;
those under a launcher start by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.cells import Cell, Told, run

AT_ONCE = 3 * (os.cpu_count() or 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """In a run of the faults alone, let the tests of other folders, which run one by one, pass the
    time while cells wait: they come after the first cell, with which all cells begin."""
    yield
    if hasattr(config, "workerinput") or not all(one.get_closest_marker("faults") for one in items):
        return
    here = [one for one in items if Path(__file__).parent in one.path.parents]
    elsewhere = [one for one in items if one not in here]
    items[:] = [*here[:1], *elsewhere, *here[1:]]


@pytest.fixture(scope="session")
def told_of(
    request: pytest.FixtureRequest, outside: Mapping[str, str]
) -> Iterator[Callable[[Cell], Told]]:
    """Return a function that returns what came of a cell; all that were chosen begin at once."""
    chosen = [
        item.callspec.params["cell"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "cell" in item.fixturenames
    ]
    if hasattr(request.config, "workerinput"):  # pytest -n runs the tests several at a time
        yield lambda cell: run(cell, outside, "fork")
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cells = {cell: pool.submit(run, cell, outside, "fork") for cell in dict.fromkeys(chosen)}
        yield lambda cell: cells[cell].result()
        pool.shutdown(cancel_futures=True)
