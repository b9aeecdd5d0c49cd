"""Exit hooks: however this process ends, it ends, and the other processes learn how.

XLA cannot be torn down while a collective waits for a process that is gone: the interpreter's
exit would hang, or abort in C++. So when the program fails or a peer is gone, the guard notifies
the other processes, flushes, and leaves by `os._exit` with the documented code, before JAX's
teardown. It hooks

* `sys.excepthook`: sends the traceback to the other processes, then prints it as usual;
* `threading.excepthook`: records the exceptions that end other threads;
* `sys.exit`: records the code or text, which Python keeps nowhere;
* `atexit`, registered after JAX's own handler and therefore run before it;
* a thread that wakes when this process starts to end, and ends it if its shutdown hangs (in a
  thread that Python joins, another exit handler, the teardown).

A hook that is set later (by `rich.traceback.install()`, a debugger, the program) may never call
this one: so the thread and the exit handler also check how the main program ended. The code of a
SystemExit raised without `sys.exit` cannot be found by any of these.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from shoal import settings
from shoal.errors import DivergenceError, PeerFailedError, ProcessLostError, ShoalError
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import speakers
from shoal.runtime.exit.causes import (
    explain,
    gone_behind,
    gone_members,
    lost_services,
    peers_behind,
    record_sent,
    report_alone,
    report_cut,
    report_stuck,
)
from shoal.runtime.exit.main_program import MainProgram, write_open_files
from shoal.runtime.exit.torch_agent import TorchAgent
from shoal.runtime.exit.unfinished import await_devices, pause_s
from shoal.runtime.failures.exception_text import (
    exit_of,
    exit_words,
    failure_of,
    is_of_runtime,
    position_in_program,
)
from shoal.runtime.failures.last_record import (
    claim,
    exit_code_of,
    for_launcher,
    for_the_log,
    has_launcher,
    record,
    record_of_exit,
)
from shoal.runtime.rules.point import Departure, Member
from shoal.runtime.rules.stopping import REQUEUE
from shoal.runtime.system.foreign_text import headline_of
from shoal.tracebacks import HIDDEN, has_hidden, is_own_file, shorten

if TYPE_CHECKING:
    from shoal.runtime.exit.job_report import EndOfThis

DEVICE_WORK = "shoal's work on devices"  # the name of threads that do it
_IN_TIME_S = 1.0  # for native code at the end
_BUSY_S = 2.0  # for work on devices to end
_MOST_THREADS = 8  # whose exceptions are recorded
_LOOK_S = 0.25  # interval of checks whether the program has ended


class ExitGuard:
    """The exit guard of this process: `hook` once, `watch` with a job client, `release` it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._joining = (0, 1)  # the index of this process in the job that it joins, of how many
        self._client: JobClient | None = None
        self._is_idle: Callable[[], bool] = lambda: True
        self._issued_work: Callable[[], Callable[[], bool]] = lambda: self._is_idle
        self._leave: Callable[[str], None] = lambda message: None
        self._compare: Callable[[], None] = lambda: None
        self._parts_together = False
        self._code: int | None = None  # of the uncaught exception
        self._code_of_hook: int | None = None  # if the program's excepthook calls sys.exit()
        self._exit_status = 0  # of the last sys.exit()
        self._exit_report = ""  # its description, for the other processes
        self._limit: tuple[float, int] | None = None  # time and code of an end by the thread
        self._native_since = math.inf  # since when it is in native code that may block for ever
        self._wake = threading.Event()
        self._program = MainProgram()
        self._agent = TorchAgent(os.environ)
        self._error: BaseException | None = None  # the uncaught exception
        self._peers: Mapping[int, Departure] | None = None  # whose end led to it, or to sys.exit()
        self._is_shown = False  # by `_on_exception`
        self._recorded_threads = 0
        self._is_recorded = False  # where its launcher reads it
        self._explanation = ""  # which processes those are, if the exception does not say it

    def hook(self) -> None:
        """Install the interpreter hooks; until `watch` they affect only exit codes."""
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._exit, sys.exit = sys.exit, self._on_sys_exit
        self._thread_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        atexit.register(self._program.forget)  # after `_on_exit`: the thread may outlive both

    def begin_joining(self, process: int, num_processes: int) -> None:
        """Note which process this is to be."""
        self._joining = process, num_processes
        claim()
        if num_processes > 1 and not has_launcher():
            _reports()  # imported now: a process that fails may have no descriptor left

    def watch(
        self,
        client: JobClient,
        *,
        is_idle: Callable[[], bool],
        issued_work: Callable[[], Callable[[], bool]],
        leave: Callable[[str], None],
        compare: Callable[[], None],
        parts_together: bool,
    ) -> None:
        """Report the end of this process to `client` from now on.

        `leave` leaves the job after a normal end; it gets the text for the other processes (empty:
        nothing to report); before an end in order, `compare` raises DivergenceError if processes
        have made different calls. `is_idle` tells whether all arrays are computed; `issued_work`
        returns a function that tells it of all that was started before its call, arrays or not;
        `parts_together` tells whether JAX's teardown waits for all processes even then, as in a job
        that JAX joined.

        Must be called after JAX was imported: exit handlers run in reverse order.
        """
        self._client, self._is_idle = client, is_idle
        self._leave, self._compare = leave, compare
        self._issued_work = issued_work
        self._parts_together = parts_together
        self._wake = wake = threading.Event()
        atexit.register(self._on_exit)
        # Started now: an interpreter that is ending cannot start threads (since Python 3.12).
        arguments = (client, wake)
        name = "shoal exit guard"
        threading.Thread(target=self._end_if_stuck, args=arguments, name=name, daemon=True).start()

    def release(self) -> None:
        """Undo `watch`: the process has left the job in order."""
        self._client = None
        self._wake.set()
        atexit.unregister(self._on_exit)

    def skip_teardown(self) -> None:
        """End without teardown: a thread of this process is stuck in JAX's runtime for good."""

        def end() -> None:
            if self._is_owner():
                _end(self._known_code())

        atexit.register(end)

    def _known_code(self) -> int:
        """Return the exit code, as far as it is known before the end."""
        if self._code:
            return self._code
        error = self._uncaught()
        if error is None:
            return self._exit_status
        return exit_code_of(error)

    def _uncaught(self) -> BaseException | None:
        """Return the exception that ended the program, if no hook has taken it."""
        if self._code is not None:
            return None
        return self._program.uncaught()

    def _is_owner(self) -> bool:
        """Return False in a forked child: it inherits the hooks, but is not a member of the job."""
        return os.getpid() == self._pid

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            self._take_exception(kind, error, trace)
        except BaseException as raised:  # by the hook before this one; Python shows it
            trace = raised.__traceback__
            while trace is not None and is_own_file(trace.tb_frame.f_code.co_filename):
                trace = trace.tb_next
            raised.__traceback__ = trace or raised.__traceback__  # a bug of ours keeps its frames
            raise  # a bare one adds no entry for this frame

    def _take_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._program.is_running():  # only displayed: the program has caught it
            self._excepthook(kind, error, trace)
            return
        shorten(error)  # some leave by a `with` block of contextlib
        if isinstance(error, PeerFailedError) and settings.is_set("SHOAL_ATTEMPT"):
            # `shoal run` shows what the other process wrote.
            notes = getattr(error, "__notes__", ())
            error.__notes__ = [note for note in notes if note != error.details]
        self._code = exit_code_of(error)
        client = self._client
        if not self._is_owner():
            self._excepthook(type(error), error, error.__traceback__)
        elif client is None:
            self._end_outside(error)
        else:
            self._end_member(client, error)

    def _end_outside(self, error: BaseException) -> None:
        """Record and show an exception of a process that is in no job: not yet, or alone."""
        self._record(error, {}, time.time())
        if not self._shows_not_joined(error):
            self._show(error)
        self._outlast(None)
        if isinstance(error, ShoalError | KeyboardInterrupt):
            raise SystemExit(self._code)  # the interpreter takes a code from its excepthook

    def _end_member(self, client: JobClient, error: BaseException) -> None:
        """Report an exception to the other processes, and show it."""
        self._agent.note_signals(client.process)
        self._is_shown = True
        with _without_sigterm(client) as signals:
            gone = self._report_failure(client, error)
            try:
                self._show(error)
            finally:
                with for_the_log(self._is_recorded):
                    self._explain(client, error, gone)
                self._limit_end()
                if _is_for_processes(client):
                    self._report_job(client, error, signals)

    def _show(self, error: BaseException) -> None:
        """Show an uncaught exception by the hook that was installed before this one.

        Python's own is for the log where a launcher reports the failure. That of the program (rich,
        a debugger) appears as it comes.
        """
        here, is_default = self._client, self._excepthook is sys.__excepthook__
        if here is not None and is_default and _is_for_processes(here):
            line = ""
            with contextlib.suppress(Exception):  # then its traceback says it
                line = _reports().stopped_line(here, self._end_of_this(error))
            if line:
                sys.stderr.write(f"{line}\n")  # one write: others print to the same stream
                sys.stderr.flush()
                return
        with for_the_log(self._is_recorded and is_default):
            if has_hidden(error) and (here is None or here.process == 0):
                print(f"shoal: {HIDDEN}", file=sys.stderr)  # once per job
            self._excepthook(type(error), error, error.__traceback__)

    def _shows_not_joined(self, error: BaseException) -> bool:
        """Show that this process could not join its job, in place of a traceback."""
        if self._excepthook is not sys.__excepthook__:
            return False
        try:
            return bool(_reports().shows_not_joined(error, *self._joining))
        except Exception:  # noqa: BLE001 (then its traceback says it)
            return False

    def _report_job(self, client: JobClient, error: BaseException, signals: Sequence[int]) -> None:
        """Add the report of the job, if this process is to make it."""
        try:
            _reports().report_job(client, self._end_of_this(error), signals)
        except Exception:  # noqa: BLE001 (without it the error is still shown)
            self._excepthook(type(error), error, error.__traceback__)

    def _end_of_this(self, error: BaseException) -> EndOfThis:
        code = self._code
        if code is None:
            code = exit_code_of(error)
        return cast("EndOfThis", _reports().EndOfThis(error, code, self._peers))

    def _on_thread_exception(self, raised: threading.ExceptHookArgs) -> None:
        """Record an exception that ended a thread: perhaps the others will wait for what it did."""
        error, thread = raised.exc_value, raised.thread
        if error is not None and thread is not None and self._is_owner():
            if not isinstance(error, SystemExit) and self._recorded_threads < _MOST_THREADS:
                self._recorded_threads += 1
                record(error, thread=thread.name)
        self._thread_hook(raised)

    def _report_failure(self, client: JobClient, error: BaseException) -> dict[int, Member]:
        """Report an uncaught exception; return the lost processes if they may be its cause."""
        at_s = time.time()
        gone = gone_behind(client, error)
        self._record(error, gone, at_s)  # before any other process learns of it
        with contextlib.suppress(ShoalError, OSError):
            kind = "failed" if self._peers is None else "followed"
            end = record_sent(client, error, self._peers)
            client.report(kind, failure_of(error, self._program.place).words, end)
        return gone

    def _record(self, error: BaseException, gone: Mapping[int, Member], at_s: float) -> None:
        """Record an exception, in torch's error file too if no other process led to it."""
        self._error, self._peers = error, peers_behind(error, gone)
        process = step = point = None
        begins: list[str] = []
        here = self._client
        if here is not None:
            process, step, point = here.process, here.progress.step, here.progress.point
            begins = speakers(here.hosts)
        self._is_recorded = record(
            error,
            process=process,
            step=step,
            point=point,
            because_of=self._peers,
            speakers=begins,
        )
        if self._peers is None:
            self._agent.record(error, at_s)

    def _outlast(self, process: int | None) -> None:
        """End after the process that led to the exception, and write torch's error file then."""
        if self._error is not None and self._peers is not None:
            self._limit = None  # the wait has a limit of its own
            at_s = self._agent.outlast(process, self._peers)
            self._agent.record(self._error, at_s, self._explanation)

    def _explain(self, client: JobClient, error: BaseException, gone: Mapping[int, Member]) -> None:
        """After an error of JAX's runtime was printed, add which processes are gone."""
        self._code = self._exit_code_of(error)
        if gone or (is_of_runtime(error) and lost_services(client)):
            code, lines = explain(client, gone)
            if self._code_of_hook is None:
                self._code = code
            self._explanation = "\n".join(f"shoal: {line}" for line in lines)
            print(self._explanation, file=sys.stderr)

    def _exit_code_of(self, error: BaseException) -> int:
        if self._code_of_hook is not None:
            return self._code_of_hook
        return exit_code_of(error)

    def _limit_end(self) -> None:
        """Make the thread end this process if it does not end by itself in time."""
        limit_s = settings.seconds("SHOAL_HANG_TIMEOUT_S")
        self._limit = (time.monotonic() + limit_s, 1 if self._code is None else self._code)
        self._wake.set()

    def _on_sys_exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            site = position_in_program(sys._getframe(1))
            if self._client is not None and site:  # "": a runner raises it again
                self._client.progress.leave(site)
            self._exit_status = status if isinstance(status, int) else int(status is not None)
            # Python takes a code from its excepthook, but not from an exit handler: these run once
            # the main thread counts as ended.
            is_ending = threading.main_thread().is_alive() and not self._program.is_running()
            if is_ending and self._program.uncaught() is not None:
                self._code_of_hook = self._exit_status & 0xFF
            error = sys.exc_info()[1]
            self._peers = None if error is None else peers_behind(error, {})
            if isinstance(error, SystemExit):  # a runner such as runpy raises it again
                self._exit_report = exit_of(error)
            else:
                self._exit_report = exit_words(status, site, error)
        self._exit(status)

    def _on_exit(self) -> None:
        client = self._client
        if client is None:
            return
        if not self._is_owner():
            # JAX's teardown would wait for threads that a fork does not have.
            flush()  # but not the copies of its parent's files
            os._exit(self._known_code())
        # The order matters: the others learn why this process ends before anything here waits;
        # calls are compared before the devices finish, which after calls that differ they may never
        # do; they finish before JAX's teardown, which would cut off their part of a program; the
        # job is left last, since no process waits for one that has left.
        error = self._program.uncaught()
        if self._code is None and error is not None:  # another hook was called instead of this one
            self._explain(client, error, self._report_failure(client, error))
        if error is not None and not self._is_shown and _is_for_processes(client):
            self._report_job(client, error, signals=())
        if self._code is not None:
            self._outlast(client.process)
            _end(self._code)
        message = self._leaving_words()
        fails = self._exit_status not in (0, REQUEUE)
        gone: Mapping[int, Member] = {}
        is_alone = False  # no other process will start its part of what these devices compute
        if fails:
            self._report_exit(client, message)
        else:
            unfinished = self._finish(client)
            gone, is_alone = unfinished or {}, unfinished is None
        # Only now can a teardown hang; otherwise Python's own end keeps its exit code, which is not
        # known here for certain: the program may have raised SystemExit itself.
        is_idle = self._is_idle()
        if not gone and (self._parts_together or not is_idle):
            gone = gone_members(client)
        is_busy = _works_on_devices()
        if gone or is_busy or (fails and not is_idle):
            with for_launcher():
                code = self._exit_status & 0xFF or report_cut(client, gone)
            self._cut(client, code)
        if is_alone and (self._program.has_returned() or self._exit_report):
            with for_launcher():
                report_alone(client)
            self._cut(client, self._exit_status & 0xFF)
        self._native_since = time.monotonic()
        self._wake.set()
        self._leave(message)
        self.release()

    def _cut(self, client: JobClient, code: int) -> NoReturn:
        """Leave the job, and end without JAX's teardown."""
        flush()  # before the services may end, because JAX's client aborts then
        write_open_files()
        with contextlib.suppress(ShoalError, OSError):
            client.close()
        os._exit(code)

    def _finish(self, client: JobClient) -> Mapping[int, Member] | None:
        """Compare the calls, unless the end may be out of order, and wait for the devices: see
        `await_devices`."""
        has_exited = self._exit_report and self._program.has_exited()
        try:
            if self._exit_status == 0 and (has_exited or self._program.has_returned()):
                self._compare()
            return await_devices(client, self._timed(self._issued_work()))
        except DivergenceError as error:
            try:
                self._take_exception(type(error), error, error.__traceback__)
                self._outlast(client.process)
            finally:
                _end(self._exit_code_of(error))
        except BaseException as error:  # noqa: BLE001 - Python would print and ignore it
            message, end = failure_of(error).words, record_sent(client, error)
            if isinstance(error, SystemExit):  # of the program's handler of a signal
                message = exit_of(error)
            elif isinstance(error, ShoalError):
                print(f"shoal: {error}", file=sys.stderr)
            elif not isinstance(error, KeyboardInterrupt):
                traceback.print_exc()
            with contextlib.suppress(ShoalError, OSError):
                client.report("failed", message, end)
            _end(exit_code_of(error))

    def _timed(self, is_done: Callable[[], bool]) -> Callable[[], bool]:
        """Let the thread know of calls that may block: they start work on devices."""

        def look() -> bool:
            self._native_since = time.monotonic()
            try:
                return is_done()
            finally:
                self._native_since = math.inf

        self._wake.set()
        return look

    def _report_exit(self, client: JobClient, message: str) -> None:
        """Report an end by `sys.exit`, as `_report_failure` and `_outlast` do for an exception."""
        peers, peer_losses = self._peers, client.peer_losses
        if peers is None and peer_losses.has_open():
            peers = {
                loss.process: loss.departure
                for loss in peer_losses.open()
                if loss.process is not None
            }
        at_s = time.time()
        if peers is None:
            self._agent.record_words(message, at_s)
        with contextlib.suppress(ShoalError, OSError):
            code, me = self._exit_status & 0xFF, client.process
            end = record_of_exit(code, headline_of(message), peers, me)
            client.report("failed" if peers is None else "followed", message, end)
        if peers is not None:
            self._agent.record_words(message, self._agent.outlast(client.process, peers))

    def _leaving_words(self) -> str:
        """Return the report, for the other processes, of an end without an exception."""
        if self._program.has_returned():
            self._exit_status = 0  # an earlier sys.exit() that was caught
            return ""
        if self._exit_report or not self._program.has_exited():
            if not self._exit_status:
                return ""
            return self._exit_report
        return f"left the job by SystemExit (exit code unknown), at {self._program.place}"

    def _await_end(self, client: JobClient, wake: threading.Event) -> None:
        """Sleep until the end begins; report what ended the program if the hook cannot."""
        has_reported = False
        while not wake.wait(_LOOK_S):
            error = self._uncaught()
            if error is None or not self._is_owner():
                continue
            if not has_reported:
                self._report_failure(client, error)
                has_reported = True
            if self._program.joins_threads():  # the other hook has finished
                self._code = self._exit_code_of(error)
                self._limit_end()

    def _end_if_stuck(self, client: JobClient, wake: threading.Event) -> None:
        """End the process when its end hangs. Sends no query within the first second."""
        self._await_end(client, wake)
        query_at = 0.0
        while self._client is client:
            now = time.monotonic()
            if self._limit is not None and now >= self._limit[0]:
                with for_launcher():
                    report_stuck(client)
                _end(self._limit[1])
            if now >= max(query_at, self._native_since + _IN_TIME_S):
                if gone_members(client):
                    with for_launcher():
                        report_stuck(client)
                    _end(self._exit_status & 0xFF or ProcessLostError.exit_code)
                query_at = now + pause_s(client)
            time.sleep(0.2)


def _reports() -> Any:
    """Return the module that reports where no launcher of shoal does: nothing else needs it."""
    from shoal.runtime.exit import job_report

    return job_report


def _is_for_processes(client: JobClient) -> bool:
    """Return whether the processes of the job report its failure."""
    return client.num_processes > 1 and not has_launcher()


def _without_sigterm(
    client: JobClient,
) -> contextlib.AbstractContextManager[Sequence[int]]:
    if not _is_for_processes(client):
        return contextlib.nullcontext(())
    return cast("contextlib.AbstractContextManager[Sequence[int]]", _reports().without_sigterm())


def _works_on_devices() -> bool:
    """Return whether a thread that gave up at its deadline still works in native code. Python must
    not end around it: tearing it down in the middle of C++ aborts."""
    limit = time.monotonic() + _BUSY_S
    for thread in threading.enumerate():
        if thread.name == DEVICE_WORK:
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                return True
    return False


def _end(code: int) -> NoReturn:
    """Flush Python's buffers, and end without any teardown."""
    flush()
    if threading.current_thread() is threading.main_thread():
        write_open_files()
    os._exit(code)


def flush() -> None:
    """Flush stdout and stderr."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
