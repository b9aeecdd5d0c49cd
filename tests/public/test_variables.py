"""Variables that begin with SHOAL_ and do not exist are named, with the nearest that does."""

from __future__ import annotations

import pytest

from shoal import settings
from shoal.errors import UsageError
from shoal.settings import SETTINGS, check_all, unknown_variables

TEXTS = {
    "host:port", "folder", "0, 1 or folder", "text", "file", "PID:FILE", "names",
}  # fmt: skip # units of what is no number


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("COORDINATOR_ADDRESS", "COORDINATOR"),
        ("COORDINATOR_ADDR", "COORDINATOR"),
        ("NPROCS", "NUM_PROCESSES"),
        ("NUM_PROCS", "NUM_PROCESSES"),
        ("PROCESS_COUNT", "NUM_PROCESSES"),
        ("WORLD_SIZE", "NUM_PROCESSES"),
        ("RANK", "PROCESS_ID"),
        ("PROCESS_INDEX", "PROCESS_ID"),
        ("MASTER_ADDR", "COORDINATOR"),
        ("TIMEOUT", "TIMEOUT_S"),
        ("INIT_TIMEOUT_S", "INITIALIZE_TIMEOUT_S"),
        ("NUM_DEVICES", "VIRTUAL_DEVICES"),
        ("process_id", "PROCESS_ID"),
    ],
)
def test_the_nearest_is_named(typed, meant):
    name = f"SHOAL_{typed}"
    found = unknown_variables({name: "a secret", "SHOAL_TOKEN": "x", "PATH": "/bin"})
    assert found[name] == f"shoal has no variable {name}; did you mean 'SHOAL_{meant}'?"


@pytest.mark.parametrize(
    ("old", "new", "default"),
    [
        ("ABORT_AFTER_S", "HANG_TIMEOUT_S", 30),
        ("LEASE_S", "SAVE_LEASE_S", 60),
        ("LEAVE_S", "PREEMPTION_GRACE_S", 300),
        ("HOST_MEMORY", "SHARED_MEMORY", 1),
    ],
)
def test_a_variable_of_0_1_is_read_under_its_old_name_with_a_warning(
    monkeypatch, old, new, default
):
    old, new = f"SHOAL_{old}", f"SHOAL_{new}"
    assert float(settings.text(new)) == default
    monkeypatch.setenv(old, "7")
    for ask in (settings.text, settings.seconds, settings.is_set):
        with pytest.warns(FutureWarning, match=f"^{old} is deprecated: it is now {new}$"):
            assert ask(new) in ("7", 7, True)
    assert unknown_variables({old: "7"}) == {}
    monkeypatch.setenv(new, "8")
    assert settings.text(new) == "8"


def test_without_a_near_one_none_is_named():
    found = unknown_variables({"SHOAL_VERBOSE": "1"})
    assert found == {"SHOAL_VERBOSE": "shoal has no variable SHOAL_VERBOSE"}


def test_known_empty_and_foreign_variables_are_not_reported():
    env = dict.fromkeys(SETTINGS, "1") | {
        "SHOAL_REPORTED": "",
        "SHOAL_NPROCS": " ",
        "SHOALS": "1",
        "RANK": "1",
    }
    assert unknown_variables(env) == {}


def test_variables_that_kubernetes_sets_for_a_service_are_not_reported():
    """For a service `shoal-run` it sets these in every pod of the namespace."""
    links = {
        "SHOAL_RUN_SERVICE_HOST": "10.0.0.1",
        "SHOAL_RUN_SERVICE_PORT": "8476",
        "SHOAL_RUN_SERVICE_PORT_MEET": "8476",
        "SHOAL_RUN_PORT": "tcp://10.0.0.1:8476",
        "SHOAL_RUN_PORT_8476_TCP": "tcp://10.0.0.1:8476",
        "SHOAL_RUN_PORT_8476_TCP_ADDR": "10.0.0.1",
    }
    own = {"SHOAL_SERVICE_HOST": "10.0.0.2", "SHOAL_PORT": "tcp://10.0.0.2:1"}
    assert unknown_variables({**links, **own}) == {}
    assert len(unknown_variables({**links, "SHOAL_PORTS": "1"})) == 1
    del links["SHOAL_RUN_SERVICE_HOST"]
    assert len(unknown_variables(links)) == len(links)


def test_variables_already_reported_by_a_launcher_are_not_reported():
    env = {"SHOAL_A": "1", "SHOAL_B": "1", "SHOAL_REPORTED": "SHOAL_A,"}
    assert list(unknown_variables(env)) == ["SHOAL_B"]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_a_number_that_is_none_is_refused_before_anything_reads_it(monkeypatch, setting):
    monkeypatch.setenv(setting.name, "abc")
    if setting.unit in TEXTS:
        check_all()
    else:
        with pytest.raises(UsageError, match=f"{setting.name}='abc' .* must be"):
            check_all()
