"""A program without the token that tries to join a job, and to record and replay connections.

    stranger.py try ADDRESS TIMES SECRET FOLDER   try so often; print what came of it, as JSON
    stranger.py node ADDRESS TIMES SECRET FOLDER  the same as a launcher, at that of node 0
    stranger.py idle ADDRESS TIMES                open so many connections, say nothing, and stay
    stranger.py jax ADDRESS SECRET                try to use JAX's service; print the same
    stranger.py relay ADDRESS TO FOLDER           pass connections on; record both directions

It uses the standard library and the frames of shoal, as anyone can.
"""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.runtime.client.hello import Identity, hello_of
from shoal.runtime.wire.connection import connect
from shoal.runtime.wire.frames import Frame, FrameError, pack_frame, split_address
from shoal.runtime.wire.proof import Introduction, introduce

Card = Mapping[str, object]  # a first frame
PATIENCE_S = 20.0
REFUSALS = ("the token is wrong", "has another token than")  # of a coordinator, of a launcher
IDENTITY = Identity(
    process=1,
    processes=2,
    host="stranger",
    token="",
    versions="",
    jax_service="",
    host_id="",
)
HELLO = hello_of(IDENTITY, "0" * 16, left_s=1.0)

NODE = {
    "do": "node", "node": 1, "nodes": 2, "processes": 1, "host": "stranger", "program": "job.py",
    "fingerprint": "", "devices": None, "versions": "", "highest_shown": -1, "token": "none",
    "restarts": "", "attempt": 0,
}  # fmt: skip


def said(frame: Frame) -> str:
    """Return the words of an answer."""
    return frame.body.decode() or str(frame.header.get("words", ""))


def limit() -> float:
    return time.monotonic() + PATIENCE_S


def guess(address: str, secret: str, card: Card = HELLO) -> str:
    """Try to join with a secret; return the answer."""
    channel = connect(split_address(address), limit(), max_body_bytes=1 << 16)
    with contextlib.closing(channel):
        refusal = introduce(channel, card, secret, limit())
        return "joined" if refusal is None else said(refusal)


def without_proof(address: str, card: Card) -> str:
    """Send a first frame as if the server asked for nothing."""
    channel = connect(split_address(address), limit(), max_body_bytes=1 << 16)
    with contextlib.closing(channel):
        channel.send(pack_frame(card), limit())
        return said(channel.receive(limit()))


def skip_proof(address: str, card: Card) -> str:
    """Answer the challenge with a request."""
    channel = connect(split_address(address), limit(), max_body_bytes=1 << 16)
    with contextlib.closing(channel):
        channel.send(Introduction("").first_frame(card), limit())
        channel.receive(limit())
        channel.send(pack_frame({"do": "members", "ticket": 1}), limit())
        return said(channel.receive(limit()))


def replay(address: str, recorded: bytes) -> str:
    """Send what a process of the job once sent; return the refusal in what comes back."""
    with socket.create_connection(split_address(address), PATIENCE_S) as sock:
        came = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(recorded)
            while data := sock.recv(1 << 16):
                came += data
    refusals = [words for words in REFUSALS if words.encode() in came]
    return refusals[0] if refusals and b'"proof"' not in came else repr(came)


def attack(
    address: str, times: int, secret: str, folder: Path, card: Card = HELLO
) -> dict[str, int]:
    """Try everything in turn; return how often each answer came."""
    sessions = [path.read_bytes() for path in sorted(folder.glob("*.sent"))]
    kinds = {
        "none": lambda _: without_proof(address, card),
        "guess": lambda at: guess(address, f"guess {at}", card),
        "empty": lambda _: guess(address, "", card),
        "another job's": lambda _: guess(address, secret, card),
        "skipped": lambda _: skip_proof(address, card),
        **(
            {"replayed": lambda at: replay(address, sessions[at % len(sessions)])}
            if sessions
            else {}
        ),
    }
    answers: collections.Counter[str] = collections.Counter()
    for at in range(times):
        kind = list(kinds)[at % len(kinds)]
        try:
            answer = kinds[kind](at // len(kinds))
        except (OSError, FrameError) as error:
            answer = f"{type(error).__name__}: {error}"
        answers[f"{kind}: {answer}"] += 1
    return dict(answers)


def reach_jax(service: str, secret: str) -> dict[str, str]:
    """Try to use JAX's service: as JAX's own client begins, and through its gate."""
    with socket.create_connection(split_address(service), PATIENCE_S) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        try:
            answer = "answered" if sock.recv(1) else "closed"
        except ConnectionError:
            answer = "closed"
    answers = {"as JAX's own client": answer}
    for name, guessed in (("a guess", "guess"), ("another job's token", secret)):
        answers[name] = guess(service, guessed, {"do": "jax"})
    return answers


def relay(address: str, to: str, folder: Path) -> None:
    """Pass connections on until killed; record each direction of each in a file."""

    def pass_on(source: socket.socket, sink: socket.socket, path: Path) -> None:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while data := source.recv(1 << 16):
                file.write(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    server = socket.create_server(split_address(address), backlog=64)
    print("listens", flush=True)
    for number in range(10_000):
        near = server.accept()[0]
        while True:  # the coordinator may start later
            try:
                far = socket.create_connection(split_address(to), PATIENCE_S)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        for ends, kind in (((near, far), "sent"), ((far, near), "answered")):
            path = folder / f"{number}.{kind}"
            threading.Thread(target=pass_on, args=(*ends, path), daemon=True).start()


if __name__ == "__main__":
    verb, address, *more = sys.argv[1:]
    if verb == "idle":
        silent = [socket.create_connection(split_address(address)) for _ in range(int(more[0]))]
        print(len(silent), "are open", flush=True)
        sys.stdin.read()
        time.sleep(10 * PATIENCE_S)
    elif verb == "jax":
        print(json.dumps(reach_jax(address, more[0])), flush=True)
    elif verb == "relay":
        relay(address, more[0], Path(more[1]))
    else:
        card = NODE if verb == "node" else HELLO
        print(json.dumps(attack(address, int(more[0]), more[1], Path(more[2]), card)), flush=True)
