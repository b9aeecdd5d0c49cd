"""The sources of a process's index and count: arguments, `SHOAL_*`, `JAX_*`, then the launcher.

A pure function of (arguments, environment). The index and the count are one pair and come from
one family, the first that has both. Families run from the innermost launcher outwards, because
`srun torchrun` and `mpirun` inside an allocation carry both sets and the outer one says "one
task". The address may come from another family: MPI gives none, so `SHOAL_COORDINATOR` does.
PMIx gives a process its rank, and no count. Where its server is a scheduler's (`srun --mpi=pmix`),
the scheduler's own variables have both. PRRTE (`prterun` of Open MPI 5) sets no others, and those
of an allocation around it are of another job: there the count is missing, which is an error.
"""

from __future__ import annotations

import operator
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shoal.arguments import not_texts
from shoal.errors import InitializeError, raise_all
from shoal.runtime.startup import dtensor_jobs
from shoal.runtime.wire.frames import address_text, split_address

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


class JobPlace(NamedTuple):
    """This process's index, the count, where they meet, and the rule that decided it."""

    process: int
    num_processes: int
    address: str | None  # the meeting place, host:port; None in a job of one
    bind_host: str | None  # where process 0 binds it; None: the default
    jax_service: str | None  # JAX's service, if a launcher runs both; None: process 0 starts both
    token: str
    virtual_devices: int | None
    local_device_ids: tuple[int, ...] | None
    reason: str
    passed_over: tuple[str, ...]  # one line for each family that was seen and not used
    host_devices: int | None = None  # CPU devices beside the accelerators


class ShownJob(NamedTuple):
    """A job of several processes, or of an unknown number, found in its launcher's variables."""

    words: str  # the variables, with their values
    num_processes: int | None


class _Family(NamedTuple):
    """One launcher's variables. Aliases must agree; `strict`: half a pair is an error."""

    name: str
    indices: tuple[str, ...]
    counts: tuple[str, ...]
    address: Callable[[Environment], str | None]
    strict: bool = False
    needs: tuple[str, ...] = ()  # required: without these the variables are not this launcher's
    completed: Callable[[Environment, list[str]], Environment] | None = None


class _Numbers(NamedTuple):
    """The values of one family; None: not set."""

    process: int | None
    num_processes: int | None
    words: str
    family: _Family


def decide(arguments: Arguments, env: Environment) -> JobPlace:
    """Return this process's place in the job.

    Raises:
      InitializeError: a launcher gives the index, but not the count.
      UsageError: values are malformed or contradict each other within one family, or a job of
        several processes has no address. All offenders at once.
    """
    given = arguments._asdict().items()
    offences = not_texts(**{name: value for name, value in given if "_address" in name})
    passed_over: list[str] = []
    process, num_processes, reason, family = _pair(arguments, env, offences, passed_over)
    address = source = None
    if num_processes > 1:
        address, source = _address(arguments, env, family, offences)
    cluster = JobPlace(
        process,
        num_processes,
        address,
        _bind_host(arguments, env, offences),
        env.get("SHOAL_JAX_SERVICE") or None if source == "SHOAL_COORDINATOR" else None,
        env.get("SHOAL_TOKEN", ""),
        _virtual_devices(arguments, env, offences),
        _device_ids(arguments, env, offences),
        reason if source is None else f"{reason}; address from {source}",
        tuple(passed_over),
        _host_devices(arguments, offences),
    )
    raise_all("initialize", offences)
    return cluster


def shown_job(env: Environment) -> ShownJob | None:
    """Return the job that `initialize()` would join; None: a job of one.

    >>> shown_job({"RANK": "1", "WORLD_SIZE": "4"})
    ShownJob(words='torchrun (RANK=1, WORLD_SIZE=4)', num_processes=4)
    >>> shown_job({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})  # a shell in an allocation

    Raises:
      UsageError: a value is malformed, or two contradict each other.
    """
    offences: list[str] = []
    numbers = _of_environment(env, offences, [])
    raise_all("the variables of this process's launcher", offences)
    if numbers is None or numbers.num_processes == 1:
        return None
    return ShownJob(numbers.words, numbers.num_processes)


def numbers_of(env: Environment) -> tuple[int, int]:
    """Return the index and count that `initialize()` would use.

    >>> numbers_of({"DTENSOR_JOBS": "a:1,b:1", "DTENSOR_CLIENT_ID": "1"}), numbers_of({})
    ((1, 2), (0, 1))

    Raises:
      InitializeError, UsageError: as `decide`, for the numbers alone.
    """
    offences: list[str] = []
    process, num_processes, _, _ = _pair(Arguments(), env, offences, [])
    raise_all("the variables of this process's launcher", offences)
    return process, num_processes


