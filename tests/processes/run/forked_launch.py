"""`shoal run` as a fork of a process that has imported JAX; the processes of its job are its forks.

For tests of what a job does and how it ends, not of how its processes start: to import JAX takes
most of the processor time of a job that ends soon.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from shoal.launch import child, log_dir, processes, supervisor
from shoal.testing.forked import ForkOrder, fork_all
from shoal.testing.warden import MARK


class ForkedLaunch:
    """What a test needs of the `Popen` of a launcher."""

    stdin = None

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        outside: Mapping[str, str],
    ) -> None:
        """`outside`: the environment in which JAX was imported, equal for many launches."""
        packages = folder / "site-packages"  # the program of the fork is no part of the test's
        packages.mkdir(exist_ok=True)
        program = packages / Path(__file__).name
        if not program.exists():
            program.symlink_to(__file__)
        order = ForkOrder(
            [str(program), str(folder), json.dumps(dict(env)), *words],
            {**outside, MARK: env[MARK]},
            is_script=True,
        )
        (self._forked,) = fork_all([order])
        self.pid = self._forked.pid
        self.stdout, self.stderr = (
            io.TextIOWrapper(io.BufferedReader(stream), errors="surrogateescape")
            for stream in (self._forked.stdout, self._forked.stderr)
        )

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int:
        return self._forked.wait()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Read its output to the end, and wait for its end."""
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(read_to_end, (self.stdout, self.stderr), timeout=timeout)
        self.wait()
        return out, err


def read_to_end(stream: io.TextIOWrapper) -> str:
    with stream:
        return stream.read()


# ---- In the fork.


class Become(BaseException):
    """Unwinds the launcher's stack in a fork of it, which becomes a process of the job.

    What its interpreter does at its end depends on the outermost frames.
    """


def start(command: Sequence[str], *, env: Mapping[str, str], **_pipes: object) -> SimpleNamespace:
    """Do what `Popen` does for the launcher, in a fork of it."""
    (out, write_out), (err, write_err) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        forget_signals()
        leave_the_launcher(Become(list(command[2:]), dict(env), write_out, write_err))
    os.close(write_out)
    os.close(write_err)
    return SimpleNamespace(
        pid=pid,
        returncode=None,
        stdout=open(out, "rb"),
        stderr=open(err, "rb"),
    )


def forget_signals() -> None:
    """Let signals do what they do in a new interpreter."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_the_launcher(become: Become) -> None:
    """Unwind its stack; what it does at its end is for itself."""

    def unwind(_code: int) -> None:
        raise become

    supervisor.kill_all = lambda **_: None
    supervisor.traceback = SimpleNamespace(print_exc=lambda: None)
    supervisor.os = SimpleNamespace(_exit=unwind)
    log_dir.os = SimpleNamespace(path=os.path, close=os.close, unlink=lambda path: None)
    raise become


def be_a_process(env: dict[str, str], out: int, err: int) -> None:
    """Have the environment and the streams of one that the launcher has started."""
    import jax
    import numpy as np

    from shoal.runtime.jax_service.announcement import announce, way_to
    from shoal.runtime.jax_service.jax_runtime import serve_unmodified_scripts, when_devices_exist
    from shoal.runtime.system.progress_file import note_devices
    from shoal.runtime.system.service_commands import show_command, show_part

    os.environ.clear()
    os.environ.update(env)
    gc.collect()  # which closes what the launcher had open
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        raw = open(fd, "wb", 0, closefd=False)  # noqa: SIM115
        new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.excepthook = sys.__excepthook__  # not typer's
    show_part("python")
    show_command(sys.executable, child.__file__)
    if devices := env.get("JAX_NUM_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", int(devices))
    np.random.seed()
    serve_unmodified_scripts(announce, way_to)  # JAX's table of clusters is already imported
    when_devices_exist(note_devices)


if __name__ == "__main__":
    from shoal.cli.main import main

    del sys.path[0]
    processes.subprocess = SimpleNamespace(
        Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )
    folder, variables, *sys.argv[1:] = sys.argv[1:]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(json.loads(variables))
    arguments = []
    try:
        main()
    except Become as fork:
        arguments, *place = fork.args
        fork.__traceback__ = fork.__context__ = None  # what they hold is let go
    be_a_process(*place)
    child.run(arguments)
