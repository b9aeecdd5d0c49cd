"""Socket calls that distinguish the socket's own errors from exceptions of signal handlers.

Python runs signal handlers inside of calls that block, and lets their exceptions leave the call: a
program's time-out by SIGALRM raises TimeoutError out of `recv`, and so does the socket. So errors
of a socket are raised as classes of their own, and nothing else counts as a failed connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LinkError(ConnectionError):
    """A connection failed, or does not come up."""


class LinkTimeoutError(LinkError, TimeoutError):
    """The time limit of a call is over."""


def encoded_name(host: str) -> bytes:
    """Return the name of a host as a resolver takes it; Python's own encoder is not written in C.

    Raises:
      LinkError: it has an empty label, or one that is too long.
    """
    try:
        return host.encode("idna")
    except UnicodeError:
        raise LinkError(f"{host!r} is not a valid name") from None


def socket_call(operation: Callable[..., T], *arguments: Any) -> T:
    """Call a function of a socket, which is written in C.

    Any other exception than the function's own leaves as it is. One that a signal handler raised
    has the handler's frame below this one in its traceback, where an error of C has none. One of
    `PyThreadState_SetAsyncExc`, raised in this frame, has no arguments.

    Raises:
      LinkError: the function raised OSError or ValueError.
    """
    try:
        return operation(*arguments)
    except (OSError, ValueError) as error:
        trace = error.__traceback__
        if not error.args or (trace is not None and trace.tb_next is not None):
            raise
        is_late = isinstance(error, TimeoutError) and error.errno is None  # else ETIMEDOUT
        raise (LinkTimeoutError if is_late else LinkError)(*error.args) from None
