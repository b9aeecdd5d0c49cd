"""Public programs under shoal, killed once and resumed, beside the same run undisturbed.

    python benchmarks/programs.py --fetch DIR            all of them
    python benchmarks/programs.py --fetch DIR NAME ...   some

Clones the repositories into DIR, unless they are there, and applies the changes that are in
benchmarks/programs/ to the pinned commits. Each program runs on 2 processes of 2 virtual devices.
In the second run, SIGKILL ends process 1 in the middle, and `shoal run --max-restarts 1` starts the
job again. Exits with 1 if a step of one has another loss than the undisturbed run.

docs/programs.md has what was changed in each program, and what to know of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

KILLED_AT = 10  # of 16 steps, each fourth of which is saved
CHANGES = Path(__file__).with_suffix("")
TWO = ["-n", "2", "--devices", "2"]


@dataclasses.dataclass(frozen=True)
class Program:
    """One program: where it is from, how it is started, and what it prints."""

    name: str  # also of its changes, if there are any: benchmarks/programs/NAME.diff
    repository: str
    commit: str
    paths: str  # what is needed of the repository
    start: str  # the directory where it is started
    command: str  # {work} is the directory of the run, {data} that of the data sets
    loss: str  # what it prints of a step: its number, and the loss
    packages: str  # to be installed, apart from JAX
    env: str = ""
    python: tuple[int, int] = (3, 11)
    tolerance: float = 0.0  # on the same number of processes
    elsewhere: float | None = None  # the tolerance if it resumes on 1 process of 4 devices


GEMMA = Program(
    name="gemma",
    repository="google/flax",
    commit="18f8f311c275d57f46d95e41b15aa97b454754c0",
    paths="examples/gemma",
    start="examples/gemma",
    command="main.py --workdir {work} --config configs/words.py --alsologtostderr",
    loss=r"Finished training step (\d+)\. .*Loss: ([\d.]+)",
    packages="flax optax orbax-checkpoint grain clu ml_collections sentencepiece jaxtyping"
    " tensorflow_cpu tensorflow-datasets tensorboard importlib_resources",
    env="TFDS_DATA_DIR={data}",
)
BIG_VISION = Program(
    name="big_vision",
    repository="google-research/big_vision",
    commit="0127fb6b337ee2a27bf4e54dea79cff176527356",
    paths="big_vision",
    start=".",
    command="-m big_vision.train --workdir {work} --config big_vision/configs/pixels.py"
    " --alsologtostderr",
    loss=r"\[(\d+)\].* training_loss = ([\d.]+)",
    packages="flax optax clu ml_collections einops overrides"
    " tensorflow_cpu tensorflow-datasets tensorboard importlib_resources",
    env="BV_JAX_INIT=1",
    elsewhere=1e-6,
)
MAXTEXT = Program(
    name="maxtext",
    repository="AI-Hypercomputer/maxtext",
    commit="e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    paths="src/maxtext :!src/maxtext/assets",
    start="src",
    command="-m maxtext.trainers.pre_train.train maxtext/configs/decoupled_base_test.yml"
    " hardware=gpu_multiprocess dataset_type=synthetic base_output_directory={work} run_name=tried"
    " steps=16 learning_rate_schedule_steps=16 enable_checkpointing=true checkpoint_period=4"
    " per_device_batch_size=2 max_target_length=32 vocab_size=64 base_emb_dim=32 base_mlp_dim=64"
    " base_num_query_heads=2 base_num_kv_heads=2 head_dim=16 base_num_decoder_layers=2",
    loss=r"completed step: (\d+),.* loss: ([\d.]+), lm_loss",
    packages="flax optax orbax-checkpoint grain clu ml_collections sentencepiece jaxtyping jinja2"
    " tensorflow_cpu tensorflow-datasets tensorboard importlib_resources omegaconf tokamax aqtp"
    " qwix transformers datasets tiktoken drjax pathwaysutils tensorboardx jsonlines sympy pandas"
    " psutil einops",
    env="DECOUPLE_GCLOUD=TRUE",
    python=(3, 12),
)
LM1B = Program(
    name="lm1b",
    repository="google/flax",
    commit=GEMMA.commit,
    paths="examples/lm1b",
    start="examples/lm1b",
    command="main.py --workdir {work} --config configs/tiny.py --alsologtostderr",
    loss=r"\[(\d+)\] .*train_loss=([\d.]+)",
    packages="flax optax orbax-checkpoint clu ml_collections"
    " tensorflow_cpu tensorflow-datasets tensorboard importlib_resources",
    elsewhere=1e-6,
)
COOKBOOK = Program(
    name="cookbook",
    repository="jax-ml/jax",
    commit="cec06d116c05f0d52adfceee3d3b730fdbcb0ce5",
    paths="docs/the-training-cookbook.py",
    start="docs",
    command="the-training-cookbook.py {work}",
    loss=r"step: (\d+)\s+train_loss: ([\d.]+)",
    packages="",
    elsewhere=1e-6,
)
EQUINOX = Program(
    name="equinox",
    repository="patrick-kidger/equinox",
    commit="9336d820b2ef66b360fc6cb3611b3da5cefbb14d",
    paths="docs/examples/parallelism.ipynb",
    start="docs/examples",
    command="-m IPython parallelism.ipynb",
    loss=r"step (\d+): loss=([\d.]+)",
    packages="equinox optax ipython nbformat",
    env="RUN={work}",
    elsewhere=1e-6,
)
PROGRAMS = (
    GEMMA,
    dataclasses.replace(GEMMA, name="gemma-moved"),
    LM1B,
    dataclasses.replace(LM1B, name="lm1b-moved"),
    BIG_VISION,
    dataclasses.replace(BIG_VISION, name="big_vision-moved", env=""),
    MAXTEXT,
    COOKBOOK,
    EQUINOX,
)


def write_words(data: Path) -> None:
    """Write a data set of random sentences, as TFDS stores one."""
    import tensorflow_datasets as tfds  # type: ignore[import,unused-ignore]

    tfds.disable_progress_bar()
    words = ("many", "small", "fish", "swim", "in", "one", "shoal", "and", "turn", "at", "once")
    numbers = random.Random(0)

    def rows(count: int) -> list[tuple[str, dict[str, str]]]:
        texts = [" ".join(numbers.choices(words, k=numbers.randint(4, 12))) for _ in range(count)]
        return [(str(n), {"text": text}) for n, text in enumerate(texts)]

    tfds.dataset_builders.store_as_tfds_dataset(
        name="words",
        version="1.0.0",
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        split_datasets={"train": rows(512), "test": rows(64)},
        data_dir=data,
        file_format="array_record",
        disable_shuffling=True,
    )


def checkout(program: Program, directory: Path) -> Path:
    """Return a new copy of the program at its commit, changed; clone its repository if need be."""
    clone = directory / program.repository.split("/")[1]
    if not clone.exists():
        url = f"https://github.com/{program.repository}"
        options = ["--quiet", "--filter=blob:none", "--no-checkout"]
        subprocess.run(["git", "clone", *options, url, clone], check=True)
    there = directory / "changed" / program.name
    shutil.rmtree(there, ignore_errors=True)
    git, changed = ["git", "-C", str(clone), "worktree"], ["git", "-C", str(there)]
    subprocess.run([*git, "prune"], check=True)
    options = ["--quiet", "--no-checkout", "--detach"]
    subprocess.run([*git, "add", *options, str(there), program.commit], check=True)
    wanted = ["--quiet", program.commit, "--", *program.paths.split()]
    subprocess.run([*changed, "checkout", *wanted], check=True)
    if (changes := CHANGES / f"{program.name}.diff").exists():
        subprocess.run([*changed, "apply", str(changes)], check=True)
    return there


def pid_of(process: int, mark: str) -> int:
    """Return the process of that rank, of the job that has this mark in its environment."""
    wanted = {f"RANK={process}".encode(), f"PROGRAMS_RUN={mark}".encode()}
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(entry.read_bytes().split(b"\0")):
                found.append(int(entry.parent.name))
    return min(found)  # its children are younger


def run(
    program: Program, there: Path, work: Path, options: list[str], *, kill: bool = False
) -> dict[int, list[str]]:
    """Run it as one job; return what it printed as loss of each step, also of a repeated one.

    Args:
      kill: send SIGKILL to process 1 when a step in the middle is printed.
    """
    where = {"work": str(work), "data": str(work.parent / "data")}
    mark = f"{os.getpid()}-{work.name}"
    env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "PROGRAMS_RUN": mark}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(there / program.start)}
    env |= dict(pair.split("=", 1) for pair in program.env.format(**where).split())
    options = [*options, "--log-dir", f"{work}-logs"]
    job = subprocess.Popen(
        [sys.executable, "-m", "shoal", "run", *options, *program.command.format(**where).split()],
        cwd=there / program.start,
        env=os.environ | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert job.stdout is not None
    losses: dict[int, list[str]] = {}
    killed = False
    for line in job.stdout:
        if line.startswith("shoal run:"):
            print("  " + line.rstrip(), flush=True)
        if line.startswith("p0|") and (found := re.search(program.loss, line)):
            losses.setdefault(int(found[1]), []).append(found[2])
            if kill and not killed and int(found[1]) >= KILLED_AT:
                os.kill(pid_of(1, mark), signal.SIGKILL)
                killed = True
    if job.wait() and (not killed or "--max-restarts" in options):
        raise SystemExit(f"{program.name}: exit code {job.returncode}, see {work}-logs")
    return losses


def compare(program: Program, directory: Path) -> bool:
    """Run it undisturbed, and killed and resumed; print all losses, and return if they agree."""
    there = checkout(program, directory)

    def new(kind: str) -> Path:
        shutil.rmtree(directory / f"{program.name}-{kind}", ignore_errors=True)
        return directory / f"{program.name}-{kind}"

    runs = {"undisturbed": run(program, there, new("undisturbed"), TWO)}
    restarted = [*TWO, "--max-restarts", "1"]
    runs["killed, resumed"] = run(program, there, new("killed"), restarted, kill=True)
    tolerances = [0.0, program.tolerance]
    if program.elsewhere is not None:
        work = new("elsewhere")
        before = run(program, there, work, TWO, kill=True)
        after = run(program, there, work, ["-n", "1", "--devices", "4"])
        runs["resumed on 1 process"] = {
            step: before.get(step, []) + after.get(step, []) for step in before | after
        }
        tolerances.append(program.elsewhere)

    print("  step" + "".join(f"{kind:>44}" for kind in runs) + "  largest difference")
    agree = True
    for step, (wanted,) in runs["undisturbed"].items():
        columns = [losses.get(step, ["nan"]) for losses in runs.values()]
        off = [max(abs(float(loss) - float(wanted)) for loss in column) for column in columns]
        agree &= all(a <= b for a, b in zip(off, tolerances, strict=True))
        print(f"  {step:>4}" + "".join(f"{' '.join(c):>44}" for c in columns) + f"  {max(off):.2g}")
    print(f"  {program.name}: the losses {'agree' if agree else 'DIFFER'}", flush=True)
    return agree


def main() -> None:
    """Try the programs whose packages are installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fetch", type=Path, metavar="DIR", help="where the repositories are")
    known = [program.name for program in PROGRAMS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no program {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    if arguments.fetch is None:  # as in `make bench`
        print("nothing was run: --fetch DIR clones repositories of hundreds of megabytes")
        return
    directory = arguments.fetch.resolve()
    agree = True
    for program in PROGRAMS:
        if program.name not in (arguments.names or known):
            continue
        print(f"{program.name} ({program.repository}, {program.commit[:10]})", flush=True)
        if sys.version_info < program.python:
            print(f"  skipped: needs Python {'.'.join(map(str, program.python))}")
            continue
        if missing := absent(program.packages.split()):
            print(f"  skipped: pip install -c requirements/python3.11.txt {' '.join(missing)}")
            continue
        directory.mkdir(parents=True, exist_ok=True)
        if "{data}" in program.env and not (directory / "data" / "words").exists():
            write_words(directory / "data")
        agree &= compare(program, directory)
    raise SystemExit(not agree)


def absent(packages: list[str]) -> list[str]:
    """Return those that are not installed."""
    missing = []
    for name in packages:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


if __name__ == "__main__":
    main()