def _pair(
    arguments: Arguments, env: Environment, offences: list[str], passed_over: list[str]
) -> tuple[int, int, str, _Family | None]:
    """Return index, count, the reason, and the family they came from."""
    given = {"process_id": arguments.process_id, "num_processes": arguments.num_processes}
    if given["num_processes"] == 1 and given["process_id"] is None:
        given["process_id"] = 0
    if any(value is not None for value in given.values()):
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) == 1:
            (lacking,) = given.keys() - found.keys()
            offences.append(f"{_shown(found)} without {lacking}: give both or neither")
            return 0, 1, "arguments", None
        return (*_fit(found, "process_id", "num_processes", offences), "arguments", None)
    numbers = _of_environment(env, offences, passed_over)
    if numbers is None:
        return 0, 1, "no launcher's variables: a job of one process", None
    index, count, words, family = numbers
    if index is not None and count is not None:
        return index, count, words, family
    if not family.counts:
        raise InitializeError(
            f"initialize: {words} shows a job, but not its number of processes\n"
            "give num_processes=, process_id= and coordinator_address=, or set SHOAL_NUM_PROCESSES,"
            " SHOAL_PROCESS_ID and SHOAL_COORDINATOR (mpirun of Open MPI sets the count itself)"
        )
    lacking = (family.counts if count is None else family.indices)[0]
    offences.append(f"{words} without {lacking}")
    return 0, 1, words, family


def _of_environment(
    env: Environment, offences: list[str], passed_over: list[str]
) -> _Numbers | None:
    """Return the numbers of the innermost launcher."""
    for family in _FAMILIES:
        numbers = _of_family(family, env, offences, passed_over)
        if numbers is not None:
            return numbers
    return None


def _of_family(
    family: _Family, env: Environment, offences: list[str], passed_over: list[str]
) -> _Numbers | None:
    """Return the numbers of a family if it has both, or if half a pair is an error."""
    env = env if family.completed is None else family.completed(env, offences)
    names = (*family.needs, *family.indices, *family.counts)
    found = {name: env[name].strip() for name in names if env.get(name, "").strip()}
    at = next((name for name in family.indices if name in found), None)
    of = next((name for name in family.counts if name in found), None)
    if not (at or of) or any(name not in found for name in family.needs):
        return None
    words = f"{family.name} ({_shown(found)})"
    if at is None or of is None:
        if family.strict:
            count = _whole(of, found[of], 1, offences) if of else None
            index = _whole(at, found[at], 0, offences) if at else None
            return _Numbers(index, count, words, family)
        lacking = family.indices[0] if at is None else family.counts[0]
        passed_over.append(f"{family.name}: {_shown(found)} without {lacking}")
        return None
    for main, aliases in ((at, family.indices), (of, family.counts)):
        differ = [n for n in aliases if n in found and found[n] != found[main]]
        offences += [f"{main}={found[main]} contradicts {n}={found[n]}" for n in differ]
    return _Numbers(*_fit(found, at, of, offences), words, family)


def _shown(found: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in found.items())


def _fit(found: Mapping[str, object], at: str, of: str, offences: list[str]) -> tuple[int, int]:
    """Return (index, count), checked; (0, 1) after an offence."""
    index, count = (
        _whole(name, found[name], least, offences) for name, least in ((at, 0), (of, 1))
    )
    if index is None or count is None:
        return 0, 1
    if index >= count:
        offences.append(f"{at}={index} is out of range for {of}={count}: 0 to {count - 1}")
        return 0, 1
    return index, count


def _whole(name: str, value: object, least: int, offences: list[str]) -> int | None:
    """Return an integer ≥ `least` from an argument or a variable's text, or None."""
    number: int | None = None
    if isinstance(value, str) and name not in Arguments._fields:  # only variables are given as text
        number = int(value) if value.isascii() and value.isdigit() else None
    elif not isinstance(value, bool | str):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
    if number is None or number < least:
        offences.append(f"{name}={value!r} must be a whole number, at least {least}")
        return None
    return number


def _address(
    arguments: Arguments, env: Environment, family: _Family | None, offences: list[str]
) -> tuple[str | None, str | None]:
    """Return the address of the meeting place, and its source."""
    sources: list[tuple[str, str | None]] = [
        ("coordinator_address", arguments.coordinator_address),
        ("SHOAL_COORDINATOR", env.get("SHOAL_COORDINATOR")),
        ("JAX_COORDINATOR_ADDRESS", _jax_address(env)),
        (family.name if family else "", family.address(env) if family else None),
    ]
    for source, address in sources:
        if not address:
            continue
        try:
            split_address(address)
        except (ValueError, AttributeError, TypeError):
            offences.append(f"{source}={address!r} is not an address: give host:port")
        return address, source
    launcher = f"{family.name} gives no address" if family else "no address given"
    offences.append(
        f"{launcher}: set SHOAL_COORDINATOR=host:port (a free port on the host of process 0) "
        "for all processes, or pass coordinator_address="
    )
    return None, None


