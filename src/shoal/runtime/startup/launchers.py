"""The sources of a process's index and count: the arguments, then the launcher.

The index and the count are one pair and come from one launcher, the first of `LAUNCHERS` that has
either. Half of a pair is an error, and so are two variables of one launcher that differ. The
address may come from elsewhere: MPI gives none (see below).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.arguments import not_one_of, not_texts
from shoal.arguments import shown as shown_value
from shoal.errors import InitializeError, raise_all
from shoal.hashing import short_digest
from shoal.runtime.startup.inherited import inherited
from shoal.runtime.startup.launcher_table import (
    LAUNCHERS,
    Environment,
    Launcher,
    jax_address,
    launcher_of,
    shown,
    variables_of,
)
from shoal.runtime.startup.options import (
    Arguments,
    bind_host,
    compile_cache,
    device_ids,
    given_token,
    host_devices,
    mutual_tls,
    partition_index,
    virtual_devices,
    whole,
)
from shoal.runtime.startup.rendezvous import Rendezvous, local_base
from shoal.runtime.system import local_devices
from shoal.runtime.system.local_devices import LocalPlace
from shoal.runtime.wire.frames import split_address

# JAX's names of methods → launchers. mpi4py would ask MPI, whose launcher sets the same numbers.
_METHODS: Mapping[str, tuple[str, ...]] = {
    "deactivate": (),
    "ompi": ("Open MPI",),
    "mpi4py": ("Open MPI", "MPICH", "Slurm step"),
    "slurm": ("Slurm step",),
    **dict.fromkeys(("tpu", "gcetpu", "gketpu"), ("TPU",)),
}
_ADDRESSES = ("SHOAL_COORDINATOR", "SHOAL_RENDEZVOUS", "JAX_COORDINATOR_ADDRESS")


class JobPlace(NamedTuple):
    """This process's index, the count, where they meet, and the rule that decided it."""

    process: int
    num_processes: int
    address: str | None  # the coordinator, host:port; None in a job of one, or by rendezvous
    bind_host: str | None  # where process 0 binds it; None: the default
    jax_service: str | None  # JAX's service, if a launcher runs both; None: process 0 starts both
    token: str  # as given; "": see `job_token`
    virtual_devices: int | None
    local_device_ids: tuple[int, ...] | None
    reason: str
    host_devices: int | None = None  # CPU devices beside the accelerators
    rendezvous: Rendezvous | None = None  # where process 0 says the address
    launched: str = ""  # the launcher's variables, if they identify the job
    is_on_one_host: bool = False  # as the launcher's variables show
    job: str = ""  # the name that the launcher has given it
    token_source: str = "SHOAL_TOKEN"
    partition_index: int | None = None  # of this process's devices, for JAX
    mutual_tls: Mapping[str, str | bool] = {}  # of JAX's service, as the program gave it
    compile_cache: bool | str = False  # its directory; True: the user's

    @property
    def name(self) -> str:
        """The name of the job, which `ps` shows with shoal's own processes."""
        meets = self.rendezvous
        return self.job or self.address or (f"{meets.base}/{meets.name}" if meets else "")


class ShownJob(NamedTuple):
    """A job of several processes, or of an unknown number, found in its launcher's variables."""

    words: str  # the variables, with their values
    num_processes: int | None
    by_jax: bool = False  # JAX has joined it already


class _Numbers(NamedTuple):
    """The values of one launcher; None: not set."""

    process: int | None
    num_processes: int | None
    words: str
    launcher: Launcher
    env: Environment  # completed


class _JobNumbers(NamedTuple):
    """The index and the count, and their source."""

    process: int
    num_processes: int
    reason: str
    launched: Launched | None = None


