"""Print a line on process 0 alone."""

from __future__ import annotations

import os

from shoal import settings
from shoal.colour import local
from shoal.errors import ShoalError
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.process import last_client
from shoal.runtime.startup.launchers import numbers_of


@local
def log(*values: object) -> None:
    """Print values on process 0, behind the current step; on other processes do nothing.

    Local.

    Any process can call it at any time: nothing is sent, and nothing is waited for. The values are
    written to standard output as one whole line, in one piece, and flushed. So a line is never torn
    by other threads, and is not left in a buffer if the process is killed. Inside `step`, the line
    begins with its number. With SHOAL_QUIET=1 nothing is printed.

    Args:
      values: as for `print`, separated by blanks. Do not compute them on process 0 alone if they
        need the other processes, such as the mean of a global array.

    Before `initialize`, the index of the process is the one that its launcher gives; with neither
    a launcher nor `jax.distributed`, every process prints.

    >>> import shoal
    >>> with shoal.step(12):
    ...     shoal.log("loss", 0.25)
    step 12: loss 0.25
    """
    if settings.number("SHOAL_QUIET") == 1:
        return
    process, step = _process_and_step()
    if process == 0:
        place = "" if step is None else f"step {step}: "
        # One write: `print` would write the end of the line by itself.
        print(f"{place}{' '.join(map(str, values))}\n", end="", flush=True)


def _process_and_step() -> tuple[int, int | None]:
    """Return the index of this process, and the innermost open step."""
    try:
        here = last_client()
        return here.process, here.progress.outer
    except ShoalError:  # a member that has not joined its job yet
        attached = jax_runtime.attached()
    try:
        return attached.process if attached else numbers_of(os.environ)[0], None
    except ShoalError:  # `initialize` raises it: the launcher's variables are wrong
        return 0, None
