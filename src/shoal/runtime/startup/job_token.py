"""The token of a job: the secret that its processes prove to have, and where it comes from.

The first of these that there is::

    given       the argument `token=`, or SHOAL_TOKEN
    made        for this job, by a launcher, in a rendezvous or in the key-value store of a job
                that JAX joined (coordinator_address.py)
    none        SHOAL_INSECURE=1, for all processes: anyone can join
    the user's  made of a file that only this user can read. All processes on one host: a file of
                that host. On several: a file in the home directory, which hosts often share
    lacking     such a job is refused

The user's file is as those of Erlang (.erlang.cookie) and X (.Xauthority) are. The token is derived
from it and the port, so that the token of one job does not open the user's jobs at other ports. The
host is not part of it: it may have several names.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import NamedTuple

from shoal import settings
from shoal.paths import make_private
from shoal.runtime.failures.joining_text import REMEDY
from shoal.runtime.wire.frames import split_address
from shoal.runtime.wire.proof import derived
from shoal.runtime.wire.sockets import is_loopback, short_folder

LACKING_S = 10.0  # a process or launcher without a token waits this long to be refused by name
_FEWEST = 32  # characters of a secret; fewer: the file is damaged, or not shoal's
_MOST_BYTES = 1024
_EMPTY_S = 1.0  # how long a file may be empty that another process has just created


class JobToken(NamedTuple):
    """The token of a job, as one process knows it."""

    secret: str
    source: str  # in words, without the secret
    lack: str = ""  # why there is none, though the job needs one

    def __repr__(self) -> str:
        return f"JobToken(…, {self.source!r}, {self.lack!r})"

    def refusal(self, address: str) -> str:
        """Return why a job does not start without a token."""
        return f"the job at {address} has no token, so anyone could join it: {self.lack}\n{REMEDY}"


def find_token(
    what: str,
    address: str,
    *,
    given: str = "",
    source: str = "SHOAL_TOKEN",
    is_on_one_host: bool = False,
    creates: bool = True,
) -> JobToken:
    """Return the token of a job whose address is given.

    Args:
      what: "job", or another word for that which meets at the port.
      given: the argument or variable, if there is one; `source` says which.
      is_on_one_host: whether all processes are known to be on this host.
      creates: whether a file of the user is created if there is none.
    """
    if given:
        return JobToken(given, source)
    if settings.number("SHOAL_INSECURE") == 1:
        return JobToken("", "none (SHOAL_INSECURE=1)")
    host, port = split_address(address)
    is_here = is_on_one_host or is_loopback(host)
    try:
        path = host_file() if is_here else home_file()
        secret = _secret_of(path) if creates else _read(path)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        problem = "SHOAL_TOKEN is not set, and no token file can be used"
        return JobToken("", "none", f"{problem} ({why})")
    return JobToken(derived(secret, f"{what} {port}"), path)


def observed_tokens(address: str) -> tuple[str, ...]:
    """Return what may be the token of this user's job at an address, if none was given to it."""
    tokens = [
        find_token("job", address, is_on_one_host=here, creates=False) for here in (False, True)
    ]
    return tuple(dict.fromkeys(token.secret for token in tokens))  # once, if both are equal


def host_file() -> str:
    """Return the path of this user's file for jobs on this host alone.

    Raises:
      OSError: its directory is not this user's.
    """
    folder = f"{short_folder()}/shoal-{os.geteuid()}"
    make_private(folder)
    return f"{folder}/token"


def home_file() -> str:
    """Return the path of this user's file for jobs on several hosts.

    Raises:
      OSError: there is no home directory, it is another user's, or cannot be written.
    """
    given = os.environ.get("XDG_CONFIG_HOME", "")
    base = given if os.path.isabs(given) else os.path.expanduser("~")
    if not os.path.isabs(base):
        raise OSError("this user has no home directory")
    if os.stat(base).st_uid != os.geteuid():
        raise PermissionError(f"{base} belongs to another user")
    config = base if base == given else os.path.join(base, ".config")
    with contextlib.suppress(FileExistsError):
        os.mkdir(config, 0o700)
    folder = os.path.join(config, "shoal")  # which may be a link, or open to readers
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.stat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a directory that only this user can write to")
    return os.path.join(folder, "token")


def _secret_of(path: str) -> str:
    """Return the secret in a file. Create the file if there is none.

    Raises:
      OSError: it cannot be created or read, or others can read it.
    """
    if not os.path.exists(path):
        _create(path)
    limit = time.monotonic() + _EMPTY_S
    while os.stat(path).st_size == 0 and time.monotonic() < limit:
        time.sleep(_EMPTY_S / 20)  # another process is about to rename its file to it
    return _read(path)  # which may be that of another process, or host


def _create(path: str) -> None:
    """Create the file, whole and on disk, unless another process does.

    `link` fails if the file exists, on NFS too; a host that does not see yet that it does learns
    it so.
    """
    whole = f"{path}.{os.urandom(8).hex()}"
    file = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, "w") as secret:
            secret.write(f"{os.urandom(32).hex()}\n")
            secret.flush()
            os.fsync(file)
        with contextlib.suppress(FileExistsError):
            _publish(whole, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(whole)


def _publish(whole: str, path: str) -> None:
    """Give a file its name, unless that exists.

    Raises:
      FileExistsError: it exists.
    """
    try:
        os.link(whole, path)
    except FileExistsError:
        raise
    except OSError:  # no links here: the process that creates the name renames its file to it
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(whole, path)


def _read(path: str) -> str:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block it
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a file of this user")
        if status.st_mode & 0o077:
            raise PermissionError(f"{path} is open to other users: chmod 600, or delete it")
        secret = os.read(file, _MOST_BYTES).decode(errors="replace").strip()
    finally:
        os.close(file)
    if len(secret) < _FEWEST:
        raise OSError(f"{path} holds no secret of {_FEWEST} characters: delete it")
    return secret
