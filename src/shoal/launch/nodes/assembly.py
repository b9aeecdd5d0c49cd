"""The rules by which the launchers of all nodes join, as a pure state machine.

Node 0 collects one `NodeCard` from each node. A problem on any of them ends the start on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MOST_REFUSED = 8


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
    highest_shown: int  # of --only; -1: all are shown
    has_token: bool = False
    restarts: str = ""  # --max-restarts and --restart-preempted, as given
    attempt: int = 0  # known to it; the highest counts

    @property
    def name(self) -> str:
        """The node and its host."""
        return f"node {self.node} ({self.host})"


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
            words = f"{card.name} was started with --nnodes {card.nodes}"
            return f"{words}, {own.name} with --nnodes {own.nodes}"
        if not 0 <= card.node < own.nodes:
            return f"{card.name}: the nodes of --nnodes {own.nodes} are 0 to {own.nodes - 1}"
        if card.node in self._here:
            hosts = f"{self._here[card.node].host} and {card.host}"
            return f"--node-rank {card.node} was given on two launchers, on {hosts}"
        if difference := _difference(own, card):
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
                return f"--only {card.highest_shown} on {card.name}: {ranks}"
        return ""


class Refused:
    """The launchers that were refused, in words, for node 0 to print once each."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def note(self, words: str) -> list[str]:
        """Take a refusal; return the line about it, if it is new and not one of too many."""
        if words in self.all or len(self.all) >= _MOST_REFUSED:
            return []
        self.all.append(words)
        return [f"refused: {words}"]


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
    own_name, advice = f"node 0 ({own.host})", "set it to one secret on all nodes"
    if own.has_token and card.has_token:
        return f"SHOAL_TOKEN of {card.name} is not that of {own_name}: {advice}"
    has, its = ("a" if one.has_token else "no" for one in (own, card))
    return f"{card.name} has {its} SHOAL_TOKEN, and {own_name} {has} one: {advice}"


def _difference(own: NodeCard, card: NodeCard) -> str:
    if own.fingerprint != card.fingerprint:
        if own.program == card.program:
            return (
                f"`{own.program}` has another content on {card.host} (node {card.node}) than on "
                f"{own.host} (node {own.node}): all nodes must run the same program"
            )
        return (
            f"{card.name} runs `{card.program}`, but {own.name} `{own.program}`: give all nodes "
            "the same program and arguments; what differs can be a variable of the environment"
        )
    if own.devices != card.devices:
        shown = [f"--devices {c.devices}" if c.devices else "no --devices" for c in (card, own)]
        return f"{card.name} was started with {shown[0]}, {own.name} with {shown[1]}"
    if own.restarts != card.restarts:
        shown = [c.restarts or "no --max-restarts" for c in (card, own)]
        return f"{card.name} was started with {shown[0]}, {own.name} with {shown[1]}"
    if own.versions != card.versions:
        return f"{card.name} has {card.versions}, but {own.name} {own.versions}"
    return ""