def decide(arguments: Arguments, env: Environment) -> JobPlace:
    """Return this process's place in the job.

    Raises:
      InitializeError: a launcher gives the index, but not the count.
      UsageError: values are malformed or contradict each other within one launcher's variables, or
        a job of several processes has no address. All offenders at once.
    """
    env = innermost(env)
    problems = not_texts(
        coordinator_address=arguments.coordinator_address,
        coordinator_bind_address=arguments.coordinator_bind_address,
    )
    numbers = _place(arguments, env, problems)
    launched = numbers.launched
    where = MeetsAt()
    if numbers.num_processes > 1:
        where = meets_at(arguments.coordinator_address, env, launched, problems)
    # A launcher that runs the services sets SHOAL_COORDINATOR.
    launcher_runs_services = where.source == "SHOAL_COORDINATOR"
    token, source = given_token(
        arguments, env, problems, launcher_runs_services=launcher_runs_services
    )
    jax_service = env.get("SHOAL_JAX_SERVICE") if launcher_runs_services else None
    reason = numbers.reason
    if where.source:
        reason = f"{reason}; address from {where.source}"
    place = JobPlace(  # what reads an argument adds its problems
        process=numbers.process,
        num_processes=numbers.num_processes,
        address=where.address,
        bind_host=bind_host(arguments, env, problems),
        jax_service=jax_service or None,
        token=token,
        token_source=source,
        virtual_devices=virtual_devices(arguments, env, problems),
        local_device_ids=_local_devices(arguments, env, launched, problems),
        reason=reason,
        host_devices=host_devices(arguments, problems),
        rendezvous=where.rendezvous,
        launched=launched.words if launched else "",
        is_on_one_host=launched is not None and launched.is_on_one_host,
        job=env.get("SHOAL_JOB", "").strip(),
        partition_index=partition_index(arguments, env, problems),
        mutual_tls=mutual_tls(arguments, problems),
        compile_cache=compile_cache(arguments, env, problems),
    )
    raise_all("initialize", problems)
    return place


def shown_job(env: Environment) -> ShownJob | None:
    """Return the job that `initialize()` would join; None: a one-process job.

    >>> shown_job({"RANK": "1", "WORLD_SIZE": "4"})
    ShownJob(words='torchrun (RANK=1, WORLD_SIZE=4)', num_processes=4, by_jax=False)
    >>> shown_job({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})  # a shell in an allocation

    Raises:
      UsageError: a value is malformed, or two contradict each other.
    """
    problems: list[str] = []
    numbers = _of_environment(innermost(env), problems)
    raise_all("the variables of this process's launcher", problems)
    if numbers is None or numbers.num_processes == 1 or not numbers.launcher.shows_job:
        return None
    return ShownJob(numbers.words, numbers.num_processes)


def numbers_of(env: Environment) -> tuple[int, int]:
    """Return the index and count that `initialize()` would use.

    >>> numbers_of({"DTENSOR_JOBS": "a:1,b:1", "DTENSOR_CLIENT_ID": "1"}), numbers_of({})
    ((1, 2), (0, 1))

    Raises:
      InitializeError, UsageError: as `decide`, for the numbers alone.
    """
    problems: list[str] = []
    place = _place(Arguments(), innermost(env), problems)
    raise_all("the variables of this process's launcher", problems)
    return place.process, place.num_processes


def innermost(env: Environment) -> Environment:
    """Return the environment without the variables of an outer job: of one in which a process has
    started another launcher, if this process is of that launcher's job.

    >>> from shoal.runtime.startup.inherited import note_of
    >>> job = {"SHOAL_PROCESS_ID": "0", "SHOAL_NUM_PROCESSES": "1"}
    >>> child = {**job, "SHOAL_LAUNCHED": note_of(job)}
    >>> numbers_of(child), numbers_of({**child, "PMI_RANK": "1", "PMI_SIZE": "2"})
    ((0, 1), (1, 2))
    """
    outer = inherited(env)
    inner = [
        launcher
        for launcher in LAUNCHERS
        if outer and any(env.get(name) and name not in outer for name in launcher.identity)
    ]
    kept = {name for launcher in inner for name in launcher.identity}
    dropped = outer - kept if inner else set()
    return {name: value for name, value in env.items() if name not in dropped}


