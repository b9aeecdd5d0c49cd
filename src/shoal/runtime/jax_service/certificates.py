"""Mutual TLS of JAX's coordination service, which JAX 0.12 has: its files, tried before JAX does.

JAX's client ends its process in C++ if a certificate is missing, is not trusted or names another
host. So Python's `ssl` connects first, with the same files, and what it finds is an exception.

The client verifies the host by the address it connects to. The proxy of a host is 127.0.0.1, which
certificates do not name: without `jax_mtls_peer_uri_prefix` the client connects directly, and the
loss of the service's host ends the processes again (docs/decisions/host-agent.md).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import InitializeError
from shoal.runtime.wire.frames import split_address

if TYPE_CHECKING:
    import ssl

CERT, KEY, CA = FILES = ("jax_mtls_cert_file", "jax_mtls_key_file", "jax_mtls_ca_file")
PREFIX = "jax_mtls_peer_uri_prefix"
VERIFY = "jax_distributed_verify_secure_credentials"
OPTIONS = (*FILES, PREFIX, VERIFY)
# Argument of `jax.distributed.initialize` → option of `jax.config`.
MUTUAL_TLS = {name.removeprefix("jax_").removeprefix("distributed_"): name for name in OPTIONS}
NO_SHIELD = (
    "JAX's clients connect directly to JAX's coordination service, because its certificate names "
    f"that host: if the host is lost, JAX ends all processes. To avoid this, set {PREFIX}"
)
_TRUE = ("y", "yes", "t", "true", "on", "1")  # as JAX reads its variables


class Certificates(NamedTuple):
    """JAX's options for mutual TLS."""

    options: Mapping[str, str]  # those that are set, VERIFY as "1"
    is_supported: bool = True  # by this JAX, as far as is known

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Certificates:
        """Return the options that the variables of a process give."""
        given = {name: environ.get(name.upper(), "") for name in OPTIONS}
        given[VERIFY] = "1" if given[VERIFY].lower() in _TRUE else ""
        return cls({name: value for name, value in given.items() if value})

    @property
    def are_given(self) -> bool:
        """Whether JAX uses mutual TLS."""
        return any(name in self.options for name in FILES)

    @property
    def need_direct(self) -> bool:
        """Whether JAX's client must connect to the service's own address."""
        return self.are_given and PREFIX not in self.options

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which another process of JAX has the same options."""
        return {name.upper(): value for name, value in self.options.items()}

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of JAX's service and client."""
        return {
            name: value == "1" if option == VERIFY else value
            for name, option in MUTUAL_TLS.items()
            if (value := self.options.get(option))
        }

    def problem(self) -> str:
        """Return why these options cannot be used on this host; "" if they can."""
        if self.options and not self.is_supported:
            return (
                "this JAX has no mutual TLS, for which the environment asks: install JAX 0.12 or "
                f"newer, or unset {', '.join(self.variables)}"
            )
        lacking = [name for name in FILES if name not in self.options]
        if len(lacking) == len(FILES):
            given = " and ".join(self.options)
            return f"{given} is set, but {CERT}, {KEY} and {CA} are not" if given else ""
        if lacking:
            return f"mutual TLS also needs {' and '.join(lacking)}"
        try:
            self._context()
        except (OSError, ValueError) as error:  # those of `ssl` too
            return _words(error)
        return ""

    def check(self, jax_service: str, limit: float) -> None:
        """Check that JAX's client of this process can connect.

        Raises:
          InitializeError: it cannot, and would end this process.
        """
        if not self.options:
            return
        problem = self.problem() or self._try(jax_service, limit)
        if problem:
            raise InitializeError(
                f"JAX's service at {jax_service} cannot be joined by TLS: {problem}"
            )

    def _context(self) -> ssl.SSLContext:
        """Raises:
        OSError: a file cannot be read, or holds something else.
        """
        import ssl  # which few jobs need

        for name in FILES:
            try:
                os.close(os.open(self.options[name], os.O_RDONLY))
            except OSError as error:
                raise OSError(f"{name}={self.options[name]}: {error.strerror}") from None
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.options[CA])
        # Without a password: an encrypted key is an error, not a question at the terminal.
        context.load_cert_chain(self.options[CERT], self.options[KEY], password="")
        # As JAX, which takes what OpenSSL 3 took, and each certificate of the file as an anchor.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False  # see `_misnamed`
        context.set_alpn_protocols(["h2"])
        return context

    def _misnamed(self, names: Iterable[tuple[str, str]], host: str) -> str:
        """Return why the names of the service's certificate do not fit; "" if one does.

        As gRPC compares them, which takes an address among the names of hosts, too.
        """
        prefix = self.options.get(PREFIX, "")
        if prefix:
            fits = any(kind == "URI" and name.startswith(prefix) for kind, name in names)
            return "" if fits else f"no URI of its certificate begins with {PREFIX}={prefix}"
        hosts = [name for kind, name in names if kind in ("DNS", "IP Address")]
        if any(_is_name_of(name, host) for name in hosts):
            return ""
        return f"its certificate is for {', '.join(hosts) or 'no host'}, not for {host}"

    def _try(self, jax_service: str, limit: float) -> str:
        """Connect as JAX's client would; return why it could not, or ""."""
        host, port = split_address(jax_service)
        left_s = max(0.001, limit - time.monotonic())
        try:
            context = self._context()
            with (
                socket.create_connection((host, port), timeout=left_s) as sock,
                context.wrap_socket(sock, server_hostname=host) as tls,
            ):
                certificate: Mapping[str, Any] = tls.getpeercert() or {}
                problem = self._misnamed(certificate.get("subjectAltName", ()), host)
                if problem:
                    return problem
                # In TLS 1.3 a refusal of this end's certificate comes after the handshake.
                if not tls.recv(1):
                    return f"the service refused the certificate {CERT}={self.options[CERT]}"
        except (OSError, ValueError) as error:
            return _words(error)
        return ""


def _is_name_of(name: str, host: str) -> bool:
    """Return whether a name of a certificate is the host's; `*.` stands for one label."""
    name, host = name.lower(), host.lower().removesuffix(".")
    _, dot, domain = host.partition(".")
    return name == host or (bool(dot) and name == f"*.{domain}")


def _words(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or error)
