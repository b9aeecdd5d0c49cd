"""Large files: room for all of it is taken first; what is not a file is left alone."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from checkpoint.open_files import open_files_below
from shoal.checkpoint.disk import direct
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.errors import StorageError, StorageFullError, UsageError


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no call takes room for a file")
def test_a_file_that_has_no_room_is_refused_before_anything_is_written(tmp_path):
    folder = LocalFolder(tmp_path)
    with pytest.raises(StorageError) as caught:
        folder.open_new("x", 1 << 55)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert caught.value.path == str(tmp_path / "x")
    assert folder.names() == []


def _refuse_to_allocate(monkeypatch, number: int) -> None:
    class Library:
        @staticmethod
        def fallocate(*_) -> int:
            return -1

    monkeypatch.setattr(direct.ctypes, "CDLL", lambda *_, **__: Library)
    monkeypatch.setattr(direct.ctypes, "get_errno", lambda: number)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_when_the_file_is_opened(tmp_path, monkeypatch, number):
    _refuse_to_allocate(monkeypatch, number)
    folder = LocalFolder(tmp_path)
    with pytest.raises(StorageFullError) as caught:
        folder.open_new("x", 1 << 30)
    assert caught.value.needed_bytes == 1 << 30
    assert caught.value.free_bytes
    assert folder.names() == []
    assert open_files_below(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_cannot_take_room_writes_all_the_same(tmp_path, monkeypatch, number):
    _refuse_to_allocate(monkeypatch, number)
    folder = LocalFolder(tmp_path)
    file = folder.open_new("x", 2 << 20)
    file.write(memoryview(b"abc"), 0)
    file.finish(3)
    assert folder.read("x") == b"abc"


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800"])
def test_invalid_paths_are_refused(path):
    with pytest.raises(UsageError, match="is not a path"):
        LocalFolder(path)


def test_room_that_was_taken_is_given_back(tmp_path):
    folder = LocalFolder(tmp_path)
    file = folder.open_new("x", 8 << 20)
    file.finish(10)
    assert folder.read("x") == bytes(10)
    assert (tmp_path / "x").stat().st_blocks * 512 <= 1 << 16


def test_age_of_a_file_is_known_in_a_read_only_directory(tmp_path, monkeypatch):
    folder = LocalFolder(tmp_path)
    folder.write_new("x", b"")

    def refuse(*_) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    assert 0 <= folder.age_s("x") < 60
