"""A folder does what it says, on this machine's file systems and on the one that tests use."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from checkpoint.forgetful_file_system import Disk
from shoal.checkpoint.blocks.memory import pages
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.format.records import PAGE_BYTES
from shoal.errors import StorageError, StorageFullError

SHM = Path("/dev/shm")


@pytest.fixture(params=["disk", "memory", "of tests"])
def folder(request, tmp_path_factory):
    if request.param == "of tests":
        yield Disk().folder("/a/step")
        return
    if request.param == "memory" and not SHM.is_dir():
        pytest.skip("no /dev/shm here")
    parent = SHM if request.param == "memory" else tmp_path_factory.getbasetemp()

    with tempfile.TemporaryDirectory(dir=parent) as path:
        yield LocalFolder(Path(path) / "a" / "step")


def test_a_folder_that_is_not_there_is_empty(folder):
    assert folder.names() == []
    assert folder.remove_folder()
    folder.sync()
    folder.remove("x")
    assert folder.free_bytes() > 0
    with pytest.raises(FileNotFoundError):
        folder.read("x")
    with pytest.raises(FileNotFoundError):
        folder.write_new("x", b"")
    assert folder.names() == []


def test_making_a_folder_makes_its_parents_and_may_be_done_again(folder):
    folder.make()
    folder.make()
    folder.write_new("x", b"1")
    assert folder.names() == ["x"]
    inner = folder.folder("inner")
    inner.make()
    assert inner.path == folder.path + "/inner"
    assert inner.names() == []
    assert inner.remove_folder()
    assert folder.names() == ["x"]


def test_a_new_file_is_never_another_one(folder):
    folder.make()
    folder.write_new("x", b"one")
    with pytest.raises(FileExistsError):
        folder.write_new("x", b"two")
    with pytest.raises(FileExistsError):
        folder.open_new("x", 3)
    assert folder.read("x") == b"one"
    assert folder.size("x") == 3


def test_reading_at_an_offset(folder):
    folder.make()
    folder.write_new("x", bytes(range(10)))
    into = bytearray(4)
    assert folder.read_at("x", 3, memoryview(into)) == 4
    assert into == bytes(range(3, 7))
    assert folder.read_at("x", 8, memoryview(into)) == 2
    assert into[:2] == bytes([8, 9])
    assert folder.read_at("x", 100, memoryview(into)) == 0
    with pytest.raises(FileNotFoundError):
        folder.read_at("y", 0, memoryview(into))
    with pytest.raises(FileNotFoundError):
        folder.size("y")


@pytest.mark.parametrize("new", [b"", b"1", b"longer than before", b"before"])
def test_rewrite_replaces_existing_files_only(folder, new):
    folder.make()
    folder.write_new("x", b"before")
    folder.rewrite("x", new)
    assert folder.read("x") == new
    with pytest.raises(FileNotFoundError):
        folder.rewrite("y", new)
    assert folder.names() == ["x"]


def test_links_and_renames(folder):
    folder.make()
    folder.write_new("a", b"a")
    folder.write_new("b", b"b")
    folder.link("a", "c")
    folder.remove("a")
    assert folder.read("c") == b"a"
    with pytest.raises(FileExistsError):
        folder.link("b", "c")
    with pytest.raises(FileNotFoundError):
        folder.link("a", "d")
    folder.rename("b", "c")
    assert folder.read("c") == b"b"
    with pytest.raises(FileNotFoundError):
        folder.rename("b", "d")
    assert folder.names() == ["c"]


def test_only_an_empty_folder_is_removed(folder):
    folder.make()
    folder.write_new("x", b"")
    assert not folder.remove_folder()
    folder.remove("x")
    assert folder.remove_folder()
    with pytest.raises(FileNotFoundError):
        folder.touch("x")


def test_the_age_of_a_file(folder):
    folder.make()
    folder.write_new("x", b"")
    assert 0 <= folder.age_s("x") < 60
    if isinstance(folder, LocalFolder):
        os.utime(Path(folder.path) / "x", (0, 1000))
        assert folder.age_s("x") > 1e9
        folder.touch("x")
        assert folder.age_s("x") < 60
        os.utime(Path(folder.path) / "x", (1e11, 1e11))
        assert folder.age_s("x") < -1e9
    assert folder.names() == ["x"]
    with pytest.raises(FileNotFoundError):
        folder.age_s("y")


def test_a_large_file_in_any_order(folder):
    folder.make()
    memory = pages(3 * PAGE_BYTES)
    memory[:] = np.arange(len(memory)) % 251
    size = 2 * PAGE_BYTES + 5
    file = folder.open_new("x", size)
    for page in (2, 0, 1):
        part = memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        file.write(memoryview(part), page * PAGE_BYTES)
    file.finish(size)
    assert folder.read("x") == memory[:size].tobytes()


def test_files_have_the_rights_that_the_umask_says(tmp_path):
    folder = LocalFolder(tmp_path / "step")
    before = os.umask(0o027)
    try:
        folder.make()
        folder.write_new("x", b"")
        folder.open_new("y", 1 << 20).finish(0)
    finally:
        os.umask(before)
    rights = {name: stat.S_IMODE((tmp_path / "step" / name).stat().st_mode) for name in "xy"}
    assert rights == {"x": 0o640, "y": 0o640}


def test_a_write_that_needs_no_pages_goes_through_the_cache(tmp_path):
    """Memory, offset or length that O_DIRECT refuses at the first write."""
    folder = LocalFolder(tmp_path)
    file = folder.open_new("x", 1 << 20)
    file.write(memoryview(b"abc"), 1)
    assert not file.is_direct
    file.write(memoryview(b"def"), 4)
    file.finish(7)
    assert folder.read("x") == b"\0abcdef"


def test_several_threads_that_are_refused_at_once(tmp_path):
    folder = LocalFolder(tmp_path)
    file = folder.open_new("x", 1 << 20)
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait(60)
        file.write(memoryview(bytes([number]) * 5), 5 * number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    file.finish(20)
    assert folder.read("x") == b"".join(bytes([number]) * 5 for number in range(4))


def test_a_system_without_direct_writes(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    file = LocalFolder(tmp_path).open_new("x", 1 << 20)
    assert not file.is_direct
    file.discard()


def test_writes_that_take_less_at_a_time(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:3], at))
    folder = LocalFolder(tmp_path)
    folder.write_new("x", b"0123456789")
    file = folder.open_new("y", 10)
    file.write(memoryview(b"0123456789"), 0)
    file.finish(10)
    assert folder.read("x") == folder.read("y") == b"0123456789"


def _recorded(monkeypatch) -> list[str]:
    """Record what is done to the file system, with the last part of each path."""
    done: list[str] = []
    paths: dict[int, str] = {}

    def record(name: str) -> None:
        real = getattr(os, name)

        def call(first, *rest, **named):
            found = real(first, *rest, **named)
            what = paths.get(first, "?") if isinstance(first, int) else Path(first).name
            if name == "open":
                paths[found] = what
            else:
                done.append(f"{name} {what}")
            return found

        monkeypatch.setattr(os, name, call)

    for name in ("open", "mkdir", "fsync", "pwrite", "ftruncate", "close", "rmdir"):
        record(name)
    return done


def test_a_new_folder_is_durable_before_it_is_used(tmp_path, monkeypatch):
    done = _recorded(monkeypatch)
    LocalFolder(tmp_path / "a" / "b").make()
    done = [each for each in done if not each.startswith("close")]
    assert done == ["mkdir a", "mkdir b", "fsync a", f"fsync {tmp_path.name}"]


def test_a_folder_that_another_process_made_is_made_durable(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    done = _recorded(monkeypatch)
    LocalFolder(tmp_path / "a" / "b").make()
    assert [each for each in done if "fsync" in each] == ["fsync a", f"fsync {tmp_path.name}"]


def test_files_are_durable_when_they_are_closed(tmp_path, monkeypatch):
    folder = LocalFolder(tmp_path)
    done = _recorded(monkeypatch)
    folder.write_new("x", b"1")
    folder.rewrite("x", b"2")
    folder.rewrite("x", b"2")
    file = folder.open_new("y", 1)
    file.write(memoryview(b"3"), 0)
    file.finish(1)
    assert done == [
        "pwrite x", "fsync x", "close x",
        "pwrite x", "ftruncate x", "fsync x", "close x",
        "pwrite x", "ftruncate x", "fsync x", "close x",  # the fsync of equal bytes may have failed
        "pwrite y", "ftruncate y", "fsync y", "close y",
    ]  # fmt: skip


def test_a_folder_is_made_again_if_its_parent_is_removed_meanwhile(tmp_path, monkeypatch):
    real = os.mkdir
    seen: list[str] = []

    def mkdir(path, *rest) -> None:
        if Path(path).name == "b" and not seen:
            seen.append(path)
            os.rmdir(tmp_path / "a")
        real(path, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    LocalFolder(tmp_path / "a" / "b").make()
    assert (tmp_path / "a" / "b").is_dir()


def _refuse(monkeypatch, name: str, number: int) -> None:
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_how_full_and_the_part_of_a_file_goes(tmp_path, monkeypatch, number):
    folder = LocalFolder(tmp_path)
    _refuse(monkeypatch, "pwrite", number)
    with pytest.raises(StorageFullError) as caught:
        folder.write_new("x", b"12345")
    error = caught.value
    assert (error.path, error.errno) == (str(tmp_path / "x"), number)
    assert error.needed_bytes == 5
    assert error.free_bytes > 0
    assert "5 bytes are to be written" in str(error)
    assert folder.names() == []
    file = folder.open_new("y", 1 << 20)
    with pytest.raises(StorageFullError) as caught:
        file.write(memoryview(b"1"), 0)
    file.discard()
    assert caught.value.needed_bytes == 1 << 20


def test_an_fsync_that_failed_is_not_retried(tmp_path, monkeypatch):
    folder = LocalFolder(tmp_path)
    calls: list[int] = []

    def fsync(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = folder.open_new("x", 1)
    monkeypatch.setattr(os, "fsync", fsync)
    for act in (lambda: file.finish(0), lambda: folder.write_new("y", b""), folder.sync):
        calls.clear()
        with pytest.raises(StorageError, match="the device failed") as caught:
            act()
        assert len(calls) == 1
        assert caught.value.errno == errno.EIO
    assert folder.names() == ["x"]


def test_a_file_system_whose_folders_have_no_fsync(tmp_path, monkeypatch):
    _refuse(monkeypatch, "fsync", errno.EINVAL)
    LocalFolder(tmp_path).sync()
    LocalFolder(tmp_path / "a").make()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "no permission"),
        (errno.EPERM, "does not permit or support this"),
        (errno.ESTALE, "remount this file system"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_os_errors_name_path_and_reason(tmp_path, monkeypatch, number, words):
    folder = LocalFolder(tmp_path)
    folder.write_new("x", b"")
    operations = {
        "open": [
            lambda: folder.read("x"), lambda: folder.size("x"), lambda: folder.write_new("y", b""),
            lambda: folder.rewrite("x", b""), lambda: folder.open_new("y", 1), folder.sync,
        ],
        "link": [lambda: folder.link("x", "y")],
        "replace": [lambda: folder.rename("x", "y")],
        "unlink": [lambda: folder.remove("x")],
        "rmdir": [folder.remove_folder],
        "utime": [lambda: folder.touch("x")],
        "listdir": [folder.names],
        "mkdir": [LocalFolder(tmp_path / "new").make],
        "statvfs": [folder.free_bytes],
    }  # fmt: skip
    for name, calls in operations.items():
        with monkeypatch.context() as patch:
            _refuse(patch, name, number)
            for call in calls:
                hint = (
                    "not support hard links" if (name, number) == ("link", errno.EPERM) else words
                )
                with pytest.raises(StorageError, match=hint) as caught:
                    call()
                assert caught.value.errno == number
                assert caught.value.path.startswith(str(tmp_path))
                assert os.strerror(number) in str(caught.value)


def test_path_through_a_file_raises_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (LocalFolder(tmp_path / "file"), LocalFolder(tmp_path / "file" / "in")):
        for call in (folder.make, folder.names, lambda folder=folder: folder.read("x")):
            with pytest.raises(StorageError, match="a component of the path is a file"):
                call()


def test_pipes_directories_and_oversized_files_are_not_read(tmp_path):
    folder = LocalFolder(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        for call in (folder.read, folder.size):
            with pytest.raises(StorageError):
                call(name)
    (tmp_path / "huge").write_bytes(b"12345")
    with pytest.raises(StorageError, match="more than 4 bytes"):
        folder.read("huge", 4)
