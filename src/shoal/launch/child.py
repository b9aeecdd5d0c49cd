"""The entry point of a job's process: runs the user's program exactly as `python` itself would.

Started as a file, `python …/child.py script args…` or `… -m module args…`, so that nothing in the
user's directory can shadow anything here; only `sys` and modules that Python has loaded already are
imported before the user's program. The additions: when the program imports JAX's table of
clusters, shoal's launcher is added to it, so that `jax.distributed.initialize()` works without
arguments, and the launcher learns when the devices exist; and a program that has joined its job so,
and ends well, ends with the others.
"""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType

TYPE_CHECKING = False  # as of `typing`, which is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Callable

_CLUSTERS = "jax._src.clusters"
_HIGH = 200  # the lowest descriptor for the file of faults
_USAGE, _INTERRUPTED = 2, 130  # exit codes


class _ClustersHook:
    """A finder that loads `jax._src.clusters` as usual, then adds shoal's launcher to it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != _CLUSTERS:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                from shoal.runtime.jax_service.announcement import announce, way_to
                from shoal.runtime.jax_service.jax_runtime import (
                    serve_unmodified_scripts,
                    when_devices_exist,
                )
                from shoal.runtime.system.progress_file import note_devices

                serve_unmodified_scripts(announce, way_to)
                when_devices_exist(note_devices)

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec


def run(arguments: list[str]) -> None:
    """Run `script args…` or `-m module args…` as `__main__` of this process.

    Raises:
      any exception of the program; its traceback starts in the program.
    """
    sys.meta_path.insert(0, _ClustersHook())  # type: ignore[arg-type]
    main = sys.modules["__main__"] = ModuleType("__main__")
    names: dict[str, object] = {"__builtins__": sys.modules["builtins"]}
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    main.__dict__.update(names)
    pid = _pid()
    record_file, path = _take_record_file(pid), (*sys.path,)

    def note(error: BaseException) -> bool:
        return _record(error, record_file, path)

    try:
        if arguments[0] == "-m":
            _run_module(arguments[1], arguments[1:])
        else:
            _run_script(main, arguments)
    except SystemExit as error:
        is_of_runpy = arguments[0] == "-m" and _of_program(error.__traceback__) is None
        if is_of_runpy and record_file[0]:  # no such module, or it cannot be run
            print(error.code, file=sys.stderr)
            error.code = _USAGE
            error.__traceback__ = error.__context__ = None
        _show_to_hooks(error)
        if _pid() == pid:  # no fork that ends here, too
            if error.code:
                note(error)
            else:
                _wait_for_others()
        raise
    except BaseException as error:
        _hide_our_frames(error, note)
        raise
    if _pid() == pid:
        _wait_for_others()


def _wait_for_others() -> None:
    """Let a program that joined its job by JAX alone end as with JAX's own service."""
    if _CLUSTERS in sys.modules and "shoal.runtime.process" not in sys.modules:
        from shoal.runtime.jax_service import device_work, jax_runtime

        jax_runtime.wait_for_others(device_work.issued_work)


