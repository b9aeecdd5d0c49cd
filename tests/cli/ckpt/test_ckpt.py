"""`shoal ckpt`, as a person runs it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

import shoal
from cli import sample_checkpoints
from collectives.thread_jobs import run_all
from shoal.checkpoint.blocks import reader
from shoal.checkpoint.disk.local_store import LocalStore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store import opening
from shoal.checkpoint.store.saved_steps import delete_step
from shoal.checkpoint.store.step_names import KEEP, step_name
from shoal.cli.main import build
from shoal.cli.tables import print_table
from shoal.errors import (
    InitializeError,
    NotCommittedError,
    StepAlreadyCommittedError,
    UsageError,
)
from shoal.runtime import process
from shoal.runtime.client.in_process import LocalJob

RUNNER = CliRunner()


def ckpt(*arguments, code=0):
    result = RUNNER.invoke(build(["ckpt"]), ["ckpt", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def as_json(*arguments, code=0):
    return json.loads(ckpt(*arguments, "--json", code=code))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return sample_checkpoints.run_of_two(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def run(saved, tmp_path):
    """A history of its own for a test that changes it."""
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMIX_RANK": "1", "PRTE_LAUNCHED": "1"},
        {"SHOAL_PROCESS_ID": "1", "SHOAL_NUM_PROCESSES": "2"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_commands_that_read_need_not_join_the_job_around_them(saved, monkeypatch, env):
    monkeypatch.setattr(process._RECORD, "alone", None)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InitializeError):
        process.client()
    step = saved / step_name(20)
    commands = [["ls", saved], ["show", step], ["verify", step], ["recover", saved]]
    for command in [*commands, ["diff", saved / step_name(10), step]]:
        ckpt(*command, code=int(command[0] == "diff"))
    for words in (["mesh", "data=4"], ["layout", "data @ data=4", "--shape", "8"]):
        assert RUNNER.invoke(build(["mesh", "layout"]), words).exit_code == 0


def data_of(folder):
    (path,) = folder.glob("data-*")
    return path


def test_ls_lists_what_is_committed(saved):
    lines = ckpt("ls", saved).splitlines()
    assert lines[0].split() == ["step", "state", "size", "files", "age", "metrics"]
    assert lines[2].split()[:2] == ["20", "committed"]
    assert lines[2].endswith("loss=0.05")
    first, second = as_json("ls", saved)
    assert (first["step"], first["state"], first["files"]) == (10, "committed", 1)
    assert second["metrics"] == {"loss": 0.05}
    assert second["bytes"] == data_of(saved / step_name(20)).stat().st_size
    assert second["age_s"] >= 0


def test_ls_takes_one_checkpoint(saved, tmp_path):
    assert [one["step"] for one in as_json("ls", saved / step_name(20))] == [20]
    sample_checkpoints.save(tmp_path / "model", {"w": np.ones(3)})
    assert ckpt("ls", tmp_path / "model").splitlines()[1].split()[:2] == ["-", "committed"]


def test_json_is_json_whatever_a_metric_is(tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    one = LocalJob(1).clients[0]
    metrics = {"loss": float("nan"), "best": float("-inf"), "acc": 0.5}
    save.on(one, tmp_path / "one", {"w": np.ones(3)}, metrics=metrics)
    (facts,) = json.loads(ckpt("ls", tmp_path / "one", "--json"), parse_constant=refuse)
    assert facts["metrics"] == {"loss": "nan", "best": "-inf", "acc": 0.5}
    shown = json.loads(ckpt("show", tmp_path / "one", "--json"), parse_constant=refuse)
    assert shown["metrics"] == facts["metrics"]


def test_step_of_a_newer_shoal_is_unsupported_and_the_others_are_inspected(run):
    sample_checkpoints.from_the_future(run / step_name(10))
    assert [one["state"] for one in as_json("ls", run)] == ["unsupported", "committed"]
    assert [len(one["problems"]) for one in as_json("verify", run, code=1)] == [1, 0]
    states = [one["state"] for one in as_json("recover", run, code=1)]
    assert states == ["unsupported", "committed"]
    assert "use a newer one" in ckpt("gc", run, code=1)


def test_verify_prints_problems_in_lines(run):
    data_of(run / step_name(20)).unlink()
    told = ckpt("verify", run, code=76).splitlines()
    assert told[1].startswith("step 20: ")
    assert told[2].startswith("  nothing of it was returned")


@pytest.mark.parametrize(
    ("module", "function", "is_before"),
    [
        (opening, "open_checkpoint", True),
        (opening, "open_checkpoint", False),
        (reader, "check_header", True),
    ],
)
def test_a_step_that_a_job_deletes_meanwhile_is_not_damaged(
    run, monkeypatch, module, function, is_before
):
    def call(*arguments):
        if is_before:
            delete()
        found = real(*arguments)
        delete()
        return found

    def delete():
        with contextlib.suppress(NotCommittedError):
            delete_step(LocalStore(run), 10)

    real = getattr(module, function)
    monkeypatch.setattr(module, function, call)
    first, second = as_json("verify", run)
    assert (first["deleted"], first["problems"]) == (True, [])
    assert (second["deleted"], second["problems"]) == (False, [])
    monkeypatch.undo()
    assert [one["step"] for one in as_json("verify", run)] == [20]


def test_verify_of_a_checkpoint_deleted_meanwhile_raises_not_committed(run, monkeypatch):
    def opened(folder):
        delete_step(LocalStore(run), 10)
        return open_checkpoint(folder)

    open_checkpoint = opening.open_checkpoint
    monkeypatch.setattr(opening, "open_checkpoint", opened)
    with pytest.raises(NotCommittedError, match="deleted or replaced by now"):
        ckpt("verify", run / step_name(10))


def test_ls_says_what_an_attempt_waits_for(run):
    attempt = sample_checkpoints.begun(run)
    (run / step_name(10) / KEEP).touch()
    told = ckpt("ls", run)
    assert re.search(rf"step 25: attempt {attempt} by h7 \(pid 123\), touched .* ago, waits", told)
    assert "waits for 3 of 3 parts: of 0, 1, 2" in told
    assert "committed, pinned" in told
    (begun,) = as_json("ls", run)[2]["attempts"]
    assert (begun["live"], begun["complete"], begun["missing"]) == (True, False, [0, 1, 2])


def test_show_shows_the_leaves(saved):
    told = ckpt("show", saved)
    assert "params/w  float64   3x4" in told
    assert 'user: {"run": "blue"}' in told
    assert "\x1b" not in told
    assert told.rstrip().endswith("20"), "the value of the last leaf"
    facts = as_json("show", saved, "--step", 10, "--leaf", "params/**")
    assert (facts["step"], facts["user"], facts["processes"]) == (10, {"run": "blue"}, 1)
    assert [(leaf["name"], leaf["dtype"], leaf["bytes"]) for leaf in facts["leaves"]] == [
        ("params/b", "bfloat16", 8),
        ("params/w", "float64", 96),
    ]


def test_verify_reads_every_byte(run):
    assert ckpt("verify", run).count("every byte is as saved, 4.105 KiB in 1 file, ") == 2
    path = data_of(run / step_name(20))
    sample_checkpoints.flip(path)
    told = ckpt("verify", run, code=76)
    assert "step 10: " in told
    assert path.name in told
    assert [bool(one["problems"]) for one in as_json("verify", run, code=76)] == [False, True]
    assert as_json("verify", run, "--step", 10)[0]["problems"] == []


@pytest.mark.parametrize("name", ["COMMIT", "manifest-*", "index-*"])
def test_damage_is_reported_with_exit_code_76(run, name):
    (path,) = (run / step_name(20)).glob(name)
    sample_checkpoints.flip(path, 20)
    (whole, damaged) = as_json("verify", run, code=76)
    assert (len(whole["problems"]), len(damaged["problems"])) == (0, 1)
    if name == "COMMIT":
        assert [one["state"] for one in as_json("ls", run, code=76)] == ["committed", "damaged"]
        assert [one["state"] for one in as_json("recover", run, code=76)][1] == "damaged"
        assert "problem" in as_json("gc", run, code=76)[1]


def test_a_missing_file_is_damage(run):
    data_of(run / step_name(20)).unlink()
    assert as_json("verify", run, "--step", 20, code=76)[0]["problems"]


def test_diff_of_equal_ones(saved, tmp_path):
    sample_checkpoints.save(tmp_path / "again", sample_checkpoints.tree(20))
    assert ckpt("diff", saved, tmp_path / "again") == "equal, bit by bit\n"
    assert as_json("diff", saved, tmp_path / "again") == {"equal": True, "differences": []}


def test_diff_says_where_values_differ(saved):
    pair = saved / step_name(10), saved / step_name(20)
    told = ckpt("diff", *pair, code=1)
    assert (
        "params/w: 12 of 12 values differ, first at [0, 0]: 10.0 | 20.0, at most 10 apart" in told
    )
    assert "step: 10 | 20\n" in told
    assert told.endswith("3 differ\n")
    assert as_json("diff", *pair, "--leaf", "params/b")["equal"]
    (one,) = as_json("diff", *pair, "--leaf", "opt/**", code=1)["differences"]
    assert (one["leaf"], one["count"], one["at"], one["max_abs"]) == ("opt/0/mu", 4, [0, 0], 10.0)


def test_diff_sees_every_bit_and_all_that_is_missing(tmp_path):
    left = {"zero": np.array([0.0, 1.0]), "nan": np.array([np.nan]), "gone": 1, "s": np.ones(3)}
    right = {"zero": np.array([-0.0, 1.0]), "nan": np.array([np.nan]), "s": np.ones((3, 1))}
    right |= {"new": None, "t": 0.5}
    left |= {"t": 1}
    sample_checkpoints.save(tmp_path / "a", left)
    sample_checkpoints.save(tmp_path / "b", right)
    found = as_json("diff", tmp_path / "a", tmp_path / "b", code=1)["differences"]
    assert {one["leaf"]: one["kind"] for one in found} == {
        "zero": "values",
        "gone": "missing",
        "s": "shape",
        "new": "missing",
        "t": "kind",
    }
    assert {one["leaf"]: one["words"] for one in found}["new"] == f"only in {tmp_path / 'b'}"


def test_diff_compares_large_leaves_in_bands(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.checkpoint.blocks.compare._BAND_BYTES", 64)
    values = np.arange(300, dtype=np.int16).reshape(30, 10)
    changed = values.copy()
    changed[17, 3] = -1
    changed[29, 9] = 0
    sample_checkpoints.save(tmp_path / "a", values)
    sample_checkpoints.save(tmp_path / "b", changed)
    (one,) = as_json("diff", tmp_path / "a", tmp_path / "b", code=1)["differences"]
    assert (one["at"], one["count"], one["first"], one["second"]) == ([17, 3], 2, "173", "-1")
    assert one["max_abs"] == 299


def test_processes_own_values_are_shown_and_compared(tmp_path):
    def value(row):
        return {"w": np.ones(2), "loader": shoal.PerProcess({"row": row})}

    for name, rows in (("a", (1, 2)), ("b", (1, 3)), ("c", (1, "three"))):
        run_all(
            LocalJob(2),
            lambda one, path=tmp_path / name, rows=rows: save.on(
                one, path, value(rows[one.process])
            ),
        )
    assert "loader  uint8    of each process" in ckpt("show", tmp_path / "a")
    (leaf,) = as_json("show", tmp_path / "a", "--leaf", "loader")["leaves"]
    assert (leaf["chunks"], leaf["bytes"] > 10) == (2, True)
    assert as_json("diff", tmp_path / "a", tmp_path / "a")["equal"]
    (one,) = as_json("diff", tmp_path / "a", tmp_path / "b", code=1)["differences"]
    assert (one["leaf"], one["kind"], one["count"]) == ("loader", "values", 1)
    (one,) = as_json("diff", tmp_path / "a", tmp_path / "c", code=1)["differences"]
    assert (one["leaf"], one["kind"]) == ("loader", "processes")


def test_recover_commits_what_is_complete(run, child_env):
    path = run / step_name(30)
    sample_checkpoints.killed_before_commit(path, child_env)
    assert "is complete: `shoal ckpt recover` commits it" in ckpt("ls", run)
    states = [one["state"] for one in as_json("recover", run)]
    assert states == ["committed", "committed", "recovered"]
    assert as_json("verify", path)[0]["problems"] == []
    assert "was committed already" in ckpt("recover", path)


def test_recover_without_a_complete_attempt_exits_1(run):
    sample_checkpoints.begun(run)
    assert "nothing complete" in ckpt("recover", run / step_name(25), code=1)


def test_gc_removes_what_is_stale_and_spares_what_is_not(run):
    attempt = sample_checkpoints.begun(run)
    before = sorted((run / step_name(25)).iterdir())
    assert f"attempt {attempt} is spared" in ckpt("gc", run)
    assert "2 files" in ckpt("gc", run, "--older", 0, "--dry-run")
    assert sorted((run / step_name(25)).iterdir()) == before
    gone = as_json("gc", run, "--older", 0)[2]
    assert sorted(gone["removed"]) == [path.name for path in before]
    assert gone["bytes"] > 0
    assert not (run / step_name(25)).exists()
    assert ckpt("gc", run, "--older", 0) == "nothing to remove\n"
    assert ckpt("verify", run).count("every byte is as saved, 4.105 KiB in 1 file, ") == 2


@pytest.mark.parametrize("command", ["ls", "show", "verify", "recover", "gc"])
def test_paths_without_a_checkpoint_raise_not_committed(command, tmp_path):
    with pytest.raises(NotCommittedError, match="there is no directory"):
        ckpt(command, tmp_path / "none")
    (tmp_path / "file.txt").touch()
    with pytest.raises(NotCommittedError, match="neither a checkpoint nor a history"):
        ckpt(command, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "RUN", "--step", 11], "has no step 11; it has 10, 20"),
        (["verify", "RUN/step_000000000010", "--step", 10], "is one checkpoint"),
        (["show", "RUN", "--leaf", "params/ww"], "did you mean 'params/w'"),
        (
            ["show", "RUN", "--leaf", "params"],
            ("did you mean 'params/**'? 'params' is a directory of"),
        ),
        (["show", "RUN", "--leaf", "!parms/**"], "leaves out no leaf; did you mean '!params/**'"),
        (
            ["diff", "RUN", "RUN", "--leaf", "params/ww"],
            "'params/ww' takes no leaf; did you mean 'params/w'",
        ),
        (["gc", "RUN", "--older", "-1"], "not negative"),
    ],
)
def test_wrong_usage(arguments, words, saved):
    with pytest.raises(UsageError, match=re.escape(words)):
        ckpt(*(str(one).replace("RUN", str(saved)) for one in arguments))


def test_a_step_that_is_not_committed_is_not_shown(run):
    sample_checkpoints.begun(run)
    with pytest.raises(NotCommittedError):
        ckpt("show", run, "--step", 25)
    with pytest.raises(NotCommittedError):
        ckpt("verify", run / step_name(25))


WITHOUT_JAX = """
import sys
sys.modules["jax"] = sys.modules["jaxlib"] = None  # importing them fails
from shoal.cli.main import main
for arguments in (["ls"], ["show"], ["verify"], ["diff", sys.argv[1]], ["recover"], ["gc"]):
    sys.argv = ["shoal", "ckpt", *arguments, sys.argv[-1]]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
