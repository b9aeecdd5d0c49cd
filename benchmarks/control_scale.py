"""What a barrier costs the meeting place as the job grows: messages, bytes and time.

The processes are simulated: one program holds all their connections, says their HELLOs, and lets
them arrive in turn; the meeting place is the real one, in its own process. `server_us` is the
processor time that the meeting place used for one barrier, as the kernel counts it.
"""

from __future__ import annotations

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
from pathlib import Path

from rows import print_row

from shoal.runtime.rules.joining import PROTOCOL
from shoal.runtime.rules.point import MAX_PAYLOAD_BYTES, Point
from shoal.runtime.wire.frames import MAX_HEADER_BYTES, FrameReader, pack_frame, split_address

SIZES = (10, 100, 1_000, 10_000)
PER_HOST = 8
BARRIERS, ROUNDS = 4, 5
BYTES_AT_ONCE = 1 << 16


class Crowd:
    """All connections of a job: each process has one for its life and one for its calls."""

    def __init__(self, address: str, count: int) -> None:
        self._address = split_address(address)
        self._readers: dict[int, tuple[socket.socket, FrameReader]] = {}
        self._poll = select.epoll()
        self.sent_bytes = self.received_bytes = self.received = 0
        self.lives = [self._connect(index) for index in range(count)]
        self.lanes: list[socket.socket] = []

    def join(self) -> None:
        """Say every HELLO, be welcome, and open the connections for the calls."""
        for index, sock in enumerate(self.lives):
            hello = {
                "do": "hello", "protocol": PROTOCOL, "process": index,
                "processes": len(self.lives), "host": f"host{index // PER_HOST}", "pid": 1,
                "incarnation": str(index), "versions": "", "jax_service": "", "token": "",
                "host_id": f"host{index // PER_HOST}", "timeout_s": 300.0,
            }  # fmt: skip
            self._send(sock, pack_frame(hello))
        self._await_answers()
        for index in range(len(self.lives)):
            self.lanes.append(self._connect(index))
            lane = {"do": "lane", "token": "", "process": index, "incarnation": str(index)}
            self._send(self.lanes[-1], pack_frame(lane))

    def barrier(self, step: int) -> None:
        """Let all arrive, and all be answered."""
        header = {
            "step": step, "do": "arrive", "timeout_s": 60.0,
            "point": Point("b", fingerprint="barrier", site="train.py:31 (main)"),
        }  # fmt: skip
        arrival = pack_frame(header)
        for sock in self.lanes:
            self._send(sock, arrival)
        self._await_answers()

    def leave(self) -> None:
        """Say goodbye."""
        for sock in self.lives:
            self._send(sock, pack_frame({"do": "bye"}))
        for sock in [*self.lanes, *self.lives]:
            sock.close()

    def _connect(self, index: int) -> socket.socket:
        """Connect from the address of the process's host: one address would run out of ports."""
        host = index // PER_HOST
        source = (f"127.1.{host // 250}.{host % 250 + 1}", 0)
        sock = socket.create_connection(self._address, source_address=source)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limits = {"max_header_bytes": MAX_HEADER_BYTES, "max_body_bytes": MAX_PAYLOAD_BYTES}
        self._readers[sock.fileno()] = sock, FrameReader(**limits)
        self._poll.register(sock, select.EPOLLIN)
        return sock

    def _await_answers(self) -> None:
        """Return when everybody has been answered once more."""
        want = self.received + len(self.lives)
        while self.received < want:
            for number, _ in self._poll.poll(60.0):
                sock, reader = self._readers[number]
                data = sock.recv(BYTES_AT_ONCE)
                if not data:
                    raise SystemExit("the meeting place closed a connection")
                self.received_bytes += len(data)
                reader.feed(data)
                while reader.next() is not None:
                    self.received += 1

    def _send(self, sock: socket.socket, data: bytes) -> None:
        sock.sendall(data)
        self.sent_bytes += len(data)


def processor_us(pid: int) -> float:
    """The processor time of a process, in microseconds: proc_pid_schedstat."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def start(count: int) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-m", "shoal.runtime.server.meeting_place", "--until-stdin-closes"]
    command += ["--processes", str(count)]
    # The crowd gives no sign of life between its barriers.
    env = {**os.environ, "SHOAL_LOST_AFTER_S": "inf", "SHOAL_TOKEN": ""}
    place = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    line = place.stdout.readline() if place.stdout else b""
    return place, str(json.loads(line)["address"])


def measure(count: int) -> None:
    """Print the row of one size."""
    place, address = start(count)
    crowd = Crowd(address, count)
    began = time.perf_counter()
    crowd.join()
    join_s = time.perf_counter() - began
    crowd.barrier(0)
    server_us, wall_us = [], []
    crowd.sent_bytes = crowd.received_bytes = 0
    for turn in range(ROUNDS):
        before, began = processor_us(place.pid), time.perf_counter()
        for number in range(BARRIERS):
            crowd.barrier(1 + turn * BARRIERS + number)
        wall_us.append((time.perf_counter() - began) / BARRIERS * 1e6)
        server_us.append((processor_us(place.pid) - before) / BARRIERS)
    barriers = ROUNDS * BARRIERS
    case = {
        "processes": count,
        "messages": 2 * count,
        "bytes_in": crowd.sent_bytes // barriers,
        "bytes_out": crowd.received_bytes // barriers,
        "server_us_per_process": round(statistics.median(server_us) / count, 2),
        "join_s": round(join_s, 2),
    }
    print_row("meeting place, a barrier", case, {"server": server_us, "wall": wall_us}, "us")
    crowd.leave()
    place.stdin.close()  # type: ignore[union-attr]
    place.wait()


def allow_open_files(wanted: int) -> int:
    """Raise the limit of open files as far as may be, for the meeting place too; return it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limit in (max(wanted, hard), hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return limit
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def main() -> None:
    """Print a row for each size, as far as the limit of open files allows."""
    most = (allow_open_files(2 * max(SIZES) + 100) - 100) // 2
    for count in SIZES:
        measure(min(count, most))


if __name__ == "__main__":
    main()
