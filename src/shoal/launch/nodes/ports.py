"""The ports of node 0 that all hosts must reach: four in a row, so that a firewall can open them.

::

    P      the launchers of all nodes
    P + 1  the meeting place
    P + 2  JAX's service
    P + 3  torch's store (MASTER_PORT), where the program starts it
"""

from __future__ import annotations

import errno
import os
import socket

from shoal.errors import InitializeError
from shoal.runtime.doctor.reachability import bind_error, resolve
from shoal.runtime.wire.frames import address_text
from shoal.runtime.wire.sockets import bind_host

NUM_PORTS = 4
_RESOLVER_S = 1.0


def open_ports(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first port; the others are free, too.

    Args:
      host: by which other hosts reach this one.

    Raises:
      InitializeError: one of them cannot be bound.
    """
    bind = bind_host(host)
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        server = socket.create_server((bind, port), family=family, backlog=4096)
    except OSError as error:
        raise InitializeError(_refusal(host, port, port, error.errno or 0)) from None
    for other in range(port + 1, port + NUM_PORTS):
        if number := bind_error(bind, other):
            server.close()
            raise InitializeError(_refusal(host, port, other, number))
    return server


def strange_address(host: str) -> str:
    """Return a note if the name by which others reach this host seems to be another host's."""
    found = resolve(host, _RESOLVER_S)
    if not found.addresses:
        return f"the name {host!r} does not resolve on this host: {found.error}"
    if bind_error(found.addresses[0], 0) != errno.EADDRNOTAVAIL:
        return ""
    named = host if host == found.addresses[0] else f"{host} ({found.addresses[0]})"
    return f"{named} is not an address of this host: is --node-rank 0 meant for another one?"


def _refusal(host: str, port: int, taken: int, number: int) -> str:
    where = address_text(bind_host(host), taken)
    words = f"--coordinator {address_text(host, port)}: cannot listen at {where}: "
    words += os.strerror(number)
    if number == errno.EADDRINUSE:
        words += (
            f"\nnode 0 uses the ports {port} to {port + NUM_PORTS - 1}: give another port on all "
            "nodes, or end what listens there (another launcher with --node-rank 0?)"
        )
    return words