def _place(arguments: Arguments, env: Environment, problems: list[str]) -> _JobNumbers:
    method = arguments.cluster_detection_method
    launchers = _launchers_of(method, problems)
    given = {"process_id": arguments.process_id, "num_processes": arguments.num_processes}
    if given["num_processes"] == 1 and given["process_id"] is None:
        given["process_id"] = 0
    if any(value is not None for value in given.values()):
        given_here = {name: value for name, value in given.items() if value is not None}
        if len(given_here) == 1:
            (lacking,) = given.keys() - given_here.keys()
            problems.append(f"{shown(given_here)} without {lacking}: pass both or neither")
            return _JobNumbers(0, 1, "arguments")
        return _JobNumbers(*_fit(given_here, "process_id", "num_processes", problems), "arguments")
    numbers = _of_environment(env, problems, launchers)
    if numbers is None:
        alone = {name: env[name] for name in _ADDRESSES if env.get(name, "").strip()}
        if method is not None and not problems:
            problems.append(
                f"cluster_detection_method={shown_value(method)} finds no number of processes: "
                "pass num_processes= and process_id= (num_processes=1: a job of one)"
            )
        elif alone:
            problems.append(
                f"{shown(alone)} without a count: set SHOAL_NUM_PROCESSES and SHOAL_PROCESS_ID, "
                "or pass num_processes= and process_id= (num_processes=1: a job of one)"
            )
        return _JobNumbers(0, 1, "no launcher's variables: a job of one process")
    index, count, source, launcher, completed = numbers
    if index is None or count is None:
        return _half(numbers, env, problems)
    local = _local_place(launcher, completed, count, problems)
    return _JobNumbers(index, count, source, Launched(launcher, completed, count, local))


def _half(numbers: _Numbers, env: Environment, problems: list[str]) -> _JobNumbers:
    """Refuse a pair with one number missing."""
    launcher, source = numbers.launcher, numbers.words
    if launcher.advice:
        raise InitializeError(
            f"initialize: {source} shows a job, but not its number of processes\n{launcher.advice}"
        )
    lacking = (launcher.counts if numbers.num_processes is None else launcher.indices)[0]
    problems.append(f"{source} without {lacking}: set both or neither")
    return _JobNumbers(0, 1, source)


def _launchers_of(method: object, problems: list[str]) -> Sequence[Launcher]:
    """Return the launchers whose variables count, by a `cluster_detection_method`."""
    if method is None:
        return LAUNCHERS
    names = {**{launcher.name: (launcher.name,) for launcher in LAUNCHERS}, **_METHODS}
    problems += not_one_of("cluster_detection_method", method, names)
    chosen = names.get(method, ()) if isinstance(method, str) else ()
    return [launcher for launcher in LAUNCHERS if launcher.name in chosen]


def _of_environment(
    env: Environment,
    problems: list[str],
    launchers: Sequence[Launcher] = LAUNCHERS,
) -> _Numbers | None:
    """Return the numbers of the innermost launcher."""
    for launcher in launchers:
        numbers = _of_launcher(launcher, env, problems)
        if numbers is not None:
            return numbers
    return None


