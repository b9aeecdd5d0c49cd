"""Each call to the system fails once, in a save, a recovery, a deletion: nothing saved is lost."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.open_files import open_files_below
from shoal.checkpoint.disk import committing, sweep
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.errors import CheckpointError, StorageError, StorageFullError
from shoal.testing.store_contract import Save, names_of, value_of

FIRST, SECOND = Save("00000000000a", value=7), Save("00000000000b", value=9)
CALLS = (
    "open", "mkdir", "fsync", "pwrite", "pread", "read", "ftruncate", "link", "replace", "unlink",
    "rmdir", "listdir", "fstat",
)  # fmt: skip
SHM = Path("/dev/shm")


@pytest.fixture
def path() -> Iterator[Path]:
    """Memory where there is some: there are many calls to fail, and each run syncs."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as found:
        yield Path(found)


def _failing_once(patch: pytest.MonkeyPatch, at: int, number: int) -> list[str]:
    """Let the call number `at` fail; return a list that says which one it was."""
    failed: list[str] = []
    count = [0]

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args, **named):
            count[0] += 1
            if count[0] == at:
                failed.append(name)
                raise OSError(number, os.strerror(number))
            return real(*args, **named)

        patch.setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    return failed


def _check(folder: LocalFolder, allowed: tuple[str, ...]) -> None:
    commit = sweep.recover_step(folder)
    assert (commit.attempt if commit else "") in allowed
    sweep.collect_garbage(folder, idle_s=0)
    assert folder.names() == (names_of(folder, commit) if commit else [])
    if commit:
        assert value_of(folder, commit) == (7 if commit.attempt == FIRST.attempt else 9)


Scenario = tuple[Callable[[LocalFolder], object], Callable[[LocalFolder], object], tuple, tuple]
SCENARIOS: dict[str, Scenario] = {
    "save": (lambda f: None, FIRST.save, ("", FIRST.attempt), (FIRST.attempt,)),
    "save again": (
        FIRST.save,
        lambda f: committing.commit(f, FIRST.attempt),
        (FIRST.attempt,),
        (FIRST.attempt,),
    ),
    "recover": (FIRST.prepare, sweep.recover_step, ("", FIRST.attempt), (FIRST.attempt,)),
    "collect": (
        lambda f: (FIRST.prepare(f), SECOND.save(f)), lambda f: sweep.collect_garbage(f, idle_s=0),
        (SECOND.attempt,), (SECOND.attempt,),
    ),
    "delete": (
        FIRST.save, lambda f: sweep.delete_committed(f, FIRST.attempt), ("", FIRST.attempt), ("",)
    ),
    "abandon": (
        FIRST.prepare, lambda f: committing.abandon(f, FIRST.attempt), ("", FIRST.attempt), ("",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_call_that_fails_is_a_typed_error_and_loses_nothing(path, name, number, monkeypatch):
    prepare, act, during, after = SCENARIOS[name]
    wanted = StorageFullError if number == errno.ENOSPC else StorageError
    seen = set()
    for at in range(1, 1000):
        folder = LocalFolder(path / str(at) / "step")
        prepare(folder)
        error = None
        with monkeypatch.context() as patch:
            failed = _failing_once(patch, at, number)
            try:
                act(folder)
            except CheckpointError as caught:
                error = caught
        if not failed:
            break
        seen |= set(failed)
        assert open_files_below(path) == []
        if error:
            assert isinstance(error, wanted), failed
            assert error.errno == number
            assert error.path.startswith(str(path))
        _check(folder, during if error else after)
    assert at > 5
    assert {"open", "listdir"} <= seen


def test_a_file_system_without_links_is_found_before_data_is_written(path, monkeypatch):
    def refuse(*_) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    folder = LocalFolder(path / "step")
    with pytest.raises(StorageError, match="not support hard links"):
        FIRST.begin(folder)
    assert folder.names() == []
