"""JAX's count of the processes against the job's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InitializeError
from shoal.runtime.jax_service.process_numbers import checked


@given(st.permutations(range(6)), st.integers(0, 5), st.integers(1, 6))
def test_process_numbers_may_be_in_any_order(order, own, asked):
    numbers = dict(enumerate(order[:asked]))
    assert checked(numbers, own, order[own]) == numbers


@given(st.permutations(range(4)), st.integers(0, 3), st.integers(0, 3))
def test_two_of_one_number_are_refused(order, own, other):
    numbers = dict(enumerate(order))
    if other != own:
        with pytest.raises(InitializeError, match=f"JAX's index {own}"):
            checked(numbers, own, order[other])
        numbers[other] = numbers[own]
        with pytest.raises(InitializeError, match=r"count processes differently"):
            checked(numbers, own, order[own])
