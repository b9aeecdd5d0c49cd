"""The variables of DTensor's jobs, as `initialize` reads them."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.runtime.startup.launchers import decide, numbers_of, shown_job
from shoal.runtime.startup.options import Arguments

TWO = {"DTENSOR_JOBS": "a:1,b:2"}


@pytest.mark.parametrize(
    ("env", "process", "count", "address"),
    [
        ({**TWO, "DTENSOR_CLIENT_ID": "1"}, 1, 2, "a:1"),
        (TWO, 0, 2, "a:1"),
        ({"DTENSOR_JOBS": " a:1 , b:2", "DTENSOR_NUM_CLIENTS": "2"}, 0, 2, "a:1"),
        ({"DTENSOR_JOBS": "a:1"}, 0, 1, None),
        ({"DTENSOR_JOBS": ""}, 0, 1, None),  # of a job of several there
        ({"DTENSOR_JOBS": " ", "DTENSOR_CLIENT_ID": "0", "DTENSOR_NUM_CLIENTS": "1"}, 0, 1, None),
        ({**TWO, "RANK": "3", "WORLD_SIZE": "4", "SHOAL_COORDINATOR": "c:3"}, 0, 2, "c:3"),
        ({**TWO, "JAX_PROCESS_ID": "4", "JAX_NUM_PROCESSES": "5"}, 4, 5, None),
    ],
)
def test_dtensor_variables_give_process_count_and_address(env, process, count, address):
    assert numbers_of(env) == (process, count)
    if "JAX_PROCESS_ID" not in env:
        assert decide(Arguments(), env)[:3] == (process, count, address)
        assert (shown_job(env) is None) == (count == 1)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"DTENSOR_NUM_CLIENTS": "2"}, "DTENSOR_NUM_CLIENTS=2 without DTENSOR_JOBS"),
        ({"DTENSOR_CLIENT_ID": "1"}, "DTENSOR_CLIENT_ID=1 without DTENSOR_JOBS: in multi-client"),
        (
            {"DTENSOR_CLIENT_ID": "1", "DTENSOR_NUM_CLIENTS": "2", "DTENSOR_JOBS": " "},
            "DTENSOR_CLIENT_ID=1 and DTENSOR_NUM_CLIENTS=2 without DTENSOR_JOBS",
        ),
        ({**TWO, "DTENSOR_CLIENT_ID": "2"}, "DTENSOR_CLIENT_ID=2 is out of range for entries"),
        ({**TWO, "DTENSOR_CLIENT_ID": "-1"}, "DTENSOR_CLIENT_ID='-1' must be a whole number"),
        ({**TWO, "DTENSOR_NUM_CLIENTS": "3"}, "DTENSOR_NUM_CLIENTS=3 contradicts the 2 entries"),
        ({"DTENSOR_JOBS": "a:1,,b:2"}, "has an empty entry"),
    ],
)
def test_what_is_refused(env, words):
    for read in (numbers_of, shown_job):
        with pytest.raises(UsageError, match=words):
            read(env)


def test_entries_that_are_no_addresses_are_refused():
    with pytest.raises(
        UsageError, match=r"DTensor gives no address of process 0.* or SHOAL_COORDINATOR"
    ):
        decide(Arguments(), {"DTENSOR_JOBS": "/bns/l/0:80,/bns/l/1:80"})


def test_a_family_that_wins_hides_what_is_wrong_in_it():
    env = {"DTENSOR_CLIENT_ID": "1", "JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "1"}
    assert numbers_of(env) == (0, 1)
