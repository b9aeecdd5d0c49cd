"""`shoal watch` and `shoal stacks`: finding a job, asking its coordinator, and saying it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.cli import observer as observing
from shoal.cli.observer import Observer, ServerAddress, find
from shoal.cli.stacks import paragraphs_of, read_processes
from shoal.errors import DeadlineError, InitializeError, ProcessLostError, ShoalError, UsageError
from shoal.runtime.rules.point import Member
from shoal.runtime.startup.job_token import observed_tokens

TOKEN = "the secret of the tests"
PATIENCE_S = 60.0


class Server:
    """A coordinator of its own."""

    def __init__(self, env: dict[str, str]) -> None:
        options = ["--processes", "3", "--until-stdin-closes"]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "shoal.runtime.server.coordinator", *options],
            env=env | {"SHOAL_TOKEN": TOKEN},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = json.loads(self.popen.stdout.readline())["address"]
        self.place = ServerAddress(self.address, (TOKEN,))

    def close(self) -> None:
        """Let it end by itself; if it cannot, kill it."""
        self.popen.stdin.close()
        try:
            self.popen.wait(PATIENCE_S)
        finally:
            self.popen.kill()
            self.popen.wait()
            self.popen.stdout.close()


@pytest.fixture
def server(child_env: dict[str, str]) -> Iterator[Server]:
    server = Server(child_env)
    yield server
    server.close()


@pytest.fixture
def shoal(
    child_env: dict[str, str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shoal", *arguments],
            env=child_env | {"TMPDIR": str(tmp_path)} | env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    return run


# Where the job is.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which nothing runs, which is the one for temporary files, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observing.tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def write_record(folder: Path, port: int, launcher: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"coordinator": f"127.0.0.1:{port}", "token": f"secret {port}"}
    path = folder / "job.json"
    path.write_text(json.dumps(told | {"launcher": launcher or ended_pid()}))
    return path


def ended_pid() -> int:
    """Return a process that runs no more."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_an_address_goes_with_the_token_of_the_environment(folder, monkeypatch):
    found = find("watch", "10.0.0.1:8476", None)
    assert found[:2] == ("10.0.0.1:8476", observed_tokens("10.0.0.1:8476")), "those of this user"
    monkeypatch.setenv("SHOAL_TOKEN", "hush")
    assert find("watch", "[::1]:8476", None)[:2] == ("[::1]:8476", ("hush",))
    assert find("watch", "[::1]:8476", "other")[:2] == ("[::1]:8476", ("other",))
    monkeypatch.setenv("SHOAL_COORDINATOR", "10.0.0.2:1")
    assert find("watch", None, None)[:2] == ("10.0.0.2:1", ("hush",))


def test_a_folder_of_logs_or_its_file_says_where_and_what_the_token_is(folder, monkeypatch):
    monkeypatch.setenv("SHOAL_TOKEN", "hush")
    path = write_record(folder / "logs", 5)
    for where in ("logs", str(path)):
        assert find("watch", where, None)[:2] == ("127.0.0.1:5", ("secret 5",))
        assert find("watch", where, None).logs == str(folder / "logs")
    assert find("watch", "logs", "other")[:2] == ("127.0.0.1:5", ("other",))


@pytest.mark.parametrize("place", ["logs", ".", "tmp/shoal-run-x"])
def test_the_only_job_that_runs_here_is_found(folder, place):
    write_record(folder / place, 5, os.getpid())
    write_record(folder / "old", 6)
    assert find("watch", None, None)[:2] == ("127.0.0.1:5", ("secret 5",))


def test_no_job_and_several_jobs_raise_with_advice(folder):
    words = "no running job of shoal run is found here; pass host:port of a coordinator, or the log"
    with pytest.raises(UsageError, match=f"^watch: {words}"):
        find("watch", None, None)
    for port, name in ((5, "a"), (6, "b")):
        write_record(folder / name, port, os.getpid())
    with pytest.raises(UsageError) as caught:
        find("stacks", None, None)
    assert str(caught.value) == (
        "stacks: 2 jobs are running here; choose one:\n"
        f"  - shoal stacks {folder}/a\n  - shoal stacks {folder}/b"
    )


