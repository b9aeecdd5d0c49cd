"""From SIGKILL to the next finished step, by part.

    python benchmarks/recovery.py [--rounds N] [--layers N] [--mib N] [--before PATH]

Jobs of 4 processes with `--mib` of state (256), whose step compiles for about 10 s on two cores
(`--layers`). In each, a random process is killed in a step, in a collective that the others wait
in, and within 1 s of its start. All jobs begin with an empty cache. The contestants take turns:

    shoal      `shoal run --max-restarts`
    no cache   the same with SHOAL_COMPILE_CACHE=0; with --before, `before`: that checkout of shoal
    orbax      JAX and orbax alone, in a loop of the shell; where orbax is installed

A part of a recovery ends once all processes have come so far: the killed one is reaped by its
parent, which thus `known`s; the others are `reaped`; Python has `started` in the new ones; JAX and
what saves are `imported`; they are connected (`initialized`); the state is `restored` to the
devices; the step is `lowered`; it is `compiled`, or read from the cache; and a `step` has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs import PATIENCE_S, free_port
from rows import print_row

PROCESSES, POLL_S = 4, 0.005
# One in each attempt but the last. That of the third counts for nothing: the fourth takes no step.
KILLS = ("step", "collective", "step", "start")
PARTS = ["known", "reaped", "started", "imported", "initialized", "restored", "lowered"]
PARTS += ["compiled", "step"]
LOOP = """
for attempt in 0 1 2 3 4; do
  (  # a shell of its own: `wait -n` knows no process of an earlier attempt
    export ATTEMPT=$attempt ADDRESS=127.0.0.1:$((PORT + attempt))
    for process in 0 1 2 3; do PROCESS=$process "$@" & done
    for process in 0 1 2 3; do wait -n || { kill -9 $(jobs -p) 2> /dev/null; wait; exit 1; }; done
  ) && exit 0
done
exit 1
"""


# ---- In a process of a job.


class Watched:
    """This process: it marks how far it has come, and is killed if it is chosen."""

    def __init__(self, plan: Mapping[str, Any], attempt: int, process: int) -> None:
        self._file, self._attempt = plan["marks"], attempt
        chance = random.Random(f"{plan['seed']} {attempt}")
        self.mark("started")
        self.kill = KILLS[attempt] if attempt < len(KILLS) else ""
        self._is_chosen = chance.randrange(PROCESSES) == process
        if self.kill == "start":
            threading.Timer(chance.random(), self.come_to, ["start"]).start()

    def mark(self, what: str) -> None:
        """Write a line that the benchmark reads."""
        row = [self._attempt, os.getpid(), what, time.monotonic()]
        with open(self._file, "a") as marks:
            marks.write(json.dumps(row) + "\n")

    def come_to(self, where: str) -> None:
        """End here, if that is due."""
        if self.kill == where and self._is_chosen:
            if where == "collective":
                time.sleep(0.5)  # the others wait for it
            self.mark("killed")
            os.kill(os.getpid(), signal.SIGKILL)


def with_shoal(plan: Mapping[str, Any]) -> None:
    """Train under `shoal run`."""
    me = Watched(plan, int(os.environ["SHOAL_ATTEMPT"]), int(os.environ["SHOAL_PROCESS_ID"]))
    import jax  # noqa: F401

    import shoal

    me.mark("imported")
    shoal.initialize()
    me.mark("initialized")
    init, layouts = state_on(shoal.make_mesh({"data": -1}), plan)
    with shoal.Checkpoints(plan["folder"], keep=1, asynchronous=False) as ckpts:
        train(me, plan, *ckpts.resume(layouts, init), ckpts.save, shoal.step)
    shoal.barrier("done")


def with_orbax(plan: Mapping[str, Any]) -> None:
    """Train without shoal."""
    me = Watched(plan, int(os.environ["ATTEMPT"]), process := int(os.environ["PROCESS"]))
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    me.mark("imported")
    jax.distributed.initialize(os.environ["ADDRESS"], PROCESSES, process)
    me.mark("initialized")
    init, _ = state_on(jax.sharding.Mesh(np.array(jax.devices()), ("data",)), plan)
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with ocp.CheckpointManager(plan["folder"], options=options) as ckpts:
        state, first = init(), 0
        if (newest := ckpts.latest_step()) is not None:
            target = ocp.args.StandardRestore(init.eval_shape())
            state, first = ckpts.restore(newest, args=target), newest + 1

        def save(step: int, state: object) -> None:
            ckpts.save(step, args=ocp.args.StandardSave(state))

        train(me, plan, state, first, save, contextlib.nullcontext)


def state_on(mesh: Any, plan: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what makes the state, and the layouts of its leaves."""
    import jax
    import jax.numpy as jnp

    def init() -> Any:
        rows = jnp.ones((plan["mib"] << 8, 1024))
        return {"rows": rows, "w": jnp.eye(64), "total": jnp.zeros(())}

    over = {"rows": jax.P("data"), "w": jax.P(), "total": jax.P()}
    layouts = {name: jax.NamedSharding(mesh, axes) for name, axes in over.items()}
    return jax.jit(init, out_shardings=layouts), layouts


