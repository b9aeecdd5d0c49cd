"""`shoal run`: run N processes of one program as one job, on this host or on several."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, get_type_hints

import typer
from typer.models import OptionInfo

from shoal import settings
from shoal.errors import InitializeError, UsageError, counted, nearest, raise_all
from shoal.launch.order import NUM_PORTS, NodesOrder, Restarts
from shoal.paths import dangling_link, local_path
from shoal.runtime.system.local_devices import num_processes, overruled
from shoal.runtime.wire.frames import address_text, split_address

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from shoal.launch.launchers import Judge, Launchers
    from shoal.launch.loop import Console
    from shoal.launch.order import JobOrder

_BETWEEN_S = 0.2  # for the others after a failure that a new attempt follows
_HELP = """\
Run a program as N processes joined as one job.

They are on this host, or on each of several. In it, `shoal.initialize()` and
`jax.distributed.initialize()` need no arguments, and torchrun's variables (RANK, WORLD_SIZE,
MASTER_ADDR, …) are set. Lines are prefixed with their rank: `p1|`. (gloo's messages about its
connections are only in the logs, which hold all output.)

docs/clusters has a page for each kind of cluster. If a job does not start, run shoal doctor.

\b
Examples:
  shoal run -n 4 train.py --lr 0.1           4 processes
  shoal run -n 4 --devices 2 train.py        each with 2 virtual CPU devices
  shoal run -n 2 -m package.train --lr 0.1   a module, as with python -m
  shoal run -n 2 ./train.sh                  a script that starts the program
  shoal run -n 2 --no-python numactl …       a command, with its arguments
  shoal run -n 8 --only 0,3 train.py         show the output of two ranks
  shoal run -n 4 --log-dir logs train.py     keep logs/p0000.log … p0003.log

\b
Several hosts: run the same command on each, with its own --node-rank (a, b):
  shoal run --nnodes 2 --node-rank 0 --coordinator a:8476 -n 4 train.py
  shoal run --nnodes 2 --node-rank 1 --coordinator a:8476 -n 4 train.py
  All hosts start and end together. The counts of -n can differ. The ranks of
  node 0 come first. Set SHOAL_TOKEN to one secret on all hosts, unless they
  share a home directory. Open four ports of node 0 to them, here 8476 to 8479
  (launchers, the coordinator, JAX's service, torch's store). CPU computations
  use any ports. If a host is off or disconnected, the job ends after
  {lost} s (SHOAL_LOST_AFTER_S). Every launcher prints the same first failure
  and its host, and returns the same exit code. Under Slurm, MPI, torchrun or
  Kubernetes the program needs no shoal run: see docs/starting.md.

\b
While the job runs, job.json next to the logs (of node 0) has its address and
token, for shoal watch, shoal stacks and other tools. Only you can read it.

\b
When a process fails:
  The other processes are notified through shoal and have {failure_grace} s to
  exit (SHOAL_FAILURE_GRACE_S). Then they get SIGTERM and, {grace} s later
  (SHOAL_GRACE_S), SIGKILL. A process that joined by
  jax.distributed.initialize alone gets SIGKILL at once, because JAX takes
  SIGTERM as a preemption notice. One report says what failed first, where,
  and what the others did. failure.json next to the logs has the same facts
  (docs/stopping.md).
  If a process is alive but lost to the others (frozen, for example), shoal
  run terminates it after they have exited. A process that is only slower is
  named in the report and never terminated. No process outlives the launcher,
  not even a grandchild or if the launcher itself is killed. (On macOS,
  processes that left their process group can.)

\b
Restarting after a failure:
  shoal run --max-restarts 3 …    at most 3 restarts, all nodes together
  shoal run --restart-preempted … after exit code 75 too; these do not count
  Each restart attempt has new services and a new token. SHOAL_ATTEMPT is its
  number, from 0. If the same exception occurs at the same line and step
  twice, with no new saved step in between, the job ends. It also ends after
  three failures without progress. Progress is a new saved step or, until one
  is saved, a step that all processes have finished (shoal.step,
  shoal.preempted). If a signal, a preemption or the loss of a host ended an
  attempt, it counts for neither rule, except for an out-of-memory kill that
  the cgroup counted.
  Exit code 2, Ctrl-C, and signals to shoal run end the job for good.
  Before a restart, the other processes have {between:g} s instead of {failure_grace} s, unless
  SHOAL_FAILURE_GRACE_S is set. A process that is saving has {failure_grace} s.