def test_job_record_of_another_user_is_ignored(folder, monkeypatch):
    write_record(folder / "logs", 5, os.getpid())
    monkeypatch.setattr(observing.os, "getuid", lambda: 10**6)
    with pytest.raises(UsageError, match="no running job of shoal run is found here"):
        find("watch", None, None)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nowhere", "'nowhere' is neither host:port of a coordinator nor a directory or file"),
        ("empty", "'empty': no job is running, or not its log directory: it has no job.json"),
        ("bad.json", "'bad.json' has no address of a job"),
        ("list.json", "'list.json' has no address of a job"),
        ("half.json", "'half.json' has no address of a job"),
        ("odd.json", "'odd.json' has no address of a job"),
    ],
)
def test_invalid_address_of_a_job_raises_with_the_reason(folder, where, words):
    (folder / "empty").mkdir()
    (folder / "bad.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "half.json").write_text('{"token": ""}')
    odd = {"coordinator": "a:1", "token": "", "launcher": None}
    (folder / "odd.json").write_text(json.dumps(odd))
    with pytest.raises(UsageError, match=words):
        find("watch", where, None)


# What the coordinator answers.


def test_all_processes_are_absent_before_any_has_joined(server, shoal):
    ended = shoal("watch", server.address, "--json", SHOAL_TOKEN=TOKEN)
    assert ended.returncode == 0
    facts = json.loads(ended.stdout)
    assert facts["address"] == server.address
    assert facts["num_processes"] == 3
    assert facts["counts"] == {"absent": 3}
    assert facts["median_step_s"] is None
    assert facts["services"] == []
    assert [p["state"] for p in facts["processes"]] == ["absent"] * 3
    ended = shoal("watch", server.address, "--token", TOKEN)
    assert ended.stdout.startswith(f"3 processes at {server.address}: 3 absent\n")
    ended = shoal("stacks", server.address, "1-2", "--token", TOKEN)
    assert ended.stdout == "".join(f"process {p} is absent: has not joined yet\n" for p in (1, 2))


def test_refused_observer_prints_the_reason_in_one_line(server, shoal):
    ended = shoal("watch", server.address, "--token", "wrong")
    assert ended.returncode == 74
    assert "answered: the token is wrong: SHOAL_TOKEN must be the one of this job" in ended.stderr
    ended = shoal("stacks", server.address, "3,7", SHOAL_TOKEN=TOKEN)
    assert ended.returncode == 2
    assert ended.stderr == "shoal: stacks: the job has processes 0 to 2, not 3, 7\n"
    ended = shoal("stacks", server.address, "--log")
    assert ended.returncode == 2
    for command in ("watch", "stacks"):
        ended = shoal(command, "127.0.0.1:1")
        assert ended.returncode == 74
        assert ended.stderr.startswith(f"shoal: {command}: no answer from 127.0.0.1:1 (")
        assert len(ended.stderr.splitlines()) == 1


def test_frozen_and_ended_coordinators_are_distinguished(server):
    looking = Observer("watch", server.place, answer_s=PATIENCE_S)
    assert [member.state for member in looking.roll().members] == ["absent"] * 3
    os.kill(server.popen.pid, signal.SIGSTOP)
    looking.query()
    assert looking.answer(time.monotonic() + 0.1) is None
    assert looking.waits_s() >= 0.1
    with pytest.raises(DeadlineError, match=f"{server.address} has not answered for 0.1 s: frozen"):
        Observer("watch", server.place, answer_s=0.1)
    os.kill(server.popen.pid, signal.SIGCONT)
    looking.query()  # no second question: the first is answered now
    assert looking.answer(time.monotonic() + PATIENCE_S) is not None
    assert looking.waits_s() == 0.0
    server.close()
    with pytest.raises(ProcessLostError, match="is gone"):
        looking.roll()
    looking.close()


@pytest.mark.parametrize("programs", [[], ["a sentence"], None])
def test_an_answer_of_another_version_is_an_error_in_words(monkeypatch, server, programs):
    answer = {"members": [], "services": [], "programs": programs}
    monkeypatch.setattr(Observer, "_body", lambda self, frame: answer)
    observer = Observer("watch", server.place)
    with pytest.raises(ShoalError, match="another version"):
        observer.roll()
    observer.close()


def test_something_else_that_listens_is_no_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            peer, _ = other.accept()
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InitializeError, match="is not a coordinator of this shoal"):
            Observer("watch", ServerAddress(f"127.0.0.1:{other.getsockname()[1]}", ("",)))
        thread.join()


