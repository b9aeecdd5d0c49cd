"""Tracebacks end at the caller's line: what is left out, what is kept, and where."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import traceback

import pytest

import shoal
from shoal.compat import torch_xla
from shoal.runtime.client.in_process import LocalJob
from shoal.tracebacks import BUG, HIDDEN, at_caller, has_hidden, shorten

HERE = __file__
MESH = shoal.Mesh({"x": 1}, device_ids=[0])
REPLICATED = shoal.Layout(MESH)


def files_of(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def raised_by(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


CALLS = {
    "a block": lambda: shoal.use_mesh(5).__enter__(),
    "a block without arguments": lambda: shoal.use_mesh(),
    "a facade": lambda: torch_xla.mark_sharding(),
    "a function": lambda: shoal.barrier(5),
    "a class": lambda: shoal.Layout(5),
    "an unknown keyword": lambda: shoal.barrier(nam="x"),
    "a missing argument": lambda: shoal.broadcast(),
    "a method": lambda: shoal.Checkpoints("x").restore(step="y"),
    "a planning function": lambda: shoal.make_mesh({"data": 0}),
    "a value": lambda: shoal.assert_same(object()),
    "a method of a mesh": lambda: MESH.coords("x"),
    "a class method": lambda: shoal.Mesh.parse("x"),
    "a method of a layout": lambda: shoal.Layout(MESH, "x").num_shards("x"),
    "a function made by manual": lambda: shoal.manual(abs, REPLICATED, REPLICATED)(object()),
    "a function with a job client": lambda: shoal.barrier.on(LocalJob(1).clients[0], 5),
    "a method of a facade": lambda: torch_xla.Mesh([0], (1,), ("x",)).get_op_sharding("y"),
    "a facade of a facade": lambda: torch_xla.get_1d_mesh(5),
    "a class that is left out": lambda: torch_xla.SPMDSavePlanner(),
}


@pytest.mark.parametrize("call", [*CALLS])
def test_an_error_raised_on_purpose_shows_the_program_alone(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = raised_by(CALLS[call])
    assert {*files_of(error)} == {HERE}
    assert BUG not in getattr(error, "__notes__", ())


@pytest.mark.parametrize("call", [*CALLS])
def test_all_frames_are_shown_on_request(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_TRACEBACK", "full")
    assert {*files_of(raised_by(CALLS[call]))} > {HERE}


def test_blocks_and_iterators_end_at_their_line_too():
    with pytest.raises(shoal.UsageError) as caught, shoal.Checkpoints(5):
        pass
    assert {*files_of(caught.value)} == {HERE}


def test_a_log_shows_what_a_reader_of_the_error_sees(caplog):
    try:
        shoal.barrier(5)
    except shoal.UsageError:
        logging.getLogger("train").exception("it failed")
    assert "barrier(5)" in caplog.text
    assert "site-packages" not in caplog.text
    assert "runtime" not in caplog.text


def test_frames_of_the_program_below_shoal_are_kept():
    @at_caller
    def public(function):
        return function()

    code = compile("def inside(public, function): return public(function)", "shoal_code.py", "exec")
    space = {}
    exec(code, space)

    def users():
        raise shoal.UsageError("a wrong batch")

    error = raised_by(space["inside"], public, users)
    assert files_of(error) == [HERE, "shoal_code.py", HERE, HERE]


def test_causes_are_shortened_and_foreign_errors_are_not(tmp_path):
    missing = tmp_path / "none"
    error = raised_by(lambda: shoal.Checkpoints(missing / "x").restore())
    seen, at = [], error
    while at is not None:
        seen += files_of(at)
        at = at.__cause__ or at.__context__
    assert {*seen} <= {HERE}

    def failing_source():
        raise OSError("disk")

    error = raised_by(at_caller(failing_source))
    assert len(files_of(error)) == 3, "the program's own error keeps all frames"
    assert not getattr(error, "__notes__", ())


def in_shoal(source, name="f"):
    """Return a function of a source that seems to lie in shoal."""
    space = {"__name__": "shoal.x"}
    file = shoal.__file__.replace("__init__", "x")
    exec(compile(source, file, "exec"), space)
    return at_caller(space[name])


def test_a_bug_says_so_and_keeps_all_frames():
    error = raised_by(in_shoal("def f(): return [][0]"))
    assert error.__notes__ == [BUG]
    assert len(files_of(error)) == 3
    assert not getattr(raised_by(in_shoal("def f(): open('/none')")), "__notes__", ())
    again = raised_by(at_caller(in_shoal("def f(): return [][0]")))
    assert again.__notes__ == [BUG], "once"


def test_a_loop_of_causes_ends():
    one, other = shoal.UsageError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    shorten(one)


PROGRAM = """
import shoal
shoal.initialize()
with shoal.step(0):
    shoal.barrier(5)
