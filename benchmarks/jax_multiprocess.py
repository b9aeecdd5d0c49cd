"""JAX's own tests of several processes, in jobs of shoal.

    python benchmarks/jax_multiprocess.py --jax-tests PATH            all files
    python benchmarks/jax_multiprocess.py --jax-tests PATH FILE ...   some: wait_barrier_test ...

PATH is a checkout of JAX at the version that is installed, or near it: its directory
tests/multiprocess (Apache-2.0) is run, of which nothing is part of shoal. The helper of these tests
is in JAX's wheel, `jax._src.test_multiprocess`. Each file runs on 4 processes of 2 CPU devices:

    JAX alone          by the helper's launcher
    launcher           the same, with `shoal.initialize` in place of JAX's
    shoal run          the same, started by `shoal run`
    ... + facade       with `shoal.compat.multihost_utils` in place of JAX's, where it is imported

Prints how many of the tests that pass with JAX alone pass in each way, and names those that do not,
with the reason. Exits with 1 if one differs for no known reason. Each process leaves a proof that
the job is shoal's: without it, its tests do not count.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import free_port

PROCESSES = 4
LIMIT_S = 600  # of one file
IMPORT = "from jax.experimental import multihost_utils"
FACADE = "from shoal.compat import multihost_utils"
ALONE = "JAX alone"
WAYS = ("launcher", "shoal run", "launcher + facade", "shoal run + facade")

# Why a test has another outcome than with JAX alone.
DIFFERENCES = {
    "WaitBarrierTest.test_non_participant_calls_fails": (
        "JAX's service forgets a failed barrier if the job may outlive a process, as shoal's jobs "
        "may: JAX alone fails it, too, with JAX_ENABLE_RECOVERABILITY=1"
    ),
    "MultiHostUtilsTest.test_process_allgather_cache_hit": (
        "it counts one compiled program, and shoal compiles none for values of this size"
    ),
}

Outcomes = dict[str, str]  # by the name of the test


def run_file(path: Path, way: str, folder: Path) -> Outcomes:
    """Run one file of tests; return what became of each, in the process where it fared worst."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_TESTS_FILE": str(path),
        "JAX_TESTS_WAY": way,
        "JAX_TESTS_PROOFS": str(folder),
        "TEST_UNDECLARED_OUTPUTS_DIR": str(folder),  # for the helper's launcher
    }
    command = [sys.executable, __file__, f"--num_processes={PROCESSES}"]
    if way.startswith("shoal run"):
        launcher = ["-m", "shoal", "run", "-n", str(PROCESSES), "--log-dir", str(folder)]
        command[1:1] = launcher
    folder.mkdir(parents=True)
    with (folder / "launcher.txt").open("w") as output:
        job = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
    pattern = "p*.log" if way.startswith("shoal run") else "jax_*_stderr.log"
    outcomes: dict[str, list[str]] = collections.defaultdict(list)
    for log in folder.glob(pattern):
        text = log.read_text(errors="replace")
        for outcome, name in re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] (\w+\.\w+)", text, re.M):
            outcomes[name].append(outcome)
    is_proven = len(proofs(folder, way)) == PROCESSES
    return {name: "no proof" if not is_proven else worst(found) for name, found in outcomes.items()}


def worst(found: list[str]) -> str:
    """Return the outcome of a test in all processes."""
    if len(found) < PROCESSES:
        return "did not end"
    return next(outcome for outcome in ("FAILED", "SKIPPED", "OK") if outcome in found)


def proofs(folder: Path, way: str) -> set[int]:
    """Return the processes that were in a job of this kind, as each of them wrote."""
    wanted = [way != ALONE, way.endswith("facade")]
    found = [json.loads(path.read_text()) for path in folder.glob("proof-*.json")]
    return {process for process, *job in found if job == wanted}


