"""How the launchers of all nodes come together: their cards, what must be equal, node 0's ports.

Node 0 collects one `NodeCard` from each node. A problem on any of them ends the start on all.
"""

from __future__ import annotations

import errno
import os
import platform
import shlex
import socket
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from shoal.errors import InitializeError
from shoal.hashing import seal
from shoal.launch.order import NUM_PORTS, JobOrder, NodesOrder
from shoal.runtime.doctor.reachability import bind_error, resolve
from shoal.runtime.failures.joining_text import REMEDY
from shoal.runtime.wire.frames import address_text
from shoal.runtime.wire.sockets import bind_host

_LETTERS = 300  # shown of a command
_MOST_REFUSED = 8
_RESOLVER_S = 1.0


class NodeCard(NamedTuple):
    """The self-description of one node's launcher, sent once."""

    node: int
    nodes: int
    processes: int  # on its host
    host: str
    program: str  # as text, shortened
    fingerprint: str  # of the whole command and the script's content
    devices: int | None
    versions: str  # of Python, shoal and JAX
    highest_shown: int  # rank of --only and --stdin; -1: none
    token: str = "none"  # its source
    restarts: str = ""  # --max-restarts and --restart-preempted, as given
    attempt: int = 0  # known to it; the highest counts

    @property
    def name(self) -> str:
        """The node and its host."""
        return f"node {self.node} ({self.host})"

    @property
    def options(self) -> tuple[str, str]:
        """The options that must be equal on all nodes, as given."""
        devices = f"--devices {self.devices}" if self.devices else "no --devices"
        return devices, self.restarts or "no --max-restarts"


def own_card(order: JobOrder, nodes: NodesOrder, attempt: int) -> NodeCard:
    """Return this launcher's card for the others."""
    return NodeCard(
        nodes.node,
        nodes.nodes,
        order.processes,
        host=socket.gethostname(),
        program=program_words(order.command),
        fingerprint=fingerprint(order.command),
        devices=order.devices,
        versions=versions(),
        highest_shown=max([*(order.shown or ()), -1 if order.stdin is None else order.stdin]),
        token=nodes.token.source,
        restarts=order.restarts.options if order.restarts else "",
        attempt=attempt,
    )


def program_words(command: Sequence[str]) -> str:
    """Return the command as text; a script without its directory, which may differ."""
    text = shlex.join([*_named(command)])
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…"


def fingerprint(command: Sequence[str]) -> str:
    """Return a hash of the command and, of a script, of its content."""
    facts = "\0".join(_named(command)).encode(errors="surrogateescape")
    if command[0] != "-m" and os.path.isfile(command[0]):
        with open(command[0], "rb") as file:
            facts += b"\0" + file.read()
    return seal(facts).hex()


def versions() -> str:
    """Return the versions of Python, shoal and JAX, as text."""
    rows = ["Python " + ".".join(platform.python_version_tuple()[:2])]
    for name in ("shoal", "jax"):
        try:
            rows.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            rows.append(f"no {name}")
    return ", ".join(rows)


def _named(command: Sequence[str]) -> list[str]:
    if command[0] == "-m":
        return list(command)
    return [os.path.basename(os.path.abspath(command[0])), *command[1:]]


class Assembly:
    """The launchers that have joined that of node 0, `own`."""

    def __init__(self, own: NodeCard) -> None:
        self._own = own
        self._here = {own.node: own}

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have joined."""
        return len(self._here) == self._own.nodes

    @property
    def missing(self) -> list[int]:
        """The nodes that have not joined."""
        return [node for node in range(self._own.nodes) if node not in self._here]

    @property
    def total(self) -> int:
        """The number of processes of the job, once complete."""
        return sum(card.processes for card in self._here.values())

    def card(self, node: int) -> NodeCard:
        """Return the card of a node that has joined."""
        return self._here[node]

    def processes_of(self, node: int) -> range:
        """Return the indices of a node's processes, once complete: node 0's come first."""
        first = sum(self._here[lower].processes for lower in range(node))
        return range(first, first + self._here[node].processes)

    def node_of_each(self) -> list[int]:
        """Return the node of each process, once complete."""
        counts = [(node, self._here[node].processes) for node in sorted(self._here)]
        return [node for node, count in counts for _ in range(count)]

    def join(self, card: NodeCard) -> str:
        """Take a node; return why no job can start with it, or an empty string."""
        own = self._own
        if card.nodes != own.nodes:
            text = f"{card.name} was started with --nnodes {card.nodes}"
            return f"{text}, {own.name} with --nnodes {own.nodes}"
        if not 0 <= card.node < own.nodes:
            return f"{card.name}: the nodes of --nnodes {own.nodes} are 0 to {own.nodes - 1}"
        if card.node in self._here:
            hosts = f"{self._here[card.node].host} and {card.host}"
            return f"--node-rank {card.node} was given on two launchers, on {hosts}"
        difference = _difference(own, card)
        if difference:
            return difference
        self._here[card.node] = card
        return self._unknown_ranks() if self.is_complete else ""

    def leave(self, node: int) -> None:
        """Forget a node that left before the job began: it may join again."""
        del self._here[node]

    def _unknown_ranks(self) -> str:
        for card in self._here.values():
            if card.highest_shown >= self.total:
                ranks = f"the ranks of all {self.total} processes are 0 to {self.total - 1}"
                return f"--only or --stdin {card.highest_shown} on {card.name}: {ranks}"
        return ""


class Refused:
    """The launchers that were refused, in words, for node 0 to print once each."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def note(self, refusal: str) -> list[str]:
        """Take a refusal; return the line about it, if it is new and not one of too many."""
        if refusal in self.all or len(self.all) >= _MOST_REFUSED:
            return []
        self.all.append(refusal)
        return [f"refused: {refusal}"]


