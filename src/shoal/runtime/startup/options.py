"""The options of `initialize` for devices and sockets, from arguments and variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.arguments import as_integer, not_flags, not_texts
from shoal.errors import WrongType
from shoal.paths import local_path
from shoal.runtime.jax_service.certificates import MUTUAL_TLS
from shoal.runtime.wire.frames import split_address

Environment = Mapping[str, str]


class Arguments(NamedTuple):
    """The arguments of `initialize`; None: not given."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: int | Sequence[int] | None = None
    coordinator_bind_address: str | None = None
    virtual_devices: int | None = None
    host_devices: int | None = None
    token: str | None = None
    cluster_detection_method: str | None = None
    partition_index: int | None = None
    mtls_cert_file: str | None = None
    mtls_key_file: str | None = None
    mtls_ca_file: str | None = None
    mtls_peer_uri_prefix: str | None = None
    verify_secure_credentials: bool | None = None
    compile_cache: bool | str | os.PathLike[str] | None = None


def whole(name: str, value: object, least: int, problems: list[str]) -> int | None:
    """Return an integer ≥ `least` from an argument or a variable's text, or None."""
    number: int | None = None
    if isinstance(value, str) and name not in Arguments._fields:  # only variables are text
        if value.isascii() and value.isdigit():
            number = int(value)
    else:
        number = as_integer(value)
    if number is None or number < least:
        problems.append(f"{name}={value!r} must be a whole number, at least {least}")
        return None
    return number


def bind_host(arguments: Arguments, env: Environment, problems: list[str]) -> str | None:
    """Return the host to bind to; JAX's spelling, host:port, is accepted too."""
    given = arguments.coordinator_bind_address or env.get("JAX_COORDINATOR_BIND_ADDRESS")
    if not given or not isinstance(given, str):
        return None
    if given.count(":") > 1 and re.fullmatch(r"[0-9a-fA-F:.]+", given):
        return given  # IPv6: `split_address` would read ::1 as the host ":" and port 1
    try:
        return split_address(given)[0]
    except ValueError:
        if re.fullmatch(r"[\w.-]+|\[?[0-9a-fA-F:.]+\]?", given):
            return given.strip("[]")
    problems.append(f"coordinator_bind_address={given!r} is neither a host nor host:port")
    return None


def given_token(
    arguments: Arguments,
    env: Environment,
    problems: list[str],
    *,
    launcher_runs_services: bool = False,
) -> tuple[str, str]:
    """Return the token of the job, if it is given, and its source. Messages must not show it.

    Args:
      launcher_runs_services: whether a launcher runs them: the token is the launcher's then.
    """
    given = arguments.token
    if given is not None and not isinstance(given, str):
        problems.append(WrongType("token must be a string"))
        given = None
    of_environment = env.get("SHOAL_TOKEN", "").strip()
    if given and not (launcher_runs_services and of_environment):
        return given, "token="
    return of_environment, "SHOAL_TOKEN"


def virtual_devices(arguments: Arguments, env: Environment, problems: list[str]) -> int | None:
    if arguments.virtual_devices is not None:
        return whole("virtual_devices", arguments.virtual_devices, 1, problems)
    given = env.get("SHOAL_VIRTUAL_DEVICES", "").strip()
    return whole("SHOAL_VIRTUAL_DEVICES", given, 1, problems) if given else None


def host_devices(arguments: Arguments, problems: list[str]) -> int | None:
    if arguments.host_devices is None:
        return None
    if arguments.virtual_devices is not None:
        problems.append(
            "virtual_devices= is for CPU devices alone, host_devices= for CPU devices beside "
            "accelerators: pass one of them"
        )
    return whole("host_devices", arguments.host_devices, 1, problems)


def partition_index(arguments: Arguments, env: Environment, problems: list[str]) -> int | None:
    if arguments.partition_index is not None:
        return whole("partition_index", arguments.partition_index, 0, problems)
    given = env.get("JAX_PARTITION_INDEX", "").strip()
    return whole("JAX_PARTITION_INDEX", given, 0, problems) if given else None


def mutual_tls(arguments: Arguments, problems: list[str]) -> dict[str, str | bool]:
    """Return the arguments for mutual TLS of JAX's service that are given."""
    given = {name: getattr(arguments, name) for name in MUTUAL_TLS}
    verify = "verify_secure_credentials"
    problems += not_texts(**{name: value for name, value in given.items() if name != verify})
    given = {name: value for name, value in given.items() if value is not None}
    problems += not_flags(**{name: value for name, value in given.items() if name == verify})
    return given


def compile_cache(arguments: Arguments, env: Environment, problems: list[str]) -> bool | str:
    """Return the directory of the compile cache. True: the user's; False: no cache.

    Raises:
      UsageError: it is not a path.
    """
    name, given = "compile_cache", arguments.compile_cache
    if given is None:
        name, given = "SHOAL_COMPILE_CACHE", env.get("SHOAL_COMPILE_CACHE", "").strip()
        given = {"": False, "0": False, "1": True}.get(given, given)
    if isinstance(given, bool):
        return given
    address = re.match(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+://", str(given))
    if address:
        problems.append(
            f"{name}={address[0]}… must be a directory of a file system, not an address; JAX's "
            "own cache has the option jax_compilation_cache_dir for it"
        )
        return False
    return os.path.abspath(local_path(given, f"initialize: {name}={given!r}"))


def device_ids(
    arguments: Arguments, env: Environment, problems: list[str]
) -> tuple[int, ...] | None:
    name, given = "local_device_ids", arguments.local_device_ids
    ids: Sequence[object]
    if given is None:
        name = "JAX_LOCAL_DEVICE_IDS"
        ids = [part.strip() for part in env.get(name, "").split(",") if part.strip()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        ids = given
    else:
        ids = [given]
    numbers = [whole(name, value, 0, problems) for value in ids]
    if given is not None and not ids:
        problems.append(f"{name}={given!r} names no device; omit it for all devices")
    twice = sorted({n for n in numbers if n is not None and numbers.count(n) > 1})
    if twice:
        problems.append(f"{name}={given or ids!r} names {twice} twice")
    return tuple(n for n in numbers if n is not None) or None
