"""`save(last); pin(last)` by real processes, and a save that fails while one of them pins."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import sys
import numpy as np
import shoal

shoal.initialize(virtual_devices=1)
one = shoal.process_index() == 1
with shoal.Checkpoints(sys.argv[1], keep=1) as ckpts:
    ckpts.save(6, {"w": np.arange(1 << 20)})
    if one:
        ckpts.pin(6)
    assert ckpts.info().step == 6
    os.environ["SHOAL_FAULTS"] = "save.write@0:raise"
    ckpts.save(7, {"w": np.arange(1 << 20)})
    for _ in range(2 * one):
        try:
            ckpts.pin(7)
        except shoal.errors.SaveAbortedError:
            print("the pin was told")
    try:
        ckpts.restore(7)
    except Exception as error:
        print("all were told:", type(error).__name__)
    assert ckpts.restore()["w"][-1] == (1 << 20) - 1
    ckpts.save(8, {"w": np.arange(3)})
    assert ckpts.restore()["w"].tolist() == [0, 1, 2]
    assert ckpts.all_steps() == (6, 8), ckpts.all_steps()
print("whole")
"""


def test_failed_save_raises_once_on_all_even_if_one_process_pins(tmp_path, child_env):
    script = tmp_path / "pins.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(script), str(tmp_path / "run")]
    done = subprocess.run(
        command, env=child_env, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the pin was told") == 2
    assert done.stdout.count("all were told") == 2
    assert done.stdout.count("whole") == 2
