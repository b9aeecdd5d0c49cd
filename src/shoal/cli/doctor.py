"""`shoal doctor`: why a job does not start."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal import settings
from shoal.checkpoint.bucket.address import Bucket, is_address
from shoal.cli.tables import print_json, safe
from shoal.draw.amounts import in_bytes, in_seconds
from shoal.draw.media.terminal import plain
from shoal.errors import UsageError, counted, raise_all
from shoal.paths import local_path
from shoal.runtime.doctor.examine import DoctorRequest, diagnosed
from shoal.runtime.doctor.findings import (
    PROBLEM,
    CheckResult,
    Diagnosis,
    Finding,
    Report,
    of_processes,
    packed,
    unknown_variable,
    unpacked,
)
from shoal.runtime.failures.process_text import listed
from shoal.runtime.system.child_process import own_environment

_HELP = """\
Find out why a job does not start.

It checks the launcher, addresses, versions, devices, clocks and directories. Start it in place of
the program, with the same launcher. The processes join as those of the program would, compare what
they see, and process 0 prints the result. If they cannot join, each process prints what it found,
and the reason. Without a launcher, it checks this process and this host.

\b
Examples:
  shoal doctor                            this process, this host
  shoal doctor -n 4                       4 processes here, as under shoal run
  srun shoal doctor --shared /home/me     all tasks; is the directory shared?
  mpirun -n 16 shoal doctor
  torchrun --nproc-per-node 4 -m shoal doctor
  shoal doctor --alone                    one of several, without the others
  shoal doctor --shared s3://bucket/run   can it save and restore there?
  shoal doctor --json                     everything, for programs

\b
What it checks:
  launcher   the variables of which launcher are used, and why no others
  address    what it resolves to; whether process 0 can listen, others connect
  token      where each process got it; all must have the same one
  versions   Python, JAX, jaxlib, NumPy, shoal, drivers
  devices    whether they start, in a child process, within --timeout
  clock      whether the clocks of all hosts agree
  files      whether each process sees the files of all others in --shared and
             SHOAL_RENDEZVOUS
  buckets    of --shared s3://…: credentials, rights, write conditions, clock
  memory, disk, proxy

\b
Exit code:
  0      no problem was found; notes do not count
  1      a problem was found; under a launcher, on all processes
  2      wrong usage
  130    ended by Ctrl-C
"""

_FOUND = 1
_INTERRUPTED = 130

_Processes = Annotated[
    str | None,
    typer.Option(
        "-n", "--processes", metavar="N", help="Start N processes here, as shoal run does."
    ),
]
_Devices = Annotated[
    str | None, typer.Option(metavar="N", help="With -n: virtual CPU devices per process.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
_Shared = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="A directory that all processes must share, or a bucket; may be repeated.",
    ),
]
_Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Limit of each wait: for processes, for devices."
    ),
]
_Alone = Annotated[bool, typer.Option("--alone", help="Do not wait for the other processes.")]
_To = Annotated[str | None, typer.Option(hidden=True)]


def doctor(
    processes: _Processes = None,
    devices: _Devices = None,
    as_json: _AsJson = False,
    shared: _Shared = None,
    timeout_s: _Timeout = 60.0,
    alone: _Alone = False,
    to: _To = None,
) -> None:
    """Find why a job does not start."""
    _check(processes, devices, timeout_s, alone)
    urls = [path for path in shared or () if is_address(path)]
    folders = tuple(path for path in shared or () if path not in urls)
    for folder in folders:
        local_path(folder, f"--shared {folder}")
    checks = {"buckets": partial(_check_buckets, urls, timeout_s)} if urls else {}
    request = DoctorRequest(folders, timeout_s, alone, checks)
    if processes is not None:
        with _until_interrupted():
            diagnosis = diagnose_here(request, processes, devices, urls)
        print_diagnosis(diagnosis, as_json=as_json)
        raise typer.Exit(_code(diagnosis))
    with _until_interrupted(), diagnosed(request, os.environ) as diagnosis:
        if to is not None:
            own = [report for report in diagnosis.reports if report.process == diagnosis.process]
            Path(to, f"process-{diagnosis.process}.json").write_bytes(packed(own[0]))
            return
        if diagnosis.process in (0, None) or not diagnosis.is_complete:
            print_diagnosis(diagnosis, as_json=as_json)
    raise typer.Exit(_code(diagnosis))


doctor.__doc__ = _HELP


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("shoal doctor: ended by Ctrl-C", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None


def _check(processes: str | None, devices: str | None, timeout_s: float, alone: bool) -> None:
    problems = []
    for option, value in (("-n", processes), ("--devices", devices)):
        if value is not None and not (value.isascii() and value.isdigit() and int(value) >= 1):
            problems.append(f"{option} {value} must be a whole number, at least 1")
    if devices is not None and processes is None:
        problems.append(f"--devices {devices} is for the processes of -n N")
    if processes is not None and alone:
        problems.append("--alone is for one of several processes: leave out -n")
    if not 0 < timeout_s < math.inf:
        problems.append(f"--timeout {timeout_s:g} must be a positive number of seconds")
    raise_all("doctor", problems)


def _code(diagnosis: Diagnosis) -> int:
    return _FOUND if diagnosis.has_problem else 0


# ---- The output of `shoal doctor`: the facts of all processes on one screen, then the findings.


_PLAIN_COLUMNS = 100
_MOST_FINDINGS = 12
_STYLES = {True: "bold red", False: "yellow"}


def print_diagnosis(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Print it: coloured on a terminal, plain in a pipe."""
    if as_json:
        print_json(json_of(diagnosis))
    elif sys.stdout.isatty():
        Console().print(render(diagnosis))
    else:
        print(plain(render(diagnosis), _PLAIN_COLUMNS), flush=True)


