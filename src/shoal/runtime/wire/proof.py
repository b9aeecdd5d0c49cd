"""Proof that both ends of a new connection have one secret, which these frames do not contain.

::

    client → server   its first frame, with a nonce
    server → client   challenge: a nonce; or a refusal
    client → server   its proof
    server → client   its proof; or a refusal

A proof is the HMAC-SHA256 (RFC 2104), under the secret, of the role, the server's nonce and the
client's first frame, which has the client's nonce. Nonces are random and used once, so a recorded
connection proves nothing; roles differ, so that a proof cannot be sent back; and who passes proofs
on cannot put another first frame before them. A stranger gets no proof of the server, with which it
could try secrets at home. The frames after these are neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import Frame, FrameError, pack_frame, text_field

__all__ = [
    "CHALLENGE",
    "Introduction",
    "derived",
    "introduce",
    "is_proof",
    "new_nonce",
    "proof",
]

CHALLENGE = "challenge"


def new_nonce() -> str:
    """Return a random text that is used once."""
    return os.urandom(16).hex()


def proof(secret: str, role: str, server_nonce: str, first: Mapping[str, Any]) -> str:
    """Return the proof of an end of a connection.

    Args:
      role: "server" or "client".
      first: the client's first frame.
    """
    return derived(secret, f"{role} {server_nonce} {json.dumps(dict(first), sort_keys=True)}")


def derived(secret: str, words: str) -> str:
    """Return a text that only a holder of the secret can compute, and that does not reveal it."""
    # surrogates, of an environment that is not UTF-8, must not raise
    key, message = (text.encode(errors="surrogatepass") for text in (secret, f"shoal {words}"))
    return hmac.digest(key, message, "sha256").hex()


def is_proof(
    given: object, secret: str, role: str, server_nonce: str, first: Mapping[str, Any]
) -> bool:
    """Return whether a proof is right, in a time that does not depend on it."""
    if not isinstance(given, str):
        return False
    try:
        wanted = proof(secret, role, server_nonce, first)
    except RecursionError:  # lists within lists, which the parser just managed to read
        return False
    return hmac.compare_digest(given.encode(errors="surrogatepass"), wanted.encode())


class Introduction:
    """The client's side, frame by frame."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._server_nonce = ""
        self._first: dict[str, Any] = {}

    def first_frame(self, card: Mapping[str, Any]) -> bytes:
        """Return the first frame."""
        self._first = {**card, "nonce": new_nonce()}
        return pack_frame(self._first)

    def answer(self, challenge: Frame) -> bytes:
        """Return the frame with this end's proof.

        Raises:
          FrameError: it is no challenge.
        """
        self._server_nonce = text_field(challenge.header, "nonce")
        own = proof(self._secret, "client", self._server_nonce, self._first)
        return pack_frame({"do": "proof", "proof": own})

    def check(self, answer: Frame) -> None:
        """Check the server's proof.

        Raises:
          FrameError: it is wrong.
        """
        given = answer.header.get("proof")
        if not is_proof(
            given, self._secret, role="server", server_nonce=self._server_nonce, first=self._first
        ):
            raise FrameError("it does not know the token of this job")


def introduce(channel: Channel, card: Mapping[str, Any], secret: str, limit: float) -> Frame | None:
    """Send the first frame on a new connection; return once both ends have proved themselves.

    Returns:
      None; or the server's refusal.

    Raises:
      LinkError: the connection is gone; as LinkTimeoutError: no answer by `limit`.
      FrameError: what answers is no server of shoal, or does not have the secret.
    """
    introduction = Introduction(secret)
    channel.send(introduction.first_frame(card), limit)
    answer = channel.receive(limit)
    if answer.header.get("is") == CHALLENGE:
        channel.send(introduction.answer(answer), limit)
        answer = channel.receive(limit)
    if answer.header.get("is") != "proof":
        return answer
    introduction.check(answer)
    return None
