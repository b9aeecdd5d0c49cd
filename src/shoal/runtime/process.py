"""Join the job, leave it, and identify this process.

The only module with mutable state: the process record, from which `client` serves the public
functions of all floors. Everything below them takes its job client as an argument.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shoal import settings
from shoal.arguments import check_flags, not_texts, seconds, shown
from shoal.colour import collective, local
from shoal.errors import InitializeError, ShoalError, raise_all
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.over_tcp import TcpJobClient
from shoal.runtime.client.record_search import raise_at_end
from shoal.runtime.exit.causes import record_sent
from shoal.runtime.exit.guard import ExitGuard
from shoal.runtime.exit.hang import HangTimeout, HangWatch
from shoal.runtime.exit.idle import StallWatch, watch_alone
from shoal.runtime.failures.exception_text import peers_named
from shoal.runtime.jax_service import device_work, jax_runtime
from shoal.runtime.notices import Sources
from shoal.runtime.rules.deadline import ends_at, left_of
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.record_marks import Found
from shoal.runtime.rules.stalls import idle_header
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.startup import membership, not_joined
from shoal.runtime.startup.device_start import DeviceStart
from shoal.runtime.startup.launchers import JobPlace, ShownJob, decide, meets_at, shown_job
from shoal.runtime.startup.membership import find_cluster
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
from shoal.runtime.startup.single_process import alone
from shoal.runtime.system.callsite import callsite, line_of
from shoal.runtime.system.stacks import register_dump

if TYPE_CHECKING:
    from shoal.plan.mesh import Mesh


_MOST = 256  # bounds the memory of a program that makes meshes in a loop


class Registered(NamedTuple):
    """A mesh, and its host mesh: one CPU device for each of its devices."""

    mesh: Mesh
    host: Mesh


class Meshes:
    """The meshes that `make_mesh` returned in this process, oldest first. Thread-safe.

    >>> from shoal import Mesh
    >>> meshes = Meshes()
    >>> one, other = (meshes.register(Mesh({"x": 4}, kind="tpu")) for _ in range(2))
    >>> one is other, one.host.kind, len(meshes.all())
    (True, 'cpu', 1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Mesh, Registered] = {}
        self.held: dict[str, object] = {}  # process-wide values of facades, such as a default mesh

    def register(self, mesh: Mesh) -> Registered:
        """Return the entry of a mesh: the same one for equal meshes."""
        new = Registered(mesh, mesh.host_mesh())
        with self._lock:
            entry = self._known.setdefault(mesh, new)
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
            return entry

    def all(self) -> tuple[Registered, ...]:
        """Return all entries, oldest first."""
        with self._lock:
            return tuple(self._known.values())


