"""The options of `shoal run` for several hosts, and the torchrun options that it refuses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import typer

from shoal import settings
from shoal.errors import UsageError
from shoal.launch.nodes.ports import NUM_PORTS
from shoal.launch.order import NodesOrder
from shoal.runtime.wire.frames import address_text, split_address

MOST_DIGITS = 9  # of any number of nodes, or port
_MASTER_PORT = "29500"  # torchrun's
_OPTIONS = {  # of `NodesRequest`, all but --nnodes
    "node": "--node-rank",
    "coordinator": "--coordinator",
    "master_host": "--master-addr",
    "master_port": "--master-port",
}


class NodesRequest(NamedTuple):
    """The options, as typed."""

    nodes: str | None = None
    node: str | None = None
    coordinator: str | None = None
    master_host: str | None = None
    master_port: str | None = None


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
    "--rdzv-backend": "leave it out: the hosts meet at --coordinator, each with its --node-rank",
    "--rdzv-id": "leave it out: a job is known by its address and SHOAL_TOKEN",
    "--rdzv-conf": "set SHOAL_INITIALIZE_TIMEOUT_S, how long to wait for all hosts",
    "--monitor-interval": "leave it out: the end of a process is noticed at once",
    "--start-method": "leave it out: each process is a new Python",
    "--role": "leave it out: all processes are of one kind",
    "--redirects": "give --log-dir DIR, which keeps the output of each process",
    "--tee": "give --log-dir DIR, which keeps what is also shown",
    "--local-ranks-filter": "give --only I,J with ranks of the whole job",
    "--local-addr": "leave it out: give --coordinator a name that all hosts resolve",
    "--logs-specs": "give --log-dir DIR",
}
_INSTEAD_OF_FLAGS: Mapping[str, str] = {
    "--standalone": "leave it out: without --nnodes all processes run on this host",
    "--no-python": "give a Python script, or -m and a module: nothing else is started",
    "--run-path": "give the script itself",
}


def _refuse(value: str | bool | None) -> None:
    """Refuse an option of torchrun; the error says what to write instead."""
    if not value:
        return
    table = {**_INSTEAD, **_INSTEAD_OF_FLAGS}
    typed = [word.partition("=")[0].replace("_", "-") for word in sys.argv[1:]]
    name = next((word for word in typed if word in table), "")
    advice = table.get(name, "see shoal run --help")
    raise UsageError(f"run: {name or 'this option'} of torchrun is not an option here: {advice}")


Refused = Annotated[
    str | None,
    typer.Option(
        *(spelling for name in _INSTEAD for spelling in dict.fromkeys(_both(name))),
        hidden=True,
        callback=_refuse,
    ),
]
RefusedFlags = Annotated[
    bool,
    typer.Option(
        *(spelling for name in _INSTEAD_OF_FLAGS for spelling in dict.fromkeys(_both(name))),
        hidden=True,
        callback=_refuse,
    ),
]


def check_nodes(request: NodesRequest, problems: list[str]) -> NodesOrder | None:
    """Return the place of this host among several; None for a job on this host alone."""
    if request.nodes is None:
        if given := [name for name, value in _OPTIONS.items() if getattr(request, name)]:
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
    host, port = where
    return NodesOrder(
        nodes,
        node,
        host,
        port,
        settings.text("SHOAL_TOKEN"),
        settings.seconds("SHOAL_INITIALIZE_TIMEOUT_S"),
        settings.seconds("SHOAL_WARN_AFTER_S"),
        settings.seconds("SHOAL_LOST_AFTER_S"),
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
        problems.append(f"--nnodes {value}: the number of hosts is fixed; give --nnodes {most}")
    else:
        problems.append(f"{option} {value} must be a whole number, at least {least}")
    return None
