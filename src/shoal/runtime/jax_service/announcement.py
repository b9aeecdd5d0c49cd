"""A process tells its launcher that it joins a job of JAX, which shoal does not see.

`jax.distributed.initialize` speaks to JAX's service alone. The launcher learns here that the
script did not forget to join.
"""

from __future__ import annotations

import contextlib
import time

from shoal import settings
from shoal.errors import UsageError
from shoal.runtime.wire.connection import connect
from shoal.runtime.wire.frames import FrameError, pack_frame, split_address

_ANSWER_S = 2.0


def announce() -> None:
    """Tell the meeting place of the launcher, if there is one; wait until it has heard.

    Nothing depends on it but a sentence of the launcher's: a meeting place that is gone or does
    not answer is no error.
    """
    address, process = settings.text("SHOAL_COORDINATOR"), settings.text("SHOAL_PROCESS_ID")
    if not (address and process.isdecimal()):
        return
    limit = time.monotonic() + _ANSWER_S
    word = {"do": "joined", "token": settings.text("SHOAL_TOKEN"), "process": int(process)}
    with contextlib.suppress(OSError, FrameError, UsageError):
        channel = connect(split_address(address), limit, max_body_bytes=1 << 16)
        try:
            channel.send(pack_frame(word), limit)
            channel.receive(limit)
        finally:
            channel.close()
