"""Plain values travel exactly; others are refused with their place."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageTypeError
from shoal.testing.values import decoded, encoded

KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
HASHABLE = st.recursive(
    KEYS | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=6,
)


def shape(value):
    """Tell apart what Python calls equal: 1, True and 1.0."""
    if isinstance(value, dict):
        return [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    return type(value), repr(value) if isinstance(value, float) else value


@given(VALUES)
def test_values_come_back_as_they_went(value):
    back = decoded(json.loads(json.dumps(encoded(value))))
    assert back == value
    assert shape(back) == shape(value)


def test_numbers_that_json_has_not_and_paths_travel():
    back = decoded(json.loads(json.dumps(encoded([math.inf, math.nan, Path("a/b"), {3}]))))
    assert back[0] == math.inf
    assert math.isnan(back[1])
    assert back[2:] == [Path("a/b"), {3}]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.float32(3), "the value is a float32"),
        ([1, {"loss": np.ones(2)}], "the value[1]['loss'] is an ndarray"),
        (object(), "the value is an object"),
        ({object(): 1}, "a key of the value is an object"),
    ],
)
def test_unsupported_values_are_refused_with_advice(value, told):
    with pytest.raises(UsageTypeError) as caught:
        encoded(value)
    assert told in str(caught.value)
    assert ".tolist()" in str(caught.value)
