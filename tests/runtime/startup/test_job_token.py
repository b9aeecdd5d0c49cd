"""The token of a job: its sources, and what counts as none."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.runtime.startup import job_token
from shoal.runtime.startup.job_token import find_token, observed_tokens

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
FAR, NEAR = "10.0.0.1:8476", "127.0.0.1:8476"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Give this user an empty home directory, and an empty /tmp."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(job_token, "short_folder", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    return tmp_path / "home"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def give_away(path: Path) -> None:
    os.chown(path, os.geteuid() + 1, -1)


def why_lacking(address: str = FAR) -> str:
    """Return why there is no token, which is never an error."""
    token = find_token("job", address)
    assert (token.secret, token.source) == ("", "none")
    assert token.lack.startswith("SHOAL_TOKEN is not set, and no token file can be used (")
    return token.lack


def test_a_given_token_needs_no_file(home, tmp_path):
    assert find_token("job", FAR, given="mine") == ("mine", "SHOAL_TOKEN", "")
    assert files(tmp_path) == []


def test_a_job_on_several_hosts_has_that_of_the_home_directory(home, tmp_path):
    token = find_token("job", FAR)
    assert files(tmp_path) == ["home/.config/shoal/token"]
    path = home / ".config/shoal/token"
    assert token.source == str(path)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent)] == [0o600, 0o700]
    assert len(token.secret) == 64
    assert token.secret not in path.read_text()
    assert find_token("job", FAR) == token


@pytest.mark.parametrize("address", [NEAR, "localhost:8476", "[::1]:8476", "127.3.2.1:8476"])
def test_a_job_on_the_loopback_touches_no_home(address, tmp_path):
    token = find_token("job", address)
    assert files(tmp_path) == [f"tmp/shoal-{os.geteuid()}/token"]
    assert find_token("job", "10.0.0.1:8476", is_on_one_host=True) == token


def test_each_port_has_a_secret_of_its_own_by_whatever_name_its_host_goes():
    ports = {find_token("job", f"10.0.0.1:{port}").secret for port in range(1, 50)}
    assert len(ports) == 49
    assert find_token("job", "a.cluster:8476") == find_token("job", FAR)
    assert find_token("launchers", FAR).secret != find_token("job", FAR).secret
    assert find_token("job", NEAR).secret != find_token("job", FAR).secret


def test_observer_tries_both_token_files():
    here, there = find_token("job", NEAR).secret, find_token("job", FAR).secret
    assert observed_tokens(FAR) == (there, here)
    assert observed_tokens(NEAR) == (here,)


def test_observer_creates_no_token_file(tmp_path):
    assert observed_tokens(FAR) == ("",)
    assert files(tmp_path) == []


def test_the_files_directory_may_be_configured(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert find_token("job", FAR).source == str(tmp_path / "config/shoal/token")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # invalid, by the specification
    assert find_token("job", FAR).source == str(tmp_path / "home/.config/shoal/token")


def test_an_insecure_job_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_INSECURE", "1")
    assert find_token("job", FAR) == ("", "none (SHOAL_INSECURE=1)", "")
    assert find_token("job", FAR, given="mine").secret == "mine"
    assert files(tmp_path) == []


def test_many_at_once_have_one(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        secrets = set(pool.map(lambda _: find_token("job", FAR).secret, range(64)))
    assert len(secrets) == 1
    assert files(tmp_path) == ["home/.config/shoal/token"], "nothing else is left"


def test_token_linked_meanwhile_by_another_host_is_used(home, monkeypatch):
    """NFS may hide a new file for a while: then `link` finds it."""
    link = os.link

    def link_late(source: str, path: str) -> None:
        Path(path).touch(0o600)
        Path(path).write_text("f" * 64)
        link(source, path)

    monkeypatch.setattr(os, "link", link_late)
    first = find_token("job", FAR)
    assert (home / ".config/shoal/token").read_text() == "f" * 64
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert find_token("job", FAR) == first


# ---- What counts as none, and is never an error.


def test_no_home(home, monkeypatch):
    monkeypatch.setenv("HOME", f"{home}/nowhere")
    assert "nowhere: No such file or directory" in why_lacking()
    assert not Path(f"{home}/nowhere").exists()


def test_a_user_without_a_name(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an unknown user
    assert "no home directory" in why_lacking()


@needs_root
def test_a_home_of_another_user(home, tmp_path):
    """As `sudo` leaves HOME, and as NFS shows root's."""
    give_away(home)
    assert "home belongs to another user" in why_lacking()
    assert files(tmp_path) == []


def test_a_home_that_cannot_be_written(home):
    home.rmdir()
    home.touch()  # `root` may write to whatever directory there is
    assert "Not a directory" in why_lacking()


def test_a_file_system_without_links(monkeypatch, home, tmp_path):
    def refuse(source: str, path: str) -> None:
        raise PermissionError(1, "Operation not permitted", source)

    monkeypatch.setattr(os, "link", refuse)
    with ThreadPoolExecutor(16) as pool:
        secrets = set(pool.map(lambda _: find_token("job", FAR).secret, range(64)))
    assert len(secrets) == 1
    assert "" not in secrets
    assert files(tmp_path) == ["home/.config/shoal/token"]


def test_a_directory_of_the_users_that_is_a_link(home, tmp_path):
    (tmp_path / "dotfiles").mkdir(mode=0o755)
    (home / ".config").mkdir()
    (home / ".config/shoal").symlink_to(tmp_path / "dotfiles")
    assert len(find_token("job", FAR).secret) == 64


@pytest.mark.parametrize("address", [FAR, NEAR])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.chmod(0o640), "is open to other users: chmod 600"),
        pytest.param(give_away, "is not a file of this user", marks=needs_root),
        (lambda path: path.write_text("short\n"), "holds no secret of 32 characters"),
        (lambda path: path.write_bytes(b""), "holds no secret of 32 characters"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not a file of this user"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file of this user"),
        (lambda path: path.parent.chmod(0o777), "is not a directory "),
        pytest.param(lambda path: give_away(path.parent), "is not a directory ", marks=needs_root),
    ],
)
def test_token_file_known_to_others_is_refused(address, spoil, words):
    path = Path(find_token("job", address).source)
    spoil(path)
    assert words in why_lacking(address)


def test_a_squatter_in_tmp_gets_nothing(tmp_path):
    """Anyone may create another user's directory first, or a link in its place."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"tmp/shoal-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert "is not a directory of this user alone" in why_lacking(NEAR)
    assert files(tmp_path) == []


def test_the_refusal_has_lines_to_paste():
    token = find_token("job", FAR)._replace(secret="", lack="no home")
    lines = token.refusal(FAR).splitlines()
    assert lines[0] == f"the job at {FAR} has no token, so anyone could join it: no home"
    pasted = ["export SHOAL_TOKEN=$(cat token)", "mpirun -x SHOAL_TOKEN", "kubectl create secret"]
    assert all(any(text in line for line in lines) for text in pasted)
    assert "set SHOAL_INSECURE=1 on all processes" in lines[-1]
