"""The fingerprint of a call: everything that must be equal at a point, as one short text."""

from __future__ import annotations

from typing import NamedTuple

from shoal.hashing import call_digest

_SHOWN = 300  # characters of the lines that are sent; longer ones become a digest


class Fingerprint(NamedTuple):
    """The parts of a fingerprint."""

    operation: str
    site: str  # the call site; empty if a name declares all calls to be one
    digest: str  # of all lines, with their number; empty if `lines` holds them all
    lines: tuple[str, ...]  # the last one may be cut if there is a digest

    @classmethod
    def of(cls, operation: str, site: str, lines: tuple[str, ...]) -> Fingerprint:
        """Return the fingerprint of a call."""
        text = "\n".join(lines)
        if len(text) <= _SHOWN:
            return cls(operation, site, "", lines)
        digest = call_digest(text.encode(errors="surrogatepass")).hex()
        return cls(operation, site, f"{len(lines)} lines, {digest}", (text[:_SHOWN],))

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """Parse a text; None if it is not a fingerprint."""
        operation, site, digest, *lines = [*text.split("\n"), "", ""]
        return cls(operation, site, digest, tuple(lines[:-2])) if "\n" in text else None

    @property
    def text(self) -> str:
        """The fingerprint as text."""
        return "\n".join([self.operation, self.site, self.digest, *self.lines])
