"""A coordinator in a thread, under a clock that the test turns, and bare sockets for clients.

Nothing happens by itself: the test turns the clock, then `turn` lets the loop come round.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading

from shoal.runtime.rules.joining import PROTOCOL
from shoal.runtime.rules.liveness import Limits
from shoal.runtime.server.coordinator import Coordinator
from shoal.runtime.wire.frames import FrameReader, pack_frame, split_address
from shoal.runtime.wire.proof import CHALLENGE, Introduction

PATIENCE_S = 30.0  # a deadline of the test itself: reached only when something is broken
LIMITS = Limits(heartbeat_s=0.25, lost_after_s=1.0, silent_lost_after_s=4.0)
TOKEN = "the secret"


@contextlib.contextmanager
def no_descriptors():
    """Leave this process no free file descriptor, in the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))  # the lowest one
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Bare:
    """One connection that says and hears frames."""

    def __init__(self, address):
        self.socket = socket.create_connection(split_address(address), timeout=PATIENCE_S)
        self._reader = FrameReader(max_header_bytes=1 << 20, max_body_bytes=1 << 24)
        self.passed_by = []

    def say(self, verb, body=b"", *, token=None, **fields):
        """Send a frame; given a token, as the first frame, with its proof."""
        with contextlib.suppress(ConnectionError):  # it may hang up at the first bytes
            if token is None:
                self.socket.sendall(pack_frame({"do": verb, **fields}, body))
                return
            introduction = Introduction(token)
            self.socket.sendall(introduction.first_frame({"do": verb, **fields}))
            challenge = self._receive()
            if challenge is not None and challenge.header.get("is") == CHALLENGE:
                self.socket.sendall(introduction.answer(challenge))

    def receive(self):
        """Return the next frame after those that prove, None if the connection has ended."""
        while (frame := self._receive()) is not None:
            if frame.header.get("is") != "proof":
                break
        return frame

    def _receive(self):
        while (frame := self._reader.next()) is None:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._reader.feed(data)
        return frame

    def told(self):
        """Return the next frame as one dictionary; "body" is its text."""
        frame = self.passed_by.pop(0) if self.passed_by else self.receive()
        return None if frame is None else {**frame.header, "body": frame.body.decode()}

    def close(self):
        self.socket.close()


class Process(Bare):
    """The connection of a process that says HELLO."""

    def __init__(self, address, process, processes, *, host_id="host", **more):
        super().__init__(address)
        self.process = process
        self.incarnation = f"run {process}"
        hello = {
            "protocol": PROTOCOL, "token": TOKEN, "process": process, "processes": processes,
            "host": f"host{process}", "pid": 100 + process, "incarnation": self.incarnation,
            "versions": "", "jax_service": "", "timeout_s": 10, "host_id": host_id,
        }  # fmt: skip
        self.say("hello", **{**hello, **more})

    def beat(self, **more):
        """Beat, and wait for the answer; what comes before it is kept for `told`."""
        self.say("beat", **{**BEAT, **more})
        while (frame := self.receive()).header != {"is": "beat"}:
            self.passed_by.append(frame)


BEAT = {"step": 3, "place": "'x' (a.py:1)", "since_s": 0.5, "step_s": 0.1, "memory_bytes": 7}


class BareCoordinator:
    """A coordinator for jobs of some processes."""

    def __init__(self, processes, limits=LIMITS):
        self.processes = processes
        self.news = []  # what its launcher is told
        self.now = 1000.0
        server = socket.create_server(("127.0.0.1", 0))
        self._coordinator = Coordinator(
            server, processes, token=TOKEN, limits=limits, clock=lambda: self.now,
            on_news=lambda **news: self.news.append(news),
        )  # fmt: skip
        self.address = self._coordinator.address
        self._leash, self._hand = os.pipe()
        self._thread = threading.Thread(
            target=self._coordinator.serve, kwargs={"until_closed": self._leash}, daemon=True
        )
        self._thread.start()
        self.clients = []
        self.observer = self.stranger("observe", token=TOKEN)
        assert self.observer.told() == {"is": "welcome", "processes": processes, "body": ""}
        self._tickets = 0

    def stranger(self, verb=None, body=b"", **fields):
        client = self._take(Bare(self.address))
        if verb is not None:
            client.say(verb, body, **fields)
        return client

    def process(self, process, **more):
        return self._take(Process(self.address, process, self.processes, **more))

    def job(self, **more):
        """Return the connections of a job whose processes are all here."""
        job = [self.process(process, **more) for process in range(self.processes)]
        assert {process.told()["is"] for process in job} == {"welcome"}
        return job

    def lane(self, process):
        return self.stranger(
            "lane", token=TOKEN, process=process.process, incarnation=process.incarnation
        )

    def host_agent(self, process, **more):
        known = {"token": TOKEN, "process": process.process, "incarnation": process.incarnation}
        return self.stranger("keep", **{**known, **more})

    def service(self, name="JAX's service"):
        service = self.stranger("serve", token=TOKEN, name=name, host="far", pid=9)
        assert service.told() == {
            "is": "welcome", "heartbeat_s": 0.25, "lost_after_s": 1.0, "body": ""
        }  # fmt: skip
        return service

    def ask(self, verb, **fields):
        """Ask as an observer."""
        self._tickets += 1
        self.observer.say(verb, ticket=self._tickets, **fields)
        frame = self.observer.receive()
        assert frame.header == {"ticket": self._tickets, "is": verb}
        return json.loads(frame.body)

    def states(self):
        return [member[2] for member in self.ask("members")["members"]]

    def turn(self, seconds=0.0, *, beating=()):
        """Turn the clock, a tick at a time, so that the loop counts all of it."""
        while seconds > 0:
            self.now += min(seconds, LIMITS.tick_s)
            seconds -= LIMITS.tick_s
            for process in beating:
                process.beat()
            self.turn()
        for _ in range(2):  # the second is answered when the loop has come round
            self.ask("members")

    def until_states(self, *wanted):
        """Come round until the loop has read what was sent on other connections."""
        for _ in range(10_000):
            states = self.states()
            if states == list(wanted):
                return
        raise AssertionError(f"{states}, not {wanted}")

    def turn_until(self, *wanted, beating):
        """Turn the clock until that is so, for no longer than any silence may last."""
        for _ in range(20):
            if self.states() == list(wanted):
                return
            self.turn(LIMITS.tick_s, beating=beating)
        raise AssertionError(f"{self.states()}, not {wanted}")

    def end(self):
        for client in self.clients:
            client.close()
        os.close(self._hand)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        os.close(self._leash)

    def _take(self, client):
        self.clients.append(client)
        return client
