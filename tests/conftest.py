"""Hostile defaults for the whole suite, set before anything imports JAX.

Eight virtual CPU devices, strict dtype promotion, rank promotion forbidden: what passes here does
not lean on a convenience that a user may have switched off. They are environment variables, so
that tests/plan need not import JAX to have them.

What the machine around the suite says (a scheduler's job, another JAX configuration) is removed
first: the suite must pass inside a Slurm job too, and a container's PYTHONDONTWRITEBYTECODE would
have each of a thousand children compile shoal anew. A child process should get `child_env`, which
carries none of this file's settings but how XLA compiles and how soon a process ends: a real
program does not run under them.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

import progress

# Whatever could tell this process, or a child, that it is part of a job, or how JAX is set up.
FOREIGN = (
    "COORDINATOR_", "CUDA_VISIBLE_DEVICES", "DTENSOR_", "JAX_", "JOB_COMPLETION_INDEX",
    "KUBERNETES_", "LOCAL_", "MASTER_", "MEGASCALE_", "NODE_RANK", "OMPI_", "PMI_", "PJRT_",
    "PMIX_", "PRTE_", "PYTHONDONTWRITE", "PYTHONPATH", "RANK", "SHOAL_", "SLURM_",
    "TORCHELASTIC_", "TPU_", "WORLD_SIZE", "XLA_",
)  # fmt: skip

for _name in [name for name in os.environ if name.startswith(FOREIGN)]:
    del os.environ[_name]

# A shell starts what runs in the background with SIGINT ignored, and all children would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The user's own token, of jobs that span hosts, must neither be made nor used.
os.environ["XDG_CONFIG_HOME"] = f"{tempfile.gettempdir()}/shoal-tests-{os.geteuid()}"
os.makedirs(os.environ["XDG_CONFIG_HOME"], mode=0o700, exist_ok=True)
os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"]  # of compiled programs

# NumPy's BLAS would start a thread for each core in each of a thousand children, to wait busily.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Processes that import JAX and do little else end sooner: see the file there.
QUICK_EXITS = str(Path(__file__).parent / "quick_exits")

OUTSIDE = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": QUICK_EXITS}
OUTSIDE.pop("PYTEST_ADDOPTS", None)  # is for this run, and its workers

os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_NUM_CPU_DEVICES="8",
    # XLA's CPU client has as many threads as cores or devices. Once 32 steps are in flight on a
    # device, starting the next blocks one of them, and with none to spare the collective that all
    # wait for never runs.
    PJRT_NPROC="16",
    JAX_NUMPY_DTYPE_PROMOTION="strict",
    JAX_NUMPY_RANK_PROMOTION="raise",
    # A worker stays in its job of one process while it runs tests that have none, for minutes: the
    # warning that nothing moves there is not one of the test that runs then.
    SHOAL_STALL_WARN_S="inf",
)

# Most of the time of a test of arrays went into good code for what runs once.
QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"  # parts, each with a compiler of its own
)

# The suite finds the same examples in every run; `make test` tries the first quarter of them, every
# other run all. Look for new ones with `pytest --hypothesis-profile=explore`; what it finds becomes
# an @example.
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run do without XLA's optimizations, which users have: not on the newest JAX.

    And let it try JAX's own tests, which are not part of shoal.
    """
    words = "on JAX 0.10, compile without XLA's optimizations"
    parser.addoption("--compile-quickly", action="store_true", help=words)
    words = "a checkout of JAX near the installed version, to run its tests of multihost_utils"
    parser.addoption("--jax-tests", metavar="PATH", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how XLA compiles, before anything imports JAX, and in the processes of jobs.

    And what is printed meanwhile.
    """
    # XLA ends a process that has a flag it does not know, and newer ones do not know them all.
    if not metadata.version("jax").startswith("0.10."):
        config.option.compile_quickly = False
    if config.getoption("--compile-quickly"):
        os.environ["XLA_FLAGS"] = OUTSIDE["XLA_FLAGS"] = QUICKLY
    progress.register(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what all tests share out of every collection of garbage: it is never garbage.

    And collect less often: most of what a test makes lives until its end.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let each worker of a whole run begin at a part of the tests of its own.

    pytest rewrites the asserts of what it imports, and keeps the result for all: where workers go
    through the files in step, each rewrites all of them.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or [Path(arg).resolve() for arg in config.args] != [Path(__file__).parent]:
        return
    files = sorted(str(path) for path in Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the tests into one order: all workers must have the same."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many tests `pytest -n auto` runs at a time: half of their time is waiting."""
    return 2 * (os.cpu_count() or 1)


@pytest.fixture(scope="session")
def outside() -> Mapping[str, str]:
    """Return the environment of child processes: CPU, how XLA compiles, nothing else decided."""
    return OUTSIDE


@pytest.fixture
def child_env(outside: Mapping[str, str]) -> dict[str, str]:
    """Return `outside`, to be changed."""
    return dict(outside)