\b
Signals: SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2 are passed on, and SIGHUP
         as SIGTERM; a second Ctrl-C kills. After SIGTERM the processes have
         {grace} s to exit (SHOAL_GRACE_S), or {leave} s if they took it as a
         notice (shoal.preempted; SHOAL_PREEMPTION_GRACE_S). Signals that are
         ignored at the start stay ignored: SIGHUP after nohup, and SIGINT in
         a script that starts it with &, which prints a line.
Input:   with -n 1 the program reads your stdin; with more, /dev/null.
         --stdin 1 gives it to process 1, for a debugger or a file
         (docs/starting.md).
Exit code:
  0      all processes ended with 0
  n      the code of the process that failed first; 128 + n for signal n
         (one that failed because of another, 70-74, is not the first)
  2      wrong usage
  70-74  raised by shoal: processes disagree, lost process, failed peer,
         deadline, the job did not start
  75     all processes ended with 0 or 75 because shoal.preempted was True, or
         all ended with 75: requeue the job. The last line says which steps
         will be repeated. After a failed save, only if all ended with 75
  77     --stalled-after: all processes were alive, and none made progress
"""


class NodesRequest(NamedTuple):
    """The options, as typed."""

    nodes: str | None = None
    node: str | None = None
    coordinator: str | None = None
    master_host: str | None = None
    master_port: str | None = None


class RunRequest(NamedTuple):
    """The command line, as typed."""

    program: tuple[str, ...]
    module: bool = False
    processes: str = "1"
    devices: str | None = None
    only: str | None = None
    log_dir: str | None = None
    prefix: bool = True
    nodes: NodesRequest = NodesRequest()
    max_restarts: str | None = None
    restart_preempted: bool = False
    stalled_after: str | None = None
    no_python: bool = False
    stdin: str | None = None
    quiet: bool = False


class _Checked(NamedTuple):
    """The numbers of the command line."""

    processes: int
    devices: int | None
    shown: frozenset[int] | None  # None: all
    nodes: NodesOrder | None = None
    restarts: Restarts | None = None
    stalled_after_s: float | None = None
    stdin: int | None = None  # the process that reads it; None: not given
    why_auto: str = ""  # the reason for the number of processes; empty: it was given


_Program = Annotated[list[str] | None, typer.Argument(metavar="SCRIPT|MODULE [ARGS]…", hidden=True)]
_Processes = Annotated[
    str,
    typer.Option(
        *("-n", "-np", "--processes", "--nproc-per-node", "--nproc_per_node"),
        metavar="N|auto",
        help="Number of processes on this host. auto: one for each GPU, or for each core.",
    ),
]
_Devices = Annotated[
    str | None,
    typer.Option(
        *("--devices", "--devices-per-process"),
        metavar="N",
        help="Virtual CPU devices per process (forces CPU); default: the real devices.",
    ),
]
_Module = Annotated[
    bool, typer.Option("-m", "--module", help="MODULE is a module's name, as for python -m.")
]
_NoPython = Annotated[
    bool,
    typer.Option(
        *("--no-python", "--no_python"),
        help="SCRIPT is a command, with its arguments, and not a Python script.",
    ),
]
_Only = Annotated[
    str | None,
    typer.Option(metavar="I,J…", help="Show the output of these ranks only; all are logged."),
]
_Stdin = Annotated[
    str | None,
    typer.Option(
        metavar="RANK",
        help="The one process that reads standard input, and where breakpoint() stops; default: "
        "with -n 1 that, otherwise none.",
    ),
]
_Prefix = Annotated[
    bool,
    typer.Option(
        "--prefix/--no-prefix",
        help="Prefix each line with its rank, as `p1|`. Without it, a pipe or file gets the "
        "bytes as written, of several processes in whole lines.",
    ),
]
_LogDir = Annotated[
    str | None,
    typer.Option(
        *("--log-dir", "--log_dir"),
        metavar="DIR",
        help="Directory of p0000.log, p0001.log …: unchanged stdout and stderr. What an earlier "
        "job has written there is removed, but not if it still runs. Default: a temporary "
        "directory, kept and named only if the job fails.",
    ),
]
_MaxRestarts = Annotated[
    str | None,
    typer.Option(
        *("--max-restarts", "--max_restarts"),
        metavar="N",
        help="Start the job again after a failure, at most N times; logs in attempt0, attempt1 … "
        "of the log directory.",
    ),
]
_RestartPreempted = Annotated[
    bool,
    typer.Option(
        "--restart-preempted", help="Start it again after exit code 75, too, as often as needed."
    ),
]
_StalledAfter = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="End the job with 77 if no process has made progress for this long (90, 90s, 10m, "
        "2h) and none does anything; default: SHOAL_STALLED_AFTER_S, or never.",
    ),
]
_Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        help="On a terminal, print neither the last line of a good run nor a note on options "
        "after the script.",
    ),
]


def run(
    program: _Program = None,
    processes: _Processes = "1",
    devices: _Devices = None,
    module: _Module = False,
    no_python: _NoPython = False,
    only: _Only = None,
    stdin: _Stdin = None,
    log_dir: _LogDir = None,
    prefix: _Prefix = True,
    max_restarts: _MaxRestarts = None,
    restart_preempted: _RestartPreempted = False,
    stalled_after: _StalledAfter = None,
    quiet: _Quiet = False,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    coordinator: Coordinator = None,
    master_addr: MasterHost = None,
    master_port: MasterPort = None,
    refused: Refused = None,
    refused_flags: RefusedFlags = False,
) -> None:
    """Run a program as N processes on each of one or more hosts, joined as one job."""
    if refused is not None or refused_flags:
        typed = sys.argv[1 : len(sys.argv) - len(program or ())]
        raise_all("run", _refusals(typed))
    if sys.platform == "win32":
        raise UsageError("run: requires Linux or macOS; on Windows use WSL")
    hosts = NodesRequest(nodes, node_rank, coordinator, master_addr, master_port)
    request = RunRequest(
        tuple(program or ()),
        module=module,
        processes=processes,
        devices=devices,
        only=only,
        log_dir=log_dir,
        prefix=prefix,
        nodes=hosts,
        max_restarts=max_restarts,
        restart_preempted=restart_preempted,
        stalled_after=stalled_after,
        no_python=no_python,
        stdin=stdin,
        quiet=quiet,
    )
    raise typer.Exit(_launch(request))


run.__doc__ = _HELP.format(
    failure_grace=settings.SETTINGS["SHOAL_FAILURE_GRACE_S"].default,
    grace=settings.SETTINGS["SHOAL_GRACE_S"].default,
    between=_BETWEEN_S,
    leave=settings.SETTINGS["SHOAL_PREEMPTION_GRACE_S"].default,
    lost=settings.SETTINGS["SHOAL_LOST_AFTER_S"].default,
)


def check(request: RunRequest) -> _Checked:
    """Check the command line; return its numbers.

    Raises:
      UsageError: an argument is wrong; all problems at once.
    """
    problems: list[str] = []
    devices = None
    if request.devices is not None:
        devices = _count("--devices", request.devices, problems)
    processes: int | None
    why_auto = ""
    if request.processes == "auto":
        processes, why_auto = _num_processes(request)
    elif (instead := _INSTEAD_OF_COUNTS.get(request.processes)) is not None:
        processes = None
        problems.append(f"-n {request.processes} of torchrun is not known here: {instead}")
    else:
        processes = _count("-n", request.processes, problems, instead=", or auto")
    nodes = check_nodes(request.nodes, problems)
    is_alone = request.nodes.nodes in (None, "1")
    ranks = processes if is_alone else None
    indices = _indices("--only", request.only, ranks, problems)
    readers = _indices("--stdin", request.stdin, ranks, problems)
    if request.stdin is not None and len(readers) > 1:
        problems.append(f"--stdin {request.stdin!r}: one process only can read it")
    restarts, stalled_after_s = _restarts(request, problems), _time(request, problems)
    if not request.program:
        problems.append("no program: pass a script, or -m and a module (shoal run --help)")
    elif request.no_python and request.module:
        problems.append("--no-python is for a command, -m for a module of Python: pass one of them")
    elif request.no_python:
        problems += _wrong_command(request.program[0])
    elif request.module:
        problems += _wrong_module(request.program[0])
    else:
        problems += _wrong_script(request.program[0])
    if request.log_dir is not None:
        problems += _wrong_log_dir(request.log_dir)
    raise_all("run", problems)
    is_shown = is_alone or request.only
    shown = indices if is_shown else None
    stdin = None if request.stdin is None else min(readers)
    return _Checked(
        processes=processes or 1,
        devices=devices,
        shown=shown,
        nodes=nodes,
        restarts=restarts,
        stalled_after_s=stalled_after_s,
        stdin=stdin,
        why_auto=why_auto,
    )


def _num_processes(request: RunRequest) -> tuple[int, str]:
    """Return how many processes `-n auto` means, and the reason."""
    forced = {} if request.devices is None else {"JAX_PLATFORMS": "cpu"}
    return num_processes({**os.environ, **forced})


def _time(request: RunRequest, problems: list[str]) -> float | None:
    """Return `--stalled-after` in seconds."""
    given = request.stalled_after
    if given is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|m|min|h|)", given.strip())
    time_s = float(match[1]) * {"h": 3600, "m": 60, "min": 60}.get(match[2], 1) if match else 0.0
    if not time_s:
        problems.append(f"--stalled-after {given} must be a time, such as 90, 90s, 10m or 2h")
    return time_s


def _restarts(request: RunRequest, problems: list[str]) -> Restarts | None:
    """Return when the job is started again."""
    if request.max_restarts is None and not request.restart_preempted:
        return None
    most = _count("--max-restarts", request.max_restarts or "0", problems, least=0)
    return Restarts(most or 0, request.restart_preempted)


def _launchers_of(order: JobOrder, attempt: int, console: Console, judge: Judge) -> Launchers:
    """Return the launchers of an attempt of a job: this one alone, or those of all nodes."""
    from shoal.launch.launchers import SingleHost

    nodes = order.nodes
    if nodes is None:
        env = os.environ | {"SHOAL_TOKEN": os.urandom(16).hex()}
        return SingleHost(order, attempt, console, env, judge)
    # A launcher alone starts without these: 15 ms.
    from shoal.launch.nodes.follower import Follower
    from shoal.launch.nodes.joining import own_card
    from shoal.launch.nodes.leader import Leader

    card = own_card(order, nodes, attempt)
    if nodes.node:
        return Follower(nodes, card, console, judge)
    return Leader(order, nodes, card, console, judge)


def _launch(request: RunRequest) -> int:
    """Check, run, and clean up; return the exit code."""
    from shoal.launch.log_dir import open_log_dir
    from shoal.launch.order import JobOrder
    from shoal.launch.restarts import Attempts
    from shoal.launch.supervisor import run_in_supervisor
    from shoal.runtime.system.service_commands import ignored_sigint_line
    from shoal.runtime.wire.sockets import LOOPBACK_ADVICE, why_no_loopback

    checked = check(request)
    if checked.stalled_after_s is not None:
        os.environ["SHOAL_STALLED_AFTER_S"] = repr(checked.stalled_after_s)  # of the processes
    grace_s = settings.seconds("SHOAL_GRACE_S")
    leave_s = settings.seconds("SHOAL_PREEMPTION_GRACE_S")
    failure_grace_s = settings.seconds("SHOAL_FAILURE_GRACE_S")
    if checked.devices is not None:
        warning = overruled(f"--devices {checked.devices}", checked.devices, os.environ)
        print(f"shoal run: {warning}\n" if warning else "", end="", file=sys.stderr)
    if checked.why_auto:
        said = counted(checked.processes, "process", "processes")
        print(f"shoal run: -n auto: {said}, {checked.why_auto}", file=sys.stderr)
    if sys.stderr.isatty():
        advice = _misplaced(request)
        if advice:
            print(f"shoal run: {advice}", file=sys.stderr)
    line = ignored_sigint_line()
    if line:
        print(f"shoal run: {line}", file=sys.stderr)
    node = checked.nodes.node if checked.nodes else None
    for message in [] if node else settings.unknown_variables(os.environ).values():
        print(f"shoal run: {message}", file=sys.stderr)  # of several launchers, that of node 0 does
    warn_after_s = settings.seconds("SHOAL_WARN_AFTER_S")
    lost_after_s = settings.seconds("SHOAL_LOST_AFTER_S")
    reason = why_no_loopback()
    if reason:
        raise InitializeError(f"run: {reason}\n{LOOPBACK_ADVICE}")
    with open_log_dir(request.log_dir, ["shoal", *sys.argv[1:]], node) as log_dir:
        command, is_python = _command(request)
        order = JobOrder(
            command,
            is_python=is_python,
            processes=checked.processes,
            devices=checked.devices,
            shown=checked.shown,
            log_dir=log_dir,
            keeps_logs=request.log_dir is not None,
            failure_grace_s=failure_grace_s,
            between_s=math.inf if os.environ.get("SHOAL_FAILURE_GRACE_S") else _BETWEEN_S,
            grace_s=grace_s,
            leave_s=leave_s,
            warn_after_s=warn_after_s,
            lost_after_s=lost_after_s,
            nodes=checked.nodes,
            restarts=checked.restarts,
            stdin=checked.stdin,
            prefix=request.prefix,
            quiet=request.quiet,
        )
        return run_in_supervisor(Attempts(order, _launchers_of).run)


def _wrong_log_dir(folder: str) -> list[str]:
    """Return what is wrong with a directory's path: one message, or none."""
    try:
        path = local_path(folder, f"--log-dir {folder!r}")
    except UsageError as error:
        return [str(error)]
    is_file = os.path.exists(path) and not os.path.isdir(path)
    return [f"--log-dir {folder!r} is a file"] if is_file else []