"""


def test_ckpt_commands_work_without_jax(run, child_env):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, str(run)],
        env=child_env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "equal, bit by bit" in done.stdout


def test_a_terminal_gets_a_drawn_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(("leaf", "size"), [["[red]w", "8 B"]], "size")
    told = capsys.readouterr().out
    assert "─" in told
    assert "[red]w" in told


@pytest.mark.parametrize("command", ["show", "verify"])
def test_step_that_is_being_written_is_reported_as_such(run, command):
    sample_checkpoints.begun(run, 25)
    words = r"step 25 is not saved; its save still runs \(by h7, pid 123, touched \d+ s ago\)"
    for arguments in ([run, "--step", 25], [run / step_name(25)]):
        with pytest.raises(NotCommittedError, match=words.partition("; ")[2]):
            ckpt(command, *arguments)
    for step in (10, 20):
        delete_step(LocalStore(run), step)
    for arguments in ([command, run], ["diff", run, run]):
        with pytest.raises(NotCommittedError, match=words):
            ckpt(*arguments)


# ---- cp, delete


def test_cp_of_a_history(run, tmp_path):
    target = tmp_path / "copy"
    out = ckpt("cp", run, target)
    assert re.findall(r"step (\d+): .* copied to", out) == ["10", "20"]
    assert re.findall(r"step (\d+): is at .* already", ckpt("cp", run, target)) == ["10", "20"]
    assert ckpt("diff", run, target) == ckpt("diff", run, run)
    ckpt("verify", target)
    sample_checkpoints.save(run / step_name(30), {"w": np.ones(2)}, 30)
    copied = as_json("cp", run, target)
    assert [(one["step"], one["was_there"]) for one in copied] == [
        (10, True), (20, True), (30, False),
    ]  # fmt: skip
    assert as_json("cp", run, tmp_path / "one", "--step", 20)[0]["copied_bytes"] > 0
    assert [one["step"] for one in as_json("ls", tmp_path / "one")] == [20]


def test_cp_of_one_checkpoint(run, tmp_path):
    step = run / step_name(20)
    ckpt("cp", step, tmp_path / "model")
    assert shoal.restore(tmp_path / "model")["step"] == 20
    with pytest.raises(UsageError, match=r"is one checkpoint, and .* is a history"):
        ckpt("cp", step, run)
    with pytest.raises(UsageError, match=r"is a history of steps, and .* is one checkpoint"):
        ckpt("cp", run, tmp_path / "model")
    with pytest.raises(StepAlreadyCommittedError, match="nothing is overwritten"):
        ckpt("cp", run / step_name(10), tmp_path / "model")
    with pytest.raises(NotCommittedError, match="there is no directory"):
        ckpt("cp", tmp_path / "nothing", tmp_path / "else")


def test_delete(run):
    with pytest.raises(UsageError, match=r"which\? Pass --step N"):
        ckpt("delete", run)
    with pytest.raises(UsageError, match="has no step 5; it has 10, 20"):
        ckpt("delete", run, "--step", 10, "--step", 5)
    shoal.Checkpoints(run).pin(20)
    with pytest.raises(UsageError, match="step 20 is pinned"):
        ckpt("delete", run, "--step", 10, "--step", 20)
    assert [one["step"] for one in as_json("ls", run)] == [10, 20]
    assert ckpt("delete", run, "--step", 10) == "step 10: deleted\n"
    with pytest.raises(UsageError, match="omit --step"):
        ckpt("delete", run / step_name(20), "--step", 20)
    shoal.Checkpoints(run).unpin(20)
    data_of(run / step_name(20)).write_bytes(b"damaged")
    assert as_json("delete", run / step_name(20)) == [
        {"step": 20, "path": str(run / step_name(20))}
    ]
    with pytest.raises(NotCommittedError):
        ckpt("ls", run)


def at_a_terminal(answer, *arguments, code):
    """Run `shoal ckpt` with a terminal as its input; return what it asked, and printed."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "shoal", "ckpt", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen(command, stdin=theirs, **pipes)
    os.write(ours, answer)
    printed, asked = started.communicate()
    os.close(ours)
    os.close(theirs)
    assert started.returncode == code, asked
    return asked, printed.lstrip()  # click asks on stderr, but for its last space


