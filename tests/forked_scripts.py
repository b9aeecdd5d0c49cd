"""Scripts in forks of a process that has imported JAX: sooner than in interpreters of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.testing.forked import ForkOrder, fork_all
from shoal.testing.running import Pump, Running
from shoal.testing.warden import MARK
from shoal.testing.warding import Warden


class Done(NamedTuple):
    """How a script ended: what `subprocess.run` returns of it."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(
    script: str, env: Mapping[str, str], folder: Path, *, timeout_s: float = 60.0
) -> Done:
    """Run `folder`/script.py with this content; nothing of it outlives the call."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    warden, pump = Warden(0), Pump()
    try:
        order = ForkOrder([str(path)], {**env, MARK: warden.mark}, is_script=True)
        running = Running(path.name, fork_all([order])[0])
        pump.follow(running)
        with pump.changed:
            has_ended = pump.changed.wait_for(lambda: running.code is not None, timeout_s)
    finally:
        warden.close()
    running.popen.wait()
    pump.close()
    assert has_ended, running.tail(10)
    return Done(running.popen.returncode, running.out.decode(), running.err.decode())