def _count(
    option: str, value: str, problems: list[str], least: int = 1, instead: str = ""
) -> int | None:
    if value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS and int(value) >= least:
        return int(value)
    problems.append(f"{option} {value} must be a whole number, at least {least}{instead}")
    return None


def _indices(
    option: str, given: str | None, processes: int | None, problems: list[str]
) -> frozenset[int]:
    """Return the ranks of an option; by default all."""
    if given is None:
        return frozenset(range(processes or 0))
    ranks = set()
    for part in (part.strip() for part in given.split(",")):
        if not (part.isascii() and part.isdigit()):
            problems.append(f"{option} {given!r}: {part!r} is not a rank; pass ranks, as in 0,3")
        elif processes is not None and int(part) >= processes:
            problems.append(
                f"{option} {part}: the ranks of -n {processes} are 0 to {processes - 1}"
            )
        else:
            ranks.add(int(part))
    return frozenset(ranks)


def _wrong_script(script: str) -> list[str]:
    """Return what is wrong with a script's path: one message, or none."""
    if os.path.isdir(script):
        has_main = os.path.isfile(os.path.join(script, "__main__.py"))
        return [] if has_main else [f"directory {script!r} holds no __main__.py"]
    if os.path.isfile(script):
        return _wrong_content(script)
    name = os.path.basename(script)
    if re.fullmatch(r"python[\d.]*", name):
        return [f"{script!r} is Python itself, which shoal run starts: leave it out"]
    directory = os.path.dirname(script)
    try:
        there = os.listdir(directory or ".")
    except OSError:
        where = dangling_link(script) or f"there is no directory {directory!r}"
        return [f"{where} (script {script!r})"]
    link = dangling_link(script)
    if link:
        return [f"{link} (script {script!r})"]
    if script.isdigit():
        return [f"there is no script {script!r}; for that many processes, pass -n {script}"]
    hint = nearest(name, [entry for entry in there if entry.endswith(".py")])
    if not hint and shutil.which(script):
        return [f"{script!r} is a command, not a script: pass --no-python to start it"]
    return [f"there is no script {script!r}{hint}"]


