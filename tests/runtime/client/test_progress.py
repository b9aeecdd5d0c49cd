"""What a process records of its main thread."""

from __future__ import annotations

from shoal.runtime.client.progress import Progress
from shoal.runtime.rules.point import Point


def test_an_exit_is_the_last_call_until_another_follows():
    progress = Progress(clock=iter(range(9)).__next__)
    assert progress.exited_at == ""
    progress.leave("train.py:31 (main)")
    assert progress.exited_at == "train.py:31 (main)"
    assert progress.place == "sys.exit() at train.py:31 (main)"
    progress.begin_wait(Point("barrier"), 3.0)  # the program has caught the exception
    assert progress.exited_at == ""