def missing_words(missing: Sequence[int], nodes: int, address: str, waited_s: float) -> str:
    """Return the line that names the missing nodes and the command to start there."""
    names = ", ".join(map(str, missing))
    noun = "node" if len(missing) == 1 else "nodes"
    command = f"shoal run --nnodes {nodes} --node-rank {missing[0]} --coordinator {address} …"
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{noun} {names} of {nodes} {verb} not joined after {waited_s:.0f} s: "
        f"each host must run `{command}` with its own rank"
    )


def stranger_words(own: NodeCard, card: NodeCard) -> str:
    """Return why a launcher with another token, or none, is refused."""
    own_name = f"node 0 ({own.host})"
    sources = f"that of {card.name} is from {card.token}"
    sources += f", that of {own_name} from {own.token}" if own.token else ""
    return f"{card.name} has another token than {own_name}: {sources}\n{REMEDY}"


def _difference(own: NodeCard, card: NodeCard) -> str:
    """Return the first difference between what two nodes run, or an empty string."""
    if own.fingerprint != card.fingerprint:
        if own.program == card.program:
            return (
                f"`{own.program}` has another content on {card.host} (node {card.node}) than on "
                f"{own.host} (node {own.node}): all nodes must run the same program"
            )
        return (
            f"{card.name} runs `{card.program}`, but {own.name} `{own.program}`: start "
            "the same program with equal arguments on all nodes; a variable of the environment can "
            "differ too"
        )
    for mine, theirs in zip(own.options, card.options, strict=True):
        if mine != theirs:
            return f"{card.name} was started with {theirs}, {own.name} with {mine}"
    if own.versions != card.versions:
        return f"{card.name} has {card.versions}, but {own.name} {own.versions}"
    return ""


def open_ports(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first port; the others are free, too.

    Args:
      host: by which other hosts reach this one.

    Raises:
      InitializeError: one of them cannot be bound.
    """
    bind = bind_host(host)
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        server = socket.create_server((bind, port), family=family, backlog=4096)
    except OSError as error:
        raise InitializeError(_refusal(host, port, port, error.errno or 0)) from None
    for other in range(port + 1, port + NUM_PORTS):
        error_number = bind_error(bind, other)
        if error_number:
            server.close()
            raise InitializeError(_refusal(host, port, other, error_number))
    return server


def strange_address(host: str) -> str:
    """Return a note if the name by which others reach this host seems to be another host's."""
    resolved = resolve(host, _RESOLVER_S)
    if not resolved.addresses:
        return f"the name {host!r} does not resolve on this host: {resolved.error}"
    if bind_error(resolved.addresses[0], 0) != errno.EADDRNOTAVAIL:
        return ""
    named = host if host == resolved.addresses[0] else f"{host} ({resolved.addresses[0]})"
    return f"{named} is not an address of this host: is --node-rank 0 meant for another one?"


def _refusal(host: str, port: int, taken: int, error_number: int) -> str:
    where = address_text(bind_host(host), taken)
    message = f"--coordinator {address_text(host, port)}: cannot listen at {where}: "
    message += os.strerror(error_number)
    if error_number == errno.EADDRINUSE:
        message += (
            f"\nnode 0 uses the ports {port} to {port + NUM_PORTS - 1}: pass another port on all "
            "nodes, or end what listens there (another launcher with --node-rank 0?)"
        )
    return message
