"""What a barrier, joining and signs of life cost the coordinator as the job grows.

The processes are simulated: one program holds all their connections, says their HELLOs, and lets
them arrive in turn; the coordinator is the real one, in its own process. `server` is the
processor time that the coordinator used for a barrier, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from argparse import RawDescriptionHelpFormatter as Raw
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows import print_row

from shoal.runtime.client.hello import Identity, hello_of
from shoal.runtime.rules.point import MAX_PAYLOAD_BYTES, Point
from shoal.runtime.wire.frames import (
    MAX_HEADER_BYTES,
    FrameReader,
    pack_frame,
    split_address,
)
from shoal.runtime.wire.proof import Introduction

SIZES = (10, 100, 1_000, 10_000)
PER_HOST = 8
BARRIERS, ROUNDS, BEATS = 4, 5, 3
HEARTBEAT_S = 2.0
BYTES_AT_ONCE = 1 << 16
EXAMPLES = """\
the figures of 2,000 and 10,000 processes, on a machine that does nothing else:

  python benchmarks/control_scale.py 2000 10000

This program and the coordinator each open two files for each process: the limit of open files
(`ulimit -Hn`) must be 20,100 for 10,000. Where it is less the job is smaller, and its row says so.
"""


def hello(index: int, count: int) -> dict[str, Any]:
    """Return the HELLO of a process."""
    host = f"host{index // PER_HOST}"
    card = Identity(
        process=index,
        processes=count,
        host=host,
        token="",
        versions="",
        jax_service="",
        host_id=host,
    )
    return hello_of(card, str(index), left_s=300.0)


def lane(index: int) -> dict[str, Any]:
    """Return the first frame of a connection for the calls of a process."""
    return {"do": "lane", "process": index, "incarnation": str(index)}


def arrival(step: int) -> dict[str, Any]:
    """Return the header of an arrival."""
    point = Point("b", operation="barrier", site="train.py:31 (main)")
    return {"step": step, "do": "arrive", "timeout_s": 60.0, "point": point}


def beat(step: int, index: int) -> dict[str, Any]:
    """Return the header of a sign of life."""
    return {
        "do": "beat", "step": step, "place": "'b' (train.py:31 (main))", "since_s": 0.5 + index,
        "step_s": 0.25, "wait_s": 0.125, "memory_bytes": 1_000_000 + index,
    }  # fmt: skip


class Crowd:
    """All connections of a job: each process has one for its life and one for its calls."""

    def __init__(self, address: str, count: int) -> None:
        self._address = split_address(address)
        self._readers: dict[int, tuple[socket.socket, FrameReader]] = {}
        self._poll = select.epoll()
        self.count = count
        self.sent_bytes = self.received_bytes = self.received = 0
        self.lives = [self._connect(index // PER_HOST) for index in range(count)]
        self.lanes: list[socket.socket] = []

    def join(self) -> None:
        """Say every HELLO, be welcome, and open the connections for the calls."""
        self._introduce(self.lives, [hello(index, self.count) for index in range(self.count)])
        self._await_answers(2 * self.count, self.lives)  # a proof, and a welcome
        self.lanes = [self._connect(index // PER_HOST) for index in range(self.count)]
        self._introduce(self.lanes, [lane(index) for index in range(self.count)])
        self._await_answers(self.count, self.lanes)

    def barrier(self, step: int) -> None:
        """Let all arrive, and all be answered."""
        frame = pack_frame(arrival(step))
        for sock in self.lanes:
            self._send(sock, frame)
        self._await_answers(self.count, self.lanes)

    def beat(self, step: int) -> None:
        """Let all give a sign of life, and all be answered."""
        sent = [pack_frame(beat(step, index)) for index in range(self.count)]
        self._send_each(sent)
        self._await_answers(self.count, self.lives)

    def leave(self) -> None:
        """Say goodbye."""
        for sock in self.lives:
            self._send(sock, pack_frame({"do": "bye"}))
        for sock in [*self.lanes, *self.lives]:
            sock.close()

    def _connect(self, host: int) -> socket.socket:
        """Connect from the address of the process's host: one address would run out of ports."""
        source = (f"127.{1 + host // 62500}.{host // 250 % 250}.{host % 250 + 1}", 0)
        sock = socket.create_connection(self._address, source_address=source)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limits = {"max_header_bytes": MAX_HEADER_BYTES, "max_body_bytes": MAX_PAYLOAD_BYTES}
        self._readers[sock.fileno()] = sock, FrameReader(**limits)
        self._poll.register(sock, select.EPOLLIN)
        return sock

    def _introduce(self, sockets: Sequence[socket.socket], cards: Sequence[dict[str, Any]]) -> None:
        """Say the first frames, and answer the challenges."""
        introductions = [Introduction("") for _ in sockets]
        for sock, introduction, card in zip(sockets, introductions, cards, strict=True):
            self._send(sock, introduction.first_frame(card))
        for sock, introduction in zip(sockets, introductions, strict=True):
            _, reader = self._readers[sock.fileno()]
            while (challenge := reader.next()) is None:
                reader.feed(sock.recv(BYTES_AT_ONCE))
            self._send(sock, introduction.answer(challenge))

    def _await_answers(self, number: int, sockets: Sequence[socket.socket]) -> None:
        """Return when so many more answers have come on these sockets.

        A crowd on other machines would not share the processor with the coordinator: this one
        sleeps until the last of the sockets is answered.
        """
        want = self.received + number
        last = select.poll()
        last.register(sockets[-1], select.POLLIN)
        last.poll(60_000.0)
        while self.received < want:
            for number, _ in self._poll.poll(60.0):
                sock, reader = self._readers[number]
                data = sock.recv(BYTES_AT_ONCE)
                if not data:
                    raise SystemExit("the coordinator closed a connection")
                self.received_bytes += len(data)
                reader.feed(data)
                while reader.next() is not None:
                    self.received += 1

    def _send_each(self, frames: Sequence[bytes]) -> None:
        """Send one of these on each connection that lives as long as the job."""
        for sock, data in zip(self.lives, frames, strict=True):
            self._send(sock, data)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        sock.sendall(data)
        self.sent_bytes += len(data)


