"""The error file of torchrun, and when a process stays until torchrun has seen another's end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time

import pytest

from shoal.errors import PeerFailedError, ProcessLostError
from shoal.runtime.exit import torch_agent
from shoal.runtime.exit.causes import UNHEARD, peers_behind
from shoal.runtime.exit.torch_agent import TorchAgent
from shoal.runtime.rules.point import Departure, Member

# Of the second node of two, with four processes each.
NODE = {"TORCHELASTIC_RUN_ID": "none", "RANK": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
# What torch 2.13 writes, in a process of its own, for the exception that `raised` makes.
TORCH = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("no data")
main()
"""
RECORDED = (
    '{"message": {"message": "ValueError: no data", "extraInfo": {"py_callstack": "Traceback (most '
    'recent call last):\\n  File \\"train.py\\", line 1, in main\\nValueError: no data\\n", '
    '"timestamp": "1700000000"}}}'
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "error.json"


@pytest.fixture
def agent(file):
    return TorchAgent({**NODE, "TORCHELASTIC_ERROR_FILE": str(file)})


def raised(message="no data"):
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def shape_of(text):
    """Return a record with its texts reduced to what does not depend on where it was raised."""
    message = json.loads(text)["message"]
    extra = message["extraInfo"]
    stack = extra["py_callstack"].splitlines()
    assert extra["timestamp"].isdigit()
    return message["message"], list(message), list(extra), stack[0], stack[-1]


def test_the_error_file_is_written_as_torch_writes_it(agent, file):
    agent.record(raised(), 1700000000.9)
    assert shape_of(file.read_text()) == shape_of(RECORDED)
    assert json.loads(file.read_text())["message"]["extraInfo"]["timestamp"] == "1700000000"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_torch_still_writes_it_as_recorded(file, child_env):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (pip install torch)")
    paths = ":".join(path for path in sys.path if "site-packages" in path)
    env = {**child_env, "PYTHONPATH": paths, "TORCHELASTIC_ERROR_FILE": str(file)}
    subprocess.run([sys.executable, "-c", TORCH], env=env, timeout=60, stderr=subprocess.DEVNULL)
    assert shape_of(file.read_text()) == shape_of(RECORDED)


def test_an_end_without_an_exception_has_its_words(agent, file):
    agent.record_words("exited: no such file (train.py:3 (main))\nlook", 5.0)
    assert json.loads(file.read_text())["message"] == {
        "message": "exited: no such file (train.py:3 (main))",
        "extraInfo": {
            "py_callstack": "exited: no such file (train.py:3 (main))\nlook",
            "timestamp": "5",
        },
    }


def test_a_file_that_exists_is_not_replaced(agent, file):
    file.write_text("the program's own")
    agent.record(raised(), 1.0)
    agent.record_words("exited", 1.0)
    agent._postpone(2.0)
    assert file.read_text() == "the program's own"


def test_only_the_time_of_a_record_is_changed(agent, file, monkeypatch):
    file.write_text(RECORDED)
    agent.outlast(6, {0: Departure("on the other node")})
    assert file.read_text() == RECORDED
    monkeypatch.setattr(torch_agent, "_AGENT_S", 0.0)
    monkeypatch.setattr(TorchAgent, "note_signals", lambda *_: None)
    before = time.time()
    at_s = agent.outlast(6, {4: Departure("ValueError: no data")})
    assert file.read_text() == RECORDED.replace("1700000000", str(int(at_s)))
    assert int(at_s) > before


def test_an_explanation_follows_the_traceback(agent, file):
    agent.record(raised(), 5.0, "shoal: process 1 of 3 (h) is lost: silent")
    lines = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"].splitlines()
    assert lines[-2:] == ["ValueError: no data", "shoal: process 1 of 3 (h) is lost: silent"]


def test_interrupts_are_not_recorded_as_in_torch(agent, file):
    agent.record(KeyboardInterrupt(), 1.0)
    assert not file.exists()


def test_without_the_variable_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TorchAgent(NODE).record(raised(), 1.0)
    assert [*tmp_path.iterdir()] == []
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_written_is_reported(file, capsys):
    path = file.parent / "missing" / "error.json"
    TorchAgent({"TORCHELASTIC_ERROR_FILE": str(path)}).record(raised(), 1.0)
    expected = f"shoal: TORCHELASTIC_ERROR_FILE={path} cannot be written: No such file or directory"
    assert capsys.readouterr().err.strip() == expected


@pytest.mark.parametrize(
    ("env", "process", "peers", "stays"),
    [
        (NODE, 6, {4: Departure("ValueError: no data")}, True),
        (NODE, None, {7: Departure("its connection closed")}, True),
        (NODE, 6, {5: Departure("at f (t.py:3)", "left", "exited")}, True),
        (NODE, 6, {3: Departure("on the other node"), 4: Departure("because of it")}, False),
        (NODE, 6, {5: Departure("went", "left")}, False),  # with code 0: torchrun sees no failure
        (NODE, 6, {}, False),  # a service
        (NODE, 2, {4: Departure("ValueError: no data")}, False),  # the program's own numbers
        ({**NODE, "SHOAL_PROCESS_ID": "6"}, 6, {4: Departure("of shoal run")}, False),
        ({**NODE, "LOCAL_RANK": "two"}, 6, {4: Departure("of another launcher")}, False),
        ({}, 6, {4: Departure("without torchrun")}, False),
    ],
)
def test_process_outlasts_peers_of_its_own_node_only(env, process, peers, stays, monkeypatch):
    monkeypatch.setattr(torch_agent, "_AGENT_S", 0.05)
    monkeypatch.setattr(TorchAgent, "note_signals", lambda *_: None)
    began = time.monotonic()
    TorchAgent(env).outlast(process, peers)
    assert (time.monotonic() - began >= 0.05) == stays


def test_the_first_of_the_processes_behind_an_error_of_jax_is_first():
    def gone(process, since_s, how=""):
        return Member(process, "h", "lost", "silent", since_s=since_s, how=how)

    rows = [gone(0, 0.1), gone(2, 0.5), gone(3, 0.4)]
    peers = peers_behind(RuntimeError(), {row.process: row for row in rows})
    assert [*peers] == [2, 3, 0]
    assert peers_behind(RuntimeError(), {1: gone(1, 0.0, UNHEARD)}) == {}


def test_an_error_about_an_error_about_a_peer_has_the_same_cause():
    error = raised()
    error.__context__ = RuntimeError("while it was handled")
    error.__context__.__cause__ = PeerFailedError("barrier", failed={3: "ValueError"})
    assert peers_behind(error, {}) == {3: Departure("ValueError")}
    assert peers_behind(ProcessLostError("the coordinator is lost"), {}) == {}
    assert peers_behind(raised(), {}) is None
