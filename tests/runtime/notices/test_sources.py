"""Sources of notices: files and functions here, signals in processes of their own."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.notices import FileNotice, Sources
from shoal.runtime.rules.stopping import ReceivedNotice

PATIENCE_S = 60.0


@pytest.fixture
def heard():
    """Return a queue of what was given, and the sources that give it."""
    box = queue.Queue()
    sources = Sources(box.put, lambda: False)
    yield box, sources
    sources.close()


def watch(sources, **more):
    given = {"signals": (), "files": (), "poll": (), "every_s": 0.01, "grace_s": None}
    sources.watch(*{**given, **more}.values())


def test_a_file_that_appears_is_a_notice_each_time(heard, tmp_path):
    box, sources = heard
    path = tmp_path / "leave"
    looks = threading.Semaphore(0)
    watch(sources, files=[path], poll=[looks.release], grace_s=30)
    assert looks.acquire(timeout=PATIENCE_S)
    assert box.empty()
    whole = tmp_path / "whole"
    whole.write_text("the queue is drained\nand more\n")
    whole.rename(path)
    first = ReceivedNotice("the queue is drained", f"file {path}", 30.0)
    assert box.get(timeout=PATIENCE_S) == first


def test_a_file_is_looked_for_again_when_it_was_removed(tmp_path):
    path = tmp_path / "leave"
    notice = FileNotice(str(path))
    assert notice() is None
    path.touch()
    assert [notice(), notice()] == [("the file exists", None)] * 2
    path.write_text("late words")
    assert notice() == ("the file exists", None)
    path.unlink()
    assert notice() is None
    path.write_text("again")
    assert notice() == ("again", None)
    path.unlink()
    path.mkdir()
    assert notice() == ("again", None)  # nobody saw it gone
    path.rmdir()
    assert notice() is None
    path.mkdir()
    assert notice()[0].startswith("the file exists (")


def test_an_answer_that_stays_is_one_notice(heard):
    box, sources = heard
    answers = iter([None, "soon", "soon", ("soon", 5), None, "soon", ("later", 7.5)])
    has_ended = threading.Event()

    def cloud():
        for answer in answers:
            return answer
        has_ended.set()
        return None

    watch(sources, poll=[cloud])
    assert has_ended.wait(PATIENCE_S)
    given = [box.get(timeout=PATIENCE_S) for _ in range(3)]
    soon, later = (ReceivedNotice(words, cloud.__qualname__) for words in ("soon", "later"))
    assert given == [soon, soon, later._replace(deadline_s=7.5)]
    assert box.empty()


def test_a_function_that_raises_is_logged_once_and_asked_again(heard, shoal_log):
    box, sources = heard
    answers = iter([OSError("no such host"), OSError("again"), 7, ("x", -1), (), "at last"])

    def cloud():
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cloud.source = "my cloud"
    watch(sources, poll=[cloud])
    assert box.get(timeout=PATIENCE_S) == ReceivedNotice("at last", "my cloud")
    assert shoal_log.lines[0] == ("WARNING", "notices: my cloud: OSError: no such host")
    assert len(shoal_log.lines) == 1


@pytest.mark.parametrize("answer", [True, False, 7, (), ("x", -1), ("x", "1"), ("x", 1, 2)])
def test_invalid_answer_raises_with_what_is_expected(heard, shoal_log, answer):
    box, sources = heard
    answers = iter([answer, "at last"])
    watch(sources, poll=[lambda: next(answers, None)])
    assert box.get(timeout=PATIENCE_S).reason == "at last"
    assert f"{answer!r} is not None, text, or (text, seconds left)" in shoal_log.lines[0][1]


def test_a_slow_function_delays_only_itself(heard):
    box, sources = heard
    hold = threading.Event()
    watch(sources, poll=[hold.wait, lambda: "quick"])
    assert box.get(timeout=PATIENCE_S).reason == "quick"
    hold.set()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"signals": ["SIGNOTHING"]}, "there is no signal 'SIGNOTHING'"),
        ({"signals": [99]}, "there is no signal 99"),
        ({"signals": ["SIGKILL"]}, "SIGKILL cannot be watched"),
        ({"signals": "SIGTERM"}, "signals='SIGTERM' must be a list"),
        ({"signals": 15}, "signals=15 must be a list"),
        ({"files": "/run/x"}, "files='/run/x' must be a list"),
        ({"files": [3.5]}, "files: 3.5 must be a string or a pathlib.Path"),
        ({"poll": ["gce"]}, "poll: 'gce' cannot be called"),
        ({"every_s": 0}, "every_s=0 must be a positive number"),
        ({"every_s": "5"}, "every_s='5' must be a number"),
        ({"grace_s": float("nan")}, "grace_s=nan must be a positive number"),
        ({"every_s": -1, "grace_s": -1}, "2 problems"),
    ],
)
def test_wrong_arguments_are_refused(heard, wrong, words):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError) as caught:
        watch(heard[1], **wrong)
    assert words in str(caught.value)
    assert ("must be a" in words and "positive" not in words) <= isinstance(
        caught.value, UsageTypeError
    )
    assert not heard[1].is_set_up
    assert signal.getsignal(signal.SIGTERM) == before


def test_signals_are_for_the_main_thread(heard, run_all):
    (error,) = run_all(lambda: watch(heard[1], signals=["SIGTERM"]))
    assert type(error) is UsageError
    assert "be watched from the main thread" in str(error)


HEAD = """
import os, queue, signal, sys, threading
from shoal.runtime.notices import Sources
me, box, trouble = os.getpid(), queue.Queue(), []
sources = Sources(box.put, lambda: bool(trouble))
def watch(*signals):
    sources.watch(signals, (), (), 1.0, None)
