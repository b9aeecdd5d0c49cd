"""What a script that joins a job with JAX alone, which shoal does not see, needs of shoal.

`jax.distributed.initialize` talks only to JAX's service. A notification tells the launcher that the
script did not forget to join, and a splice gets the script through the door of that service.
"""

from __future__ import annotations

import contextlib
import os
import time

from shoal import settings
from shoal.errors import InitializeError, UsageError
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.jax_service.keeper_link import PROXIES, HostKeeper, KeeperError, without_proxy
from shoal.runtime.wire.connection import connect
from shoal.runtime.wire.frames import FrameError, split_address
from shoal.runtime.wire.proof import introduce
from shoal.runtime.wire.socket_calls import LinkError
from shoal.runtime.wire.sockets import is_loopback

_ANSWER_S = 2.0


def way_to(jax_service: str) -> str:
    """Return the address at which JAX's client of this process reaches the launcher's service.

    On the loopback the door is open, and for mutual TLS. Else it asks for the token, which a splice
    of this process proves: it ends with it.

    Raises:
      InitializeError: the splice cannot be started, or cannot reach the service.
    """
    needs_direct = jax_runtime.certificates().need_direct
    if needs_direct or is_loopback(split_address(jax_service)[0]):
        return jax_service
    limit = time.monotonic() + settings.seconds("SHOAL_INITIALIZE_TIMEOUT_S")
    splice = HostKeeper(settings.text("SHOAL_JOB"))
    try:
        near = splice.begin_splice(settings.text("SHOAL_TOKEN"), jax_service, limit)
    except KeeperError as error:
        words = f"jax.distributed.initialize: JAX's service at {jax_service} cannot be reached"
        raise InitializeError(f"{words}: {error}") from None
    if any(os.environ.get(name) for name in PROXIES):  # JAX warns of variables about proxies
        os.environ.update(without_proxy(split_address(near)[0], os.environ))
    return near


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
    with contextlib.suppress(LinkError, FrameError, UsageError):
        channel = connect(split_address(address), limit, max_body_bytes=1 << 16)
        try:
            if introduce(channel, card, settings.text("SHOAL_TOKEN"), limit) is None:
                channel.receive(limit)
        finally:
            channel.close()
