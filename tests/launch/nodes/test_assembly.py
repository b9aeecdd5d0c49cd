"""What the launchers of all nodes must agree on before a job starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.nodes.joining import Assembly, NodeCard, missing_words


def card(node: int, nodes: int = 3, processes: int = 2, **changed: object) -> NodeCard:
    own = NodeCard(
        node, nodes, processes, f"host{node}", "train.py", "0a", None, "Python 3.11, jax 0.10", -1
    )
    return own._replace(**changed)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_indices_go_by_node_whatever_the_order_of_joining(counts, random):
    nodes = len(counts)
    rules = Assembly(card(0, nodes, counts[0]))
    others = list(range(1, nodes))
    random.shuffle(others)
    for at, node in enumerate(others):
        assert not rules.is_complete
        assert rules.missing == sorted(others[at:])
        assert rules.join(card(node, nodes, counts[node])) == ""
    assert rules.is_complete
    assert rules.total == sum(counts)
    indices = [index for node in range(nodes) for index in rules.processes_of(node)]
    assert indices == list(range(sum(counts)))
    assert [len(rules.processes_of(node)) for node in range(nodes)] == counts


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"nodes": 4},
            "node 1 (host1) was started with --nnodes 4, node 0 (host0) with --nnodes 3",
        ),
        ({"node": 0}, "--node-rank 0 was given on two launchers, on host0 and host1"),
        ({"node": 3}, "node 3 (host1): the nodes of --nnodes 3 are 0 to 2"),
        ({"node": -1}, "node -1 (host1): the nodes of --nnodes 3 are 0 to 2"),
        ({"fingerprint": "0b"}, "`train.py` has another content on host1 (node 1) than on host0"),
        (
            {"fingerprint": "0b", "program": "train.py 2"},
            "node 1 (host1) runs `train.py 2`, but node 0 (host0) `train.py`",
        ),
        (
            {"devices": 2},
            "node 1 (host1) was started with --devices 2, node 0 (host0) with no --devices",
        ),
        (
            {"restarts": "--max-restarts 2"},
            "node 1 (host1) was started with --max-restarts 2, node 0 (host0) with no --max-res",
        ),
        (
            {"versions": "Python 3.11, jax 0.11"},
            "node 1 (host1) has Python 3.11, jax 0.11, but node 0 (host0) Python 3.11, jax 0.10",
        ),
    ],
)
def test_nodes_that_differ_are_refused_with_both_values(changed, words):
    rules = Assembly(card(0))
    assert words in rules.join(card(1, host="host1")._replace(**changed))
    assert rules.missing == [1, 2]


def test_a_node_that_left_may_come_again():
    rules = Assembly(card(0))
    assert rules.join(card(1)) == ""
    assert "--node-rank 1 was given on two launchers" in rules.join(card(1, host="other"))
    rules.leave(1)
    assert rules.join(card(1, host="other")) == ""
    assert rules.card(1).host == "other"


def test_ranks_to_show_are_those_of_the_whole_job():
    rules = Assembly(card(0, highest_shown=5))
    assert rules.join(card(1)) == ""
    words = Assembly(card(0, 2, highest_shown=4)).join(card(1, 2))
    assert words == "--only or --stdin 4 on node 0 (host0): the ranks of all 4 processes are 0 to 3"
    assert rules.join(card(2)) == ""


def test_missing_nodes_are_reported_with_the_command_to_run():
    assert missing_words([2], 3, "a:1", 10.2) == (
        "node 2 of 3 has not joined after 10 s: each host must run `shoal run --nnodes 3 "
        "--node-rank 2 --coordinator a:1 …` with its own rank"
    )
    assert missing_words([1, 2], 3, "a:1", 10.2).startswith("nodes 1, 2 of 3 have not joined")
