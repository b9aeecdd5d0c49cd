"""Validate paths: of a file system, with `~` for the home; not an address such as hf://.

Every function and command that takes a path calls `local_path` first: otherwise an address would
become a directory named `hf:`, and `~` a directory named `~`, in the working directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat

from shoal.errors import UsageError, UsageTypeError

# pathlib makes gs:/bucket of gs://bucket. One letter is the drive of another system.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_HOST = re.compile(r"\s*(?!file:/[^/]|file:///)[a-z][a-z0-9+.-]+:/+([^/]*)(.*)", re.DOTALL | re.I)
_OF_ACCOUNT = re.compile("(abfss?|adl):/+[^/:@]+@[^/:@]+(/.*)?", re.DOTALL | re.IGNORECASE)
_SIGNED = re.compile(
    "[?&;#](sig|signature|sv|se|token|password|awsaccesskeyid|googleaccessid|x-amz-[a-z-]+|"
    "x-goog-[a-z-]+|[a-z_]*(secret|access|account|api)_?[a-z_]*key[a-z_]*)=",
    re.IGNORECASE,
)


def local_path(path: object, prefix: str = "") -> str:
    """Return a path of a file system as text, with `~` expanded; also of `file:///…`.

    Args:
      path: str, bytes or an os.PathLike.
      prefix: the prefix of messages, such as "save: path='x'"; "": the path itself.

    Raises:
      UsageError: it is an address (`hf://…`), the home of an unknown user, or not a path at all.

    >>> local_path("runs/7"), local_path("./gs:/x"), local_path("file:///a%20b")
    ('runs/7', './gs:/x', '/a b')
    """
    prefix = prefix or repr(path)
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise UsageTypeError(f"{prefix} must be a string or a pathlib.Path") from None
    host_of(text)  # refuses secrets before anything shows them
    match = _ADDRESS.fullmatch(text)
    if match:
        if match[1].lower() != "file":
            raise UsageError(f"{prefix}: {_no_address(text, match[1])}")
        text = _path_of_file(text, match[2], prefix)
    try:
        is_path = b"\0" not in os.fsencode(text or "\0")
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise UsageError(f"{prefix} is not a path")
    whole = os.path.expanduser(text)
    if whole.startswith("~"):
        user = whole[1:].partition("/")[0]
        raise UsageError(
            f"{prefix}: there is no home directory of a user {user!r}\n"
            f"for a local directory with this name, pass {'./' + whole!r}"
        )
    return whole


def host_of(text: str) -> str:
    """Return the host, or the bucket, of an address, for tests of it; "" of a path.

    An address that holds credentials or a signature is refused, without showing it.

    Azure's addresses may name an account: container@account.

    Raises:
      UsageError: it does.

    >>> host_of("abfss://container@account.dfs.core.windows.net/run")
    'container@account.dfs.core.windows.net'
    """
    from urllib.parse import unquote

    address = unquote(text)
    host = _HOST.fullmatch(address)
    if host is None:
        return ""
    has_login = "@" in host[1] or (":" in host[1] and "@" in host[2])  # a secret may hold a slash
    if has_login and not _OF_ACCOUNT.fullmatch(address):
        raise UsageError(
            "an address must not hold credentials: pass them as options of shoal.Bucket"
        )
    if _SIGNED.search(address):
        raise UsageError(
            "an address must not hold a signature: pass it as an option of shoal.Bucket"
        )
    return host[1]


def dangling_link(path: str) -> str:
    """Return which symbolic link of a path leads nowhere, and where to; "" if none does.

    The system reports such a path as absent, as a file that exists, or as no directory, depending
    on the call. Loops of links are not meant: they have an error of their own (ELOOP).
    """
    there = os.path.abspath(path)
    links: list[str] = []
    while os.path.dirname(there) != there:
        links += [there] if os.path.islink(there) else []
        there = os.path.dirname(there)
    for link in reversed(links):  # the outermost first
        try:
            os.stat(link)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                target = os.path.realpath(link)
                return f"{link} is a symbolic link to {target}, which does not exist"
    return ""


def why_refused(error: OSError, path: str) -> str:
    """Return the system's reason for refusing a path; a link that leads nowhere is named."""
    return dangling_link(path) or error.strerror or str(error)


def open_no_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file of shoal's own, never through a symbolic link: its target would be overwritten.

    Raises:
      OSError: as `os.open`; for a link with words that say what to do.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or not os.path.islink(path):
            raise
        target = os.path.realpath(path)
        why = f"it is a symbolic link to {target}, which would be overwritten: remove the link"
        raise OSError(errno.ELOOP, f"{os.path.basename(path)}: {why}") from None


def write_private(path: str, text: str) -> None:
    """Write a file that only this user may read, whole or not at all.

    Raises:
      OSError: it cannot be written.
    """
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, "w", encoding="utf-8", errors="replace") as stream:
            stream.write(f"{text}\n")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def make_private(folder: str) -> None:
    """Create a directory for this user alone, in one that others may write to.

    Raises:
      OSError: it cannot be created, or what is there belongs or is open to others.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)
    status = os.lstat(folder)
    is_open = not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077
    if is_open or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a directory of this user alone")


def free_bytes_at(path: str) -> int | None:
    """Return the free space at a path, or where it would be created; quotas are not seen.

    None: unknown. File systems that do not count, such as some in user space, report 0 of 0 blocks.

    Raises:
      OSError: the path cannot be looked at.
    """
    while True:
        try:
            there = os.statvfs(path)
            return there.f_bavail * there.f_frsize if there.f_blocks else None
        except FileNotFoundError:
            parent = os.path.dirname(path)
            if parent == path:
                raise
            path = parent
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOTSUP):
                return None
            raise


def _path_of_file(text: str, rest: str, prefix: str) -> str:
    """Return the path of `file:///tmp/a%20b`; pathlib makes `file:/tmp/a%20b` of it."""
    from urllib.parse import unquote

    host, _, below = rest.partition("/")
    if not text[len("file:") :].startswith("//") or text[len("file:") :].startswith("///"):
        return "/" + unquote(rest)
    if host == "localhost" and below:
        return "/" + unquote(below)
    raise UsageError(
        f"{prefix}: file:// names the host {host!r}: for a path of this one, write "
        f"{'file:///' + rest!r} or {'/' + unquote(rest)!r}"
    )


def _no_address(text: str, scheme: str) -> str:
    """Return why this is not a path, and what to write instead."""
    instead = ", write gs://" if scheme.lower() == "gcs" else ""
    return (
        f"{scheme}:// is not supported here{instead}\n"
        "pass a path that all processes share, such as /shared/run; a checkpoint may be in a "
        "bucket, too (s3://, gs://, az://) "
        f"(for a local directory with this name, pass {'./' + text!r})"
    )
