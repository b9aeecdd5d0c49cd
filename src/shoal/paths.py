"""Validate paths: of a file system, with `~` for the home; not an address such as gs://.

Every function and command that takes a path calls this first: otherwise an address would become a
folder named `gs:`, and `~` a folder named `~`, in the working directory.
"""

from __future__ import annotations

import os
import re

from shoal.errors import UsageError, UsageTypeError

# pathlib makes gs:/bucket of gs://bucket. One letter is the drive of another system.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def local_path(path: object, said: str = "") -> str:
    """Return a path of a file system as text, with `~` expanded.

    Args:
      path: str, bytes or an os.PathLike.
      said: the prefix of messages, such as "save: path='x'"; "": the path itself.

    Raises:
      UsageError: it is an address (`gs://…`), the home of an unknown user, or not a path at all.

    >>> local_path("runs/7"), local_path("./gs:/x")
    ('runs/7', './gs:/x')
    """
    said = said or repr(path)
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise UsageTypeError(f"{said} must be text or a pathlib.Path") from None
    if match := _ADDRESS.fullmatch(text):
        raise UsageError(f"{said}: {_no_address(text, *match.groups())}")
    try:
        is_path = b"\0" not in os.fsencode(text or "\0")
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise UsageError(f"{said} is not a path")
    whole = os.path.expanduser(text)
    if whole.startswith("~"):
        user = whole[1:].partition("/")[0]
        raise UsageError(
            f"{said}: there is no home directory of a user {user!r}\n"
            f"a folder of that very name is {'./' + whole!r}"
        )
    return whole


def _no_address(text: str, scheme: str, rest: str) -> str:
    """Return why this is not a path, and what to write instead."""
    if scheme.lower() == "file":
        from urllib.parse import unquote

        host, slash, below = rest.partition("/")
        is_here = not text.startswith("file://") or text.startswith("file:///")
        path = below if host == "localhost" and slash and not is_here else rest
        return f"file:// is not supported, only paths are: write {'/' + unquote(path)!r}"
    return (
        f"{scheme}:// is not supported, only file systems are\n"
        "give a path on one that all processes share, such as /shared/run "
        f"(a folder of that very name is {'./' + text!r})"
    )
