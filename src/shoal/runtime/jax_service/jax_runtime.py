"""JAX's runtime: the only module of shoal that imports `jax._src` or `jaxlib`.

XLA connects devices through JAX's coordination service, so that service must exist and be joined.
Nothing here ever *waits* upon it: its client cannot be interrupted, and its errors end the process
in C++. Hence `recoverable` and heartbeats that never time out; the coordinator is responsible
for liveness. JAX is imported inside functions only.

``python -m shoal.runtime.jax_service.jax_runtime --processes N`` runs the service and prints its
address.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import operator
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import InitializeError
from shoal.runtime.failures.exception_text import position_in_program
from shoal.runtime.jax_service.certificates import CERT, MUTUAL_TLS, OPTIONS, Certificates
from shoal.runtime.jax_service.jax_proxy import JaxGate
from shoal.runtime.jax_service.service_link import ServiceLink
from shoal.runtime.system.callsite import site_of
from shoal.runtime.system.local_devices import (
    chosen_devices,
    count_accelerators,
    cpu_threads,
    overruled,
    with_configured,
)
from shoal.runtime.system.own_name import ADVICE, why_unresolved
from shoal.runtime.system.progress_file import note_done, note_loaded
from shoal.runtime.system.service_commands import (
    WAITS,
    ignore_job_signals,
    show_part,
    wait_for_token,
)
from shoal.runtime.wire.frames import address_text
from shoal.runtime.wire.server_sockets import allow_many_connections
from shoal.runtime.wire.sockets import is_loopback, short_folder
from shoal.tracebacks import is_ours, is_own_file

if TYPE_CHECKING:  # of the members of a job: the service, which is waited for, starts without
    from shoal.runtime.rules.programs import CompiledProgram
    from shoal.runtime.system.compile_cache import Entries

COMPILER = "jax._src.compiler"  # on the stack of a thread that compiles
NEWEST_TESTED = (0, 12)  # the newest series of JAX that the suite has passed with
# All private names that are used below; what a later JAX renames is found before a job starts.
PRIVATE = {
    "jax._src.api": ("clean_up",),
    "jax._src.clusters": (
        "ClusterEnv._cluster_types",
        "ClusterEnv.auto_detect_unset_distributed_params",
        "GceTpuCluster",
        "GkeTpuCluster",
    ),
    "jax._src.config": (
        "compilation_cache_include_metadata_in_key",
        "explicit_device_put_scope",
    ),
    "jax._src.distributed": (
        "global_state.client",
        "global_state.coordinator_address",
        "global_state.num_processes",
        "global_state.partition_index",
        "global_state.preemption_sync_manager",
        "global_state.process_id",
        "global_state.shutdown",
    ),
    "jax._src.mesh": ("get_concrete_mesh", "thread_resources"),
    "jax._src.xla_bridge": ("_backend_lock", "_backends", "num_cpu_devices.value"),
    "jaxlib._jax": (
        "get_distributed_runtime_client",
        "get_distributed_runtime_service",
        "make_gloo_tcp_collectives",
    ),
}
# And of the compile cache, which a JAX that lacks one does without.
CACHE_HOOKS: Mapping[str, Sequence[str]] = {
    "jax._src.compilation_cache": (
        "_cache",
        "get_executable_and_time(cache_key, compile_options, backend)",
        "put_executable_and_time(cache_key, module_name, executable, backend, compile_time)",
        "reset_cache()",
    ),
    "jax._src.compiler": (
        "_cache_write(cache_key, compile_time_secs, module_name, backend, executable)",
    ),
}
# The same, of the notes of compiled programs.
PROGRAM_HOOKS: Mapping[str, Sequence[str]] = {
    "jax._src.compiler": ("compile_or_get_cached(backend, computation, devices, compile_options)",),
}
_LOG = logging.getLogger("shoal")
_NEVER_S = 10**6  # of heartbeats and registration: JAX must never declare a process dead
_SHUTDOWN_S = 5
_ANSWER_S = 2.0  # how long to wait for an answer of the service
_END = "shoal/end"  # a barrier
_END_S = 300  # as JAX waits
_LOOK_S = 0.1
_HERE = "shoal/here"  # a key that exists as long as JAX's service does


class Attached(NamedTuple):
    """A job already joined by `jax.distributed.initialize`."""

    process: int
    num_processes: int
    address: str  # of JAX's service, which runs inside process 0


class JaxService:
    """JAX's coordination service, run from `start` until `close`, in a process that does no more.

    It has no token, so it listens at a Unix socket that this process alone can reach, behind a
    `jax_proxy.JaxGate`.
    """

    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when jaxlib is loaded
        # jaxlib loads NumPy, whose BLAS would start a thread for each core, which wait by spinning.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        gc.disable()
        try:
            from jaxlib import _jax  # most of the start-up time

            self._create = _jax.get_distributed_runtime_service
        except (ImportError, AttributeError):
            check_version()
            raise
        gc.freeze()  # none of it is ever garbage, and collections would look at all of it
        gc.enable()

    def start(
        self, num_processes: int, token: str, *, host: str = "127.0.0.1", port: int = 0
    ) -> str:
        """Listen; return the address of the gate."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, port), family=family, backlog=4096)
        keywords = Certificates.of_environment(os.environ).keywords
        if "mtls_cert_file" not in str(self._create.__doc__):
            keywords = {}  # of an older JAX: the processes refuse to join
        folder = f"{short_folder()}/shoal-jax-{os.urandom(8).hex()}"
        os.mkdir(folder, 0o700)
        try:
            path = f"{folder}/service"
            self._service = self._create(
                f"unix:{path}",
                num_processes,
                heartbeat_timeout=_NEVER_S,
                cluster_register_timeout=_NEVER_S,
                shutdown_timeout=_SHUTDOWN_S,
                recoverable=True,
                **keywords,
            )
            with contextlib.suppress(OSError, AttributeError), socket.socket(socket.AF_UNIX) as end:
                # The socket's inode, which stays reachable: no file outlives this process.
                inode = f"/proc/self/fd/{os.open(path, os.O_PATH)}"
                end.connect(inode)
                os.unlink(path)
                path = inode
        finally:
            with contextlib.suppress(OSError):  # without /proc the socket stays there
                os.rmdir(folder)
        allow_many_connections()
        is_open = is_loopback(host) or not token
        JaxGate(server, path, token, is_open=is_open, has_tls=bool(keywords)).open()
        return address_text(host, server.getsockname()[1])

    def close(self) -> None:
        """Stop. Clients that are still connected abort; the caller ensures that there are none."""
        self._service.shutdown()


