"""The name of this host, by which JAX connects the CPU devices of processes on several hosts."""

from __future__ import annotations

import socket

ADVICE = "CPU devices of processes on several hosts connect by it: add it to /etc/hosts"


def unresolved(name: str, why: str) -> str:
    """Return the words about a host whose own name does not resolve."""
    return f"this host's own name {name!r} does not resolve: {why}"


def is_own(name: str) -> bool:
    """Return whether this is the name of this host, in full or without its domain."""
    own = socket.gethostname().lower()
    return name.lower() in (own, own.partition(".")[0])


def why_unresolved(name: str = "") -> str:
    """Return the same words about this host; "" if its name resolves. The resolver may be slow.

    Args:
      name: one for which `is_own` is true; "": its full name.
    """
    name = name or socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        return unresolved(name, getattr(error, "strerror", None) or str(error))
    return ""
