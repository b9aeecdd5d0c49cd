"""Entries of the compile cache: whole, of this user and of this jaxlib, or absent."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.system import compile_cache
from shoal.runtime.system.compile_cache import Entries, default_root, name_of, this_processor

NAME, OTHER = "jax-0123456789abcdef", "jax-fedcba9876543210"
COUNTED = 64 << 10  # what a small entry counts as
KEYS = st.text(max_size=300).filter(str.isprintable)


def files(entries: Entries) -> list[Path]:
    return sorted(Path(entries.path).iterdir())


def test_an_entry_is_read_as_it_was_written_by_every_process(tmp_path):
    first, second = Entries(str(tmp_path), NAME), Entries(str(tmp_path), NAME)
    assert first.read("jit_f-0") is None
    first.write("jit_f-0", b"code")
    assert second.read("jit_f-0") == b"code" == first.read("jit_f-0")
    assert second.read("jit_f-1") is None
    assert [oct(path.stat().st_mode & 0o777) for path in files(first)] == ["0o600"]
    assert oct(os.stat(first.path).st_mode & 0o777) == "0o700"


@given(written=st.dictionaries(KEYS, st.binary(max_size=50), max_size=20))
def test_no_key_returns_the_program_of_another(written, tmp_path_factory):
    entries = Entries(str(tmp_path_factory.mktemp("root")), NAME)
    for key, program in written.items():
        entries.write(key, program)
    assert {key: entries.read(key) for key in written} == written


def test_an_entry_is_written_once(tmp_path):
    entries = Entries(str(tmp_path), NAME)
    entries.write("key", b"first")
    entries.write("key", b"second")
    assert entries.read("key") == b"first"


def damage(path: Path, how: str, chance: random.Random) -> None:
    """Damage a file that is an entry."""
    content = bytearray(path.read_bytes())
    offset = chance.randrange(len(content))
    if how == "torn":
        path.write_bytes(content[:offset])
    elif how == "flipped":
        content[offset] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    elif how == "longer":
        path.write_bytes(content + b"\0")
    elif how == "link":
        path.rename(aside := path.with_name("aside"))
        path.symlink_to(aside)
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)


@pytest.mark.parametrize("how", ["torn", "flipped", "longer", "link", "pipe"])
def test_a_damaged_entry_is_absent_and_removed_and_written_anew(tmp_path, how):
    chance, entries = random.Random(how), Entries(str(tmp_path), NAME)
    for index in range(200):
        key, program = f"key {index}", chance.randbytes(chance.randrange(200))
        entries.write(key, program)
        (path,) = files(entries)
        damage(path, how, chance)
        assert entries.read(key) is None
        assert not os.path.lexists(path)
        entries.write(key, program)
        assert entries.read(key) == program
        for path in files(entries):
            path.unlink()


def test_a_directory_in_place_of_an_entry_is_absent_and_leaves_no_descriptor(tmp_path):
    entries = Entries(str(tmp_path), NAME)
    Path(entries._path_of("key")).mkdir()
    free = os.dup(0)
    os.close(free)
    assert entries.read("key") is None
    entries.write("key", b"code")
    again = os.dup(0)
    os.close(again)
    assert again == free


def test_an_entry_of_another_user_is_absent_and_removed(tmp_path):
    entries = Entries(str(tmp_path), NAME)
    for index in range(200):
        entries.write(f"key {index}", b"code")
    entries._user += 1  # as root, a test could give them away
    assert [entries.read(f"key {index}") for index in range(200)] == [None] * 200
    assert files(entries) == []


@pytest.mark.parametrize("at", [NAME, OTHER])
def test_an_entry_of_another_jaxlib_or_key_in_its_place_is_absent(tmp_path, at):
    there, here = Entries(str(tmp_path), at), Entries(str(tmp_path), NAME)
    there.write("theirs", b"code")
    (path,) = files(there)
    for index in range(200):
        target = Path(here._path_of(f"key {index}"))
        target.write_bytes(path.read_bytes())
        assert here.read(f"key {index}") is None
        assert not target.exists()
    assert there.read("theirs") == b"code"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o750])
def test_a_directory_that_is_open_to_others_is_refused(tmp_path, mode):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME).chmod(mode)
    with pytest.raises(PermissionError, match=f"{NAME} is not a directory of this user alone"):
        Entries(str(tmp_path), NAME)


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    Entries(str(tmp_path), NAME)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="is not a directory of this user alone"):
        Entries(str(tmp_path), NAME)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        Entries(str(tmp_path), NAME)


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Entries(str(tmp_path / "file"), NAME)


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    entries = Entries(str(tmp_path), NAME)

    def rename(_source: str, _target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="No space"):
        entries.write("key", b"code")
    assert files(entries) == []


def test_two_writers_and_readers_at_once_get_whole_programs_or_none(tmp_path):
    programs = {f"key {index}": random.Random(index).randbytes(3000) for index in range(40)}
    wrong: list[str] = []

    def work(seed: int) -> None:
        entries, chance = Entries(str(tmp_path), NAME, most_bytes=20 * COUNTED), random.Random(seed)
        for _ in range(300):
            key = chance.choice([*programs])
            if entries.read(key) not in (None, programs[key]):
                wrong.append(key)
            entries.write(key, programs[key])

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("num_bytes", [10, 100_000])
def test_over_the_bound_the_least_recently_used_go_first_of_every_name(tmp_path, num_bytes):
    most_bytes = 10 * max(COUNTED, num_bytes + 100)
    old = Entries(str(tmp_path), OTHER)
    old.write("of an earlier JAX", bytes(num_bytes))
    entries = Entries(str(tmp_path), NAME, most_bytes)
    (tmp_path / NAME / "notes.txt").write_text("not an entry")
    for index in range(8):
        entries.write(str(index), bytes(num_bytes))
    for path in [*files(old), *files(entries)]:
        os.utime(path, (time.time() - 1000,) * 2)
    assert entries.read("0") == bytes(num_bytes)  # used now
    for index in range(8, 12):
        entries.write(str(index), bytes(num_bytes))
    left = {str(index) for index in range(12) if entries.read(str(index)) is not None}
    assert {"0", "8", "9", "10", "11"} <= left
    assert (tmp_path / NAME / "notes.txt").exists()
    sizes = [path.stat().st_size for path in [*files(old), *files(entries)] if path.suffix == ""]
    assert sum(max(COUNTED, size) for size in sizes) <= most_bytes
    assert len(sizes) >= 8


def test_only_what_was_used_since_a_time_is_removed(tmp_path):
    entries, other = Entries(str(tmp_path), NAME), Entries(str(tmp_path), OTHER)
    for key in ("before", "read since", "written since"):
        entries.write(key, b"code")
    other.write("of another build", b"code")
    for key, used_s in {"before": 900, "read since": 900, "written since": 1000}.items():
        os.utime(entries._path_of(key), (used_s, used_s))
    began_s = time.time() - 1
    assert entries.read("read since") == b"code"
    entries.remove_since(began_s)
    assert entries.read("read since") is None
    assert entries.read("written since") == b"code"
    entries.remove_since(1000)
    assert entries.read("written since") is None
    assert other.read("of another build") == b"code"


def test_a_program_larger_than_the_bound_is_not_stored(tmp_path):
    entries = Entries(str(tmp_path), NAME, most_bytes=3 * COUNTED)
    entries.write("small", bytes(100))
    entries.write("large", bytes(3 * COUNTED))
    assert entries.read("large") is None
    assert entries.read("small") == bytes(100)


def test_what_a_killed_writer_left_is_no_entry_and_counts(tmp_path):
    entries = Entries(str(tmp_path), NAME, most_bytes=3 * COUNTED)
    entries.write("key", b"code")
    part = Path(f"{entries._path_of('other')}.123-abcd")
    part.write_bytes(bytes(1500))
    os.utime(part, (0, 0))
    entries.write("third", bytes(COUNTED + 1))
    assert not part.exists()
    assert entries.read("key") == b"code"
    assert entries.read("other") is None


@pytest.fixture
def libraries(tmp_path):
    """Return a directory with a library whose middle is not hashed."""
    folder = tmp_path / "jaxlib"
    folder.mkdir()
    (folder / "lib.so").write_bytes(bytes(3 << 20))
    (folder / "readme.txt").write_text("")
    return folder


def test_the_name_is_the_same_each_time(libraries):
    names = {name_of(["0.10.2"], [str(libraries)], "cpu") for _ in range(3)}
    assert len(names) == 1
    assert all(map(compile_cache._NAME.fullmatch, names))


@pytest.mark.parametrize("what", ["version", "size", "first", "last", "another", "processor"])
def test_cache_name_distinguishes_builds_and_processors(libraries, what):
    before = name_of(["0.10.2"], [str(libraries)], "cpu")
    versions, processor, path = ["0.10.2"], "cpu", libraries / "lib.so"
    content = bytearray(path.read_bytes())
    if what == "version":
        versions = ["0.10.3"]
    elif what == "size":
        path.write_bytes(content + b"\0")
    elif what == "first":
        path.write_bytes(b"1" + content[1:])
    elif what == "last":
        path.write_bytes(content[:-1] + b"1")
    elif what == "another":
        (libraries / "plugin.so").write_bytes(b"")
    else:
        processor = "another"
    assert name_of(versions, [str(libraries)], processor) != before


def test_the_processor_is_its_model_and_flags_and_not_its_pace(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC\ncpu MHz\t\t: 2596.1\nflags\t\t: fpu avx2\n\n"
        "processor\t: 1\nmodel name\t: other\n"
    )
    text = this_processor(str(tmp_path / "cpuinfo"))
    assert text.splitlines()[1:] == ["model name=AMD EPYC", "flags=fpu avx2"]
    assert this_processor(str(tmp_path / "none"))


def test_the_root_is_in_the_users_cache_directory(monkeypatch):
    assert default_root({"XDG_CACHE_HOME": "/x"}) == "/x/shoal/compile"
    monkeypatch.setenv("HOME", "/home/me")
    assert default_root({"XDG_CACHE_HOME": "relative"}) == "/home/me/.cache/shoal/compile"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(OSError, match="no home directory"):
        default_root({})
