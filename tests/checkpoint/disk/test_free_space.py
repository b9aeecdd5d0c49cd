"""Free space that the file system does not tell is unknown, and the disk not full."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

import shoal
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.saving import agreeing
from shoal.cli.doctor import _disk
from shoal.errors import StorageFullError
from shoal.runtime.doctor import host_state
from shoal.runtime.doctor.host_state import FolderMarks


def _refuse(monkeypatch, name: str, number: int) -> None:
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, refuse)


def _no_blocks(monkeypatch) -> None:
    """A file system that does not count its blocks, as many in user space and gateways."""
    real = os.statvfs

    def statvfs(path):
        there = list(real(path))
        there[2:5] = 0, 0, 0  # f_blocks, f_bfree, f_bavail
        return os.statvfs_result(there)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_a_file_system_that_counts_no_blocks_is_not_full(tmp_path, monkeypatch):
    _no_blocks(monkeypatch)
    folder = LocalFolder(tmp_path)
    assert folder.free_bytes() is None
    assert LocalFolder(tmp_path / "not" / "there").free_bytes() is None
    shoal.save(tmp_path / "one", {"w": np.ones(1 << 16)})
    assert shoal.restore(tmp_path / "one")["w"].sum() == 1 << 16
    with shoal.Checkpoints(tmp_path / "run") as ckpts:
        ckpts.save(1, {"w": np.ones(1 << 16)})
    _refuse(monkeypatch, "pwrite", errno.ENOSPC)
    with pytest.raises(StorageFullError) as caught:
        folder.write_new("x", b"12345")
    assert caught.value.free_bytes is None
    assert "5 bytes are to be written" in str(caught.value)
    assert "are free" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_that_cannot_say_how_full_it_is(tmp_path, monkeypatch, number):
    _refuse(monkeypatch, "statvfs", number)
    assert LocalFolder(tmp_path).free_bytes() is None
    shoal.save(tmp_path / "one", {"w": np.ones(2)})


def test_free_space_is_checked_where_it_is_known(tmp_path):
    def said(*free):
        return {n: {"bytes": 1000, "free": one} for n, one in enumerate(free)}

    folder = LocalFolder(tmp_path)
    agreeing.check_space(folder, said(None, None))
    agreeing.check_space(folder, said(None, 10_000))
    with pytest.raises(StorageFullError, match="1500 are free"):
        agreeing.check_space(folder, said(None, 1500))


def test_doctor_does_not_warn_of_a_disk_that_counts_no_blocks(tmp_path, monkeypatch):
    _no_blocks(monkeypatch)
    monkeypatch.chdir(tmp_path)
    facts, findings = host_state.check_disk()
    assert findings == ()
    assert {one["free_bytes"] for one in facts.values()} == {None}
    marks = FolderMarks([str(tmp_path)], "1")
    facts, findings = marks.write()
    marks.remove()
    assert (findings, facts[str(tmp_path)]["free_bytes"]) == ((), None)
    assert "unknown free space" in _disk([host_state.check_disk().facts])
