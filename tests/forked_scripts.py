"""Scripts in forks of a process that has imported JAX: sooner than in interpreters of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
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


class ForkedScript:
    """`folder`/`name`, written with this content, that runs until it ends or is waited for."""

    def __init__(
        self,
        script: str,
        env: Mapping[str, str],
        folder: Path,
        *,
        name: str = "script.py",
        namespaces: Sequence[str] = (),
    ) -> None:
        path = folder / name
        part = path.with_suffix(".part")
        part.write_text(textwrap.dedent(script))
        part.replace(path)  # another process may be about to read it
        self._warden, self._pump = Warden(0), Pump()
        marked = {**env, MARK: self._warden.mark}
        order = ForkOrder([str(path)], marked, namespaces, is_script=True)
        self._running = Running(name, fork_all([order])[0])
        self._pump.follow(self._running)

    def wait(self, timeout_s: float = 60.0) -> Done:
        """Wait until it has ended; nothing of it outlives this."""
        running = self._running
        with self._pump.changed:
            has_ended = self._pump.changed.wait_for(lambda: running.code is not None, timeout_s)
        self._warden.close()
        running.popen.wait()
        self._pump.close()
        assert has_ended, running.tail(10)
        return Done(running.popen.returncode, running.out.decode(), running.err.decode())


def run_forked(
    script: str, env: Mapping[str, str], folder: Path, *, timeout_s: float = 60.0
) -> Done:
    """Run `folder`/script.py with this content."""
    return ForkedScript(script, env, folder).wait(timeout_s)
