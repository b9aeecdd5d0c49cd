"""Notify the launcher that a script joins a job with JAX alone, which shoal does not see.

`jax.distributed.initialize` talks only to JAX's service. The notification tells the launcher that
the script did not forget to join.
"""

from __future__ import annotations

import contextlib
import time

from shoal import settings
from shoal.errors import UsageError
from shoal.runtime.wire.connection import connect
from shoal.runtime.wire.frames import FrameError, split_address
from shoal.runtime.wire.proof import introduce

_ANSWER_S = 2.0


def announce() -> None:
    """Notify the launcher's meeting place, if there is one; wait for its acknowledgement.

    Only one message of the launcher depends on it, so a meeting place that is gone or does not
    answer is no error.
    """
    address, process = settings.text("SHOAL_COORDINATOR"), settings.text("SHOAL_PROCESS_ID")
    if not (address and process.isdecimal()):
        return
    limit = time.monotonic() + _ANSWER_S
    card = {"do": "joined", "process": int(process)}
    with contextlib.suppress(OSError, FrameError, UsageError):
        channel = connect(split_address(address), limit, max_body_bytes=1 << 16)
        try:
            if introduce(channel, card, settings.text("SHOAL_TOKEN"), limit) is None:
                channel.receive(limit)
        finally:
            channel.close()