def _of_launcher(launcher: Launcher, env: Environment, problems: list[str]) -> _Numbers | None:
    """Return the numbers of this launcher, or None."""
    env = launcher.completed(env, problems)
    indices = (*launcher.indices, *launcher.same_index)
    variables = variables_of(env, (*launcher.needs, *indices, *launcher.counts))
    index_name = next((name for name in launcher.indices if name in variables), None)
    count_name = next((name for name in launcher.counts if name in variables), None)
    if not (index_name or count_name) or any(name not in variables for name in launcher.needs):
        return None
    source = f"{launcher.name} ({shown(variables)})"
    if index_name is not None and count_name is not None:
        for main, aliases in ((index_name, indices), (count_name, launcher.counts)):
            differ = [n for n in aliases if n in variables and variables[n] != variables[main]]
            problems += [f"{main}={variables[main]} contradicts {n}={variables[n]}" for n in differ]
        return _Numbers(*_fit(variables, index_name, count_name, problems), source, launcher, env)
    half = next(
        f"{name}={variables[name]}" for name in (index_name, count_name) if name is not None
    )
    if half in launcher.no_job:
        return None
    index = whole(index_name, variables[index_name], 0, problems) if index_name else None
    count = whole(count_name, variables[count_name], 1, problems) if count_name else None
    return _Numbers(
        process=0 if count == 1 else index,
        num_processes=count,
        words=source,
        launcher=launcher,
        env=env,
    )


def _local_place(
    launcher: Launcher, env: Environment, num_processes: int, problems: list[str]
) -> LocalPlace:
    """Return the local index and count of this process."""
    variables = variables_of(env, (*launcher.local_indices, *launcher.local_counts))
    index_name = next((name for name in launcher.local_indices if name in variables), None)
    count_name = next((name for name in launcher.local_counts if name in variables), None)
    index = count = None
    if index_name is not None and count_name is not None:
        index, count = _fit(variables, index_name, count_name, problems)
    elif index_name is not None:
        index = whole(index_name, variables[index_name], 0, problems)
    elif count_name is not None:
        count = whole(count_name, variables[count_name], 1, problems)
    if count_name is not None and count is not None and count > num_processes:
        problems.append(
            f"{count_name}={count} contradicts the {num_processes} processes of the whole job"
        )
    name = count_name or index_name  # the count is alike on all processes
    source = shown({name: variables[name]}) if name else ""
    return LocalPlace(index, count, source, launcher.binds_devices(env))


def _local_devices(
    arguments: Arguments, env: Environment, launched: Launched | None, problems: list[str]
) -> tuple[int, ...] | None:
    """Return the accelerators of this process; None: all that it sees."""
    ids = device_ids(arguments, env, problems)
    is_cpu_only = arguments.virtual_devices is not None or env.get("SHOAL_VIRTUAL_DEVICES")
    if ids is not None or launched is None or is_cpu_only:
        return ids
    return local_devices.chosen(launched.local, env, problems)


def _fit(
    variables: Mapping[str, object], index_name: str, count_name: str, problems: list[str]
) -> tuple[int, int]:
    """Return (index, count), checked; (0, 1) after a problem."""
    index, count = (
        whole(name, variables[name], least, problems)
        for name, least in ((index_name, 0), (count_name, 1))
    )
    if index is None or count is None:
        return 0, 1
    if index >= count:
        problems.append(
            f"{index_name}={index} is out of range for {count_name}={count}: 0 to {count - 1}"
        )
        return 0, 1
    return index, count


# ---- Where the processes of a job meet: at an address, or in a directory with process 0's
# address.


ON_THIS_HOST = "a directory of this host"
_SET = (
    "set SHOAL_RENDEZVOUS=/a/directory that all hosts share, or SHOAL_COORDINATOR=host:port (a "
    "free port on the host of process 0), for all processes, or pass coordinator_address="
)


class MeetsAt(NamedTuple):
    """An address or a rendezvous, and its source; neither after a problem."""

    address: str | None = None
    rendezvous: Rendezvous | None = None
    source: str = ""


class Launched(NamedTuple):
    """The launcher of this process, and the values it sets besides index and count."""

    launcher: Launcher
    env: Environment  # completed
    num_processes: int
    local: LocalPlace

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes are on this host."""
        return self.local.processes == self.num_processes

    @property
    def words(self) -> str:
        """The launcher's variables for this process, if any of them identifies the job; else ""."""
        launcher = self.launcher
        if not variables_of(self.env, launcher.job):
            return ""
        return f"{launcher.name}: {shown(variables_of(self.env, launcher.own))}"


