"""Checks of this host against real sockets and files."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from shoal.runtime.doctor import host_state, reachability
from shoal.runtime.doctor.examine import check_proxies
from shoal.runtime.doctor.host_state import FolderMarks, check_versions, file_system
from shoal.runtime.doctor.reachability import port_owner


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_unknown_host_name_has_no_address():
    host = reachability.resolve("no-such-host.invalid", 30)
    assert host.addresses == ()
    assert host.error


def test_invalid_name_is_refused():
    assert reachability.resolve("a" * 70 + ".b", 30).addresses == ()


def test_a_listener_is_reached_and_its_absence_is_refused(listener):
    assert reachability.connect_to(f"127.0.0.1:{listener}", 5).outcome == "open"
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.1", 0))
        tried = reachability.connect_to(f"127.0.0.1:{bound.getsockname()[1]}", 5)
    assert (tried.outcome, tried.words) == ("refused", "Connection refused")


def test_what_cannot_be_bound_and_whose_it_is(listener):
    assert reachability.bind_error("127.0.0.1", listener) == errno.EADDRINUSE
    assert reachability.bind_error("192.0.2.1", 0) == errno.EADDRNOTAVAIL
    assert reachability.bind_error("127.0.0.1", 0) == 0
    assert port_owner(listener).startswith(f"pid {os.getpid()} (")


def test_a_port_without_an_owner():
    with socket.socket() as bound:
        bound.bind(("", 0))  # of all addresses: another test may listen at the port of one
        assert port_owner(bound.getsockname()[1]) == ""


PROXY = "http://user:secret@proxy:3128"


@pytest.mark.parametrize(
    ("env", "is_in_the_way"),
    [
        ({}, False),
        ({"http_proxy": PROXY}, True),
        ({"https_proxy": PROXY}, True),
        ({"HTTP_PROXY": PROXY}, False),  # which gRPC does not read
        ({"http_proxy": PROXY, "no_proxy": "n1.cluster"}, False),
        ({"http_proxy": PROXY, "NO_PROXY": ".cluster"}, False),
        ({"http_proxy": PROXY, "no_proxy": "10.0.0.0/8"}, False),
        ({"http_proxy": PROXY, "no_proxy": "10.1.0.0/16, other"}, True),
        ({"http_proxy": PROXY, "no_proxy": "*"}, True),
        # the first that is set counts
        ({"http_proxy": PROXY, "no_grpc_proxy": "other", "no_proxy": "n1.cluster"}, True),
    ],
)
def test_proxies(env, is_in_the_way):
    checked = check_proxies("n1.cluster", ["10.0.0.1"], env)
    assert [finding.check for finding in checked.findings] == ["proxy"] * is_in_the_way
    assert "secret" not in str(checked)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://user:secret@proxy:3128", "http://…@proxy:3128"),
        ("user:secret@proxy:3128", "…@proxy:3128"),
        ("http://user:sec/ret@proxy:3128", "http://…@proxy:3128"),
        ("http://user:a@secret@proxy:3128", "http://…@proxy:3128"),
        ("user:/secret//@proxy", "…@proxy"),
        ("http://user:sec\nret@proxy", "http://…@proxy"),
        ("http://proxy:3128/", "http://proxy:3128/"),
        ("proxy:3128", "proxy:3128"),
    ],
)
def test_a_password_of_a_proxy_is_never_shown(value, shown):
    checked = check_proxies("n1.cluster", [], {"http_proxy": value})
    assert checked.facts["http_proxy"] == shown
    assert f"http_proxy={shown} is in the way" in checked.findings[0].words


def test_memory_of_a_container(tmp_path):
    for path, text in {
        "proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 1000000 kB\n",
        "sys/fs/cgroup/memory.max": f"{700 << 20}\n",
        "sys/fs/cgroup/memory.current": f"{300 << 20}\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    checked = host_state.check_memory(str(tmp_path))
    assert checked.facts == {"available_bytes": 400 << 20, "total_bytes": 700 << 20}
    assert [finding.words for finding in checked.findings] == ["only 400 MiB of memory are free"]
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_state.check_memory(str(tmp_path)).facts["total_bytes"] == 1 << 30


def test_memory_where_nothing_is_known(tmp_path):
    assert host_state.check_memory(str(tmp_path)) == ({}, ())


def test_versions_are_those_of_this_python():
    import jax

    facts = check_versions({"XLA_FLAGS": "--a", "HOME": "/"}).facts
    assert facts["jax"] == jax.__version__
    assert (facts["XLA_FLAGS"], "HOME" in facts) == ("--a", False)


def test_marks_are_seen_by_name_and_removed(tmp_path):
    folder = str(tmp_path)
    first, second = (FolderMarks([folder, folder], name) for name in ("one", "two"))
    assert first.write().findings == ()
    second.write()
    assert first.see({0: "one", 1: "two"}) == {folder: []}
    second.remove()
    assert first.see({0: "one", 1: "two"}) == {folder: [1]}
    first.remove()
    assert os.listdir(folder) == []


def test_a_folder_that_is_not_there(tmp_path):
    missing = str(tmp_path / "no")
    marks = FolderMarks([missing], "one")
    assert [f.check for f in marks.write().findings] == ["folders"]
    marks.remove()


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw 0 0\nb /home nfs4 rw 0 0\nc /home/me lustre rw 0 0\n")
    kinds = [file_system(f, str(mounts)) for f in ("/home/me/x", "/home/meg", "/etc", "/home")]
    assert kinds == ["lustre", "nfs4", "ext4", "nfs4"]


def test_lacking_directories_are_notes(monkeypatch, tmp_path):
    """A container may have none that can be written; and a directory may have been removed."""
    monkeypatch.setattr(host_state.tempfile, "tempdir", None)
    monkeypatch.setattr(host_state.tempfile, "_candidate_tempdir_list", list)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    facts, findings = host_state.check_disk()
    assert facts == {}
    assert [(finding.level, finding.words.partition(":")[0]) for finding in findings] == [
        ("note", "there is no directory for temporary files"),
        ("note", "there is no directory where this process runs"),
    ]
