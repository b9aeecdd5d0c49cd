"""The coordinator: the server at which the processes of a job meet.

::

    python -m shoal.runtime.server.coordinator --processes 4 --until-empty

prints one line, `{"address": "127.0.0.1:43211"}`, once it listens. The token is read from
SHOAL_TOKEN. It is one selectors loop that moves frames between sockets and two state machines,
`joining` and `meeting`, which hold all the rules.

A process keeps one connection open for its life: if it ends without a BYE the process is dead, as
is known as soon as the kernel reports it. Each lane has a connection of its own, whose end has no
meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import UsageError
from shoal.runtime.rules.joining import Hello, Joining, JoinReply, Refusal, parse_hello
from shoal.runtime.rules.liveness import Limits, Liveness, RunningClock
from shoal.runtime.rules.stopping import LAST, Stopped
from shoal.runtime.server.callers import (
    ECHO,
    HostAgentCaller,
    LaneCaller,
    ObserverCaller,
    ProcessCaller,
    ServiceCaller,
)
from shoal.runtime.server.job import ServedJob
from shoal.runtime.system.foreign_text import headline_of
from shoal.runtime.system.service_commands import (
    WAITS,
    ignore_job_signals,
    show_part,
    wait_for_token,
)
from shoal.runtime.wire.frames import (
    MAX_HELLO_BYTES,
    Frame,
    FrameError,
    address_text,
    pack_frame,
    text_field,
    whole_field,
)
from shoal.runtime.wire.server_sockets import (
    Connection,
    Connections,
    allow_many_connections,
)
from shoal.runtime.wire.sockets import listen_unix, watch_link

_LETTING_GO_S = 5.0  # how long an earlier job may take to release its address


class Coordinator:
    """Serves one job after another, on a given listening socket.

    A process that left may send HELLO for the next job while others are still in the last.
    """

    def __init__(
        self,
        server: socket.socket,
        num_processes: int,
        *,
        token: str = "",
        jax_service: str = "",
        refusal: str = "",
        lacks_token: bool = False,
        limits: Limits | None = None,
        near: socket.socket | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_leaving: Callable[[bool, Stopped | None], None] = lambda has_notice, stopped: None,
        on_news: Callable[..., None] = lambda **_news: None,
    ) -> None:
        """Prepare; `serve` runs the loop.

        Args:
          refusal: why no process can join; each one that tries receives these words.
          lacks_token: whether that is for want of a token.
          on_leaving: called when an open notice, or what the job leaves behind, changes.
          on_news: called with `joined=PROCESS`, and `by_jax=True` if JAX alone has joined its own
            job; `gone=PROCESS, state=, words=, at_s=`, after
            `dismissed=PROCESS` if it is declared lost while its connection stands;
            `keeper=HOST_ID, pid=, host=, processes=`; `keeper_gone=HOST_ID, at_s=` if that
            connection ends before the job; `service=NAME, words=` if a service is lost.
        """
        self.address = address_text(*server.getsockname()[:2])
        self._num_processes = num_processes
        self._token = token
        self._jax_service = jax_service
        reason = "lacks-token" if lacks_token else "given"
        self._refusal = Refusal(reason, words=refusal) if refusal else None
        self._limits = limits or Limits.of_settings()
        self._clock = clock
        self._running = RunningClock(clock(), tick_s=self._limits.tick_s)
        self._look_at = math.inf  # when silence must be checked next
        self._near = near.getsockname()[1:].decode() if near else ""
        self._connections = Connections([server, *([near] if near else [])], self, clock)
        self._is_for_one_job = False
        self._services = Services(
            self._connections, self._limits, clock, self._running, self._lose_service
        )
        self._on_leaving = on_leaving  # of the newest job
        self._reported_leaving: tuple[bool, Stopped | None] = (False, None)
        self._on_news = on_news
        self._earlier: list[ServedJob] = []  # jobs that still have processes
        self.newest_job = self._new_job()  # the job that a HELLO joins

    def serve(
        self, *, until_closed: int | None = None, until_empty: bool = False, idle_s: float = 300.0
    ) -> None:
        """Serve until the other end of the pipe `until_closed` is closed, or no process is left.

        With `until_empty` it serves one job, and also ends if no process connects within `idle_s`;
        once all have joined, the end of the pipe has no effect.
        """
        self._is_for_one_job = until_empty
        if until_closed is not None:
            self._connections.hold_leash(until_closed)
        now = quiet_since = self._clock()
        while True:
            due = self._due()
            wake = min(due, quiet_since + idle_s) if until_empty else due
            is_held = self._connections.poll(None if wake == math.inf else max(0.0, wake - now))
            newest = self.newest_job
            if not is_held and not (until_empty and newest.meeting is not None):
                newest.answer_joining(newest.joining.abandon(self._clock()))
                break
            now = self._clock()
            if now >= due:
                self._on_time(now)
            if self._has_processes():
                quiet_since = now
            elif until_empty and (self.newest_job.is_over(now) or now >= quiet_since + idle_s):
                break
        self._connections.close_all()

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Handle the first frames of an untrusted connection. See `server_sockets.Listener`."""
        if self._refusal is not None:
            self._refuse(connection, frame)
            return
        introduced = self._connections.introduced(connection, frame, self._token)
        if introduced is None:
            return
        first, is_proved = introduced
        verb, header = text_field(first.header, "do"), first.header
        if not is_proved:
            joining = self.newest_job.joining
            reply = joining.refuse_stranger(header, connection.origin, connection)
            self.newest_job.answer_joining([reply])
        elif verb == "hello":
            self._on_hello(connection, parse_hello(header))
        elif verb == "lane":
            self._on_lane(connection, header)
        elif verb == "keep":
            self._on_host_agent(connection, header)
        elif verb == "observe":
            caller = ObserverCaller(lambda: self.newest_job)
            self._connections.trust(
                connection, caller, max_header_bytes=MAX_HELLO_BYTES, max_body_bytes=0
            )
            welcome = {"is": "welcome", "processes": self._num_processes}
            self._connections.send(connection, pack_frame(welcome))
        elif verb == "serve":
            self._start_silence_checks()
            self._services.add(connection, header)
        elif verb == "joined":  # a job of JAX alone, without shoal
            self._on_news(joined=whole_field(header, "process"), by_jax=True)
            self._connections.send(connection, pack_frame({"is": "welcome"}), then_close=True)
        else:
            raise FrameError(f"{verb[:40]!r} from an unidentified connection")

    def _refuse(self, connection: Connection, frame: Frame) -> None:
        """Refuse a connection to a job that no process can join."""
        if text_field(frame.header, "do") == "hello":
            self.newest_job.hello(connection, parse_hello(frame.header))
        else:
            reply = JoinReply(connection, self._refusal)
            self.newest_job.answer_joining([reply])

    def on_end(self, connection: Connection, reason: str) -> None:
        """See `server_sockets.Listener`. The end of an untrusted connection has no meaning."""

    def _lose_service(self, name: str, reason: str) -> None:
        """Notify the parent process and the jobs of the loss of a service."""
        self._on_news(service=name, words=reason)
        for job in self._jobs:
            job.lose_service(name, reason)

    @property
    def _jobs(self) -> list[ServedJob]:
        return [*self._earlier, self.newest_job]

    def _new_job(self) -> ServedJob:
        joining: Joining[Connection] = Joining(
            self._num_processes,
            jax_service=self._jax_service,
            refusal=self._refusal,
        )
        self._services.forget_ended()
        job = ServedJob(joining, self._connections, self._clock, self._limits, self._running)
        job.near = self._near
        job.leaving.on_change = self._report_leaving
        job.on_news = self._on_news
        job.service_rows = lambda: self._services.rows
        return job

    def _report_leaving(self) -> None:
        rounds = self.newest_job.leaving.rounds
        state = (rounds.is_open, rounds.stopped)
        if state != self._reported_leaving:
            self._reported_leaving = state
            self._on_leaving(*state)

    def _has_processes(self) -> bool:
        return bool(self.newest_job.mail.lives) or any(job.mail.lives for job in self._earlier)

    def _due(self) -> float:
        """Return the time of the next action without input."""
        newest = self.newest_job
        due = min(newest.next_deadline, self._connections.next_deadline, self._look_at)
        if self._earlier:
            due = min(due, *(job.next_deadline for job in self._earlier))
        return due if self._has_processes() else min(due, newest.joining.stands_until)

    def _on_time(self, now: float) -> None:
        self._earlier = [job for job in self._earlier if job.mail.lives]
        for job in self._jobs:
            job.on_time(now)
        if now >= self._look_at:
            self._judge_silence(now)
            is_watching = self._services or self._has_processes()
            self._look_at = now + self._limits.tick_s if is_watching else math.inf

    def _start_silence_checks(self) -> None:
        """Start checking silence: there is a process or a service to watch."""
        if self._look_at == math.inf:
            now = self._clock()
            self._running.read(now)
            self._look_at = now + self._limits.tick_s

    def _judge_silence(self, now: float) -> None:
        ran_s = self._running.read(now)
        late = [job for job in self._jobs if job.is_silence_due(now)]
        if late or self._services.is_due(ran_s):
            self._connections.poll(0)  # frames that arrived while this process was busy, or stopped
            self._services.tick(ran_s)
            for job in late:
                job.judge_silence(now)

    def _on_hello(self, connection: Connection, hello: Hello) -> None:
        if self.newest_job.ended_for(hello.process, self._clock()):
            if self._is_for_one_job:
                self._connections.send(connection, pack_frame({"is": "later"}), then_close=True)
                return
            self._earlier.append(self.newest_job)
            self.newest_job = self._new_job()
            self._report_leaving()
        life = self.newest_job.hello(connection, hello)
        if life is not None:
            self._start_silence_checks()
            process = ProcessCaller(self.newest_job, life)
            self._connections.trust(connection, process, max_body_bytes=process.max_body_bytes)
            watch_link(connection.socket, self._limits.lost_after_s)

    def _on_lane(self, connection: Connection, header: Mapping[str, Any]) -> None:
        process, incarnation = whole_field(header, "process"), text_field(header, "incarnation")
        for job in self._jobs:
            life = job.life_of(process, incarnation)
            if life is not None:
                life.lanes.add(connection)
                self._connections.trust(connection, LaneCaller(job, life))
                return
        raise FrameError("a lane of an unknown process")

    def _on_host_agent(self, connection: Connection, header: Mapping[str, Any]) -> None:
        process, incarnation = whole_field(header, "process"), text_field(header, "incarnation")
        for job in self._jobs:
            kept = job.keep(connection, process, incarnation)
            if kept is not None:
                host_id, processes = kept
                news = {"pid": header.get("pid"), "host": job.joining.hosts[process]}
                self._on_news(keeper=host_id, processes=list(processes), **news)
                self._connections.trust(connection, HostAgentCaller(job, *kept), max_body_bytes=0)
                return
        raise FrameError("a host agent of a host that its sender does not lead")


