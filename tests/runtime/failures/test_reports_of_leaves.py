"""A report names the leaf that differs, whole, and shows what each group gave of it.

The lines are those that the calls compare; which of them differs is found here by brute force.
"""

from __future__ import annotations

import json
from itertools import zip_longest

import numpy as np
import pytest

from few import few
from runtime.failures.example_failures import failed, these
from shoal.arrays.bridge.leaf_layouts import Leaf
from shoal.arrays.host.digest import digest
from shoal.arrays.host.record_call import record_lines
from shoal.checkpoint.saving.request import state_lines
from shoal.checkpoint.saving.state import read_state
from shoal.checkpoint.tree.names import name_of
from shoal.collectives.leaves import leaf_of
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.failures.comparison import (
    ShownSide,
    compare_lines,
    divergence_error,
    headline,
    needs,
)
from shoal.runtime.failures.facts import Cause, to_json
from shoal.runtime.failures.page import LINES
from shoal.runtime.failures.rendering import facts_without_secrets, plain_text
from shoal.runtime.rules.call_record import RecordedCall
from shoal.runtime.rules.first_difference import ENDED

PATHS = [
    path.split()
    for path in """
    params k
    params dense kernel
    params Dense_0 bias
    params layer_0 attention key kernel
    params layer_0 attention query kernel
    params decoder layers_0 self_attention value kernel
    params decoder layers mlp wi_0 kernel
    params decoder layers self_attention out kernel
    params token_embedder embedding
    params shared_embedding embedding
    params encoder encoderblock_11 MultiHeadDotProductAttention_0 key kernel
    params Transformer encoderblock_3 MlpBlock_0 Dense_1 bias
    params img Transformer encoderblock LayerNorm_0 scale
    params txt embedding
    params BertEncoder_0 layer_23 attention self query kernel
    params BertEncoder_0 layer_23 intermediate dense kernel
    params ResNet stage3 block5 conv2 kernel
    batch_stats ResNet stage3 block5 bn2 mean
    transformer/~/linear_7 w
    resnet50/~/block_group_2/~/block_5/~/conv_1 w
    mlp/~/linear_0 b
    haiku_transformer/h11/attn/key w
    layers 0 weight
    layers 17 attention key_proj weight
    mlp layers 2 bias
    vision_model encoder layers 11 self_attn k_proj weight
    opt 0 mu params decoder layers_0 self_attention key kernel
    opt 0 nu params decoder layers_0 self_attention key kernel
    opt 1 inner_states trainable inner_state 0 mu params encoder layer_5 mlp wo kernel
    opt_state hyperparams learning_rate
    opt_state inner_state 0 count
    rngs dropout key
    rngs dropout count
    ema params decoder decoder_norm scale
    step
    metrics train loss total
    state params model blocks stack block_12 feed_forward router experts expert_3 gate_proj kernel
    state opt_state inner 1 nu model blocks stack block_12 feed_forward experts down_proj kernel
    params token kernel
    model secret_sharing password_head kernel
    """.strip().splitlines()
]
MESH = Mesh({"x": 2}, kind="cpu", processes=[0, 1])
ONE = np.arange(12, dtype=np.float32).reshape(4, 3)
KINDS = {  # what one process has, and the other; None: no such leaf
    "value": (ONE, ONE + 1),
    "shape": (ONE, ONE[:2]),
    "dtype": (ONE, ONE.astype(np.float16)),
    "layout": (ONE, ONE),
    "missing": (ONE, None),
}
SPLIT, WHOLE = Layout(MESH, "x", None), Layout(MESH, None, None)
ROWS = {kind: (SPLIT, WHOLE if kind == "layout" else SPLIT) for kind in KINDS}
SHOWN = {
    "value": ("process 0", "process 1"),
    "shape": ("float32[4,3]", "float32[2,3]"),
    "dtype": ("float32[4,3]", "float16[4,3]"),
    "layout": ("(x, -)", "(-, -)"),
    "missing": ("float32[4,3]",),
}


def keyed(path):
    return "".join(f"[{part!r}]" for part in path)


def tree_of(path, leaf):
    """Return a tree with a leaf at a path, or none, and others beside it."""
    inner = ({} if leaf is None else {path[0]: leaf}) if len(path) == 1 else None
    return {"a": 1, **({path[0]: tree_of(path[1:], leaf)} if inner is None else inner), "zz": 1}


