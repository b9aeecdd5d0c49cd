"""A launch does the same in what it may inherit, and in any pid namespace."""

from __future__ import annotations

import sys

import pytest

# Starts the rest of its command line with SIGCHLD ignored, or blocked.
AMISS = {
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])",
}
# Its pipes are closed before it ends, so only SIGCHLD can say that it has.
ENDS = "import os, sys, time; os.close(1); os.close(2); time.sleep(0.2); os._exit(3)"


@pytest.mark.parametrize("amiss", AMISS)
def test_exit_codes_are_seen_if_sigchld_was_ignored_or_blocked(launch, amiss):
    start = f"import os, signal, sys; {AMISS[amiss]}; os.execv(sys.argv[1], sys.argv[1:])"
    finished = launch.run("-n", "1", script=ENDS, before=[sys.executable, "-c", start])
    assert finished.code == 3, finished
    assert "failed first" in finished.verdict
