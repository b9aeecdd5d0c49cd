"""Check that the paths given by the processes lead to one directory, by its contents.

One directory may be mounted or linked under another path on each host.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from shoal.checkpoint.coordination.lead import meet_lead, run_on_lead
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.step_names import new_attempt, temporary_name
from shoal.errors import DivergenceError, StorageError
from shoal.hashing import seal
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.system.callsite import callsite


def in_one_folder(
    client: JobClient,
    operation: str,
    options: Mapping[str, object],
    act: Callable[[], Any],
    store: Store,
    *,
    group: Group,
    timeout_s: float,
    may_write: bool,
) -> tuple[Any, str]:
    """Like `run_on_lead`, if all paths lead to one directory; return also the lead's path.

    `options` must be equal on all processes.

    Where the paths differ, the lead creates an empty file for a moment, and all processes look for
    it; where nothing may be written, they compare the contents.

    Also raises DivergenceError on all: the paths lead to different directories.
    """

    def answer() -> tuple[Any, str]:
        return act(), store.path

    spec = tuple(f"{name}={value}" for name, value in options.items())
    (said, called), answers = meet_lead(
        client, operation, spec, act=answer, brought=json.dumps(store.path).encode(),
        group=group, timeout_s=timeout_s,
    )  # fmt: skip
    paths = {p: called if p == group.lead else json.loads(text) for p, text in answers.items()}
    if len({*paths.values()}) == 1:
        return said, called
    mark = run_on_lead(
        client, operation, ("which directory",), lambda: _leave_mark(store, may_write),
        group=group, timeout_s=timeout_s,
    )  # fmt: skip
    try:
        call = Call(operation, None, callsite(), ("the same directory",))
        seen = agree(client, call, _look(store, mark), timeout_s=timeout_s, group=group.named)
    finally:
        if mark is not None and client.process == group.lead:
            with contextlib.suppress(StorageError):  # empty, and not a checkpoint's name
                store.remove(mark)
    if len({*seen.values()}) > 1:
        raise different_folders(client, operation, paths)
    return said, called


def different_folders(
    client: JobClient, operation: str, paths: Mapping[int, str]
) -> DivergenceError:
    """Return the error that lists the path of each process."""
    me = ThisProcess(client.process, client.hosts)
    sides: dict[str, tuple[int, ...]] = {}
    for process in sorted(paths):
        sides[paths[process]] = (*sides.get(paths[process], ()), process)
    rows = "\n".join(f"  - {path}: {', '.join(map(me.name, who))}" for path, who in sides.items())
    return DivergenceError(
        f"{me}: {operation}: the paths of the processes lead to different directories\n{rows}\n"
        "pass paths that lead to one directory on all of them",
        sides=sides,
    )


def _leave_mark(store: Store, may_write: bool) -> str | None:
    """Create a marker file; return its name, None if nothing can be written."""
    mark = temporary_name(new_attempt())
    try:
        if may_write:
            store.leave(mark)
            return mark
    except (StorageError, FileNotFoundError):
        pass
    return None


def _look(store: Store, mark: str | None) -> bytes:
    """Return a fingerprint of the directory, equal on all processes that see the same one."""
    try:
        if mark is None:
            return seal(json.dumps(store.names()).encode())
        store.size(mark)
    except (StorageError, FileNotFoundError):
        return b"not there"
    return b"there"