def test_delete_asks_on_a_terminal(run):
    asked, printed = at_a_terminal(b"n\n", "delete", run, "--step", 10, "--step", 20, code=1)
    assert f"Delete step 10, step 20 of {run} for good? [y/N]:" in asked
    assert printed == ""
    assert [one["step"] for one in as_json("ls", run)] == [10, 20]
    assert at_a_terminal(b"", "delete", run, "--step", 10, "--yes", code=0) == (
        "", "step 10: deleted\n"
    )  # fmt: skip
    asked, printed = at_a_terminal(b"y\n", "rm", run / step_name(20), code=0)
    assert f"Delete {run / step_name(20)} for good? [y/N]:" in asked
    assert printed == "step 20: deleted\n"


def test_delete_can_be_tried_first(run):
    both = ("--step", 10, "--step", 20)
    shown = "step 10: would be deleted\nstep 20: would be deleted\n"
    assert ckpt("delete", run, *both, "--dry-run") == shown
    assert at_a_terminal(b"", "delete", run, *both, "--dry-run", code=0) == ("", shown)
    shoal.Checkpoints(run).pin(20)
    with pytest.raises(UsageError, match="step 20 is pinned"):
        ckpt("delete", run, *both, "--dry-run")
    assert [one["step"] for one in as_json("ls", run)] == [10, 20]
