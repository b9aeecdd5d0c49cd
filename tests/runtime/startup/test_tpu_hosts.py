"""TPU hosts, as JAX's own detection finds them: on GKE by variables, else by the metadata server.

The variables are as GKE documents them, the answers those of a metadata server as JAX reads them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shoal.errors import InitializeError
from shoal.runtime.jax_service import jax_runtime
from shoal.runtime.startup import launcher_table
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.options import Arguments
from shoal.runtime.system.child_process import own_environment

# As if chips were attached, and without the metadata server, which JAX asks for slices.
FORCED = {"JAX_FORCE_TPU_INIT": "1", "MEGASCALE_NUM_SLICES": "", "MEGASCALE_SLICE_ID": "",
          "MEGASCALE_COORDINATOR_ADDRESS": ""}  # fmt: skip
GKE = {
    **FORCED, "TPU_WORKER_ID": "2",
    "TPU_WORKER_HOSTNAMES": "localhost,job-0-1.job,job-0-2.job,job-0-3.job",
}  # fmt: skip
SLICES = {**GKE, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
          "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080"}  # fmt: skip
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
MPI = {"PMI_RANK": "0", "PMI_SIZE": "3", "SHOAL_COORDINATOR": "h:1"}

ASK = """
import json, os
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.options import Arguments
print(json.dumps(decide(Arguments(), os.environ)))
"""


def asked(env):
    """Return what is decided in a process of its own, for JAX looks for TPUs at its import."""
    clean = own_environment()
    for name in ("JAX_PLATFORMS", "SHOAL_COORDINATOR"):
        clean.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("env", "pair", "address", "rule"),
    [
        (GKE, [2, 4], "localhost:8482", "TPU (TPU host=2, TPU hosts=4); address from TPU"),
        ({**SLICES, **POD}, [6, 8], "localhost:8482", "TPU (TPU host=6, TPU hosts=8)"),
        ({**GKE, **MPI}, [0, 3], "h:1", "MPICH"),
        ({**GKE, "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, [0, 1], None, "TPU ("),
    ],
)
def test_the_variables_of_gke(env, pair, address, rule):
    process, count, address_found, *_ = told = asked(env)
    assert ([process, count], address_found) == (pair, address)
    assert any(isinstance(field, str) and field.startswith(rule) for field in told)


class Metadata:
    """JAX's description of a TPU VM, of which a metadata server tells."""

    def __init__(self, answers):
        self.answers = answers

    def is_env_present(self):
        return "agent-worker-number" in self.answers

    def get_process_id(self):
        return int(self.answers["agent-worker-number"])

    def get_process_count(self):
        return len(self.answers["worker-network-endpoints"].split(","))

    def get_coordinator_address(self, timeout_secs, override_coordinator_port):
        return self.answers["worker-network-endpoints"].split(",")[0].split(":")[2] + ":8482"


@pytest.fixture
def chips(monkeypatch):
    monkeypatch.setattr(launcher_table, "devices_seen", lambda platform, env: (4, False))
    yield
    launcher_table._tpu_numbers.cache_clear()


def tells(monkeypatch, *kinds):
    monkeypatch.setattr(jax_runtime, "tpu_hosts", lambda: kinds)
    launcher_table._tpu_numbers.cache_clear()


def test_the_metadata_server(monkeypatch, chips):
    endpoints = "unknown:unknown:10.130.0.8,unknown:unknown:10.130.0.9"
    told = {"agent-worker-number": "1", "worker-network-endpoints": endpoints}
    tells(monkeypatch, Metadata({}), Metadata(told))
    place = decide(Arguments(), {})
    assert place[:3] == (1, 2, "10.130.0.8:8482")
    assert decide(Arguments(), {**MPI})[:3] == (0, 3, "h:1")
    assert decide(Arguments(), {"JAX_PLATFORMS": "cpu"})[:2] == (0, 1)
    assert decide(Arguments(), {"JAX_PLATFORMS": "tpu,cpu"})[:2] == (1, 2)
    tells(monkeypatch, Metadata({}), Metadata({}))
    assert decide(Arguments(), {})[:2] == (0, 1)


def test_a_detection_that_fails_is_no_job_of_one(monkeypatch, chips):
    tells(monkeypatch, Metadata({"agent-worker-number": "?"}))
    with pytest.raises(InitializeError, match=r"JAX's detection of its slice failed: ValueError"):
        decide(Arguments(), {})


def test_nothing_is_asked_where_nothing_shows_a_tpu(monkeypatch):
    monkeypatch.setattr(jax_runtime, "tpu_hosts", lambda: pytest.fail("asked"))
    launcher_table._tpu_numbers.cache_clear()
    assert decide(Arguments(), {})[:2] == (0, 1)


def test_the_mirror_of_jax_still_fits():
    for kind in jax_runtime.tpu_hosts():
        for name in ("is_env_present", "get_process_id", "get_process_count"):
            assert callable(getattr(kind, name))
