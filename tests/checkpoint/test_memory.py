"""Garbage is looked for again, whatever happens."""

from __future__ import annotations

import gc

import pytest

from shoal.checkpoint.memory import extra_bytes, uncollected


def _fail_inside(inside):
    with uncollected():
        inside.append(gc.isenabled())
        raise ZeroDivisionError


@pytest.mark.parametrize("before", [True, False])
def test_what_was_on_is_on_again(before):
    was_enabled = gc.isenabled()
    try:
        gc.enable() if before else gc.disable()
        inside = []
        with pytest.raises(ZeroDivisionError):
            _fail_inside(inside)
        assert inside == [False]
        assert gc.isenabled() == before
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_the_bound_is_the_callers_or_some_of_what_is_free():
    assert extra_bytes(12345) == 12345
    assert 1 << 20 < extra_bytes(None) <= 2 << 30
