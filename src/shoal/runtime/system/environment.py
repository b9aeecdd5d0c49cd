"""Copy the environment of this process while other threads may change it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def own_environment() -> dict[str, str]:
    """Return a copy, for starting a process.

    Without one, exec reads the environment itself, and fails with "Bad address" if another thread
    changes it meanwhile, as pytest does for every test. `dict(os.environ)` fails, too, if a
    variable is removed during the copy.
    """
    found = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in found if value is not None}


def uninspected(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy for a process without a terminal.

    With PYTHONINSPECT, Python shows the end of a program by `sys.exit(0)` as an error, and its exit
    code is 1: it would go on at a terminal, interactively.
    """
    return {name: value for name, value in env.items() if name != "PYTHONINSPECT"}