def send(number=signal.SIGTERM):
    os.kill(me, number)
def source():
    return box.get(timeout=60).source
"""


def run(script, code=0):
    """Run a script in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout.split()


def test_a_signal_is_a_notice_however_often_it_comes():
    assert run("""
        watch("SIGTERM", signal.SIGUSR1)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            send(number)
            print(source())
        assert box.empty()
        """) == ["SIGTERM", "SIGTERM", "SIGUSR1"]


def test_a_signal_that_comes_again_and_again_is_logged_once():
    """As a scheduler sends it that is not obeyed."""
    assert (
        run("""
        import logging, shoal
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        shoal.preemption.watch(signals=["SIGTERM", "SIGUSR1"])
        for _ in range(100):
            send()
        send(signal.SIGUSR1)
        while not (shoal.preemption.notice() and shoal.preemption.notice().others): pass
        shoal.runtime.process.sources().close()
        """).count("SIGTERM:")
        == 1
    )


def test_handlers_installed_before_and_after_are_called_too():
    assert run("""
        signal.signal(signal.SIGTERM, lambda *_: print("before"))
        watch("SIGTERM")
        send(); print(source())
        signal.signal(signal.SIGTERM, lambda *_: print("after"))
        send(); print(source())
        """) == ["before", "SIGTERM", "after", "SIGTERM"]


def test_what_a_handler_of_before_raises_is_raised_after_the_notice():
    assert run("""
        def leave(*_): sys.exit(7)
        signal.signal(signal.SIGTERM, leave)
        watch("SIGTERM")
        try: send()
        except SystemExit as error: print(error.code, source())
        """) == ["7", "SIGTERM"]


def test_another_user_of_pythons_pipe_is_served_too():
    """Before us: it is forwarded to. After us (asyncio): our handler tells."""
    assert run("""
        def pipe():
            ends = os.pipe(); os.set_blocking(ends[1], False); return ends
        read, write = pipe()
        signal.set_wakeup_fd(write)
        watch("SIGTERM")
        send(); print(source(), os.read(read, 9)[0])
        signal.signal(signal.SIGUSR1, lambda *_: None)
        send(signal.SIGUSR1); print(os.read(read, 9)[0])
        later, write_later = pipe()
        assert signal.set_wakeup_fd(write_later) not in (-1, write)
        send(); print(source(), os.read(later, 9)[0])
        assert signal.set_wakeup_fd(-1) == write_later
        send(); print(source())
        send(); print(source())
        sources.close()
        assert box.empty()
        """) == ["SIGTERM", "15", "10", "SIGTERM", "15", "SIGTERM", "SIGTERM"]


def test_asyncio_gets_its_signals_and_so_do_we():
    assert run("""
        import asyncio
        watch("SIGTERM")
        async def main():
            came = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)
            send(signal.SIGUSR1); await came.wait(); print("asyncio")
            send(); print(await asyncio.to_thread(source))
        asyncio.run(main())
        send(); print(source())
        """) == ["asyncio", "SIGTERM", "SIGTERM"]


