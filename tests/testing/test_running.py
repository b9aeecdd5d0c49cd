"""The thread that reads what processes say, and notes how they end."""

from __future__ import annotations

import subprocess
import sys
import threading

from shoal.testing.running import Pump, Running


class Held(bytearray):
    """Holds whoever adds to it until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def __iadd__(self, said):
        self.reached.set()
        assert self.go.wait(30)
        return super().__iadd__(said)


def test_the_end_of_a_pipe_and_of_its_process_come_at_once():
    code = "import sys; print('out', flush=True); sys.stdin.read()"
    pump = Pump()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as popen:  # fmt: skip
        running = Running("process 0", popen)
        running.out = held = Held()
        pump.follow(running)
        assert held.reached.wait(30)
        # The thread still reads. When it looks again it finds the word of an end first, which
        # lets it read all pipes to theirs, and then the end of stderr once more.
        pump._ended.append(running)
        pump._wake.send(b".")
        popen.stdin.close()
        popen.wait()
        held.go.set()
        with pump.changed:
            assert pump.changed.wait_for(lambda: running.code is not None, 30)
    assert bytes(running.out) == b"out\n"
    pump.close()
    assert popen.stdout.closed