def compare(paths: Sequence[Path], work: Path) -> bool:
    """Run the files in each way; print and return whether each difference has a known reason."""
    num_passing = 0
    counts = dict.fromkeys(WAYS, 0)
    differing: dict[str, list[str]] = collections.defaultdict(list)
    for path in paths:
        alone = run_file(path, ALONE, work / path.stem / ALONE)
        passing = [name for name, outcome in alone.items() if outcome == "OK"]
        num_passing += len(passing)
        found: dict[str, Outcomes] = {}
        for way in WAYS:
            without = way.removesuffix(" + facade")
            if without in found and IMPORT not in path.read_text():
                found[way] = found[without]
            else:
                found[way] = run_file(path, way, work / path.stem / way)
            for name in passing:
                outcome = found[way].get(name, "did not run")
                counts[way] += outcome == "OK"
                if outcome != "OK":
                    differing[f"{path.stem}.{name}"].append(f"{way}: {outcome}")
        same = min(sum(found[way].get(name) == "OK" for name in passing) for way in WAYS)
        print(f"  {path.stem}: {same} of {len(passing)}, {len(alone)} in all", flush=True)
    print(f"JAX {importlib.metadata.version('jax')}: {num_passing} tests pass with JAX alone")
    for way, count in counts.items():
        print(f"  {count} of them by {way}")
    reasons = {name: DIFFERENCES.get(name.partition(".")[2]) for name in differing}
    for name, outcomes in differing.items():
        print(f"  {name}: {reasons[name] or 'NO KNOWN REASON'}\n    {', '.join(outcomes)}")
    print(f"  logs: {work}")
    return num_passing > 0 and all(reasons.values())


# What follows runs in the processes of the tests.


def be_test_file() -> None:
    """Run a file of tests as `__main__`, as the helper's launcher or as one of its processes.

    The launcher starts the processes by `sys.argv[0]`, which must stay this file.
    """
    path, way = Path(os.environ["JAX_TESTS_FILE"]), os.environ["JAX_TESTS_WAY"]
    # JAX 0.10 has one port for all, without this package.
    ports: Any = types.ModuleType("portpicker")
    ports.pick_unused_port = lambda **_: free_port()
    sys.modules["portpicker"] = ports
    if way.startswith("shoal run"):
        sys.argv.append(f"--multiprocess_test_worker_id={os.environ['RANK']}")
    source = path.read_text()
    if way.endswith("facade"):
        source = source.replace(IMPORT, FACADE)
    replace_initialize(way)
    names = sys.modules["__main__"].__dict__  # where unittest looks for tests
    names["__file__"] = str(path)
    exec(compile(source, path, "exec", dont_inherit=True), names)


def replace_initialize(way: str) -> None:
    """Let the helper join the processes by `shoal.initialize`, and each write a proof of it."""
    from jax._src import distributed

    of_jax = distributed.initialize

    def initialize(*args: Any, **options: Any) -> None:
        if way == ALONE:
            of_jax(*args, **options)
        else:
            import shoal

            shoal.initialize(*args, **options)
        process = distributed.global_state.process_id
        job = sys.modules.get("shoal")
        is_shoal = job is not None and job.is_initialized() and job.process_count() == PROCESSES
        module = getattr(sys.modules["__main__"], "multihost_utils", None)
        proof = [process, is_shoal, str(getattr(module, "__name__", "")).startswith("shoal.")]
        (Path(os.environ["JAX_TESTS_PROOFS"]) / f"proof-{process}.json").write_text(
            json.dumps(proof)
        )

    distributed.initialize = initialize


def main() -> None:
    """Run the files in each way, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jax-tests", type=Path, metavar="PATH", help="a checkout of JAX")
    parser.add_argument("files", nargs="*", metavar="FILE", help="of tests/multiprocess")
    arguments = parser.parse_args()
    if arguments.jax_tests is None:  # as in `make bench`
        print("nothing was run: --jax-tests PATH is a checkout of JAX, which has the tests")
        return
    try:
        importlib.metadata.version("absl-py")
    except importlib.metadata.PackageNotFoundError:
        parser.error("JAX's helper needs another package: pip install absl-py")
    tests = (arguments.jax_tests / "tests" / "multiprocess").resolve()
    known = [path.stem for path in sorted(tests.glob("*_test.py"))]
    if not known or (unknown := set(arguments.files) - set(known)):
        parser.error(f"{tests} has no {', '.join(sorted(unknown)) if known else 'tests'}")
    paths = [tests / f"{name}.py" for name in arguments.files or known]
    raise SystemExit(not compare(paths, Path(tempfile.mkdtemp(prefix="jax-tests-"))))


if __name__ == "__main__":
    if "JAX_TESTS_FILE" in os.environ:
        be_test_file()
    else:
        main()