@pytest.mark.parametrize("fork", ["os", "thread", "multiprocessing"])
def test_a_forked_child_ends_by_sigterm_and_gives_no_notice(fork):
    """Also where the signal comes at once, before the child has done anything."""
    assert run(f"""
        import multiprocessing, time, warnings
        warnings.simplefilter("ignore")
        watch("SIGTERM")
        def child():
            while True: time.sleep(60)
        def by_os():
            pid = os.fork()
            if not pid: child()
            os.kill(pid, signal.SIGTERM)
            return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        def by_thread():
            codes = []
            thread = threading.Thread(target=lambda: codes.append(by_os()))
            thread.start(); thread.join(60)
            return codes[0]
        def by_multiprocessing():
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start(); process.terminate(); process.join(60)
            return -process.exitcode
        print({{by_{fork}() for _ in range(20)}})
        send(); print(source())
        assert box.empty()
        """) == ["{15}", "SIGTERM"]


def test_handlers_are_put_back():
    assert run(
        """
        def mine(*_): print("mine")
        signal.signal(signal.SIGUSR1, mine)
        watch("SIGTERM", "SIGUSR1", "SIGUSR2")
        signal.signal(signal.SIGUSR2, mine)
        sources.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGUSR2) == mine
        assert signal.set_wakeup_fd(-1) == -1
        send(signal.SIGUSR1); send(signal.SIGUSR2)
        assert box.empty()
        sys.stdout.flush()
        send()
        """,
        -signal.SIGTERM,
    ) == ["mine", "mine"]


def test_closed_in_another_thread_it_passes_everything_on():
    assert (
        run(
            """
        watch("SIGTERM")
        thread = threading.Thread(target=sources.close); thread.start(); thread.join(60)
        send()
        signal.pause()
        """,
            -signal.SIGTERM,
        )
        == []
    )


def test_sources_that_were_closed_in_another_thread_may_be_followed_by_others():
    assert run("""
        watch("SIGTERM")
        thread = threading.Thread(target=sources.close)
        thread.start(); thread.join()
        sources = Sources(box.put, lambda: False)
        watch("SIGTERM")
        send(); print(source())
        sources.close()
        print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        """) == ["SIGTERM", "True"]


def test_once_a_process_is_gone_sigterm_ends_the_program_again():
    assert run(
        """
        watch("SIGTERM")
        send(); print(source(), flush=True)
        trouble.append("process 1")
        send()
        while True: signal.pause()
        """,
        128 + signal.SIGTERM,
    ) == ["SIGTERM"]


def test_by_default_sigterm_is_watched_unless_it_is_ignored():
    assert run("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sources.watch_by_default()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sources.watch_by_default()
        send(); print(source())
        before = signal.getsignal(signal.SIGINT)
        assert before is signal.default_int_handler
        """) == ["SIGTERM"]


def test_first_call_in_a_thread_does_not_prevent_watching():
    assert run("""
        import shoal
        thread = threading.Thread(target=shoal.preempted, args=(0,))
        thread.start(); thread.join()
        assert not shoal.preempted(0)
        send()
        while shoal.preemption.notice() is None: pass
        print(shoal.preemption.notice().source)
        """) == ["SIGTERM"]


def test_the_public_functions_watch_in_the_process_that_calls_them():
    assert run(
        """
        import shoal
        assert shoal.preempted(3) is False
        send()
        stop = shoal.runtime.process.client().stop
        while shoal.preemption.notice() is None: stop.wait(0, 60)
        notice = shoal.preemption.notice()
        print(notice.source, notice.step, shoal.preempted(3), shoal.preempted(4))
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        shoal.preemption.mark_saved(4)
        sys.exit(shoal.preemption.exit_code())
        """,
        75,
    ) == ["SIGTERM", "4", "False", "True", "-15"]


def test_the_end_of_the_program_waits_for_a_message_that_is_written_and_allows_no_more(heard):
    # Python aborts if a thread writes then: "could not acquire lock … at interpreter shutdown".
    _, sources = heard
    begun, go_on, written = threading.Event(), threading.Event(), []

    class Slow(logging.Handler):
        def emit(self, record):
            begun.set()
            assert go_on.wait(PATIENCE_S)
            written.append(record.getMessage())

    def fails():
        raise OSError("no such server")

    slow = Slow()
    logging.getLogger("shoal").addHandler(slow)
    try:
        watch(sources, poll=[fails])
        assert begun.wait(PATIENCE_S)
        end = threading.Thread(target=sources.fall_silent)
        end.start()
        end.join(0.2)
        assert end.is_alive()
        go_on.set()
        end.join(PATIENCE_S)
        assert len(written) == 1
        looks = threading.Semaphore(0)
        watch(sources, poll=[fails, looks.release])
        assert all(looks.acquire(timeout=PATIENCE_S) for _ in range(3))
        assert len(written) == 1
    finally:
        logging.getLogger("shoal").removeHandler(slow)