def _wrong_content(path: str) -> list[str]:
    """Return a message if the file cannot be started."""
    try:
        is_python = _is_python(path)
    except OSError as error:
        return [f"script {path!r} cannot be read: {error.strerror}"]
    if is_python:
        return []
    if os.access(path, os.X_OK):
        return _wrong_first_line(path)
    return [f"{path!r} is neither a Python script nor executable: chmod +x {shlex.quote(path)}"]


def _is_python(path: str) -> bool:
    """Return whether a script is Python's: not clearly another program."""
    with open(path, "rb") as file:
        head = file.read(256)
    shebang = head.partition(b"\n")[0] if head.startswith(b"#!") else b""
    if path.endswith(".sh") and b"python" not in shebang:
        return False
    if shebang and b"python" not in shebang and not path.endswith(".py"):
        return False
    return not head.startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe"))


def _wrong_command(command: str) -> list[str]:
    """Return a message if a command cannot be found."""
    path = shutil.which(command)
    if path:
        return _wrong_first_line(path)
    here = os.path.join(".", command)
    if os.path.dirname(command):
        return [f"there is no command {command!r}, or it is not executable"]
    if os.access(here, os.X_OK) and os.path.isfile(here):
        return [f"there is no command {command!r} on the PATH; did you mean {here!r}?"]
    return [f"there is no command {command!r} on the PATH"]


