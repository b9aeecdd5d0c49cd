"""What a script that joins a job with JAX alone, which shoal does not see, needs of shoal.

`jax.distributed.initialize` talks only to JAX's service. A notification tells the launcher that the
script did not forget to join, and a proxy gets the script through the gate of that service.
"""

from __future__ import annotations

import contextlib
import os
import time

from shoal import settings
from shoal.errors import InitializeError, UsageError
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.jax_service.host_agent_link import (
    PROXIES,
    HostAgent,
    HostAgentError,
    without_proxy,
)
from shoal.runtime.wire.connection import connect
from shoal.runtime.wire.frames import FrameError, split_address
from shoal.runtime.wire.proof import introduce
from shoal.runtime.wire.socket_calls import LinkError
from shoal.runtime.wire.sockets import is_loopback

_ANSWER_S = 2.0


def way_to(jax_service: str) -> str:
    """Return the address at which JAX's client of this process reaches the launcher's service.

    On the loopback the gate is open, and for mutual TLS. Else it asks for the token, which a proxy
    of this process proves; the proxy ends with the process.

    Raises:
      InitializeError: the proxy cannot be started, or cannot reach the service.
    """
    needs_direct = jax_runtime.certificates().need_direct
    if needs_direct or is_loopback(split_address(jax_service)[0]):
        return jax_service
    limit = time.monotonic() + settings.seconds("SHOAL_INITIALIZE_TIMEOUT_S")
    proxy = HostAgent(settings.text("SHOAL_JOB"))
    try:
        near = proxy.begin_proxy(settings.text("SHOAL_TOKEN"), jax_service, limit)
    except HostAgentError as error:
        problem = f"jax.distributed.initialize: JAX's service at {jax_service} cannot be reached"
        raise InitializeError(f"{problem}: {error}") from None
    if any(os.environ.get(name) for name in PROXIES):  # JAX warns of variables about proxies
        os.environ.update(without_proxy(split_address(near)[0], os.environ))
    return near


def announce() -> None:
    """Notify the launcher's coordinator, if there is one, and wait for its acknowledgement.

    Only one message of the launcher depends on it, so a coordinator that is gone or does not
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
