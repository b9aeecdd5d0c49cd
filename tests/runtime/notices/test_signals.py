"""Signals that are watched leave the rest of the program alone."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading

import pytest

from shoal.runtime.notices import SignalWatch

PATIENCE_S = 60.0


@pytest.fixture
def came():
    """Return a queue of the signals that came; SIGUSR2 is watched."""
    box = queue.Queue()
    watch = SignalWatch(box.put)
    watch.watch([signal.SIGUSR2])
    yield box
    watch.close()


def test_a_library_that_reads_is_not_interrupted(came):
    """Without a watch the program would have ended: no library expects to go on after it."""
    libc, (read_fd, write_fd) = ctypes.CDLL(None), os.pipe()
    main = threading.main_thread().ident

    def pester():
        for _ in range(50):
            signal.pthread_kill(main, signal.SIGUSR2)
            came.get(timeout=PATIENCE_S)
        os.write(write_fd, b"data")

    thread = threading.Thread(target=pester)
    thread.start()
    data = ctypes.create_string_buffer(10)
    count = libc.read(read_fd, data, 10)
    thread.join(PATIENCE_S)
    os.close(read_fd)
    os.close(write_fd)
    assert (count, data.value) == (4, b"data")