def _wrong_first_line(path: str) -> list[str]:
    """Return a message if a script of a shell names no program that can start it."""
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:  # a command that can be executed only
        return []
    if path.endswith(".sh") and not first.startswith(b"#!"):
        return [f"the first line of {path!r} must name what starts it, as #!/bin/sh"]
    named = re.match(rb"#![ \t]*([^ \t\n]+)", first)
    if named is None or os.path.exists(named[1]):
        return []
    advice = "; its lines end as in Windows" if named[1].endswith(b"\r") else ""
    return [f"{path!r} is started by {os.fsdecode(named[1])!r}, which is not there{advice}"]


def _command(request: RunRequest) -> tuple[tuple[str, ...], bool]:
    """Return the command of each process, and whether Python runs it."""
    if request.module:
        return ("-m", *request.program), True
    script, *arguments = request.program
    if request.no_python:
        return request.program, False
    if os.path.isdir(script) or _is_python(script):
        return request.program, True
    return (os.path.join(".", script), *arguments), False  # a file, and not on the PATH


def _misplaced(request: RunRequest) -> str:
    """Return a note on options of `shoal run` after the script, if the script does not name them.

    They are the script's. What a script may name is searched in its text: `"--devices"`,
    `devices: int`, `log_dir=`, but no `jax.devices()`. -m is left out: Hydra has it too.
    """
    script, *arguments = request.program
    typed = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    if request.quiet or request.module or not typed or not os.path.isfile(script):
        return ""
    with open(script, encoding="utf-8", errors="replace") as file:
        text = file.read()
    own = _own_options()
    named = [word for word in dict.fromkeys(typed) if word in own and not _names_option(text, word)]
    if not named:
        return ""
    return f"{', '.join(named)} after {script} goes to it; options of shoal run precede the script"


