"""What the tests of the bench let their processes do: functions that a child can import."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time

import shoal
from shoal.runtime.system.fault_points import reach


def who(*more: object, **named: object) -> tuple[object, ...]:
    return (shoal.process_index(), shoal.process_count(), more, named)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def what_is_its_own() -> tuple[object, ...]:
    """Return what no two processes share, and what all of a cluster do."""
    import numpy as np

    assert "jax" in sys.modules
    names = ("SHOAL_PROCESS_ID", "SHOAL_MINE")
    return (os.getpid(), os.getsid(0), os.getppid(), *map(os.environ.get, names), np.random.rand())


def host() -> str:
    return os.uname().nodename


def global_sum() -> tuple[float, int]:
    """Sum 0..D-1 with a jitted collective over all D devices."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
    rows = np.arange(len(devices), dtype=np.float32)
    array = jax.make_array_from_callback(rows.shape, sharding, lambda where: rows[where])
    return float(jax.jit(lambda a: a.sum())(array)), len(devices)


def who_and_sum(*more: object, **named: object) -> tuple[object, ...]:
    """Both in one job: joining it is what takes time. As a program does, it joins first."""
    shoal.initialize()
    shoal.initialize(virtual_devices=2)
    return who(*more, **named), global_sum()


def fail_in(process: int) -> None:
    if shoal.process_index() == process:
        raise ValueError("no more data")
    shoal.barrier("never")


def exit_with(code: int) -> None:
    sys.exit(code)


def meet(*names: str) -> None:
    for name in names:
        say(f"before {name}")
        shoal.barrier(name)
        say(f"after {name}")


def say(words: str) -> None:
    """One write on a line of its own: gloo's threads print to the same stdout."""
    os.write(1, f"\n{words}\n".encode())


def sleep() -> None:
    say("asleep")
    time.sleep(1000)


def leave_somebody_behind() -> int:
    """Start a process in a session of its own, whose parent ends before it."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
    return subprocess.Popen(command, start_new_session=True, close_fds=False).pid


def reach_twice() -> list[str]:
    for _ in range(2):
        reach("mine")
    return [os.environ["SHOAL_FAULTS"]]


class _Speaks:
    def __del__(self) -> None:
        os.write(1, b"of the module\n")


def speak_at_the_end() -> None:
    """Leave what speaks at the interpreter's end, and when this module is taken apart."""
    atexit.register(os.write, 1, b"atexit\n")
    globals()["_left"] = _Speaks()


def change_its_streams() -> tuple[object, ...]:
    """Change how standard output encodes, which writes what it holds and asks where it stands."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return sys.stdout.encoding, sys.stdout.seekable()


def unfit() -> object:
    return object()


def print_much() -> None:
    """More than any pipe holds, on both streams."""
    for _ in range(40):
        os.write(1, b"o" * 50_000 + b"\n")
        os.write(2, b"e" * 50_000 + b"\n")


def ask_over_network(address: str) -> None:
    """Process 0 answers datagrams; the other asks three times, and says whether it heard."""
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        if os.environ["SHOAL_PROCESS_ID"] == "0":
            sock.bind((address, 9000))
            say("listens")
            while (asked := sock.recvfrom(99))[0] != b"2":
                sock.sendto(*asked)
            sock.sendto(*asked)
            return
        for turn in range(3):
            reach("asked")
            sock.settimeout(0.5 if turn == 1 else 30.0)  # the second is asked to a cut cable
            sock.sendto(str(turn).encode(), (address, 9000))
            try:
                answer = sock.recv(99)
            except TimeoutError:
                say(f"silence {turn}")
            else:
                say(f"answer {answer.decode()}")