def lines_of_values(path, leaf, rows):
    return [] if leaf is None else [leaf_of(keyed(path), leaf).line]


def lines_of_save(path, leaf, rows):
    return [*state_lines(read_state(tree_of(path, leaf), 2), (), 2)]


def lines_of_put(path, leaf, rows):
    if leaf is None:
        return [*record_lines([Leaf("", ONE, rows)])][:1]
    entry = RecordedCall("put", "", record_lines([Leaf(keyed(path), leaf, rows)]), digest(leaf))
    return [*entry.lines]


CALLS = {
    "assert_same": lines_of_values,
    "broadcast": lines_of_values,
    "save": lines_of_save,
    "put": lines_of_put,
    "create": lines_of_put,
}
COMPARED = {  # `assert_same` compares values once these lines are equal: see test_run_reports
    "assert_same": {"shape", "dtype", "missing"},
    "broadcast": {"shape", "dtype", "missing"},
    "save": {"value", "shape", "dtype", "missing"},
    "put": {*KINDS},
    "create": {*KINDS},
}
CASES = [(call, kind) for call, kinds in COMPARED.items() for kind in sorted(kinds)]


def failure_of(call, one, other):
    """Return the failure of two processes whose calls have these lines."""
    pairs = zip_longest(one, other, fillvalue=ENDED)
    kind, said = compare_lines(next(pair for pair in pairs if pair[0] != pair[1]), ENDED)
    rows = [
        ShownSide([process], text, call=call, site="train.py:3 (main)")
        for process, text in enumerate(said)
    ]
    error = divergence_error(headline(kind, call), rows, kind=kind, advice=needs(call, kind.what))
    cause = Cause(processes=these(0, 1), kind="diverged", difference=error.difference)
    return failed("diverged", 70, 1.0, cause, n=2, advice=(needs(call, kind.what),))


def plain(lines):
    """Return what lines say without their breaks."""
    return "".join(line.strip() for line in lines)


IN_SUITE = [case for number, case in enumerate(CASES) if number % 3 == 0]


@pytest.mark.parametrize(("call", "kind"), few(CASES, IN_SUITE))
def test_the_path_is_whole_and_both_sides_are_shown(call, kind):
    given = [*zip(KINDS[kind], ROWS[kind], strict=True)]
    for path in PATHS:
        failure = failure_of(call, *(CALLS[call](path, leaf, rows) for leaf, rows in given))
        shown = plain_text(failure).splitlines()
        assert len(shown) <= LINES
        assert max(map(len, shown)) <= 80
        name = name_of(path) if call == "save" else keyed(path)
        assert [text for text in (name, *SHOWN[kind]) if text not in plain(shown)] == [], shown
        facts = to_json(failure)["causes"][0]["difference"]
        sides = facts["sides"]
        if kind == "missing":
            assert name in {side.get("path") for side in sides}, facts
            continue
        assert facts["path"] == name
        leaves = [leaf for leaf, _ in given]
        assert [side["dtype"] for side in sides] == [leaf.dtype.name for leaf in leaves]
        assert [tuple(side["shape"]) for side in sides] == [leaf.shape for leaf in leaves]
        assert sides[0][kind] != sides[1][kind], facts


SECRETS = [
    ["api_key"], ["auth", "password"], ["hub", "token"], ["HF_TOKEN"], ["db", "passwd"],
    ["client_secret"], ["aws", "AWS_SECRET_ACCESS_KEY"], ["wandb", "api-key"],
    ["ssh", "private_key"], ["access_token"],
]  # fmt: skip


@pytest.mark.parametrize("path", SECRETS, ids="/".join)
def test_texts_under_such_names_are_hidden_and_numbers_are_not(path):
    def lines(value):
        return [*state_lines(read_state(tree_of(path, value), 2), (), 2)]

    for one, other, is_hidden in (("hunter2", "s3cret9", True), (41017, 58913, False)):
        failure = failure_of("save", lines(one), lines(other))
        text = plain_text(failure) + json.dumps(to_json(facts_without_secrets(failure)))
        assert [str(value) in text for value in (one, other)] == [not is_hidden] * 2, text
        assert "/".join(path) in text