def main(arguments: list[str] | None = None) -> int:
    """Run the server from the command line."""
    options = _parse(arguments)
    show_part("shoal-coord")
    if options.until_stdin_closes or options.until_empty:
        ignore_job_signals()  # the end of the job ends this process
    try:
        limits = Limits.of_settings()
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    allow_many_connections()
    gc.freeze()
    gc.set_threshold(100_000)  # little here refers to itself, and an arrival is a few objects
    if options.waits:
        wait_for_token()
    listener = _listen(options.bind, options.port, min(options.idle_s, _LETTING_GO_S))
    coordinator = Coordinator(
        listener,
        options.processes,
        token=os.environ.get("SHOAL_TOKEN", ""),
        jax_service=options.jax_service,
        refusal=options.refusal,
        lacks_token=options.lacks_token,
        limits=limits,
        near=listen_unix(),
        on_leaving=_print_leaving if options.print_leaving else lambda *_: None,
        on_news=_print_news if options.print_news else lambda **_: None,
    )
    print(json.dumps({"address": coordinator.address}), flush=True)
    try:
        coordinator.serve(
            until_closed=sys.stdin.fileno() if options.until_stdin_closes else None,
            until_empty=options.until_empty,
            idle_s=options.idle_s,
        )
    except KeyboardInterrupt:
        return 130
    except PermissionError:
        print("--until-stdin-closes: standard input must be a pipe", file=sys.stderr)
        return 2
    return 0


