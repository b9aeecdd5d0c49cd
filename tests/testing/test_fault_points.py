"""Faults at named points: the text, the turns, and what happens."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from shoal.errors import UsageError
from shoal.runtime.system import fault_points
from shoal.runtime.system.fault_points import InjectedError, parse, reach, text_of

WHOLE = "barrier.before_arrive@1:kill; mine@0:delay=2; y:raise; z@2#3:exit=3; w#*:stop"


@pytest.fixture
def faults(monkeypatch):
    def let(text):
        monkeypatch.setenv("SHOAL_FAULTS", text)

    return let


def test_a_text_is_read_and_written():
    assert text_of(parse(WHOLE)) == WHOLE
    assert [(f.process, f.turn, f.kind, f.value) for f in parse(WHOLE)] == [
        (1, 1, "kill", ""),
        (0, 1, "delay", "2"),
        (None, 1, "raise", ""),
        (2, 3, "exit", "3"),
        (None, 0, "stop", ""),
    ]
    assert parse(" ; ;") == ()


def test_fault_points_without_a_fault_do_nothing(faults, monkeypatch):
    monkeypatch.delenv("SHOAL_FAULTS", raising=False)
    reach("barrier.before_arrive", 0)
    assert "SHOAL_FAULTS" not in os.environ
    faults("x@1:raise")
    reach("x", 0)
    reach("y", 1)
    assert os.environ["SHOAL_FAULTS"] == "x@1:raise"


def test_the_third_time_and_then_never_again(faults):
    faults("x@1#3:raise; y:raise")
    reach("x", 1)
    reach("x", 0)
    reach("x", 1)
    with pytest.raises(InjectedError, match="at 'x'"):
        reach("x", 1)
    assert os.environ["SHOAL_FAULTS"] == "y:raise"
    reach("x", 1)


def test_fault_with_a_star_is_injected_each_time(faults):
    faults("x#*:raise")
    for _ in range(3):
        with pytest.raises(InjectedError):
            reach("x")


def test_the_process_is_known_from_the_environment(faults, monkeypatch):
    faults("x@2:raise")
    reach("x")
    monkeypatch.setenv("SHOAL_PROCESS_ID", "2")
    with pytest.raises(InjectedError):
        reach("x")


def test_an_exit_and_a_delay(faults, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    faults("x:exit=3; y:exit; z:delay=0.5")
    for point, code in (("x", 3), ("y", 1)):
        with pytest.raises(SystemExit) as left:
            reach(point)
        assert left.value.code == code
    reach("z")
    assert slept == [0.5]


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_signal(kind, child_env):
    code = "from shoal.runtime.system.fault_points import reach; reach('x', 1); print('on')"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=child_env | {"SHOAL_FAULTS": f"x@1:{kind}"},
        stdout=subprocess.PIPE,
    )
    with process:
        if kind == "kill":
            assert process.wait(30) == -9
        else:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            process.kill()
        assert process.stdout.read() == b""


def test_a_pause_lasts_until_it_is_released(faults, tmp_path):
    with socket.socket(socket.AF_UNIX) as bench:
        bench.bind(str(tmp_path / "s"))
        bench.listen()
        bench.settimeout(30)
        faults(f"x@1:pause={tmp_path / 's'}")
        thread = threading.Thread(target=reach, args=("x", 1), daemon=True)
        thread.start()
        connection, _ = bench.accept()
        said = connection.makefile().readline()
        assert said == f'{{"point": "x", "process": 1, "pid": {os.getpid()}}}\n'
        assert thread.is_alive()
        connection.send(b".")
        thread.join(30)
        assert not thread.is_alive()
        connection.close()


def test_a_signal_that_does_not_end_the_read_of_a_pause_is_handled_in_it(faults, tmp_path):
    handled = threading.Event()
    seen = []

    def strike(listener):
        connection, _ = listener.accept()
        with connection:
            connection.makefile().readline()
            # To this thread, so that the read of the other is not interrupted: as little as by a
            # signal that comes between its last look for signals and the read.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            seen.append(handled.wait(20))

    before = signal.signal(signal.SIGUSR2, lambda *_: handled.set())
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            faults(f"x:pause={tmp_path / 's'}")
            bench = threading.Thread(target=strike, args=(listener,), daemon=True)
            bench.start()
            reach("x")
            bench.join(30)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == [True]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x", "'x' is not POINT[@PROCESS][#TURN]:KIND[=VALUE]"),
        ("x@a:kill", "is not POINT"),
        (
            "x:kil",
            "'kil' is not one of kill, stop, raise, exit, delay, pause; did you mean 'kill'?",
        ),
        ("barier.before_arrive:kill", "no point 'barier.before_arrive'; did you mean 'barrier.be"),
        ("saves.opened:kill", "no point 'saves.opened'; did you mean 'save.opened'"),
        ("barrier.before_arive:kill", "no point 'barrier.before_arive'; did you mean 'barrier.be"),
        ("x#0:kill", "turns are counted from 1"),
        ("x:kill=9", "kill takes no value"),
        ("x:exit=256", "a code from 0 to 255"),
        ("x:exit=a", "a code from 0 to 255"),
        ("x:delay", "a positive number of seconds"),
        ("x:delay=-1", "a positive number of seconds"),
        ("x:delay=inf", "a positive number of seconds"),
        ("x:pause", "the path of a socket"),
    ],
)
def test_a_malformed_text_is_refused(text, told, faults):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert told in str(caught.value)
    faults(text)
    with pytest.raises(UsageError, match="SHOAL_FAULTS"):
        reach("anything")


def test_programs_have_points_of_their_own():
    text = "train.end:kill; saved:kill; evaluation.before:exit=3"
    assert [str(fault) for fault in parse(text)] == text.split("; ")


def test_every_problem_of_a_faults_string_is_reported_at_once():
    with pytest.raises(UsageError) as caught:
        parse("a:b; c; d:delay=x; fine:kill")
    assert len(caught.value.problems) == 3


def test_the_list_of_points_is_that_of_the_code():
    from meta.source import package_tree

    texts = [
        text for path, text in package_tree().items() if path != "runtime/system/fault_points.py"
    ]
    for point in fault_points.POINTS:
        operation, moment = point.split(".")
        of_each_call = any(f'reach(f"{{call.operation}}.{moment}"' in text for text in texts)
        is_call = any(f'Call("{operation}"' in text for text in texts)
        assert any(f'reach("{point}"' in text for text in texts) or (of_each_call and is_call), (
            point
        )
