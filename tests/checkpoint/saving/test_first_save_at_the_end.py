"""The first save of a process, made while the interpreter shuts down."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import shoal

SAVE = 'shoal.save("out.ckpt", {"w": np.ones(3 << 20, np.float32)}); print("saved")'
PROGRAMS = {
    "an exit handler": f"""
import atexit, numpy as np, shoal
def work():
    {SAVE}
atexit.register(work)
""",
    "a thread that outlives the main thread": f"""
import threading, numpy as np, shoal
def work():
    threading.main_thread().join()
    {SAVE}
threading.Thread(target=work).start()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_first_save_at_interpreter_exit_is_committed(name, tmp_path, child_env):
    command = [sys.executable, "-c", PROGRAMS[name]]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
    assert np.all(shoal.restore(tmp_path / "out.ckpt")["w"] == 1)
