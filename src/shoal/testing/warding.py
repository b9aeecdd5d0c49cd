"""Client of the warden: see `warden`."""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import subprocess
import sys
import tempfile
from typing import IO, cast

from shoal.errors import DeadlineError, UsageError
from shoal.runtime.system.child_process import own_environment
from shoal.testing import warden
from shoal.testing.network import why_no_cuts

__all__ = ["Warden"]

_START_S = 30.0
_END_S = 20.0


class Warden:
    """A warden that runs; `places` network namespaces with it."""

    def __init__(self, places: int) -> None:
        """Raises:
        UsageError: a network is required but impossible here; says why.
        """
        if places:
            why = why_no_cuts()
            if why:
                raise UsageError(f"processes cannot be disconnected here: {why}")
        self.mark = secrets.token_hex(8)
        if places:
            module = ["-P", "-m", "shoal.testing.warden"]
            command = [sys.executable, *module, self.mark, "--network", str(places)]
        else:  # it uses only the standard library, and starts in a few milliseconds
            command = [sys.executable, "-I", "-S", warden.__file__, self.mark]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._popen = subprocess.Popen(
            command,
            env=own_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C reaches only the test, whose end ends the warden
        )
        answer = self._line()
        self.namespaces: list[list[str]] = json.loads(answer) if places else []

    def order(self, order: str, place: int) -> None:
        """Cut or mend the network; returns when done."""
        if not self.namespaces:
            raise UsageError(f"{order}: this cluster has no network; Cluster(network=True) has one")
        pipe = cast("IO[bytes]", self._popen.stdin)
        pipe.write(f"{order} {place}\n".encode())
        pipe.flush()
        self._line()

    def close(self) -> None:
        """End all processes that carry the mark, and the network. Idempotent."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._popen.wait(_END_S)
        self._errors.close()

    def _line(self) -> str:
        pipe = cast("IO[bytes]", self._popen.stdout)
        readable = select.poll()
        readable.register(pipe, select.POLLIN)
        line = pipe.readline().decode() if readable.poll(_START_S * 1000) else ""
        if not line:
            self._errors.seek(0)
            answer = self._errors.read().decode(errors="replace").strip().splitlines()
            self.close()
            raise DeadlineError(f"the test bench's warden does not respond: {(answer or [''])[-1]}")
        return line