def train(
    me: Watched, plan: Mapping[str, Any], state: Any, first: int, save: Any, around: Any
) -> None:
    """Take a step and save it; in the next one, a process is killed."""
    import jax
    import jax.numpy as jnp

    def loss(w: jax.Array) -> jax.Array:
        x = jnp.ones((64, 64))
        for layer in range(plan["layers"]):
            x = jnp.tanh(x @ w) * jnp.cos(x + layer)
        return x.sum()

    def advance(state: Any) -> Any:
        rows = state["rows"] * 0.999
        w = state["w"] - 0.1 * jax.grad(loss)(state["w"])
        return {"rows": rows, "w": w, "total": rows.sum()}  # over all processes

    layouts = jax.tree.map(lambda leaf: leaf.sharding, jax.block_until_ready(state))
    me.mark("restored")
    lowered = jax.jit(advance, donate_argnums=0, out_shardings=layouts).lower(state)
    me.mark("lowered")
    compiled = lowered.compile()
    me.mark("compiled")
    with around(first):
        state = jax.block_until_ready(compiled(state))
    me.mark("step")
    if me.kill:
        save(first, state)
        with around(first + 1):
            me.come_to("collective")
            state = compiled(state)
            me.come_to("step")
            jax.block_until_ready(state)
            time.sleep(PATIENCE_S)  # until the launcher ends it


# ---- The benchmark.


def recoveries(name: str, plan: dict[str, Any], before: str) -> Iterator[tuple[str, list[float]]]:
    """Run one job; yield the kill and the seconds of each part of each recovery."""
    with tempfile.TemporaryDirectory() as work:
        marks, output = Path(work, "marks"), Path(work, "output")
        plan |= {"name": name, "folder": f"{work}/run", "marks": str(marks)}
        program = [__file__, "--play", json.dumps(plan)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": f"{work}/cache"}
        command = [sys.executable, "-m", "shoal", "run", "-n", str(PROCESSES), "--devices", "1"]
        command += ["--max-restarts", str(len(KILLS)), "--log-dir", f"{work}/logs", *program]
        if name == "no cache":
            env["SHOAL_COMPILE_CACHE"] = "0"
        if name == "before":
            env["PYTHONPATH"] = f"{before}/src"
        if name == "orbax":
            env["PORT"] = str(free_port())
            command = ["bash", "-c", LOOP, "loop", sys.executable, *program]
        marks.touch()
        with output.open("w") as said:
            job = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
            gone = watch(job, marks)
        if job.returncode:
            raise SystemExit(f"{name}: {output.read_text()[-4000:]}")
        rows = [json.loads(line) for line in marks.read_text().splitlines()]
    for attempt in (0, 1, 3):
        pid, killed_s = next((row[1], row[3]) for row in rows if row[::2] == [attempt, "killed"])
        times = [killed_s, gone[pid], max(gone[row[1]] for row in rows if row[0] == attempt)]
        times += [max(r[3] for r in rows if r[::2] == [attempt + 1, part]) for part in PARTS[2:]]
        yield KILLS[attempt], [end - begin for begin, end in itertools.pairwise(times)]


def watch(job: subprocess.Popen[bytes], marks: Path) -> dict[int, float]:
    """Wait for the end of a job; return when each of its processes was reaped."""
    seen, gone = set[int](), dict[int, float]()
    with marks.open() as lines:
        while job.poll() is None:
            seen |= {json.loads(line)[1] for line in lines}
            ended = [pid for pid in seen - gone.keys() if not os.path.exists(f"/proc/{pid}")]
            gone |= dict.fromkeys(ended, time.monotonic())
            time.sleep(POLL_S)
    return gone


def main() -> None:
    """Let the contestants take turns; print a row for each kind of kill, and for each part."""
    parser = argparse.ArgumentParser()
    for name, default in {"rounds": 3, "layers": 36, "mib": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--before", default="", metavar="PATH")
    parser.add_argument("--play", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        (with_orbax if options.play["name"] == "orbax" else with_shoal)(options.play)
        return
    names = ["shoal", "before" if options.before else "no cache"]
    names += ["orbax"] if importlib.util.find_spec("orbax") else []
    found: dict[str, list[tuple[str, list[float]]]] = {name: [] for name in names}
    case = {"processes": PROCESSES, "layers": options.layers, "mib": options.mib}
    for seed, name in itertools.product(range(options.rounds), names):
        found[name] += recoveries(name, {**case, "seed": seed}, options.before)
    for kill in dict.fromkeys(KILLS):
        samples = {n: [sum(parts) for at, parts in rows if at == kill] for n, rows in found.items()}
        print_row("recovery", {"killed in": kill, **case}, samples, "s")
    samples = {n: [sum(parts[:-1]) for _, parts in rows] for n, rows in found.items()}
    print_row("recovery without the step", case, samples, "s")
    for index, part in enumerate(PARTS):
        samples = {n: [parts[index] for _, parts in rows] for n, rows in found.items()}
        print_row("part of a recovery", {"part": part}, samples, "s")


if __name__ == "__main__":
    main()