class _Record:
    """The state of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.guard: ExitGuard | None = None
        self.joined: JobClient | None = None  # since `initialize`, until `shutdown`
        self.initialized: Initialized | None = None  # the call by which it joined
        self.attempts = 0  # to join a job
        self.alone: JobClient | None = None  # before `initialize`
        self.sources: Sources | None = None  # of preemption notices
        self.left: JobClient | None = None  # the job client of the job it left last
        self.meshes = Meshes()  # of `make_mesh`
        self.start = DeviceStart()  # of the devices
        self.strict_dtypes: bool | None = None  # None: as the variable says


_RECORD = _Record()
_LOG = logging.getLogger("shoal")


@collective()
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    coordinator_bind_address: str | None = None,
    timeout_s: float | None = None,
    virtual_devices: int | None = None,
    host_devices: int | None = None,
    hooks: bool = True,
    strict_dtypes: bool | None = None,
    token: str | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: float | None = None,
    shutdown_timeout_seconds: float | None = None,
    heartbeat_timeout_seconds: float | None = None,
    partition_index: int | None = None,
    mtls_cert_file: str | None = None,
    mtls_key_file: str | None = None,
    mtls_ca_file: str | None = None,
    mtls_peer_uri_prefix: str | None = None,
    verify_secure_credentials: bool | None = None,
    compile_cache: bool | str | os.PathLike[str] | None = None,
) -> None:
    """Join the job: connect its processes, and let JAX see the devices of all of them.

    Collective over all processes.

    Call it before the first use of JAX's devices. It accepts the arguments of
    `jax.distributed.initialize`, the first four also by position. A repeated call does nothing if
    its arguments are equivalent or not given (a notebook cell that is run again, a library).
    Arguments not given come from `SHOAL_*`, `JAX_*`, `DTENSOR_*`, torchrun, Open MPI, MPICH, a
    Slurm step, a TPU slice or Kubernetes, in this order (docs/starting.md); without any of these
    the job has one process. PMIx alone (`prterun`) gives no count: pass the arguments there. It
    either returns on all living processes or raises on all, and never aborts a process.

    Under `shoal run` the services of the job are already running; otherwise process 0 starts them
    as separate processes, which end with the job. If the program has called
    `jax.distributed.initialize` before, this attaches to that job; JAX's own reaction to lost
    processes, an abort after its heartbeat time-out, then stays in force, and so does its SIGTERM
    handler until shoal watches that signal (`preempted`, `preemption.watch`).

    Args:
      coordinator_address: host and port of the coordinator, on the host of process 0.
      num_processes: the number of processes of the job.
      process_id: the index of this process, from 0.
      local_device_ids: the accelerators that this process may use; None: all it sees, or its share
        of the GPUs if the launcher shows the same ones to several processes of this host.
      coordinator_bind_address: the host process 0 binds the services to; None: the loopback if
        the address is the loopback's, else all interfaces.
      timeout_s: time limit for all to join; None: SHOAL_INITIALIZE_TIMEOUT_S (300).
      virtual_devices: use this many virtual CPU devices per process, and no accelerator. Overrides
        `shoal run --devices`, SHOAL_VIRTUAL_DEVICES, JAX_NUM_CPU_DEVICES and XLA_FLAGS; process 0
        logs a line if they differ. None: SHOAL_VIRTUAL_DEVICES, else JAX's rule.
      host_devices: the number of CPU devices per process next to the accelerators, for the meshes
        of `Mesh.host_mesh`. None: one for each accelerator. `virtual_devices` overrides it.
      hooks: False: install no hooks in this process's interpreter, and never end it (docs/guest.md
        lists them). The program must then call `shutdown` before it exits, or the other processes
        lose it; they are notified that it exited, but not with which exception. Processes can
        differ in this. Repeated calls also install none, until `shutdown`.
      strict_dtypes: True: a host value whose dtype arrays on devices cannot have, such as float64,
        is an error of `put` and others that place it; False: it is narrowed, with a
        `DtypeWarning`. None: as it was; at first SHOAL_STRICT_DTYPES (0).
      token: the job's secret, equal on all processes. None: from SHOAL_TOKEN, the launcher or the
        rendezvous, or else derived from your token file (docs/starting.md). Under `shoal run` the
        launcher's token is used.
      cluster_detection_method: the launcher whose variables give the number of processes and the
        index, if the arguments do not: a name from docs/starting.md, such as "torchrun" or "Slurm
        step", or JAX's name for it. "deactivate": none of them. None: the innermost one.
      initialization_timeout: JAX's name for `timeout_s`; pass one of them.
      shutdown_timeout_seconds: time limit of `shutdown`, if its `timeout_s` is not given; None:
        SHOAL_TIMEOUT_S (600).
      heartbeat_timeout_seconds: has no effect, as process 0 logs: SHOAL_LOST_AFTER_S determines
        when a process is lost.
      partition_index: the partition of this process's devices (a TPU slice), on all processes or
        on none; None: JAX_PARTITION_INDEX, else as JAX finds it.
      mtls_cert_file: this process's certificates, for mutual TLS of JAX's coordination service,
        which JAX 0.12 has. It sets the option of `jax.config` that `jax.distributed.initialize`
        reads, as the next four do; None: the option stays as it is.
      mtls_key_file: the private key of `mtls_cert_file`.
      mtls_ca_file: the certificates that verify those of the peers.
      mtls_peer_uri_prefix: with which a URI of a peer's certificate must begin, in place of the
        name of its host; without it, the loss of the service's host ends all processes.
      verify_secure_credentials: True: refuse to start without mutual TLS.
      compile_cache: the directory in which JAX keeps the programs that it compiles, on every
        process, so that a program that starts again loads them; True: one in the user's cache
        directory; False: none. Where JAX's own cache is set (`jax_compilation_cache_dir`), that one
        is used. None: SHOAL_COMPILE_CACHE, which `shoal run --max-restarts` sets to 1
        (docs/stopping.md).

    Raises:
      InitializeError: on every living process, within the deadline: a process did not arrive, an
        index is taken twice, counts or versions differ, the processes have no token in common, or
        the coordinator cannot be reached. On
        this process: it was initialized before with other arguments (both are shown), or with hooks
        and now without; it is a fork or a child of a process of the job; JAX has already created
        its devices; or its launcher gives the index of the process, but not their number.
      UsageError: on this process: an argument or a variable is malformed.

    >>> initialize(virtual_devices=2)
    >>> process_count()
    1
    >>> shutdown()
    """
    arguments = Arguments(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids,
        coordinator_bind_address,
        virtual_devices,
        host_devices,
        token,
        cluster_detection_method,
        partition_index,
        mtls_cert_file,
        mtls_key_file,
        mtls_ca_file,
        mtls_peer_uri_prefix,
        verify_secure_credentials,
        compile_cache,
    )
    if _RECORD.guard is None and _RECORD.joined is None and hooks is not False:
        # First: the program ends with the code of what is refused below.
        _RECORD.guard = ExitGuard()
        _RECORD.guard.hook()
    _check_hooks(hooks)
    settings.check_all()
    limits = TimeLimits.of(timeout_s, initialization_timeout, shutdown_timeout_seconds)
    hang_timeout = HangTimeout.of_settings()
    if strict_dtypes is not None:
        check_flags("initialize", strict_dtypes=strict_dtypes)
        _RECORD.strict_dtypes = strict_dtypes
    if _RECORD.joined is not None and _RECORD.initialized is not None:
        client()  # raises in a fork, which is not a member
        _RECORD.initialized.check_same(arguments)
        return
    joined, is_attached = _join(arguments, limits, _RECORD.guard)
    _watch(joined, _RECORD.guard, hang_timeout, is_attached=is_attached)
    if heartbeat_timeout_seconds is not None:
        _LOG.log(
            _level(process_index()),
            "initialize(heartbeat_timeout_seconds=%s) has no effect: a process is lost after "
            "SHOAL_LOST_AFTER_S (%g s)",
            shown(heartbeat_timeout_seconds),
            settings.seconds("SHOAL_LOST_AFTER_S"),
        )


class TimeLimits(NamedTuple):
    """The time limits that `initialize` was given."""

    joining: float  # deadline, on the monotonic clock
    leaving_s: float | None  # of `shutdown`

    @classmethod
    def of(cls, timeout_s: object, initialization_timeout: object, leaving_s: object) -> TimeLimits:
        """Raises:
        UsageError: one is not a positive number, or the first two are given.
        """
        problems: list[str] = []
        if timeout_s is not None and initialization_timeout is not None:
            problems.append(
                f"timeout_s={shown(timeout_s)} and initialization_timeout="
                f"{shown(initialization_timeout)} (JAX's name for it): pass one of them"
            )
        given = {
            "timeout_s": timeout_s,
            "initialization_timeout": initialization_timeout,
            "shutdown_timeout_seconds": leaving_s,
        }
        limits = {n: seconds(n, value, problems) for n, value in given.items() if value is not None}
        raise_all("initialize", problems)
        leaving = limits.pop("shutdown_timeout_seconds", None)
        joining = next(iter(limits.values()), settings.seconds("SHOAL_INITIALIZE_TIMEOUT_S"))
        return cls(ends_at(joining), leaving)


def _level(process: int) -> int:
    """Return the level of a line that most likely all processes have: a warning on one of them."""
    return logging.INFO if process else logging.WARNING


def _check_hooks(hooks: bool) -> None:
    check_flags("initialize", hooks=hooks)
    if _RECORD.guard is not None and not hooks:
        # Hooks of the program, installed later, may call those of the guard: they must stay.
        raise InitializeError(
            "initialize(hooks=False): an earlier initialize() of this process has installed hooks\n"
            "pass hooks=False to the first one"
        )


def has_strict_dtypes() -> bool:
    """Return whether a host value that would be narrowed on devices is an error."""
    if _RECORD.strict_dtypes is not None:
        return _RECORD.strict_dtypes
    return settings.number("SHOAL_STRICT_DTYPES") == 1


def _join(
    arguments: Arguments, limits: TimeLimits, guard: ExitGuard | None
) -> tuple[JobClient, bool]:
    """Let JAX see the devices, and become a member of the job; return whether JAX was before."""
    lines = [jax_runtime.check_version()]  # first: what follows uses JAX's private names
    cluster, is_attached = membership.find_cluster(arguments, reports=True)
    not_joined.refuse_child(cluster)
    has_left = _RECORD.left is not None and _RECORD.left.num_processes > 1
    membership.check_in_time(cluster, is_attached=is_attached, has_left=has_left)
    jax_runtime.use_mutual_tls(cluster.mutual_tls)
    if not jax_runtime.backend_exists():
        options = (cluster.virtual_devices, cluster.local_device_ids, cluster.host_devices)
        lines.append(jax_runtime.configure_devices(*options))
    is_asked = arguments.compile_cache is not None
    since_s = settings.number("SHOAL_CACHE_SUSPECT_SINCE")
    cache = cluster.compile_cache
    lines.append(jax_runtime.keep_compiled(cache, is_asked=is_asked, suspect_since_s=since_s))
    for line in filter(None, lines):
        _LOG.log(_level(cluster.process), "%s", line)
    _RECORD.attempts += 1
    membership.leave_outer_job()
    if guard is not None:
        guard.begin_joining(cluster.process, cluster.num_processes)  # a child is no member
    try:
        joined = membership.become_member(
            cluster,
            limits.joining,
            is_attached=is_attached,
            attempt=_RECORD.attempts,
            hooks=guard is not None,
        )
    except BaseException:
        if guard is not None and membership.is_connecting():
            guard.skip_teardown()
        raise
    _RECORD.initialized = Initialized(
        arguments, cluster, is_attached, site=callsite(), leaving_s=limits.leaving_s
    )
    _RECORD.pid, _RECORD.joined = os.getpid(), joined
    return joined, is_attached


def _watch(
    joined: JobClient, guard: ExitGuard | None, hang_timeout: HangTimeout, *, is_attached: bool
) -> None:
    """Report the end of this process from now on, and watch whether it hangs.

    Without a guard (`hooks=False`) it is never ended, and nothing is installed in its interpreter.
    """
    if guard is not None and joined.num_processes > 1:
        line = jax_runtime.note_programs(joined.programs.note)
        joined.programs.is_noting = not line
        if line:
            _LOG.log(_level(joined.process), "%s", line)
        guard.watch(
            joined,
            is_idle=device_work.is_idle,
            issued_work=device_work.issued_work,
            leave=_leave_at_exit,
            compare=_compare_at_end,
            parts_together=is_attached,
        )
    ends = guard is not None
    if not isinstance(joined, TcpJobClient):
        watch_alone(joined, ends=ends)
        return
    shown = register_dump() if ends else None
    stalls = StallWatch(joined, lambda idle: joined.send(idle_header(idle)), shown, ends=ends)
    joined.watch_main_line(HangWatch(joined, hang_timeout, ends=ends).look)
    joined.watch_idle(stalls)


@collective()
def shutdown(*, timeout_s: float | None = None) -> None:
    """Leave the job together, after each process has finished its computations and saves.

    Collective over all processes.

    Without `initialize` before it, nothing happens. A program that simply ends needs no `shutdown`:
    its process stays until its devices have finished, because others may need their part, and its
    calls that send nothing are compared with those of the others. This process has left the job in
    any case, even if an exception is raised.

    Args:
      timeout_s: time limit for all to arrive; None: `initialize(shutdown_timeout_seconds=)`, else
        SHOAL_TIMEOUT_S (600).

    Raises:
      DeadlineError, ProcessLostError, PeerFailedError, DivergenceError: on all that arrived: the
        processes could not all leave together.

    >>> shutdown()
    """
    joined, guard = _RECORD.joined, _RECORD.guard
    _RECORD.meshes = Meshes()  # also without a job: facades begin anew
    if joined is None or _RECORD.pid != os.getpid():
        return
    if timeout_s is None and _RECORD.initialized is not None:
        timeout_s = _RECORD.initialized.leaving_s
    deadline = ends_at(settings.timeout("shutdown", timeout_s, "SHOAL_TIMEOUT_S"))
    try:
        membership.wait_for_saves(joined, deadline)
        if joined.num_processes > 1:
            membership.wait_until_idle(joined, deadline)
            point = Point("shutdown", operation="shutdown", site=callsite())
            verdict = b"%d" % joined.stop.verdict  # all then end with the same code
            verdicts = joined.arrive(point, verdict, timeout_s=left_of(deadline))
            joined.stop.join_verdicts(map(int, verdicts.values()))
    except ShoalError as error:
        kind = "failed" if peers_named(error) is None else "followed"
        joined.report(kind, f"shutdown: {error}", record_sent(joined, error))
        raise
    else:
        if joined.num_processes > 1 and not _is_attached():
            jax_runtime.leave(process_ends=False)
        joined.close()
        if guard is not None:
            guard.release()
    finally:
        not_joined.unmark_member()
        joined.kept.clear()  # buffers of collectives: `left` would keep them alive
        _RECORD.joined, _RECORD.left = None, joined
        if _RECORD.sources is not None:
            _RECORD.sources.close()
            _RECORD.sources = None


@local
def is_initialized() -> bool:
    """Return whether this process is in a job: after `initialize`, before `shutdown`.

    Local.

    True in a process forked from a member, which has its parent's index.

    >>> is_initialized()
    False
    """
    return _RECORD.joined is not None


@local
def process_index() -> int:
    """Return the index of this process in its job, from 0.

    Local.

    After `shutdown` it stays that of the job that was left, for code that runs at the end of the
    program. A process forked after `initialize` (a data loader's) gets its parent's index.

    Raises:
      InitializeError: this process belongs to a job of several that it has not joined: its
        launcher's variables show one, or `jax.distributed` joined it.

    >>> process_index()
    0
    """
    return _here().process


@local
def process_count() -> int:
    """Return the number of processes of the job; after `shutdown`, of the job that was left.

    Local.

    Raises:
      InitializeError: this process belongs to a job of several that it has not joined: its
        launcher's variables show one, or `jax.distributed` joined it.

    >>> process_count()
    1
    """
    return _here().num_processes


def client() -> JobClient:
    """Return the job client of this process; before `initialize`, that of a one-process job.

    Raises:
      InitializeError: this process belongs to a job of several that it has not joined, has left
        its job, or is a fork of a process that joined one.
    """
    if _RECORD.joined is None:
        left = _RECORD.left
        if left is not None and left.num_processes > 1:
            raise InitializeError(
                f"this process has left its job, in which it was process {left.process} of "
                f"{left.num_processes}: shutdown() was called\n"
                "make collective calls before that, or call initialize() to join a job again"
            )
        return _alone()
    if _RECORD.pid != os.getpid():
        raise InitializeError(
            f"this process is a fork of process {_RECORD.joined.process} of "
            f"{_RECORD.joined.num_processes}, and not a member of the job\n"
            "make collective calls in the process that called initialize()"
        )
    return _RECORD.joined


def device_start() -> DeviceStart:
    """Return the state of the device start of this process."""
    return _RECORD.start


def has_joined() -> bool:
    """Return whether this process, or the one it was forked from, has ever joined a job."""
    return (_RECORD.joined or _RECORD.left) is not None


def last_client() -> JobClient:
    """Return `client()`, or after `shutdown` that of the job that was left."""
    return (_RECORD.joined or _RECORD.left) or _alone()


def _here() -> JobClient:
    """Return the job client of this process's current or last job."""
    if _RECORD.joined is None and _RECORD.left is not None:
        left, attached = _RECORD.left, jax_runtime.attached()
        if attached is not None and attached[:2] != (left.process, left.num_processes):
            return _alone()  # jax.distributed has joined another job since
    return last_client()


@local
def meshes() -> tuple[Registered, ...]:
    """Return the meshes that `make_mesh` made in this process and job, as planned, oldest first.

    Local.

    Returns:
      Each with its `mesh` and its `host`: `mesh.host_mesh()`, the CPU devices beside it. Each is
      listed once, no matter how often or in how many threads it was made; `shutdown` clears
      the list.

    >>> from shoal import make_mesh
    >>> from shoal.plan.mesh import mesh_of
    >>> mesh = make_mesh({"shown": -1})
    >>> meshes()[-1].mesh == mesh_of("example", mesh), meshes()[-1].host.kind
    (True, 'cpu')
    """
    return _RECORD.meshes.all()


def held() -> dict[str, object]:
    """Return the values that facades keep process-wide until `shutdown`, by name."""
    return _RECORD.meshes.held


def registered(mesh: Mesh) -> Mesh:
    """Return the first registered mesh of this job that equals this one."""
    return _RECORD.meshes.register(mesh).mesh


def is_watching() -> bool:
    """Return whether this process watches sources of notices."""
    return _RECORD.sources is not None and _RECORD.sources.is_set_up


def sources() -> Sources:
    """Return the notice sources of this process, created at the first use."""
    if _RECORD.sources is None or _RECORD.sources.pid != os.getpid():
        _RECORD.sources = Sources(_give_notice, _has_losses)
    return _RECORD.sources


def _is_attached() -> bool:
    """Return whether `initialize` attached to a job joined by `jax.distributed`."""
    return _RECORD.initialized is not None and _RECORD.initialized.is_attached


def _give_notice(given: ReceivedNotice) -> bool:
    return last_client().give_notice(given)  # a signal may arrive while `shutdown` returns


def _has_losses() -> bool:
    return _RECORD.joined is not None and bool(_RECORD.joined.peer_losses.open())


def _alone() -> JobClient:
    """Return a one-process job; raise if this process is known to be one of several."""
    attached = jax_runtime.attached()
    if attached is None and _RECORD.alone is not None:  # fast path for loops
        return _RECORD.alone
    if attached is None:
        shown = shown_job(os.environ)
    elif attached.num_processes > 1:
        shown = ShownJob(not_joined.BY_JAX, attached.num_processes, by_jax=True)
    else:
        shown = None
    if shown is not None:
        not_joined.refuse_launched_child()
        raise not_joined.not_joined(shown)
    if _RECORD.alone is None:
        _RECORD.alone = alone()
    return _RECORD.alone


def _compare_at_end() -> None:
    """Compare the calls that send nothing with those of the other processes, at an end in order.

    Raises:
      DivergenceError: they differ.
    """
    joined, differences = _RECORD.joined, list[Found]()
    if isinstance(joined, TcpJobClient):
        with contextlib.suppress(ShoalError):  # the coordinator is lost, or late
            differences = joined.end()
        raise_at_end(joined, differences)


def _leave_at_exit(message: str) -> None:
    """Leave at the end of the program: JAX first, because its service ends with the job."""
    joined = _RECORD.joined
    if joined is None:
        return
    not_joined.unmark_member()
    if not _is_attached():
        jax_runtime.leave(process_ends=True)
    with contextlib.suppress(ShoalError, OSError):
        joined.close(message)


# ---- The arguments of `initialize`, kept for a repeated call: a notebook cell that is run again,
# a library that makes sure of the job, or a program whose test bench has already joined it.


# The job and this process's place in it; not their source, nor the secret.
_COMPARED = {
    "process": "process_id",
    "num_processes": "num_processes",
    "address": "coordinator_address",
    "bind_host": "coordinator_bind_address",
    "virtual_devices": "virtual_devices",
    "local_device_ids": "local_device_ids",
    "host_devices": "host_devices",
    "partition_index": "partition_index",
    "compile_cache": "compile_cache",
}
_NUMBERS = ("process", "num_processes", "address")  # whose source is one: arguments or a launcher


class Initialized(NamedTuple):
    """The call that joined the job."""

    arguments: Arguments
    cluster: JobPlace  # the result of the arguments and the environment
    is_attached: bool
    site: str
    leaving_s: float | None  # time limit of `shutdown`

    def check_same(self, arguments: Arguments) -> None:
        """Raise InitializeError if these arguments contradict those of the call that joined.

        What is not given contradicts nothing, unless the environment describes another job by now.

        Raises:
          UsageError: an argument is malformed.
        """
        now = self._given(arguments)
        fixed = {*now, *(_NUMBERS if now.keys() & {*_NUMBERS[:2]} else ())}
        if self.is_attached:
            again, _ = find_cluster(self.arguments)
        else:
            again = decide(self.arguments, os.environ)
        now = {field: getattr(again, field) for field in _COMPARED if field not in fixed} | now
        differing = [
            f"{name}: {_shown(before)} before, {_shown(now[field])} now"
            for field, name in _COMPARED.items()
            if field in now and (before := getattr(self.cluster, field)) != now[field]
        ]
        in_effect = jax_runtime.certificates().keywords
        differing += [
            f"{name}: {_shown(before)} before, {value} now"
            for name, value in mutual_tls(arguments, []).items()
            if (before := in_effect.get(name)) != (value or None)
        ]
        if not differing:
            return
        cluster, lines = self.cluster, "\n".join(differing)
        raise InitializeError(
            f"initialize was called before, with other arguments ({line_of(self.site)})\n"
            f"before: {_call(self.arguments)}\nnow:    {_call(arguments)}\n{lines}\n"
            f"this is process {cluster.process} of {cluster.num_processes}; call shutdown() first "
            "to join another job"
        )

    def _given(self, arguments: Arguments) -> dict[str, object]:
        """Return what these arguments say, without the environment, by the field of `JobPlace`."""
        address, count, process = arguments[:3]
        texts = {"coordinator_address": address}
        texts["coordinator_bind_address"] = arguments.coordinator_bind_address
        problems = not_texts(**texts)
        values = {
            "process": None if process is None else whole("process_id", process, 0, problems),
            "num_processes": None if count is None else whole("num_processes", count, 1, problems),
            "address": None if address is None else meets_at(address, {}, None, problems).address,
            "bind_host": bind_host(arguments, {}, problems),
            "virtual_devices": virtual_devices(arguments, {}, problems),
            "local_device_ids": device_ids(arguments, {}, problems),
            "host_devices": host_devices(arguments, problems),
            "partition_index": partition_index(arguments, {}, problems),
        }
        if arguments.compile_cache is not None:
            values["compile_cache"] = compile_cache(arguments, {}, problems)
        mutual_tls(arguments, problems)  # checked; compared with what JAX has
        given_token(arguments, {}, problems)  # checked, but neither compared nor shown
        raise_all("initialize", problems)
        given: dict[str, object] = {
            field: value for field, value in values.items() if value is not None
        }
        if self.is_attached or given.get("num_processes", self.cluster.num_processes) == 1:
            given.pop("address", None)  # of no effect
        return given


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _call(arguments: Arguments) -> str:
    given = arguments._replace(token=None)._asdict().items()  # which is a secret
    return f"initialize({', '.join(f'{k}={v!r}' for k, v in given if v is not None)})"