def check_version() -> str:
    """Check that this JAX has what shoal uses of its private modules.

    Returns a line if this JAX is newer than those that were tested, otherwise "".

    Raises:
      InitializeError: on this process: it lacks something; the message names the versions to take.
    """
    import jax

    lacking = [*_lacking(PRIVATE)]
    if not lacking and jax.__version_info__[:2] <= NEWEST_TESTED:
        return ""
    newest = ".".join(map(str, NEWEST_TESTED))
    own, other = f"shoal {sys.modules['shoal'].__version__}", f"JAX {jax.__version__}"
    if lacking:
        raise InitializeError(
            f"{own} does not work with {other}, which has no {', '.join(lacking)}\n"
            f"install a newer shoal, or a JAX that this one was tested with: at most {newest}"
        )
    return f"{own} was tested with JAX up to {newest}, and this is {other}"


def _lacking(table: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the names of a table that its modules do not have, or have with other parameters."""
    import inspect

    for module, names in table.items():
        for name in names:
            path, _, first = name.rstrip(")").partition("(")
            try:
                there = operator.attrgetter(path)(importlib.import_module(module))
            except (ImportError, AttributeError):
                yield f"{module}.{name}"
                continue
            if first and not ", ".join(inspect.signature(there).parameters).startswith(first):
                yield f"{module}.{name}"


def certificates() -> Certificates:
    """Return JAX's options for mutual TLS."""
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is None or not hasattr(config, CERT):
        given = Certificates.of_environment(os.environ)
        return given._replace(is_supported=config is None)
    values = {name: getattr(config, name) for name in OPTIONS}
    return Certificates({n: "1" if v is True else str(v) for n, v in values.items() if v})


def use_mutual_tls(given: Mapping[str, str | bool]) -> None:
    """Set JAX's options for mutual TLS, by the arguments that the program gave.

    Raises:
      InitializeError: this JAX has none.
    """
    if not given:
        return
    import jax

    if not hasattr(jax.config, CERT):
        raise InitializeError(
            f"initialize: {', '.join(f'{name}=' for name in given)} given, but JAX "
            f"{jax.__version__} has no mutual TLS: install JAX 0.12 or newer"
        )
    for name, value in given.items():
        jax.config.update(MUTUAL_TLS[name], value)


def attached() -> Attached | None:
    """Return the job that this process joined through `jax.distributed`, or None."""
    distributed = sys.modules.get("jax._src.distributed")  # an import would take longer
    if distributed is None:
        return None
    state = distributed.global_state
    if state.client is None:
        return None
    return Attached(state.process_id, state.num_processes, state.coordinator_address or "")


def wait_for_others(issued_work: Callable[[], Callable[[], bool]]) -> None:
    """Wait until all processes of a job that this one joined through JAX alone have ended.

    JAX's own service disconnects all clients together. With shoal's (`recoverable`), each client
    disconnects when its program ends, and closes connections over which the last collectives of
    the others may still run. A SIGTERM ends the wait: the launcher sends it if another process has
    failed.

    Args:
      issued_work: returns a function that returns whether this process's devices have finished
        what was started until now. Until then its client stays, because without it they cannot
        connect to other devices.
    """
    import jax
    from jax._src import distributed

    job = attached()
    if job is None or job.num_processes == 1:
        return
    client = distributed.global_state.client
    is_over = threading.Event()
    signals: list[int] = []  # no Event: its lock may be held where the handler interrupts
    is_done = issued_work()

    def wait() -> None:
        limit = time.monotonic() + _END_S
        try:
            while not is_done() and time.monotonic() < limit:
                time.sleep(0.002)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # a process did not arrive
                client.wait_at_barrier(_END, _END_S * 1000)
        finally:
            is_over.set()

    # JAX's own handler does nothing.
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    note_done()  # from now on SIGTERM ends this process
    threading.Thread(target=wait, name="shoal-end", daemon=True).start()
    while not signals and not is_over.wait(_LOOK_S):
        pass  # signals are handled in between


def current_mesh() -> Any:
    """Return the mesh of `jax.set_mesh`, else that of JAX's `with mesh:`; None if there is none.

    `jax.sharding.get_mesh` raises inside `jit`, and does not know the second.
    """
    try:
        from jax._src import mesh

        current = mesh.get_concrete_mesh()
        if current is None or current.empty:
            current = mesh.thread_resources.env.physical_mesh
    except (ImportError, AttributeError):
        check_version()
        raise
    return None if current.empty else current


def explicit_transfers() -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread's transfers to devices count as `jax.device_put`'s.

    JAX's transfer guard permits these under "disallow", and refuses them under "disallow_explicit".
    Those of `jnp.asarray` and `jax.make_array_from_callback` count as implicit ones (jax 0.10 to
    0.12), though a call of these is no less explicit; and `device_put` of a list of shards takes
    four times as long.
    """
    try:
        from jax._src import config

        scope: contextlib.AbstractContextManager[None] = config.explicit_device_put_scope()
    except (ImportError, AttributeError):
        check_version()
        raise
    return scope


def backend_exists() -> bool:
    """Return whether JAX has created a backend, after which no job can be joined. Never blocks."""
    return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", False))


def when_devices_exist(call: Callable[[], None]) -> None:
    """Call `call` whenever JAX compiles a program, once the devices exist.

    JAX has no event for the start of the devices, and a program that uses them compiles soon.
    """
    from jax import monitoring

    def look(_event: str, _duration_s: float, **_more: str | int) -> None:
        if backend_exists():
            call()

    monitoring.register_event_duration_secs_listener(look)


def is_starting() -> bool:
    """Return whether any thread is starting the devices; some platforms may exist already."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge._backend_lock.locked())


def devices(platform: str | None) -> list[Any]:
    """Return all devices of the job, of one platform or the default one. Starts them."""
    import jax

    return list(jax.devices(platform))


def platforms() -> str:
    """Return the platforms that JAX is configured to use, "" for its own choice."""
    return str(sys.modules["jax"].config.jax_platforms or "")


def tpu_hosts() -> tuple[Any, ...]:
    """Return JAX's own detectors of TPU hosts: on GKE by variables, else by the metadata server."""
    from jax._src import clusters

    return clusters.GkeTpuCluster, clusters.GceTpuCluster


def virtual_devices() -> int:
    """Return the number of CPU devices of this process, 0 if JAX's default is another platform."""
    import jax

    return jax.local_device_count() if jax.default_backend() == "cpu" else 0


def host_devices() -> int:
    """Return the number of CPU devices of this process, beside other platforms."""
    import jax

    try:
        return len(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX_PLATFORMS excludes them
        return 0


def configure_devices(
    virtual_devices: int | None,
    local_device_ids: Sequence[int] | None,
    host_devices: int | None = None,
) -> str:
    """Choose the devices of this process, before a backend exists.

    Returns a line about settings that contradict `virtual_devices`, or without it `host_devices`;
    "" if there are none.

    Without both the CPU gets as many devices as this process has accelerators, so that a mesh of
    accelerators maps one to one to a mesh of host devices.
    """
    import jax
    from jax._src import xla_bridge

    if virtual_devices is not None:
        before = with_configured(xla_bridge.num_cpu_devices.value, os.environ)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", virtual_devices)
        os.environ.update(cpu_threads(virtual_devices, before))
        explicit = f"initialize(virtual_devices={virtual_devices})"
        if before.get("SHOAL_VIRTUAL_DEVICES", "").strip() == str(virtual_devices):
            explicit = f"SHOAL_VIRTUAL_DEVICES={virtual_devices}"
        return overruled(explicit, virtual_devices, before)
    if local_device_ids is not None:
        visible = ",".join(str(i) for i in local_device_ids)
        for option in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(option, visible)
    if host_devices is not None:
        return _make_host_devices(host_devices)
    chosen = max(xla_bridge.num_cpu_devices.value, chosen_devices(os.environ))
    os.environ.update(cpu_threads(chosen, os.environ))
    platforms = [name for name in str(jax.config.jax_platforms or "").split(",") if name]
    if chosen >= 0 or (platforms and ("cpu" not in platforms or len(platforms) == 1)):
        return ""
    twins = count_accelerators(os.environ)
    if local_device_ids is not None:
        twins = min(twins, len(local_device_ids))
    if twins > 1:
        jax.config.update("jax_num_cpu_devices", twins)
        os.environ.update(cpu_threads(twins, os.environ))
    return ""


def _make_host_devices(count: int) -> str:
    """Let JAX create CPU devices beside its accelerators."""
    import jax
    from jax._src import xla_bridge

    before = with_configured(xla_bridge.num_cpu_devices.value, os.environ)
    chosen = str(jax.config.jax_platforms or "")
    if chosen and "cpu" not in chosen.split(","):
        jax.config.update("jax_platforms", f"{chosen},cpu")
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.update(cpu_threads(count, before))
    return overruled(f"initialize(host_devices={count})", count, before)


def connect(address: str, process: int) -> Any:
    """Return JAX's client, connected. Blocks, without the GIL, until all processes connect."""
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(
        address,
        process,
        init_timeout=_NEVER_S,
        shutdown_timeout=_SHUTDOWN_S,
        heartbeat_timeout=_NEVER_S,
        shutdown_on_destruction=False,  # see `disconnect`
        use_compression=True,
        **certificates().keywords,
    )
    client.connect()
    client.key_value_set(_HERE, "", allow_overwrite=True)
    return client


def disconnect(client: Any) -> None:
    """Leave JAX's service if it answers; otherwise the call would end this process after 5 s.

    The one call that times out properly is a get; for an existing key it returns at once.
    """
    import jax

    try:
        client.blocking_key_value_get(_HERE, int(_ANSWER_S * 1000))
    except jax.errors.JaxRuntimeError:
        return
    client.shutdown()


def use_loopback(is_on_one_host: bool | None) -> None:
    """Let CPU devices connect by the loopback, or as JAX does: by this host's name.

    A container's or a laptop's resolver may not know that name. Of gloo the user would hear nothing
    but that a line of its C++ failed, so the name is looked up first. None: leave it all to JAX.
    """
    from jaxlib import _jax

    own = _jax.make_gloo_tcp_collectives
    make = getattr(own, "shoal_wraps", own)  # that of an earlier job

    def connect(*arguments: Any, **options: Any) -> Any:
        if is_on_one_host:
            return make(*arguments, **options, hostname="127.0.0.1")
        if not options.get("hostname"):
            problem = why_unresolved()
            if problem:
                raise OSError(f"{problem}; {ADVICE}")
        return make(*arguments, **options)

    connect.shoal_wraps = make  # type: ignore[attr-defined]
    _jax.make_gloo_tcp_collectives = make if is_on_one_host is None else connect


def install(
    client: Any, address: str, process: int, num_processes: int, partition_index: int | None
) -> None:
    """Make `client` the one that backends use, as `jax.distributed.initialize` does.

    JAX's preemption manager is left out: it would take SIGTERM away from every program. One of ours
    answers in its place (`multihost_utils.reached_preemption_sync_point`).
    """
    from jax._src import distributed

    state = distributed.global_state
    state.client, state.coordinator_address = client, address
    state.process_id, state.num_processes = process, num_processes
    state.partition_index = partition_index
    state.preemption_sync_manager = _Preemption()
    stay_until_teardown()


def stay_until_teardown() -> None:
    """Let `jax.distributed.shutdown()` do nothing as long as there are devices.

    The process stays in the job until `leave`, or JAX's own exit handler, which shuts down again
    after it has closed the devices.

    Gloo connects devices at their first common collective, and asks JAX's client where the others
    are. That can be after the call: the results of a program are not awaited, and JAX's check in
    `device_put` awaits them on one device of each process. JAX's own service lets its clients go
    together; shoal's (`recoverable`) lets each go at once, and a client that has left gives no
    address: the collective fails on its process, which ends, and another one waits for it for ever.
    """
    from jax._src import distributed

    state = distributed.global_state

    def shutdown() -> None:
        if not backend_exists():
            type(state).shutdown(state)

    state.shutdown = shutdown


def leave(*, process_ends: bool) -> None:
    """Disconnect from JAX's service; at the end of the process, after the backends are gone.

    A backend that is being closed may still need the service, hence JAX's own order. A service
    that is dead or frozen delays this by two seconds.
    """
    from jax._src import api, distributed

    state = distributed.global_state
    client, state.client = state.client, None
    if process_ends:
        state.client = client and _Leaving(client)
        api.clean_up()
        return
    use_loopback(None)
    if client is not None:
        disconnect(client)
    state.shutdown()
    state.process_id, state.num_processes = 0, 1


class _Preemption:
    """A stand-in for JAX's preemption manager: `shoal.preempted`, watching from its first call."""

    def reached_sync_point(self, step: int) -> bool:
        return bool(sys.modules["shoal"].preempted(step))

    def shutdown(self) -> None:
        """Do nothing: what watches belongs to the job, not to JAX's state."""


class _Leaving:
    """A stand-in for JAX's client: JAX's teardown shuts it down, which calls `disconnect`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def shutdown(self) -> None:
        disconnect(self._client)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def own_index() -> int:
    """Return JAX's index of this process."""
    import jax

    return int(jax.process_index())


def publish(key: str, value: str) -> None:
    """Publish `value` to the processes of an attached job."""
    from jax._src import distributed

    distributed.global_state.client.key_value_set(key, value, allow_overwrite=True)


class NothingPublishedError(TimeoutError):
    """A value was not published in time."""


def look_up(key: str, *, timeout_s: float) -> str:
    """Return the value that process 0 published: the one call of JAX's client that times out.

    Raises:
      NothingPublishedError: no value was published in time.
    """
    import jax
    from jax._src import distributed

    try:
        client = distributed.global_state.client
        return str(client.blocking_key_value_get(key, max(1, int(timeout_s * 1000))))
    except jax.errors.JaxRuntimeError as error:
        raise NothingPublishedError(str(error)) from None


def keep_compiled(
    directory: bool | str, *, is_asked: bool, suspect_since_s: float | None = None
) -> str:
    """Let JAX store the programs that it compiles in files, and load them from there.

    JAX can do so itself (`jax_compilation_cache_dir`), but in a job process 0 alone writes, and on
    CPU it writes under keys that no other process has. So JAX gets a cache of ours, without that
    option: its value would become part of every key (JAX 0.10), and on GPUs XLA would write further
    files there, which are neither checked nor bounded. Once the program sets the option, JAX's own
    cache takes over.

    On GPUs of several processes, XLA shares the work of a compilation between them, so a process
    that compiles while the others load waits for them, for up to 24 hours. There is no cache there.

    Returns a line if there is no cache although one was requested, otherwise "".

    Args:
      directory: of the entries; True: the user's; False: no cache.
      is_asked: whether the program, not the environment, has requested a cache.
      suspect_since_s: entries that were used since then are removed, and there is no cache.
    """
    import jax
    import jaxlib

    own, lacking = jax.config.jax_compilation_cache_dir, [*_lacking(CACHE_HOOKS)]
    if not lacking:
        _unhook()  # the cache of an earlier job
    if not directory:
        return ""
    if own:
        line = f"initialize(compile_cache=) has no effect: jax_compilation_cache_dir is {own}"
        return line if is_asked else ""
    if lacking:
        return (
            f"no compile cache: JAX {jax.__version__} has no {', '.join(lacking)}\nJAX's own "
            "(JAX_COMPILATION_CACHE_DIR) does without, but process 0 alone writes it"
        )
    from shoal.runtime.system.compile_cache import (
        Entries,
        default_root,
        name_of,
        this_processor,
    )

    try:
        root = default_root(os.environ) if directory is True else str(directory)
        folders = {os.path.dirname(jaxlib.__file__), *_plugins()}
        name = name_of([jax.__version__, jaxlib.__version__], folders, this_processor())
        entries = Entries(root, name)
        if suspect_since_s is not None:
            entries.remove_since(suspect_since_s)
            return ""
        _hook(_CompileCache(entries))
    except OSError as error:
        return f"no compile cache: {_reason(error)}"
    return ""


def with_own_lines() -> contextlib.AbstractContextManager[None]:
    """In the block, what is compiled has the source lines of the program as it is now.

    Otherwise JAX's keys leave the lines out, so what is loaded from a cache has those of the
    program that was compiled.
    """
    from jax._src import config

    scope: contextlib.AbstractContextManager[None]
    scope = config.compilation_cache_include_metadata_in_key(True)
    return scope


def _plugins() -> Iterator[str]:
    """Yield the directories of JAX's plugins, as JAX finds them, and of libtpu."""
    import importlib.metadata
    import importlib.util

    points = importlib.metadata.entry_points(group="jax_plugins")
    for name in ("jax_plugins", "libtpu", *(point.module for point in points)):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # of a package that is not there
            continue
        for place in (spec and spec.submodule_search_locations) or ():
            yield place
            if name == "jax_plugins":  # a namespace, to which each plugin adds a package
                yield from (entry.path for entry in os.scandir(place) if entry.is_dir())


def _reason(error: OSError) -> str:
    """Return why a file or directory cannot be used."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


class _CompileCache:
    """What JAX takes for its cache of compiled programs."""

    def __init__(self, entries: Entries) -> None:
        self._entries, self._said = entries, set[str]()
        self._path = entries.path  # which JAX logs
        self.is_full = False

    def get(self, key: str) -> bytes | None:
        """Return the program of a key, or None."""
        program = self._entries.read(key)
        if program is not None:
            note_loaded()  # before it runs
        return program

    def put(self, key: str, program: bytes) -> None:
        """Store a program, if it can be stored."""
        try:
            self._entries.write(key, program)
        except OSError as error:
            self.is_full = True
            reason = error.strerror or error  # of a full disk, which names no file
            self._say(f"the compile cache takes no more programs: {self._path}: {reason}")

    def serves(self, backend: Any) -> bool:
        """Return whether programs for these devices are stored."""
        from jax._src import distributed

        if distributed.global_state.num_processes in (None, 1) or backend.platform in _ALONE:
            return True
        self._say(
            f"no compile cache: it does not serve {backend.platform.upper()} devices of several "
            "processes (SHOAL_COMPILE_CACHE=0 omits this line)"
        )
        return False

    def refuse(self, key: str, error: Exception) -> None:
        """Remove an entry that JAX cannot load although nothing in it has changed."""
        self._entries.remove(key)
        self._say(
            f"JAX cannot load what it has stored in {self._path}, and compiles it again: "
            f"{type(error).__name__}: {error}"
        )

    def _say(self, message: str) -> None:
        """Log a line, once; it is most likely the same on all processes."""
        from jax._src import distributed

        kind = message.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            level = logging.INFO if distributed.global_state.process_id else logging.WARNING
            _LOG.log(level, "%s", message)


_ALONE = ("cpu", "tpu")  # platforms on which each process compiles by itself


def _unhook() -> None:
    """Take a cache of ours away from JAX."""
    from jax._src import compilation_cache

    if isinstance(compilation_cache._cache, _CompileCache):
        compilation_cache.reset_cache()


def _hook(cache: _CompileCache) -> None:
    """Give JAX this cache."""
    import jax
    from jax._src import compilation_cache, compiler

    load, write = compilation_cache.get_executable_and_time, compiler._cache_write
    own_load, own_write = (getattr(function, "shoal_wraps", function) for function in (load, write))

    def is_used() -> bool:
        is_ours = compilation_cache._cache is cache
        if is_ours and jax.config.jax_compilation_cache_dir:  # which the program has set since
            compilation_cache.reset_cache()
            return False
        return is_ours

    def get_executable_and_time(
        cache_key: str, compile_options: Any, backend: Any, *more: Any
    ) -> Any:
        if not is_used():
            return own_load(cache_key, compile_options, backend, *more)
        if not cache.serves(backend):
            return None, None
        try:
            return own_load(cache_key, compile_options, backend, *more)
        except Exception as error:  # noqa: BLE001 (JAX would warn, at each start)
            cache.refuse(cache_key, error)
            return None, None

    def cache_write(
        cache_key: str,
        compile_time_secs: float,
        module_name: str,
        backend: Any,
        executable: Any,
        *more: Any,
    ) -> None:
        if not is_used():
            own_write(cache_key, compile_time_secs, module_name, backend, executable, *more)
            return
        # On JAX 0.10 `more` is the program's callbacks, whose addresses it contains.
        if any(more) or cache.is_full or not cache.serves(backend):
            return
        seconds = int(compile_time_secs)
        try:
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, seconds
            )
        except Exception as error:  # noqa: BLE001 (XLA cannot serialize every program)
            _LOG.debug("%s is not stored: %s", module_name, error)

    get_executable_and_time.shoal_wraps = own_load  # type: ignore[attr-defined]
    cache_write.shoal_wraps = own_write  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = get_executable_and_time
    compiler._cache_write = cache_write
    compilation_cache._cache = cache


def note_programs(note: Callable[[Sequence[int], CompiledProgram], None]) -> str:
    """Call `note` before JAX compiles, or loads, a program for devices of several processes.

    It takes the owners of the devices and the program; those that shoal runs for itself are left
    out. A call of a program that is compiled already does not get here.

    Returns a line if this JAX has no place for that, otherwise "".
    """
    import jax
    from jax._src import compiler

    lacking = [*_lacking(PROGRAM_HOOKS)]
    if lacking:
        return f"compiled programs are not noted: JAX {jax.__version__} has no {lacking[0]}"
    there = compiler.compile_or_get_cached
    own = getattr(there, "shoal_wraps", there)

    def compile_or_get_cached(
        backend: Any,
        computation: Any,
        devices: Any,
        compile_options: Any,
        *more: Any,
        **options: Any,
    ) -> Any:
        # Before it is compiled: that may wait for other processes, too.
        with contextlib.suppress(Exception):  # without notes, the program runs as well
            _note(note, backend, computation, devices)
        return own(backend, computation, devices, compile_options, *more, **options)

    compile_or_get_cached.shoal_wraps = own  # type: ignore[attr-defined]
    compiler.compile_or_get_cached = compile_or_get_cached
    return ""


def _note(
    note: Callable[[Sequence[int], CompiledProgram], None],
    backend: Any,
    computation: Any,
    devices: Any,
) -> None:
    """Note a program over this process and others, unless it is shoal's own."""
    import jax

    from shoal.runtime.client.programs import program_of
    from shoal.runtime.rules.programs import MOST_LARGE

    owners = {device.process_index for device in devices.flat}
    count = jax.process_count()
    # On TPUs, JAX's numbers may be others than the job's.
    if len(owners) == 1 or (backend.platform == "tpu" and len(owners) < count):
        return
    # A process may compile for devices of others alone, or of a topology that is not there.
    if jax.process_index() not in owners or max(owners) >= count:
        return
    frame, of_jax = sys._getframe(2), os.path.dirname(jax.__file__) + os.sep
    while frame.f_back is not None and _is_between(frame, of_jax):
        frame = frame.f_back
    if is_own_file(frame.f_code.co_filename):
        return
    site = position_in_program(frame) or site_of(frame, frame.f_lineno)
    # To print large constants takes as long as to compile.
    text = computation.operation.get_asm(
        enable_debug_info=False, binary=True, large_elements_limit=MOST_LARGE
    )
    note([*owners], program_of(text, [device.id for device in devices.flat], site))


def _is_between(frame: FrameType, of_jax: str) -> bool:
    """Return whether a frame is between JAX's compiler and the code that has called JAX."""
    is_through = is_ours(frame) and not is_own_file(frame.f_code.co_filename)
    return is_through or frame.f_code.co_filename.startswith(of_jax)


def serve_unmodified_scripts(
    on_initialize: Callable[[], None] = lambda: None,
    way_to: Callable[[str], str] = lambda jax_service: jax_service,
) -> None:
    """Let `jax.distributed.initialize()` without arguments find the job of `shoal run`.

    Must be called once `jax._src.clusters` is loaded and before the script initializes. JAX takes
    count and index only from a `ClusterEnv`; this one goes first, otherwise Slurm wins inside an
    allocation. It sets no local process, or JAX would pin one device to each.

    Process 0 of such a script always starts a service of its own, on the port of the address. The
    launcher's service has that port already; so if that address was chosen, JAX's goes to a decoy.

    Args:
      on_initialize: called when the script calls `jax.distributed.initialize`, with or without
        arguments.
      way_to: returns the address at which this process reaches the launcher's service.
    """
    from jax._src import clusters

    table = {clusters.__name__: PRIVATE[clusters.__name__]}
    if any(_lacking(table)):  # no other module: JAX itself is being imported
        return  # the script may not need a job; `initialize` tells what this JAX lacks

    class ShoalCluster(clusters.ClusterEnv):  # type: ignore[misc]
        name = "shoal"

        @classmethod
        def is_env_present(cls) -> bool:
            return all(os.environ.get(name) for name in _LAUNCHED)

        @classmethod
        def get_coordinator_address(cls, **_: object) -> str:
            return os.environ["SHOAL_JAX_SERVICE"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["SHOAL_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["SHOAL_PROCESS_ID"])

    kinds = clusters.ClusterEnv._cluster_types
    kinds.insert(0, kinds.pop(kinds.index(ShoalCluster)))
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params

    def detect_with_decoy(*arguments: Any, **options: Any) -> Any:
        on_initialize()
        detected = detect(*arguments, **options)
        address = detected[0]
        if detected[0] == os.environ.get("SHOAL_JAX_SERVICE"):
            os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", _DECOY)
            detected = (way_to(str(detected[0])), *detected[1:])
            stay_until_teardown()
        use_loopback(is_loopback(str(address).rpartition(":")[0].strip("[]")))
        return detected

    clusters.ClusterEnv.auto_detect_unset_distributed_params = detect_with_decoy


_LAUNCHED = ("SHOAL_JAX_SERVICE", "SHOAL_NUM_PROCESSES", "SHOAL_PROCESS_ID")
_DECOY = "127.0.0.1:0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run JAX's service until stdin closes; first print its address, as one line of JSON.

    A line on stdin, `{"coordinator": "127.0.0.1:43211"}`, gives the coordinator to report to.
    """
    parser = argparse.ArgumentParser(prog="python -m shoal.runtime.jax_service.jax_runtime")
    parser.add_argument("--job", default="")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--until-stdin-closes", action="store_true", required=True)
    parser.add_argument(WAITS, action="store_true")
    options = parser.parse_args(arguments)
    show_part("shoal-jax")
    ignore_job_signals()
    try:
        service = JaxService()
    except InitializeError as error:
        sys.exit(str(error))
    if options.waits:
        wait_for_token()
    token = os.environ.get("SHOAL_TOKEN", "")
    address = service.start(options.processes, token, host=options.bind, port=options.port)
    print(json.dumps({"address": address}), flush=True)
    link = ServiceLink("JAX's service", token)
    link.stay(sys.stdin.fileno())
    service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