def json_of(diagnosis: Diagnosis) -> dict[str, object]:
    """Return everything, for programs."""
    findings = [
        {**finding._asdict(), "processes": processes}
        for finding, processes in grouped(diagnosis).items()
    ]
    return {
        "is_complete": diagnosis.is_complete,
        "findings": sorted(findings, key=lambda finding: finding["level"] != PROBLEM),
        "processes": [
            {name: value for name, value in report._asdict().items() if name != "findings"}
            for report in diagnosis.reports
        ],
    }


def grouped(diagnosis: Diagnosis) -> dict[Finding, list[int | None]]:
    """Return each finding once, problems first, with the processes that found it.

    A difference between processes is found by none of them; its text names them.
    """
    processes_of: dict[Finding, list[int | None]] = {}
    for report, finding in diagnosis.findings:
        processes_of.setdefault(finding, []).extend([] if report is None else [report.process])
    order = sorted(processes_of, key=lambda finding: finding.level != PROBLEM)
    return {finding: processes_of[finding] for finding in order}


def render(diagnosis: Diagnosis) -> RenderableType:
    """Return the text of a console."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in facts_lines(diagnosis.reports):
        facts.add_row(Text(name, style="cyan"), Text(safe_lines(text)))
    return Group(Text(_title(diagnosis.reports), style="bold"), facts, *_findings(diagnosis))


def safe_lines(text: str) -> str:
    """Escape unprintable characters, except line ends."""
    return "\n".join(safe(line) for line in text.split("\n"))


def _title(reports: tuple[Report, ...]) -> str:
    if not reports:
        return "shoal doctor: no process reported"
    hosts = list(dict.fromkeys(report.host for report in reports))
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else hosts[0]
    if len(reports) > 1:
        return f"shoal doctor: {len(reports)} processes on {safe(where)}"
    report = reports[0]
    index = "?" if report.process is None else report.process
    return f"shoal doctor: process {index} of {report.num_processes or '?'} on {safe(where)}"


def _findings(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    findings = grouped(diagnosis)
    problems = sum(finding.level == PROBLEM for finding in findings)
    if not problems:
        yield Text("no problem found", style="bold green")
    else:
        yield Text(counted(problems, "problem"), style=_STYLES[True])
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding, processes in list(findings.items())[:_MOST_FINDINGS]:
        whose = _whose(diagnosis.reports, processes)
        text = Text(safe(f"{finding.check}: {whose}{finding.words}"))
        if finding.advice:
            text.append(f"\n-> {safe(finding.advice)}", style="green")
        label = Text(f"  {finding.level}", style=_STYLES[finding.level == PROBLEM])
        table.add_row(label, text)
    yield table
    if len(findings) > _MOST_FINDINGS:
        yield Text(f"  and {len(findings) - _MOST_FINDINGS} more (--json has all)")


def _whose(reports: tuple[Report, ...], processes: Sequence[int | None]) -> str:
    """Return which processes have a finding, as the beginning of its line; "" if that is clear."""
    known = [process for process in processes if process is not None]
    if not known or len(reports) == 1:
        return ""
    names = {str(report) for report in reports if report.process in known}
    name = names.pop() if len(names) == 1 else listed(known)
    return f"{name}: "


# ---- The facts of one process or of many as lines of text; equal facts are listed once.


_MOST_GROUPS = 4


def facts_lines(reports: Sequence[Report]) -> list[tuple[str, str]]:
    """Return (check, text) for each check that has facts."""
    lines = [] if not reports else [("launcher", _launcher(reports[0].facts.get("launcher", {})))]
    for check, words_of in _WORDS.items():
        if any(check in report.facts for report in reports):
            lines.append((check, _each(reports, check, words_of)))
    for check, words_of_all in _TOGETHER.items():
        facts = [report.facts[check] for report in reports if report.facts.get(check)]
        if facts:
            lines.append((check, words_of_all(facts)))
    return [(check, text) for check, text in lines if text]


def _each(
    reports: Sequence[Report], check: str, words_of: Callable[[Mapping[str, Any]], str]
) -> str:
    processes_of: dict[str, list[int]] = {}
    for index, report in enumerate(reports):
        text = words_of(report.facts.get(check, {})) or "unknown"
        processes_of.setdefault(text, []).append(
            index if report.process is None else report.process
        )
    if len(processes_of) == 1:
        return next(iter(processes_of))
    rows = [f"{listed(processes)}: {text}" for text, processes in processes_of.items()]
    more = len(rows) - _MOST_GROUPS
    return "\n".join(rows[:_MOST_GROUPS] + ([f"and {more} more"] if more > 0 else []))


def _launcher(facts: Mapping[str, Any]) -> str:
    """Return the rule used, those seen but not used, and those not set; of the first report."""
    rules = facts.get("rules", [])
    lines = [str(facts.get("rule", "no rule holds"))]
    lines += [
        f"not used: {rule['launcher']}: {rule['why']}"
        for rule in rules
        if rule["is_seen"] and not rule["is_used"]
    ]
    absent = [rule["launcher"] for rule in rules if not rule["is_seen"]]
    lines += [f"not set: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def _address(facts: Mapping[str, Any]) -> str:
    directory = facts.get("directory")
    if directory:
        text = f"process 0 publishes it in {directory}"
    elif "address" in facts:
        to = ", ".join(facts["resolves_to"]) or "nothing"
        text = f"{facts['address']}, which resolves to {to}"
    else:
        return "none needed"
    if "connecting" in facts:
        text += f": {facts['connecting']}"
    service = facts.get("jax_service")
    if service:
        text += f"; JAX's service at {service}: {facts['connecting_to_jax_service']}"
    return text


def _versions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts.items())


def _devices(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    text = f"{facts['count']} × {facts['platform']}"
    return text if facts["kind"] == facts["platform"] else f"{text} ({facts['kind']})"


def _host(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    addresses = ", ".join(facts["addresses"]) or "no address"
    return f"{facts['name']} ({addresses}), {counted(facts['cores'], 'core')}"


def _folders(facts: Mapping[str, Any]) -> str:
    rows = (
        f"{path}: {folder['file_system'] or 'unknown file system'}"
        for path, folder in facts.items()
    )
    return ", ".join(rows) or "none given"


def _check_buckets(urls: Sequence[str], timeout_s: float) -> CheckResult:
    """Try what saves and restores need of each bucket."""
    from shoal.checkpoint.bucket.preflight import examine

    facts: dict[str, Any] = {}
    findings = []
    limit = datetime.timedelta(seconds=timeout_s)
    options: dict[str, Any] = {
        "retry_config": {"max_retries": 10, "retry_timeout": limit},
        "client_options": {"read_timeout": limit, "connect_timeout": limit},
    }
    for url in dict.fromkeys(urls):
        try:
            examined = examine(Bucket(url, **options))
        except UsageError as error:
            facts[url] = {}
            findings.append(Finding("buckets", *str(error).split("\n", 1)))
            continue
        facts[url] = examined.facts
        findings += [Finding("buckets", problem, advice) for problem, advice in examined.problems]
    return CheckResult(facts, tuple(findings))


def _buckets(facts: Mapping[str, Any]) -> str:
    rows = []
    for url, bucket in facts.items():
        rights = ", ".join(bucket.get("rights", ())) or "nothing"
        if not bucket:
            continue
        rows.append(f"{url}: {rights} (credentials: {bucket['credentials']})")
        if "clock_ahead_s" in bucket:
            rows.append(f"its clock {_off(round(bucket['clock_ahead_s']))} that of this host")
        if bucket.get("rights"):
            rows.append(f"its lifecycle rule should {bucket['lifecycle']}")
    return "\n".join(rows)


def _off(ahead_s: int) -> str:
    return f"is {ahead_s:+d} s from" if ahead_s else "agrees with"


def _proxy(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items()) or "none"


def _memory(facts: Sequence[Mapping[str, Any]]) -> str:
    free = _span([memory["available_bytes"] for memory in facts])
    return f"{free} available of {_span([memory['total_bytes'] for memory in facts])}"


def _disk(facts: Sequence[Mapping[str, Any]]) -> str:
    free: dict[str, list[int]] = {}
    for disk in facts:
        for directory, room in disk.items():
            known = [room["free_bytes"]] if room["free_bytes"] is not None else []
            free.setdefault(directory, []).extend(known)
    rows = {
        directory: f"{_span(room)} free" if room else "unknown free space"
        for directory, room in free.items()
    }
    return ", ".join(f"{directory}: {text}" for directory, text in rows.items())


def _clock(facts: Sequence[Mapping[str, Any]]) -> str:
    times = [clock["time_s"] for clock in facts]
    first = datetime.datetime.fromtimestamp(min(times), datetime.UTC)
    text = first.isoformat(timespec="seconds").replace("+00:00", "Z")
    return text if len(times) == 1 else f"{text}, {in_seconds(max(times) - min(times))} apart"


def _span(amounts: Sequence[int]) -> str:
    least, most = in_bytes(min(amounts)), in_bytes(max(amounts))
    return least if least == most else f"{least} to {most}"


_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "address": _address,
    "token": lambda facts: facts.get("source", "none needed"),
    "versions": _versions,
    "devices": _devices,
    "host": _host,
    "folders": _folders,
    "buckets": _buckets,
    "proxy": _proxy,
}
_TOGETHER: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "memory": _memory,
    "disk": _disk,
    "clock": _clock,
}


# ---- The job of `shoal doctor -n N`: N processes of the same command, under `shoal run`.
#
# Each writes its report into a directory, so that they are compared even if they cannot meet.


def diagnose_here(
    request: DoctorRequest, processes: str, devices: str | None, urls: Sequence[str] = ()
) -> Diagnosis:
    """Run the checks in N processes of this machine; return all reports, compared."""
    options = [] if devices is None else ["--devices", devices]
    shared = [part for folder in (*request.shared, *urls) for part in ("--shared", folder)]
    env = own_environment()
    unknown = settings.unknown_variables(env)  # found here; otherwise the launcher reports them
    with tempfile.TemporaryDirectory(prefix="shoal-doctor-") as to:
        code = _ended(
            [
                *(sys.executable, "-P", "-m", "shoal", "run", "--quiet", "-n", processes, *options),
                *("--no-prefix", "-m", "shoal", "doctor", "--to", to),
                *("--timeout", str(request.timeout_s), *shared),
            ],
            {name: value for name, value in env.items() if name not in unknown},
        )
        files = sorted(Path(to).iterdir(), key=lambda file: int(file.stem.rpartition("-")[2]))
        reports = tuple(unpacked(file.read_bytes()) for file in files)
    diagnosis = _whole(reports, int(processes), code)
    notes = map(unknown_variable, unknown.values())
    return diagnosis._replace(differences=(*diagnosis.differences, *notes))


def _ended(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the job; return its exit code.

    It has a process group of its own: at Ctrl-C, it would print how it was interrupted, and each
    process a traceback. Without its launcher, it ends in silence.
    """
    job = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # what libraries print
        process_group=0,
    )
    try:
        return job.wait()
    except BaseException:
        job.kill()
        job.wait()
        raise


def _whole(reports: tuple[Report, ...], processes: int, code: int) -> Diagnosis:
    missing = sorted(set(range(processes)) - {report.process for report in reports})
    if not missing and code == 0:
        return of_processes(reports)
    finding = Finding("joining", f"shoal run ended with code {code}; its last lines say why")
    differences = of_processes(reports).differences if reports else ()
    process = reports[0].process if reports else None
    return Diagnosis(reports, (finding, *differences), process, is_complete=False, has_problem=True)