"""


def test_python_prints_the_short_one_and_says_so_once(child_env):
    said = {}
    for kind in ("short", "full"):
        env = {**child_env, "SHOAL_TRACEBACK": kind}
        command = [sys.executable, "-c", PROGRAM]
        said[kind] = subprocess.run(command, env=env, capture_output=True, text=True).stderr
    assert said["short"].count("File ") == 1
    assert said["short"].splitlines()[0] == f"shoal: {HIDDEN}"
    assert said["full"].count("File ") > 3
    assert HIDDEN not in said["full"]


def test_pytest_shows_the_line_of_the_test_and_no_frame_of_shoal(child_env, tmp_path):
    (tmp_path / "test_of_user.py").write_text(
        "import shoal\n\ndef helper():\n    shoal.barrier(5)\n\ndef test_one():\n    helper()\n"
    )
    said = {}
    for style, kind in (("long", "short"), ("short", "short"), ("short", "full")):
        env = {**child_env, "SHOAL_TRACEBACK": kind}
        command = [sys.executable, "-m", "pytest", "-q", f"--tb={style}", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        said[style, kind] = done.stdout
        assert ("runtime" in done.stdout) == (kind == "full"), done.stdout
    assert said["long", "short"].count("shoal.barrier(5)") == 1
    places = [line for line in said["short", "short"].splitlines() if ".py:" in line]
    assert places[:2] == ["test_of_user.py:7: in test_one", "test_of_user.py:4: in helper"]
    assert [line for line in places[2:] if not line.startswith("FAILED test_of_user.py")] == []


def test_values_in_the_environment_are_checked(monkeypatch):
    monkeypatch.setenv("SHOAL_TRACEBACK", "no")
    with pytest.raises(shoal.UsageError, match="SHOAL_TRACEBACK"):
        shoal.initialize()


def test_an_exception_may_have_a_member_called_exceptions_or_be_frozen():
    class Own(Exception):
        exceptions = ("a",)

    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        word: str

    for one in (Own(), Frozen("x")):
        try:
            raise one
        except (Own, Frozen):
            error = raised_by(shoal.barrier, 5)
        assert type(error) is shoal.errors.UsageTypeError
        assert has_hidden(error)
        shorten(one)


def test_what_the_program_was_handling_stays_as_it_is():
    def opened():
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: os.stat("/none"))

    def fails():
        try:
            opened()
        except OSError as handled:
            before.extend(files_of(handled))
            shoal.barrier(5)

    before = []
    error = raised_by(fails)
    assert files_of(error.__context__) == before
    assert len(before) == 6


def test_a_bug_that_leads_to_an_error_keeps_its_frames():
    def saves():
        try:
            in_shoal("def f(): return [][0]")()
        except IndexError as error:
            raise shoal.UsageError("not saved") from error

    error = raised_by(at_caller(saves))
    assert error.__cause__.__notes__ == [BUG]
    assert len(files_of(error.__cause__)) == 3


def test_mistakes_of_the_program_are_no_bugs():
    @contextlib.contextmanager
    def own():
        yield

    for call in (own, lambda _: contextlib.closing(5).__exit__()):
        error = raised_by(call, 5)
        shorten(error)
        assert not getattr(error, "__notes__", ())


def test_a_program_that_is_installed_keeps_its_frames_above_shoal():
    source = "import functools, contextlib\n" + "def f(call):\n    with block(): call()\n"
    source += "@contextlib.contextmanager\ndef block():\n    yield\n"
    space = {}
    exec(compile(source, "/x/site-packages/trainer.py", "exec"), space)
    error = raised_by(space["f"], lambda: shoal.barrier(5))
    assert "/x/site-packages/trainer.py" in files_of(error)


UNUSED = """
import contextlib, warnings
import shoal
mesh = shoal.Mesh({"x": 1})
with shoal.use_mesh(mesh):
    pass
with contextlib.ExitStack() as stack:
    stack.enter_context(shoal.use_mesh(mesh))
shoal.use_mesh(mesh)(print)("entered by decoration")
try:
    shoal.use_mesh(mesh, 3)
except TypeError:
    pass
shoal.use_mesh(mesh)
def main():
    block = shoal.use_mesh(mesh)
main()
"""


def test_a_block_that_is_never_entered_warns_at_its_line(child_env, tmp_path):
    (tmp_path / "program.py").write_text(UNUSED.lstrip())
    found = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=child_env, capture_output=True, text=True
    )
    lines = [line for line in found.stderr.splitlines() if "Warning" in line]
    text = "RuntimeWarning: use_mesh(…) does nothing by itself: write `with use_mesh(…):`"
    assert lines == [f"{tmp_path}/program.py:{line}: {text}" for line in (13, 15)]
    assert found.returncode == 0
