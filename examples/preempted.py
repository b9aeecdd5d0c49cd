"""Train, be preempted in the middle, and resume elsewhere, with the same result.

    python examples/preempted.py [--checkpoints PATH]

1. `digits.py` trains undisturbed, as 2 processes x 4 virtual devices.
2. It trains again, and this program sends it a SIGTERM after half of the epochs, as a batch system
   would: it saves, and `shoal run` returns 75 (start me again).
3. It is started again on a smaller mesh, as 1 process x 4, and goes on to the end.

PATH: where to save; in a bucket, too (s3://bucket/demo). By default in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

DIGITS = Path(__file__).with_name("digits.py")
REQUEUE = 75


def run(processes, devices, folder, *saves, leave_at=None):
    """Run it; with `leave_at`, send SIGTERM after that line. Return the code and its lines."""
    words = ["shoal", "run", "-n", str(processes), "--devices", str(devices), "--no-prefix"]
    words += [os.path.relpath(DIGITS), str(folder), *saves]
    print(f"$ {shlex.join(words)}", flush=True)
    lines = []
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
            if leave_at is not None and line.startswith(leave_at):
                leave_at = None
                print(f"--- SIGTERM to shoal run (pid {job.pid})", flush=True)
                job.send_signal(signal.SIGTERM)
    return job.returncode, lines


def losses(lines):
    """Return the loss of each epoch, from `epoch 15 of 30 ━━╌╌ loss 0.1282`."""
    words = [line.split() for line in lines if line.startswith("epoch ")]
    return {int(row[1]): float(row[-1]) for row in words}


def main(checkpoints=None):
    saves = ["--checkpoints", checkpoints] if checkpoints else []
    with tempfile.TemporaryDirectory() as folder:
        print("1. Train undisturbed: 2 processes x 4 virtual devices", flush=True)
        print("   (each start imports JAX and compiles: some seconds of silence)", flush=True)
        code, undisturbed = run(2, 4, Path(folder, "undisturbed"))
        if code:
            return code
        print("\n2. Train again, and preempt the job after half of the epochs", flush=True)
        code, _ = run(2, 4, Path(folder, "run"), *saves, leave_at="epoch 15 ")
        print(f"--- shoal run returned {code}", flush=True)
        if code != REQUEUE:
            return 1
        print("\n3. Resume with half of the devices: 1 process x 4", flush=True)
        code, resumed = run(1, 4, Path(folder, "run"), *saves)
    if code:
        return code
    before, after = losses(undisturbed), losses(resumed)
    most = max(abs(before[epoch] - after[epoch]) for epoch in after)
    print(f"\nlosses of epochs {min(after)} to {max(after)}: differ by at most {most:.4f}")
    print(f"undisturbed: {undisturbed[-1]}")
    print(f"preempted, and resumed with half of the devices: {resumed[-1]}", flush=True)
    return int(undisturbed[-1] != resumed[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", metavar="PATH")
    sys.exit(main(**vars(parser.parse_args())))