def _run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m` does, through the private function that it calls itself."""
    import os
    import runpy

    sys.argv[:] = ["-m", *arguments[1:]]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_script(main: ModuleType, arguments: list[str]) -> None:
    """Run a script as `python script` does: its real directory becomes sys.path[0]."""
    import os
    import runpy
    from importlib.machinery import SourceFileLoader
    from io import open_code
    from pkgutil import get_importer

    script = arguments[0]
    sys.argv[:] = arguments
    if get_importer(script) is not None:  # a directory or zip file with a __main__.py
        sys.path.insert(0, os.path.abspath(script))
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    path = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = SourceFileLoader("__main__", path)
    with open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _show_to_hooks(error: SystemExit) -> None:
    """Show hooks of `sys.exit` a SystemExit raised without it, which Python shows nowhere."""
    try:  # noqa: SIM105 (contextlib might be the program's own by now)
        sys.exit(error.code)
    except SystemExit:
        pass


def _pid() -> int:
    import os

    return os.getpid()


def _take_record_file(pid: int) -> tuple[str, int]:
    """Keep the file of the record for this process alone; return its path, "" if there is none, and
    an open descriptor of it, -1 if there is none."""
    import os

    path = os.environ.get("SHOAL_RECORD_FILE", "")
    if not path:
        return "", -1
    os.environ["SHOAL_RECORD_FILE"] = f"{pid}:{path}"  # its children record nothing
    try:
        _note_faults(_open_high(f"{path}.fault"))
        return path, _open_high(path)
    except (ImportError, OSError, ValueError):
        return path, -1


def _open_high(path: str) -> int:
    """Open a file under a number that the program does not get for a file of its own, once it has
    closed all others."""
    import fcntl
    import os

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    try:
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    finally:
        os.close(file)


def _note_faults(file: int) -> None:
    """Let Python write where it stands when a fault of native code ends this process."""
    import faulthandler
    import os

    def blind() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file, inheritable=False)
        os.close(null)

    if not faulthandler.is_enabled():  # by PYTHONFAULTHANDLER
        os.register_at_fork(after_in_child=blind)  # a fork's fault is not this process's
        faulthandler.enable(file, all_threads=False)


def _hide_our_frames(error: BaseException, note: Callable[[BaseException], bool]) -> None:
    """Remove the frames before the program from the traceback passed to the excepthook.

    Args:
      note: records an exception for the launcher, and returns whether it could.
    """
    trace = _of_program(error.__traceback__)
    shown_by, pid = sys.excepthook, _pid()

    def show(kind: type[BaseException], value: BaseException, _trace: TracebackType | None) -> None:
        value = value.with_traceback(trace)
        is_recorded = _pid() == pid and note(value)
        try:
            if is_recorded and shown_by is sys.__excepthook__:
                from shoal.runtime.failures.last_record import for_the_log

                with for_the_log(is_recorded):
                    shown_by(kind, value, trace)
            else:
                shown_by(kind, value, trace)
            if is_recorded and isinstance(value, KeyboardInterrupt):
                sys.exit(_INTERRUPTED)  # Python's own depends on the imports since
        except BaseException as raised:  # by a hook of the program; Python shows it
            raised.__traceback__ = _of_program(raised.__traceback__) or raised.__traceback__
            raise  # a bare one adds no entry for this frame

    sys.excepthook = show


def _record(error: BaseException, record_file: tuple[str, int], path: tuple[str, ...]) -> bool:
    """Let the launcher know how the program ended; return whether it can.

    What that needs is imported as if the program's directory was the last of the path: a file there
    may have the name of a module of Python.

    Args:
      path: where Python looked for modules before the program's directory was added.
    """
    if not record_file[0]:
        return False
    of_program, hidden = sys.path, {}
    try:
        hidden = {name: sys.modules.pop(name) for name in _hiding_others(path)}
        sys.path = [*path, *of_program]
        from shoal.runtime.failures.last_record import record

        return record(error, record_file=record_file)
    except Exception:  # noqa: BLE001 (the program may have changed what an import needs)
        return False
    finally:
        sys.path = of_program
        sys.modules.update(hidden)


def _hiding_others(path: tuple[str, ...]) -> list[str]:
    """Return the modules of the program that have names of Python's, or of shoal."""
    import os

    dirname = os.path.dirname
    own = {*path, dirname(os.__file__), dirname(dirname(dirname(__file__)))}
    tops = set()
    for name in {*sys.stdlib_module_names, "shoal"} & sys.modules.keys():
        module = sys.modules[name]
        if not isinstance(module, ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")  # a lazy module is not loaded
        if isinstance(names.get("__file__"), str):  # else it is built in
            folder = dirname(names["__file__"])
            if (dirname(folder) if "__path__" in names else folder) not in own:
                tops.add(name)
    return [name for name in [*sys.modules] if name.partition(".")[0] in tops]


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of this file
    run(sys.argv[1:])
