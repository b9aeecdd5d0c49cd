"""Exit hooks: however this process ends, it ends, and the other processes learn how.

XLA cannot be torn down while a collective waits for a process that is gone: the interpreter's
exit would hang, or abort in C++. So when the program fails or a peer is gone, the guard notifies
the other processes, flushes, and leaves by `os._exit` with the documented code, before JAX's
teardown. It hooks

* `sys.excepthook`: sends the traceback to the other processes, then prints it as usual;
* `sys.exit`: records the code or text, which Python keeps nowhere;
* `atexit`, registered after JAX's own handler and therefore run before it;
* one thread that sleeps until this process starts to end, for anything that gets stuck on the way
  (a thread that Python joins, another exit handler, the teardown).

A hook that is set later (by `rich.traceback.install()`, a debugger, the program) may never call
this one: so the thread and the exit handler also check how the main program ended. The code of a
SystemExit raised without `sys.exit` cannot be found by any of these.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from shoal import settings
from shoal.errors import DeadlineError, PeerFailedError, ProcessLostError, ShoalError
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.client.known_losses import Trouble
from shoal.runtime.exit.main_program import MainProgram
from shoal.runtime.rules.point import Member
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.failure_words import (
    exit_of,
    exit_words,
    failure_of,
    fate_of,
    one_line,
    stands,
    text_of,
)

DEVICE_WORK = "shoal's work on devices"  # the name of threads that do it
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_ASK_S = 2.0  # how long an ending process waits for news of the other processes
_BEHIND_S = 0.5
_LOOK_S = 0.25  # interval of checks whether the program has ended
_EXPLAINED = 8  # processes that a message names
_UNHEARD = "the meeting place does not answer"
_RUNTIME_WORDS = ("Connection closed by peer", "Gloo", "NCCL", "Socket closed", "Broken pipe")


def gone_members(coordinator: Coordinator, timeout_s: float = _ASK_S) -> dict[int, Member]:
    """Return the processes that are lost or have failed; all others if there is no answer."""
    try:
        members = coordinator.members(timeout_s=timeout_s)
    except (ShoalError, OSError):
        hosts = dict(enumerate(coordinator.hosts))
        del hosts[coordinator.process]
        return {process: Member(process, host, "lost", _UNHEARD) for process, host in hosts.items()}
    bad = [m for m in members if m.state in ("lost", "failed")]
    return {m.process: m for m in bad if m.process != coordinator.process}


def pause_s(coordinator: Coordinator) -> float:
    """Return the interval of such queries, which grows with the job as the answer does."""
    return 1.0 + coordinator.num_processes / 20


class ExitGuard:
    """The exit guard of this process: `hook` once, `watch` a coordinator, `release` it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._coordinator: Coordinator | None = None
        self._is_idle: Callable[[], bool] = lambda: True
        self._leave: Callable[[str], None] = lambda words: None
        self._parts_together = False
        self._code: int | None = None  # of the uncaught exception
        self._exit_status = 0  # of the last sys.exit()
        self._exit_report = ""  # its description, for the other processes
        self._limit: tuple[float, int] | None = None  # time and code of an end by the thread
        self._is_leaving = False
        self._wake = threading.Event()
        self._program = MainProgram()

    def hook(self) -> None:
        """Install the interpreter hooks; until `watch` they affect only exit codes."""
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._exit, sys.exit = sys.exit, self._on_sys_exit

    def watch(
        self,
        coordinator: Coordinator,
        *,
        is_idle: Callable[[], bool],
        leave: Callable[[str], None],
        parts_together: bool,
    ) -> None:
        """Report the end of this process to `coordinator` from now on.

        `leave` leaves the job after a normal end; it gets the text for the other processes (empty:
        nothing to report). `is_idle` tells whether the devices have finished their work;
        `parts_together` whether JAX's teardown waits for all processes even then, as in a job that
        JAX joined.

        Must be called after JAX was imported: exit handlers run in reverse order.
        """
        self._coordinator, self._is_idle, self._leave = coordinator, is_idle, leave
        self._parts_together = parts_together
        self._wake = wake = threading.Event()
        atexit.register(self._on_exit)
        # Started now: an interpreter that is ending cannot start threads (since Python 3.12).
        arguments = (coordinator, wake)
        name = "shoal exit guard"
        threading.Thread(target=self._end_if_stuck, args=arguments, name=name, daemon=True).start()

    def release(self) -> None:
        """Undo `watch`: the process has left the job in order."""
        self._coordinator = None
        self._wake.set()
        atexit.unregister(self._on_exit)

    def skip_teardown(self) -> None:
        """End without teardown: a thread of this process is stuck in JAX's runtime for good."""
        atexit.register(lambda: _end(self._known_code()) if self._is_owner() else None)

    def _known_code(self) -> int:
        """Return the exit code, as far as it is known before the end."""
        error = self._program.uncaught() if self._code is None else None
        return self._code or (self._exit_status if error is None else _code_of(error))

    def _is_owner(self) -> bool:
        """Return False in a forked child: it inherits the hooks, but is not a member of the job."""
        return os.getpid() == self._pid

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._program.is_running():  # only displayed: the program has caught it
            self._excepthook(kind, error, trace)
            return
        coordinator = self._coordinator if self._is_owner() else None
        self._code = _code_of(error)
        if coordinator is None:
            self._excepthook(kind, error, trace)
            if self._is_owner() and isinstance(error, ShoalError):
                raise SystemExit(self._code)  # the interpreter takes a code from its excepthook
            return
        gone = _report_failure(coordinator, error)
        try:
            self._excepthook(kind, error, trace)
        finally:
            self._explain(coordinator, error, gone)
            self._limit_end()

    def _explain(
        self, coordinator: Coordinator, error: BaseException, gone: Mapping[int, Member]
    ) -> None:
        """After an error of JAX's runtime was printed, add which processes are gone."""
        self._code = _code_of(error)
        if gone or (_is_of_runtime(error) and _lost_services(coordinator)):
            self._code = _explain(coordinator, gone)

    def _limit_end(self) -> None:
        """Make the thread end this process if it does not end by itself in time."""
        limit_s = settings.seconds("SHOAL_ABORT_AFTER_S")
        self._limit = (time.monotonic() + limit_s, 1 if self._code is None else self._code)
        self._wake.set()

    def _on_sys_exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self._exit_status = status if isinstance(status, int) else int(status is not None)
            error = sys.exc_info()[1]
            if isinstance(error, SystemExit):  # a runner such as runpy raises it again
                self._exit_report = exit_of(error)
            else:
                self._exit_report = exit_words(status, stands(sys._getframe(1)), error)
        self._exit(status)

    def _on_exit(self) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            return
        if not self._is_owner():
            # JAX's teardown would wait for threads that a fork does not have.
            _end(self._known_code())
        error = self._program.uncaught()
        if self._code is None and error is not None:  # another hook was called instead of this one
            self._explain(coordinator, error, _report_failure(coordinator, error))
        if self._code is not None:
            _end(self._code)
        words = self._leaving_words()
        fails = self._exit_status not in (0, REQUEUE)
        if fails:
            with contextlib.suppress(ShoalError, OSError):
                coordinator.tell("failed", words)
        # Only now can a teardown hang; otherwise Python's own end keeps its exit code, which is not
        # known here for certain: the program may have raised SystemExit itself.
        is_idle = self._is_idle()
        gone = gone_members(coordinator) if self._parts_together or not is_idle else {}
        is_busy = _works_on_devices()
        if gone or is_busy or (fails and not is_idle):
            code = self._exit_status & 0xFF or _report_cut(coordinator, is_busy and not gone)
            flush()  # before the services may end, because JAX's client aborts then
            with contextlib.suppress(ShoalError, OSError):
                coordinator.close()
            os._exit(code)
        self._is_leaving = True
        self._wake.set()
        self._leave(words)
        self.release()

    def _leaving_words(self) -> str:
        """Return the report, for the other processes, of an end without an exception."""
        if self._program.has_returned():
            self._exit_status = 0  # an earlier sys.exit() that was caught
            return ""
        if self._exit_report or not self._program.has_exited():
            return self._exit_report if self._exit_status else ""
        return f"left the job by SystemExit (exit code unknown), at {self._program.place}"

    def _await_end(self, coordinator: Coordinator, wake: threading.Event) -> None:
        """Sleep until the end begins; report what ended the program if the hook cannot."""
        has_reported = False
        while not wake.wait(_LOOK_S):
            error = self._program.uncaught() if self._code is None else None
            if error is None or not self._is_owner():
                continue
            if not has_reported:
                _report_failure(coordinator, error)
                has_reported = True
            if self._program.joins_threads():  # the other hook has finished
                self._code = _code_of(error)
                self._limit_end()

    def _end_if_stuck(self, coordinator: Coordinator, wake: threading.Event) -> None:
        """End the process when its teardown hangs. Sends no query within the first second."""
        self._await_end(coordinator, wake)
        ask_at = time.monotonic() + 1.0
        while self._coordinator is coordinator:
            now = time.monotonic()
            if self._limit is not None and now >= self._limit[0]:
                _report_stuck(coordinator)
                _end(self._limit[1])
            if self._is_leaving and now >= ask_at:
                if gone_members(coordinator):
                    _report_stuck(coordinator)
                    _end(self._exit_status & 0xFF or ProcessLostError.exit_code)
                ask_at = now + pause_s(coordinator)
            time.sleep(0.2)


