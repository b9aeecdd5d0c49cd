"""What is given as a path: a scheme is refused and `~` is a home, wherever a path can be given."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shoal
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store.opening import open_checkpoint
from shoal.cli import run as run_command
from shoal.cli import watch as watch_command
from shoal.cli.main import build
from shoal.cli.observer import find
from shoal.errors import UsageError, UsageTypeError
from shoal.launch.log_dir import open_log_dir
from shoal.paths import local_path
from shoal.runtime.client.in_process import LocalJob
from shoal.testing.bench_programs import program_of


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Work in an empty folder; the home is another one, beside it."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gs://bucket/run", "gs:// is not supported here"),
        ("s3://bucket", "s3:// is not supported here"),
        ("hf://org/model", "hf:// is not supported"),
        (Path("hf://org/model"), "hf:// is not supported"),  # it is 'hf:/org/model' by now
        ("S3+http://b", r"S3\+http:// is not supported"),
        ("file://tmp/x", "write 'file:///tmp/x' or '/tmp/x'"),
        ("~no-such-user/x", r"no home directory of a user 'no-such-user'.*'\./~no-such-user/x'"),
        ("", "not a path"),
        ("a\0b", "not a path"),
        ("~\0b", "not a path"),
        ("\ud800", "not a path"),
    ],
)
def test_local_path_refuses_addresses_and_invalid_paths(given, words):
    with pytest.raises(UsageError, match=f"(?s)^this.*{words}"):
        local_path(given, "this")


@pytest.mark.parametrize("given", [None, 3, ["a"]])
def test_local_path_refuses_values_that_are_not_paths(given):
    with pytest.raises(UsageTypeError, match=r"^.* must be a string or a pathlib\.Path"):
        local_path(given)


def test_local_paths(home):
    same = ["x", "/x/y", "a:b", "a/gs://b", "./gs:/b", "gs:", "10:30/x", "x~", "./~"]
    assert [local_path(path) for path in same] == same
    assert local_path(Path("a") / "b") == "a/b"
    assert local_path(b"a") == "a"
    for text in ("file:///tmp/a%20b", "file://localhost/tmp/a%20b", "file:/tmp/a%20b"):
        assert local_path(text) == "/tmp/a b"
    assert local_path(Path("file:///tmp/x")) == "/tmp/x"
    assert local_path("~") == str(home)
    assert local_path(Path("~/x")) == f"{home}/x"


def cli(*arguments):
    result = CliRunner().invoke(build(["ckpt", "watch"]), [os.fspath(part) for part in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def log_dir(path):
    (Path.cwd().parent / "train.py").write_text("")
    request = run_command.RunRequest(("../train.py",), log_dir=os.fspath(path))
    run_command.check(request)
    with open_log_dir(request.log_dir, ["shoal"]) as folder:
        return folder


W = {"w": np.ones(3)}


# What takes a path; nobody is asked for anything where the path is wrong.
TAKERS = {
    "save": lambda path: save.on(LocalJob(1).clients[0], path, W),
    "restore": lambda path: restore.on(LocalJob(1).clients[0], path),
    "plan_restore": shoal.plan_restore,
    "Checkpoints": shoal.Checkpoints,
    "LocalStore": LocalStore,
    "preemption.watch": lambda path: shoal.preemption.watch(signals=(), files=[path]),
    "run --log-dir": log_dir,
    "watch": lambda path: cli("watch", path),
    "watch --log": lambda path: cli("watch", "127.0.0.1:1", "--log", path),
    "script": lambda path: program_of(path, (), {}, folder="", initialize=False),
    **{
        f"ckpt {name}": lambda path, name=name: cli("ckpt", name, path)
        for name in ("ls", "show", "verify", "recover", "gc")
    },
    "ckpt diff": lambda path: cli("ckpt", "diff", path, ".."),
}


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("taker", TAKERS)
def test_an_address_is_refused_before_anything_is_done(taker, kind, capfd):
    with pytest.raises(UsageError) as caught:
        TAKERS[taker](kind("hf://bucket/run"))
    assert taker == "watch" or "hf:// is not supported" in str(caught.value)
    assert os.listdir() == []


def test_home_directory_in_a_path_is_expanded(home, capfd):
    shoal.save("~/model", W)
    assert shoal.restore(Path("~/model"))["w"].tolist() == [1, 1, 1]
    assert shoal.plan_restore("~/model").needed_bytes == 24
    assert open_checkpoint(LocalStore("~/model")).store.path == f"{home}/model"
    with shoal.Checkpoints("~/run", asynchronous=False) as checkpoints:
        checkpoints.save(3, W)
        assert checkpoints.path == f"{home}/run"
    assert "3" in cli("ckpt", "ls", "~/run").output
    assert cli("ckpt", "diff", "~/run", "~/model").exit_code == 0
    assert log_dir("~/logs") == f"{home}/logs"
    (home / "logs/job.json").write_text('{"coordinator": "h:1", "token": "t", "launcher": 1}')
    assert find("watch", "~/logs", None).address == "h:1"
    assert find("watch", "~/logs/job.json", None).address == "h:1"
    assert watch_command._check("urgency", None, "~/watched", True) == f"{home}/watched"
    (home / "train.py").touch()
    program = program_of("~/train.py", (), {}, folder="", initialize=False)
    assert program.script == f"{home}/train.py"
    assert os.listdir() == []
    assert sorted(os.listdir(home)) == ["logs", "model", "run", "train.py"]
