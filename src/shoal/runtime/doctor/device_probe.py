"""Start the devices of this process in a child, so that a driver that hangs is only a finding.

The child joins no job: it sees the devices that this process would use.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from shoal.runtime.doctor.findings import CheckResult, Finding
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.startup.launchers import JobPlace
from shoal.runtime.system.child_process import Spawned
from shoal.runtime.system.service_commands import show_part

_REAP_S = 1.0
_ADVICE = (
    "is another program using the devices? Look at the driver's own tool (nvidia-smi, tpu-info) "
    "and at the system log; JAX_PLATFORMS=cpu leaves accelerators alone"
)


class DeviceProbe:
    """A child that starts the devices; begun early, because that takes seconds."""

    def __init__(self, place: JobPlace | None, timeout_s: float) -> None:
        wanted = (None, None) if place is None else (place.virtual_devices, place.local_device_ids)
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._child = Spawned(
            "shoal.runtime.doctor.device_probe",
            json.dumps(wanted),
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )

    def result(self) -> CheckResult:
        """Wait for the child until the deadline; return the devices."""
        try:
            return self._outcome()
        finally:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one in a driver cannot be reaped
                self._child.wait(_REAP_S)
            self._child.stdin.close()
            self._child.detach()

    def _outcome(self) -> CheckResult:
        output = self._output()
        if output is None:
            problem = f"the devices did not start within {self._timeout_s:g} s: the driver hangs"
        elif "error" in output:
            problem = f"the devices do not start: {output['error']}"
        else:
            return CheckResult(output)
        return CheckResult({}, (Finding("devices", problem, _ADVICE),))

    def _output(self) -> dict[str, Any] | None:
        """Return what the child printed; None: nothing by the deadline."""
        data, stdout = b"", self._child.stdout
        readable = select.poll()
        readable.register(stdout, select.POLLIN)
        while readable.poll(max(0.0, self._deadline - time.monotonic()) * 1000):
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                return self._parsed(data)
            data += part
        return None

    def _parsed(self, data: bytes) -> dict[str, Any]:
        for line in reversed(data.decode(errors="replace").splitlines()):
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
        return {"error": self._child.last_words() or "the child ended without output"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the devices, and print one line of JSON about them."""
    show_part("shoal-doctor")
    virtual_devices, device_ids = json.loads((arguments or sys.argv[1:])[0])
    try:
        jax_runtime.configure_devices(virtual_devices, device_ids)
        devices = jax_runtime.devices(None)
        facts = {
            "platform": devices[0].platform,
            "count": len(devices),
            "kind": devices[0].device_kind,
            "cpu_devices": jax_runtime.host_devices(),
        }
    except Exception as error:  # noqa: BLE001 - of JAX and of drivers: many types
        lines = str(error).splitlines() or [""]
        facts = {"error": f"{type(error).__name__}: {lines[0]}"}
    print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