def _print_leaving(has_notice: bool, stopped: Stopped | None) -> None:
    """Report to the parent process whether the job has a notice, and what it leaves behind."""
    is_whole = stopped is not None and stopped.kept == LAST and not stopped.has_failed
    line: dict[str, object] = {"notice": has_notice, "saved": is_whole}
    if stopped is not None and not is_whole:
        line |= {"words": stopped.words, "has_failed": stopped.has_failed}
    with contextlib.suppress(OSError):  # the parent no longer reads
        print(json.dumps(line), flush=True)


def _print_news(**news: Any) -> None:
    """Report to the parent process who joined the job, and who is gone."""
    if "words" in news:  # not a whole traceback, so that an unread pipe holds many
        news["words"] = headline_of(str(news["words"]))
    with contextlib.suppress(OSError):
        print(json.dumps(news), flush=True)


def _listen(host: str, port: int, patience_s: float) -> socket.socket:
    """Listen; wait a while for an earlier job at the same address to end."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    limit = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= limit:
                raise
        time.sleep(0.02)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.runtime.server.coordinator")
    parser.add_argument("--job", default="", metavar="NAME", help="for ps: of no effect here")
    parser.add_argument("--processes", type=int, required=True, metavar="N")
    parser.add_argument("--bind", default="127.0.0.1", metavar="HOST")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--jax-service", default="", metavar="HOST:PORT")
    parser.add_argument("--refusal", default="", metavar="WORDS", help="why no process can join")
    parser.add_argument("--lacks-token", action="store_true", help="that is for want of a token")
    parser.add_argument("--until-stdin-closes", action="store_true")
    parser.add_argument("--until-empty", action="store_true")
    parser.add_argument(WAITS, action="store_true", help="for a line with the token")
    parser.add_argument("--print-leaving", action="store_true", help="a line at each change")
    parser.add_argument(
        "--print-news", action="store_true", help="a line for each join and departure"
    )
    parser.add_argument("--idle-s", type=float, default=300.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: at least 1")
    return options


# ---- The services that monitor themselves at the coordinator: JAX's.
#
# They have no host agent: their silence alone decides.


class Services:
    """The services that are connected."""

    def __init__(
        self,
        connections: Connections,
        limits: Limits,
        clock: Callable[[], float],
        running: RunningClock,
        on_lost: Callable[[str, str], None],
    ) -> None:
        """`on_lost` is called with a service's name and why."""
        self._here: list[ServiceCaller] = []
        self._connections = connections
        self._limits = limits
        self._clock = clock
        self._running = running
        self._on_lost = on_lost
        own = limits._replace(silent_lost_after_s=limits.lost_after_s)
        self._liveness: Liveness[ServiceCaller] = Liveness(own)

    def __bool__(self) -> bool:
        return self._liveness.is_watching

    @property
    def rows(self) -> list[list[str]]:
        """The rows for observers."""
        return [service.row for service in self._here]

    def is_due(self, ran_s: float) -> bool:
        """Return whether `tick` must be called, at this time of the running clock."""
        return self._liveness.next_deadline() <= ran_s

    def tick(self, ran_s: float) -> None:
        """End the services that have been silent for too long."""
        for service, state, reason, _ in self._liveness.tick(ran_s):
            if state == "lost":
                self._connections.close(service.connection)
                service.on_end(service.connection, reason)

    def forget_ended(self) -> None:
        """Forget the services that are lost: another job begins."""
        self._here = [service for service in self._here if service.state == "here"]

    def add(self, connection: Connection, header: Mapping[str, Any]) -> None:
        """Take a service's first frame."""
        service = ServiceCaller(connection, header, on_beat=self._beat, on_gone=self._end)
        self._here.append(service)
        self._connections.trust(
            connection, service, max_header_bytes=MAX_HELLO_BYTES, max_body_bytes=0
        )
        self._liveness.watch(self._running.read(self._clock()), service)
        watch_link(connection.socket, self._limits.lost_after_s)
        welcome = {"is": "welcome", **self._limits.words}
        self._connections.send(connection, pack_frame(welcome))

    def _beat(self, service: ServiceCaller) -> None:
        if service.state == "here":
            self._liveness.beat(self._running.read(self._clock()), service)
        self._connections.send(service.connection, ECHO)

    def _end(self, service: ServiceCaller, state: str, reason: str) -> None:
        """Record that a service has left in order, or is lost. Only the first report counts."""
        if service.state != "here":
            return
        self._liveness.forget(service)
        service.state, service.words = state, reason
        if state == "left":
            self._here.remove(service)
        else:
            self._on_lost(service.name, reason)


if __name__ == "__main__":
    sys.exit(main())
