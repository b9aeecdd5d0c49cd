"""Processes run by a bench: their output, their ends, and their pauses.

One thread reads all pipes, so that no process ever blocks on its output, and one thread per process
waits for its end. All waits share one condition.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple, cast

from shoal.testing.forked import Forked

__all__ = ["Pause", "Pump", "Running"]


class Pause(NamedTuple):
    """A process held at a named point."""

    point: str
    process: int | None
    connection: socket.socket


class Running:
    """One process, and its output so far."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes] | Forked) -> None:
        self.name, self.popen = name, popen
        self.began = time.monotonic()
        self.out, self.err = bytearray(), bytearray()
        self.code: int | None = None  # once it has ended and its output was read
        self.ended_s = 0.0  # seconds after its start

    def tail(self, lines: int) -> str:
        """Return its status and last output."""
        state = "runs" if self.code is None else f"ended with code {self.code}"
        output = (self.out + self.err).decode(errors="replace").splitlines()[-lines:]
        return "\n".join(
            [f"{self.name} (pid {self.popen.pid}) {state}", *(f"  | {t}" for t in output)]
        )


class Pump:
    """Reads outputs and records ends; see the module. `changed` is notified of any news."""

    def __init__(self, pauses_at: str = "") -> None:
        """`pauses_at`: path of a new Unix socket, to which paused processes connect."""
        self.changed = threading.Condition()
        self.pauses: list[Pause] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._ended: list[Running] = []
        self._is_closed = False
        self._selector.register(self._woken, selectors.EVENT_READ, self._note_ends)
        if pauses_at:
            self._listen(pauses_at)
        self._thread = threading.Thread(target=self._run, name="shoal bench", daemon=True)
        self._thread.start()

    def follow(self, running: Running) -> None:
        """Read a process's output, and record its end."""
        for stream, output in (
            (running.popen.stdout, running.out),
            (running.popen.stderr, running.err),
        ):
            pipe = cast("IO[bytes]", stream)
            os.set_blocking(pipe.fileno(), False)
            with self.changed:
                self._selector.register(
                    pipe,
                    selectors.EVENT_READ,
                    lambda pipe=pipe, output=output: self._read(pipe, output),
                )
        self._wake.send(b".")
        threading.Thread(target=self._await_end, args=(running,), daemon=True).start()

    def close(self) -> None:
        """Stop reading, and close everything. All processes must have ended."""
        self._is_closed = True
        self._wake.send(b".")
        self._thread.join()
        for pause in self.pauses:
            pause.connection.close()
        for key in list(self._selector.get_map().values()):
            cast("Any", key.fileobj).close()
        self._selector.close()
        self._wake.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                with self.changed:
                    cast("Callable[[], None]", key.data)()
                    self.changed.notify_all()

    def _read(self, pipe: IO[bytes], output: bytearray) -> bool:
        """Read what is available; return whether there may be more."""
        if pipe.closed:  # already read to its end
            return False
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
        output += data
        return bool(data)

    def _await_end(self, running: Running) -> None:
        running.popen.wait()
        running.ended_s = time.monotonic() - running.began
        with self.changed:
            self._ended.append(running)
        with contextlib.suppress(OSError):  # closed
            self._wake.send(b".")

    def _note_ends(self) -> None:
        self._woken.recv(4096)
        while self._ended:
            running = self._ended.pop()
            # A grandchild may keep the pipe open for ever: take the available output now.
            for pipe, output in (
                (running.popen.stdout, running.out),
                (running.popen.stderr, running.err),
            ):
                while pipe is not None and not pipe.closed and self._read(pipe, output):
                    pass
            running.code = running.popen.returncode

    def _listen(self, path: str) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(64)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        output = bytearray()

        def read_message() -> None:
            data = connection.recv(4096)
            output.extend(data)
            if data and not output.endswith(b"\n"):
                return
            self._selector.unregister(connection)
            if not data:
                connection.close()
                return
            report = json.loads(output)
            self.pauses.append(Pause(report["point"], report["process"], connection))

        self._selector.register(connection, selectors.EVENT_READ, read_message)
