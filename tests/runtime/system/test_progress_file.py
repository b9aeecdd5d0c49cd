"""What a process notes of its steps outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shoal.runtime.system import progress_file
from shoal.runtime.system.progress_file import StepProgress

NOTES = """
import os, signal, shoal
for number in (3, 12, 7):
    with shoal.step(number): pass
assert not shoal.preempted(13)
try:
    with shoal.step(14): 1 / 0
except ZeroDivisionError: pass
shoal.preemption.mark_saved(10)
shoal.preemption.mark_saved(2**80 if {huge} else 4)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("huge", [False, True])
def test_the_highest_numbers_stay_when_a_process_is_killed(tmp_path, child_env, huge):
    path = str(tmp_path / "progress")
    progress_file.prepare(path)
    assert progress_file.read(path) == StepProgress(-1, -1)
    env = {**child_env, "SHOAL_PROGRESS_FILE": path}
    command = [sys.executable, "-c", NOTES.format(huge=huge)]
    assert subprocess.run(command, env=env, timeout=60).returncode == -signal.SIGKILL
    assert progress_file.read(path) == StepProgress(14, (1 << 63) - 1 if huge else 10, 12)


def test_a_save_in_a_thread_does_not_undo_a_step_nor_the_other_way_round(tmp_path, child_env):
    path = str(tmp_path / "progress")
    progress_file.prepare(path)
    both = """
import sys, threading
from shoal.runtime.system.progress_file import note_saved, note_step
sys.setswitchinterval(1e-6)
def count(note): [note(number) for number in range(30_000)]
threads = [threading.Thread(target=count, args=[note]) for note in (note_saved, note_step)]
for one in threads: one.start()
"""
    env = {**child_env, "SHOAL_PROGRESS_FILE": path}
    assert subprocess.run([sys.executable, "-c", both], env=env, timeout=60).returncode == 0
    assert progress_file.read(path) == StepProgress(29_999, 29_999)


def test_a_file_that_is_gone_or_cut_has_nothing(tmp_path, child_env):
    assert progress_file.read(str(tmp_path / "none")) == StepProgress()
    (tmp_path / "cut").write_bytes(b"123")
    assert progress_file.read(str(tmp_path / "cut")) == StepProgress()
    env = {**child_env, "SHOAL_PROGRESS_FILE": str(tmp_path / "none")}
    command = [sys.executable, "-c", "import shoal; shoal.preemption.mark_saved(3)"]
    assert subprocess.run(command, env=env, timeout=60).returncode == 0
    assert not os.path.exists(tmp_path / "none")


SAVES = """
import sys, shoal
from shoal.runtime.system import progress_file
with progress_file.saving():
    with progress_file.saving(): pass
    with shoal.step(3): print("saving", flush=True)
    sys.stdin.read(1)
print("saved", flush=True)
sys.stdin.read()
"""


def test_a_save_that_is_running_is_seen_from_outside(tmp_path, child_env):
    path = str(tmp_path / "progress")
    assert not progress_file.is_saving(path)
    progress_file.prepare(path)
    assert not progress_file.is_saving(path)
    env = {**child_env, "SHOAL_PROGRESS_FILE": path}
    with subprocess.Popen(
        [sys.executable, "-c", SAVES], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == "saving\n"
        assert progress_file.is_saving(path)
        child.stdin.write("x")
        child.stdin.flush()
        assert child.stdout.readline() == "saved\n"
        assert not progress_file.is_saving(path)
        assert progress_file.read(path) == StepProgress(3, -1, 3)
        child.stdin.close()


def test_a_program_that_is_done_is_seen_from_outside(tmp_path, child_env):
    path = str(tmp_path / "progress")
    progress_file.prepare(path)
    assert not progress_file.is_done(path)
    note = "from shoal.runtime.system import progress_file; progress_file.note_done()"
    env = {**child_env, "SHOAL_PROGRESS_FILE": path}
    assert subprocess.run([sys.executable, "-c", note], env=env, timeout=60).returncode == 0
    assert progress_file.is_done(path)
    assert not progress_file.is_saving(path)


def test_progress_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "progress").symlink_to("mine")
    with pytest.raises(OSError, match=r"progress: it is a symbolic link to .*: remove the link"):
        progress_file.prepare(str(tmp_path / "progress"))
    assert (tmp_path / "mine").read_text() == "precious"