def processor_us(pid: int) -> float:
    """The processor time of a process, in microseconds: proc_pid_schedstat."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def resident_mib(pid: int) -> int:
    """The resident memory of a process, in MiB: proc_pid_statm."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def start(count: int) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-m", "shoal.runtime.server.coordinator", "--until-stdin-closes"]
    command += ["--processes", str(count)]
    # The crowd gives no sign of life between its barriers.
    env = {**os.environ, "SHOAL_LOST_AFTER_S": "inf", "SHOAL_TOKEN": ""}
    coordinator = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    line = coordinator.stdout.readline() if coordinator.stdout else b""
    return coordinator, str(json.loads(line)["address"])


def measure(count: int) -> None:
    """Print the row of one size."""
    coordinator, address = start(count)
    crowd = Crowd(address, count)
    began, before = time.perf_counter(), processor_us(coordinator.pid)
    crowd.join()
    crowd.barrier(0)
    join_s, join_us = time.perf_counter() - began, processor_us(coordinator.pid) - before
    server_us, wall_us, beat_us = [], [], []
    crowd.sent_bytes = crowd.received_bytes = 0
    for turn in range(ROUNDS):
        before, began = processor_us(coordinator.pid), time.perf_counter()
        for number in range(BARRIERS):
            crowd.barrier(1 + turn * BARRIERS + number)
        wall_us.append((time.perf_counter() - began) / BARRIERS * 1e6)
        server_us.append((processor_us(coordinator.pid) - before) / BARRIERS)
    barriers = ROUNDS * BARRIERS
    case = {
        "processes": count,
        "bytes_in": crowd.sent_bytes // barriers,
        "bytes_out": crowd.received_bytes // barriers,
        "server_us_per_process": round(statistics.median(server_us) / count, 2),
        "join_wall_s": round(join_s, 2),
        "join_server_s": round(join_us / 1e6, 2),
    }
    for turn in range(BEATS):
        before = processor_us(coordinator.pid)
        crowd.beat(turn)
        beat_us.append(processor_us(coordinator.pid) - before)
    case["beats_percent_of_a_core"] = round(statistics.median(beat_us) / HEARTBEAT_S / 1e4, 2)
    case["server_mib"] = resident_mib(coordinator.pid)
    print_row("coordinator, a barrier", case, {"server": server_us, "wall": wall_us}, "us")
    crowd.leave()
    coordinator.stdin.close()  # type: ignore[union-attr]
    coordinator.wait()


def allow_open_files(wanted: int) -> int:
    """Raise the limit of open files as far as may be, for the coordinator too; return it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limit in (max(wanted, hard), hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return limit
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def main() -> None:
    """Print a row for each size, as far as the limit of open files allows."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=Raw)
    parser.add_argument(
        "sizes", type=int, nargs="*", default=SIZES, metavar="N",
        help=f"numbers of processes (default: {' '.join(map(str, SIZES))})",
    )  # fmt: skip
    sizes = parser.parse_args().sizes
    files = allow_open_files(2 * max(sizes) + 100)
    for count in sizes:
        measure(min(count, (files - 100) // 2))


if __name__ == "__main__":
    main()