def _report_failure(coordinator: Coordinator, error: BaseException) -> dict[int, Member]:
    """Report an uncaught exception; return the lost processes if they may be its cause."""
    gone = _cause(coordinator) if _is_of_runtime(error) else {}
    with contextlib.suppress(ShoalError, OSError):
        coordinator.tell("failed", failure_of(error).words)
    return gone


def _is_of_runtime(error: BaseException) -> bool:
    """Return whether the error is from XLA or a transport, which do not name the lost peer.

    Also true if the program caught such an error and raised another about it.
    """
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen and not isinstance(at, ShoalError):
        is_xla = type(at).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
        if is_xla or any(words in text_of(at) for words in _RUNTIME_WORDS):
            return True
        seen.append(at)
        at = at.__cause__ or at.__context__
    return False


def _cause(coordinator: Coordinator) -> dict[int, Member]:
    """Return the lost processes; the meeting place may learn of them just after the transport."""
    gone = gone_members(coordinator)
    if not gone:
        time.sleep(_BEHIND_S)
        gone = gone_members(coordinator)
    return gone


def _lost_services(coordinator: Coordinator) -> list[Trouble]:
    return [trouble for trouble in coordinator.troubles.open() if trouble.process is None]


def _explain(coordinator: Coordinator, gone: Mapping[int, Member]) -> int:
    """Print the losses behind an error of JAX's runtime; return the exit code."""
    services = _lost_services(coordinator)  # the other processes may have died of these
    if gone and all(member.said == _UNHEARD for member in gone.values()):
        try:
            coordinator.check()
        except ShoalError as error:  # the meeting place is lost, or declared this process lost
            print(f"shoal: {error}", file=sys.stderr)
            return error.exit_code
    for service in services:
        print(f"shoal: {service.name} is lost: {service.words}", file=sys.stderr)
    for member in list(gone.values())[:_EXPLAINED]:
        place = f"process {member.process} of {coordinator.num_processes} ({member.host})"
        fate = f"is lost: {member.said}" if member.state == "lost" else fate_of(member.said)
        print(f"shoal: {place} {one_line(fate)}", file=sys.stderr)
    is_lost = bool(services) or any(member.state == "lost" for member in gone.values())
    return ProcessLostError.exit_code if is_lost else PeerFailedError.exit_code