def _own_options() -> set[str]:
    """Return the options of `shoal run` in all spellings."""
    spellings = set[str]()
    for name, hint in get_type_hints(run, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, OptionInfo) and not option.hidden and name != "module":
                names = [option.default, *(option.param_decls or ())]  # typer's order in Annotated
                declared = "/".join(word for word in names if isinstance(word, str))
                spellings.update((declared or f"--{name.replace('_', '-')}").split("/"))
    return spellings


def _names_option(text: str, option: str) -> bool:
    if not option.startswith("--"):
        return re.search(rf"{option}(?!\w)", text) is not None
    name = re.sub("[-_]", "[-_]", option.removeprefix("--"))
    return re.search(rf"(?<![\w.]){name}(?![\w(])", text) is not None


def _wrong_module(name: str) -> list[str]:
    """Return a message if a module cannot be found from here; no code of its packages runs."""
    import pkgutil  # noqa: F401 (now: later a file of this directory could be found instead)

    sys.path.insert(0, os.getcwd())
    try:
        return _missing_module(name)
    finally:
        del sys.path[0]


def _missing_module(name: str) -> list[str]:
    package, places, is_certain = "", sys.path, True
    for part in (*name.split("."), "__main__"):
        here = f"{package}.{part}" if package else part
        spec = None
        if part:
            spec = _spec_of(here, places if package else None)
        if spec is None:
            return [_no_module(name, here, package, places)] if is_certain else []
        inside = spec.submodule_search_locations
        if inside is None and len(here) < len(name):
            advice = "; leave out .py" if name == f"{here}.py" else ""
            return [f"there is no module {name!r}: {here!r} is not a package{advice}"]
        if inside is None:
            break
        if spec.origin is None:  # a namespace
            inside = [os.path.join(place, part) for place in places]
        elif _sets_path(spec.origin):
            is_certain = False
        package, places = here, [*inside]
    return []


def _spec_of(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    from importlib.machinery import ModuleSpec

    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, places)
        except KeyError:  # a namespace, whose package would have to be imported
            return ModuleSpec(name, None, is_package=True)
        if spec is not None:
            return spec
    return None


def _sets_path(file: str) -> bool:
    """Return whether a package decides itself where its modules are."""
    try:
        with open(file, "rb") as stream:
            return b"__path__" in stream.read()
    except OSError:
        return True


def _no_module(name: str, missing: str, package: str, places: Sequence[str]) -> str:
    from pkgutil import iter_modules

    if name and package == name:
        return f"package {name!r} holds no __main__.py: pass -m {name}.MODULE"
    if os.path.isfile(name):
        return f"there is no module {missing!r}; leave out -m for a script"
    beside = iter_modules(places if package else [os.getcwd()], f"{package}.".lstrip("."))
    return f"there is no module {missing!r}{nearest(missing, [module.name for module in beside])}"


