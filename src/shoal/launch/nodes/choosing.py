"""Which launchers run a job: this one alone, or those of all nodes."""

from __future__ import annotations

import os
import secrets

from shoal.launch.console import Console
from shoal.launch.crew import Alone, Crew
from shoal.launch.nodes.follower import Follower
from shoal.launch.nodes.leader import Leader
from shoal.launch.nodes.program import own_card
from shoal.launch.order import JobOrder


def crew_of(order: JobOrder, console: Console) -> Crew:
    """Return the launchers of a job."""
    nodes = order.nodes
    if nodes is None:
        env = os.environ | {"SHOAL_TOKEN": secrets.token_hex(16)}
        return Alone(console, env, order.log_dir, order.processes)
    card = own_card(order, nodes)
    return Follower(nodes, card, console) if nodes.node else Leader(order, nodes, card, console)