def meets_at(
    given: str | None, env: Environment, launched: Launched | None, problems: list[str]
) -> MeetsAt:
    """Return where the job meets.

    The first source that is set: the argument, SHOAL_COORDINATOR, SHOAL_RENDEZVOUS,
    JAX_COORDINATOR_ADDRESS, the launcher. Without any, and with all processes of the launcher on
    this host, they meet in a directory of this host.
    """
    directory = env.get("SHOAL_RENDEZVOUS", "").strip()
    sources = [
        ("coordinator_address", given),
        ("SHOAL_COORDINATOR", env.get("SHOAL_COORDINATOR")),
        ("SHOAL_RENDEZVOUS", directory),
        ("JAX_COORDINATOR_ADDRESS", jax_address(env)),
    ]
    for source, address_text in sources:
        if address_text and source == "SHOAL_RENDEZVOUS":
            return _in_directory(directory, launched, problems)
        if address_text:
            return _at(address_text, source, problems)
    if launched is None:
        problems.append(f"no address given: {_SET}")
        return MeetsAt()
    address_text = launched.launcher.address(launched.env)
    if address_text:
        return _at(address_text, launched.launcher.name, problems)
    if launched.is_on_one_host:
        return MeetsAt(None, _here(launched), ON_THIS_HOST)
    problems.append(_no_address(launched))
    return MeetsAt()


def _at(address: str, source: str, problems: list[str]) -> MeetsAt:
    try:
        split_address(address)
    except (ValueError, AttributeError, TypeError):
        problems.append(f"{source}={address!r} is not an address: pass host:port")
    return MeetsAt(address, None, source)


def _in_directory(directory: str, launched: Launched | None, problems: list[str]) -> MeetsAt:
    if not os.path.isabs(directory):
        problems.append(f"SHOAL_RENDEZVOUS={directory!r} must be an absolute path")
    return MeetsAt(
        None, Rendezvous(directory, _directory_name(launched), False), "SHOAL_RENDEZVOUS"
    )


def _here(launched: Launched) -> Rendezvous:
    launcher, env = launched.launcher, launched.env
    # Those with a blank in their name are not the process's: `completed` has added them.
    own = [f"{name}={env[name]}" for name in launcher.own if name in env and " " not in name]
    return Rendezvous(
        local_base(), _directory_name(launched, launcher_of(own, launcher.daemon)), True
    )


def _directory_name(launched: Launched | None, *more: str) -> str:
    """Return the name of this job's directory, equal on all its processes."""
    if launched is None:
        return "shoal-job"
    name = re.sub("[^a-z0-9]+", "-", launched.launcher.name.lower()).strip("-")
    values = [launched.env.get(variable, "").strip() for variable in launched.launcher.job]
    key = "\n".join([*values, *more]).encode()
    return f"shoal-{name}-{short_digest(key).hex()}"


def _no_address(launched: Launched) -> str:
    launcher, local = launched.launcher, launched.local
    if "JOB_COMPLETION_INDEX" in launched.env:
        return (
            f"{launcher.name} gives no address, and the pod has no name in a headless service: "
            f"name one as `subdomain` of its template, or {_SET}"
        )
    pair = ("MASTER_ADDR", "MASTER_PORT")
    given = variables_of(launched.env, pair)
    if launcher.name == "torchrun" and len(given) == 1:
        (half,), (lacking,) = given.items(), set(pair) - given.keys()
        return f"{launcher.name} sets {'='.join(half)} without {lacking}: set both"
    hosts = "its processes are on several hosts"
    if local.processes is None:
        hosts = "nothing shows that all processes are on one host"
    shown = f" ({local.words})" if local.words else ""
    return f"{launcher.name} gives no address of process 0, and {hosts}{shown}: {_SET}"