def _code_of(error: BaseException) -> int:
    if isinstance(error, ShoalError):
        return error.exit_code
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _report_stuck(coordinator: Coordinator) -> None:
    print(
        f"shoal: process {coordinator.process} of {coordinator.num_processes} did not exit "
        "by itself, most likely because of a collective with a lost process; ending it now",
        file=sys.stderr,
    )


def _works_on_devices() -> bool:
    """Return whether a thread that gave up at its deadline still works in native code. Python must
    not end around it: tearing it down in the middle of C++ aborts."""
    limit = time.monotonic() + _ASK_S
    for thread in threading.enumerate():
        if thread.name == DEVICE_WORK:
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                return True
    return False


def _report_cut(coordinator: Coordinator, is_busy: bool) -> int:
    """Print why this process ends without teardown; return the exit code."""
    why = "a process that is gone"
    if is_busy:
        why = "work on its devices that continues past its deadline"
    print(
        f"shoal: process {coordinator.process} of {coordinator.num_processes} ends without JAX's "
        f"teardown, which would wait for {why}",
        file=sys.stderr,
    )
    return DeadlineError.exit_code if is_busy else ProcessLostError.exit_code


def _end(code: int) -> NoReturn:
    """Flush Python's buffers, and end without any teardown."""
    flush()
    os._exit(code)


def flush() -> None:
    """Flush stdout and stderr."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