# ---- The options of `shoal run` for several hosts, and those of other launchers that it refuses.


MOST_DIGITS = 9  # of any number of nodes, or port
_MASTER_PORT = "29500"  # torchrun's
_OPTIONS = {  # of `NodesRequest`, all but --nnodes
    "node": "--node-rank",
    "coordinator": "--coordinator",
    "master_host": "--master-addr",
    "master_port": "--master-port",
}


def _both(name: str) -> tuple[str, str]:
    """Return an option in both of torchrun's spellings."""
    return name, "--" + name.removeprefix("--").replace("-", "_")


Nodes = Annotated[
    str | None,
    typer.Option("--nnodes", metavar="N", help="Number of hosts; each runs this command."),
]
NodeRank = Annotated[
    str | None,
    typer.Option(
        *_both("--node-rank"), metavar="K", help="Which of the hosts this is: 0 to N - 1."
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        *("--coordinator", *_both("--rdzv-endpoint")),
        metavar="HOST:PORT",
        help="Where node 0 is reached by all hosts, and the first of four free ports there.",
    ),
]
MasterHost = Annotated[
    str | None,
    typer.Option(*_both("--master-addr"), metavar="HOST", help="The same as two options:"),
]
MasterPort = Annotated[
    str | None,
    typer.Option(*_both("--master-port"), metavar="PORT", help="… and its port, or 29500."),
]

# Options of torchrun with a value, and without: what to write instead.
_INSTEAD: Mapping[str, str] = {
    "--rdzv-backend": "leave it out: the hosts join at --coordinator, each with its --node-rank",
    "--rdzv-id": "leave it out: a job is known by its address and SHOAL_TOKEN",
    "--rdzv-conf": "set SHOAL_INITIALIZE_TIMEOUT_S, how long to wait for all hosts",
    "--monitor-interval": "leave it out: the end of a process is noticed at once",
    "--start-method": "leave it out: each process is a new Python",
    "--role": "leave it out: all processes are of one kind",
    "--redirects": "pass --log-dir DIR, which keeps the output of each process",
    "--tee": "pass --log-dir DIR, which keeps what is also shown",
    "--local-ranks-filter": "pass --only I,J with ranks of the whole job",
    "--local-addr": "leave it out: pass --coordinator a name that all hosts resolve",
    "--logs-specs": "pass --log-dir DIR",
    "--signals-to-handle": "leave it out: all signals are passed on to the processes",
}
# Options of mpirun and srun, and short ones of torchrun: whose it is, and what to write instead.
_OF_OTHERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("--hostfile", "--host", "-hosts", "-f"),
        (
            "mpirun",
            "run the command on each host, with --nnodes N --node-rank K --coordinator HOST:PORT",
        ),
    ),
    "--bind-to": (
        "mpirun",
        "leave it out: the system schedules the processes; to bind them, pass --no-python and a "
        "script that calls taskset or numactl",
    ),
    **dict.fromkeys(
        ("-x", "-genv"),
        (
            "mpirun",
            "leave it out: the processes get all variables; to set one, write "
            "NAME=VALUE shoal run …",
        ),
    ),
    "--ntasks": ("srun", "pass -n N, the number of processes on this host"),
    "--timeout": (
        "mpirun",
        "pass --stalled-after TIME, which ends a job that stands still; for a limit on the whole "
        "job, write timeout S shoal run …",
    ),
    "-r": ("torchrun", _INSTEAD["--redirects"]),
    "-t": ("torchrun", _INSTEAD["--tee"]),
}
_INSTEAD_OF_FLAGS: Mapping[str, str] = {
    "--standalone": "leave it out: without --nnodes all processes run on this host",
    "--run-path": "pass the script itself",
}


_INSTEAD_OF_COUNTS: Mapping[str, str] = {
    "gpu": "write -n auto, one process for each GPU",
    "cpu": "write JAX_PLATFORMS=cpu shoal run -n auto …, one process for each core",
}