def test_watch_every_follows_the_job_to_its_end_and_logs_each_answer(server, child_env, tmp_path):
    log = tmp_path / "watch.jsonl"
    log.write_text("what was there before\n")
    command = ["watch", server.address, "--every", "0.01", "--log", str(log)]
    watch = subprocess.Popen(
        [sys.executable, "-m", "shoal", *command],
        env=child_env | {"SHOAL_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    with watch:
        titles = (line for line in watch.stdout if line.startswith("3 processes at"))
        assert next(titles) == next(titles)
        server.popen.send_signal(signal.SIGSTOP)
        note = next(line for line in watch.stdout if line.startswith("the coordinator"))
        assert "has not answered for " in note
        server.popen.send_signal(signal.SIGCONT)
        server.close()
        last = watch.stdout.read().splitlines()[-1]
        assert watch.wait(PATIENCE_S) == 0
    told = f"the job is over: its coordinator at {server.address} has closed"
    assert last == f"{told}; last seen: 3 absent"
    first, *lines = log.read_text().splitlines()
    assert first == "what was there before"
    assert len(lines) >= 2
    times = [json.loads(line)["time"] for line in lines]
    assert times == sorted(times)


IN_A_DESTRUCTOR = """
import io, os, signal
from rich.console import Console
from shoal.cli.watch import _View

class Hit:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

view = _View(Console(file=io.StringIO(), force_terminal=True), False, "urgency")
with view.screen(is_shown=True) as show:
    Hit()
    show(None, "")
"""


def test_sigterm_ends_it_though_a_destructor_takes_the_exception(child_env):
    script = [sys.executable, "-c", IN_A_DESTRUCTOR]
    ended = subprocess.run(
        script, env=child_env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr


# The command line.


def test_an_exception_is_shown_once_and_not_again_by_those_that_it_ended():
    own, place = "ValueError: no batch (a.py:8 (main))", "barrier 'epoch' (a.py:15 (main))"
    led = f"PeerFailedError: barrier 'epoch' cannot complete: process 1 (h) raised {own}"
    members = [
        Member(0, "h", "failed", led, place=place, follows=True),
        Member(1, "h", "failed", own),
    ]
    first, second = "\n".join(paragraphs_of(members, {})).splitlines()
    assert first == f"process 0 (h) has failed because of another process, at {place}"
    assert second == f"process 1 (h) has failed: {own}"
    [alone] = paragraphs_of(members[:1], {})  # the other is not asked about
    assert alone == f"process 0 (h) has failed: {led}"


def test_indices_are_read():
    assert read_processes("3") == [3]
    assert read_processes("0-2, 12,1") == [0, 1, 2, 12]
    with pytest.raises(UsageError, match="'x' is not a list of ranks; pass ranks, as in 3 or"):
        read_processes("x")
    with pytest.raises(UsageError) as caught:
        read_processes("5-2,99999999999")
    assert len(caught.value.problems) == 2


def test_all_offenders_are_named_at_once(shoal):
    ended = shoal("watch", "a:1", "--sort", "tim", "--every", "0", "--no-table")
    assert ended.returncode == 2
    for words in ("3 problems", "did you mean 'time'?", "--every 0 must be", "pass --log FILE"):
        assert words in ended.stderr


def test_a_log_that_takes_no_lines_is_refused(server, shoal, tmp_path):
    for path in (str(tmp_path), *(["/dev/full"] if os.path.exists("/dev/full") else [])):
        ended = shoal("watch", server.address, "--token", TOKEN, "--json", "--log", path)
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"shoal: watch: --log {path!r}: ")


@pytest.mark.parametrize("command", ["watch", "stacks"])
def test_help_helps(shoal, command):
    ended = shoal(command, "--help")
    assert ended.returncode == 0
    for words in (f"shoal {command} 10.0.0.1:8476", "Exit code", "--json", "SHOAL_TOKEN"):
        assert words in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 82