def _bind_host(arguments: Arguments, env: Environment, offences: list[str]) -> str | None:
    """Return the host to bind to; JAX's spelling, host:port, is accepted too."""
    given = arguments.coordinator_bind_address or env.get("JAX_COORDINATOR_BIND_ADDRESS")
    if not given or not isinstance(given, str):
        return None
    try:
        return split_address(given)[0]
    except ValueError:
        if re.fullmatch(r"[\w.-]+|\[?[0-9a-fA-F:.]+\]?", given):
            return given.strip("[]")
    offences.append(f"coordinator_bind_address={given!r} is neither a host nor host:port")
    return None


def _virtual_devices(arguments: Arguments, env: Environment, offences: list[str]) -> int | None:
    if arguments.virtual_devices is not None:
        return _whole("virtual_devices", arguments.virtual_devices, 1, offences)
    given = env.get("SHOAL_VIRTUAL_DEVICES", "").strip()
    return _whole("SHOAL_VIRTUAL_DEVICES", given, 1, offences) if given else None


def _host_devices(arguments: Arguments, offences: list[str]) -> int | None:
    if arguments.host_devices is None:
        return None
    if arguments.virtual_devices is not None:
        offences.append(
            "virtual_devices= is for CPU devices alone, host_devices= for CPU devices beside "
            "accelerators: give one of them"
        )
    return _whole("host_devices", arguments.host_devices, 1, offences)


def _device_ids(
    arguments: Arguments, env: Environment, offences: list[str]
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
    numbers = [_whole(name, value, 0, offences) for value in ids]
    if given is not None and not ids:
        offences.append(f"{name}={given!r} names no device; omit it for all devices")
    if twice := sorted({n for n in numbers if n is not None and numbers.count(n) > 1}):
        offences.append(f"{name}={given or ids!r} names {twice} twice")
    return tuple(n for n in numbers if n is not None) or None


def is_loopback(host: str) -> bool:
    """Return whether this is a name or an address of the loopback."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `"n[007-010,12],m1"` → `"n007"`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodes.strip())
    return "".join(part or "" for part in match.groups()) if match else ""


def _derived_port(key: str) -> int:
    """Return a port derived from `key`, above Linux's ephemeral ports (as JAX does)."""
    return 61440 + zlib.crc32(key.encode()) % 4096


def _jax_address(env: Environment) -> str | None:
    address = env.get("JAX_COORDINATOR_ADDRESS", "").strip()
    port = env.get("JAX_COORDINATOR_PORT", "").strip()
    if address and port and not re.search(r"(^[^:]*|\]):\d+$", address):
        address = address_text(address.strip("[]"), int(port)) if port.isdigit() else address
    return address or None


def _torchrun_address(env: Environment) -> str | None:
    """MASTER_PORT itself is in use by torch's own store."""
    host, port = env.get("MASTER_ADDR", "").strip(), env.get("MASTER_PORT", "").strip()
    return address_text(host, _derived_port(f"torchrun {host} {port}")) if host and port else None


def _slurm_address(env: Environment) -> str | None:
    host = first_host(env.get("SLURM_STEP_NODELIST", ""))
    step = f"slurm {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return address_text(host, _derived_port(step)) if host else None


def _no_address(env: Environment) -> str | None:
    return None


_FAMILIES = (
    _Family("SHOAL_*", ("SHOAL_PROCESS_ID",), ("SHOAL_NUM_PROCESSES",), _no_address, strict=True),
    _Family("JAX_*", ("JAX_PROCESS_ID",), ("JAX_NUM_PROCESSES",), _no_address, strict=True),
    _Family(
        "DTensor",
        (dtensor_jobs.INDEX,),
        (dtensor_jobs.COUNT,),
        dtensor_jobs.address,
        completed=dtensor_jobs.completed,
    ),
    _Family("torchrun", ("RANK",), ("WORLD_SIZE",), _torchrun_address),
    _Family(
        "Open MPI", ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), ("OMPI_COMM_WORLD_SIZE",), _no_address
    ),
    _Family("PRRTE", ("PMIX_RANK",), (), _no_address, strict=True, needs=("PRTE_LAUNCHED",)),
    _Family("MPICH", ("PMI_RANK",), ("PMI_SIZE",), _no_address),
    _Family("Slurm step", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), _slurm_address),
    _Family("PMIx", ("PMIX_RANK",), (), _no_address, strict=True),
)
