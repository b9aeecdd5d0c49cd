"""Choose the launchers of a job: this one alone, or those of all nodes."""

from __future__ import annotations

import os

from shoal.launch.crew import Alone, Crew, Judge
from shoal.launch.loop import Console
from shoal.launch.order import JobOrder


def crew_of(order: JobOrder, attempt: int, console: Console, judge: Judge) -> Crew:
    """Return the launchers of an attempt of a job."""
    nodes = order.nodes
    if nodes is None:
        env = os.environ | {"SHOAL_TOKEN": os.urandom(16).hex()}
        return Alone(order, attempt, console, env, judge)
    # A launcher alone starts without these: 15 ms.
    from shoal.launch.nodes.follower import Follower
    from shoal.launch.nodes.leader import Leader
    from shoal.launch.nodes.program import own_card

    card = own_card(order, nodes, attempt)
    if nodes.node:
        return Follower(nodes, card, console, judge)
    return Leader(order, nodes, card, console, judge)