def _refusals(typed: Sequence[str]) -> list[str]:
    """Return a message for each option of another launcher; it says what to write instead.

    Args:
      typed: the words before the program.
    """
    of_torchrun = {**_INSTEAD, **_INSTEAD_OF_FLAGS}
    table = {**{name: ("torchrun", advice) for name, advice in of_torchrun.items()}, **_OF_OTHERS}
    options = [word for word in typed if word.startswith("-")]
    names = [word.partition("=")[0].replace("_", "-") for word in options]
    names = [f"-{word}" if f"-{word}" in _OF_OTHERS else word for word in names]  # mpirun's
    options_of_others = [name for name in dict.fromkeys(names) if name in table] or ["this option"]
    table["this option"] = ("another launcher", "see shoal run --help")
    return [
        f"{name} of {table[name][0]} is not an option here: {table[name][1]}"
        for name in options_of_others
    ]


Refused = Annotated[
    str | None,
    typer.Option(
        *(spelling for name in _INSTEAD for spelling in dict.fromkeys(_both(name))),
        *_OF_OTHERS,
        *("-hostfile", "-host", "-bind-to"),
        hidden=True,
    ),
]
RefusedFlags = Annotated[
    bool,
    typer.Option(
        *(spelling for name in _INSTEAD_OF_FLAGS for spelling in dict.fromkeys(_both(name))),
        hidden=True,
    ),
]


def check_nodes(request: NodesRequest, problems: list[str]) -> NodesOrder | None:
    """Return the place of this host among several; None for a job on this host alone."""
    if request.nodes is None:
        given = [name for name, value in _OPTIONS.items() if getattr(request, name)]
        if given:
            named = " and ".join(_OPTIONS[name] for name in given)
            verb = "require" if len(given) > 1 else "requires"
            problems.append(f"{named} {verb} --nnodes N: the number of hosts")
        return None
    nodes = _number("--nnodes", request.nodes, 1, problems)
    if nodes == 1 and request.node in (None, "0"):
        return None
    node = None
    if request.node is not None:
        node = _number("--node-rank", request.node, 0, problems)
    elif nodes is not None:
        problems.append(f"--nnodes {nodes} requires --node-rank: 0 on one host, 1 on the next, …")
    if nodes is not None and node is not None and node >= nodes:
        problems.append(f"--node-rank {node}: the ranks of --nnodes {nodes} are 0 to {nodes - 1}")
    where = _where(request, problems)
    if nodes is None or node is None or where is None:
        return None
    from shoal.runtime.startup.job_token import find_token  # imports hashlib

    host, port = where
    token = find_token("launchers", address_text(host, port), given=settings.text("SHOAL_TOKEN"))
    return NodesOrder(
        nodes,
        node,
        host,
        port,
        token,
        timeout_s=settings.seconds("SHOAL_INITIALIZE_TIMEOUT_S"),
        warn_after_s=settings.seconds("SHOAL_WARN_AFTER_S"),
        lost_after_s=settings.seconds("SHOAL_LOST_AFTER_S"),
    )


def _where(request: NodesRequest, problems: list[str]) -> tuple[str, int] | None:
    """Return host and port of node 0."""
    before = len(problems)
    given: list[tuple[str, int]] = []
    if request.coordinator:
        try:
            given.append(split_address(request.coordinator))
        except UsageError as error:
            problems.append(f"--coordinator: {error}")
    if request.master_host:
        port = _number("--master-port", request.master_port or _MASTER_PORT, 1, problems)
        given.append((request.master_host, port or 0))
    elif request.master_port:
        problems.append(f"--master-port {request.master_port} requires --master-addr HOST")
    if len(problems) > before:
        return None
    if not given:
        problems.append(
            "--nnodes requires --coordinator HOST:PORT: a name or address of the host of node 0 "
            "that all hosts reach, and the first of four free ports there"
        )
        return None
    if len(set(given)) > 1:
        texts = [address_text(*where) for where in given]
        problems.append(f"--coordinator {texts[0]} is not --master-addr and -port, {texts[1]}")
        return None
    host, first = given[0]
    if not 0 < first <= 65536 - NUM_PORTS:
        problems.append(
            f"--coordinator {address_text(host, first)}: its port must be 1 to "
            f"{65536 - NUM_PORTS}, and known to all hosts"
        )
        return None
    return host, first


def _number(option: str, value: str, least: int, problems: list[str]) -> int | None:
    if value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS and int(value) >= least:
        return int(value)
    least_text, _, most = value.partition(":")
    if option == "--nnodes" and least_text.isdigit() and most.isdigit():
        problems.append(f"--nnodes {value}: the number of hosts is fixed; pass --nnodes {most}")
    else:
        problems.append(f"{option} {value} must be a whole number, at least {least}")
    return None
