"""Failures of small programs, as facts: one for each report in `reports.txt`."""

from __future__ import annotations

from shoal.runtime.failures.facts import (
    BystanderState,
    CallPlace,
    Cause,
    CheckpointFacts,
    Difference,
    DivergenceSide,
    ErrorFacts,
    JobFailure,
    Memory,
    ProcessSet,
    StackFrame,
    Wait,
    Waiting,
)
from shoal.runtime.failures.headline import job_headline

MIB = 1 << 20
LOAD = 'def load(): batches.put(open("data/b.bin").read() if p == 1 else "")'
GET = 'batch = batches.get(); shoal.barrier("batch", timeout_s=5)'
EQUAL_TREES = "broadcast needs the same tree, shapes and dtypes on every process."
NO_FILE = "[Errno 2] No such file or directory: 'data/b.bin'"


SAME_CALLS = "All processes of a group must make the same collective calls, in the same order."


def these(*numbers: int) -> ProcessSet:
    return ProcessSet(numbers)


def at(line: int, call: str = "", name: str = "", source: str = "", **more) -> CallPlace:
    return CallPlace(call=call, name=name, file="train.py", line=line, source=source, **more)


def frame(line: int, function: str, source: str, file: str = "train.py") -> StackFrame:
    return StackFrame(file=file, line=line, function=function, source=source)


def waiting(*numbers: int, place: CallPlace, **more) -> BystanderState:
    return BystanderState(processes=these(*numbers), state="waiting", place=place, **more)


def failed(kind: str, code: int, after_s: float, *causes: Cause, n: int = 3, **more) -> JobFailure:
    """Return a failure with the headline of its causes."""
    facts = JobFailure(
        kind=kind, headline="", exit_code=code, failed_after_s=after_s, num_processes=n,
        causes=causes, **{"logs": "logs", **more},
    )  # fmt: skip
    return type(facts)(**{name: getattr(facts, name) for name in facts.__slots__}
                       | {"headline": job_headline(facts)})  # fmt: skip


def raised(*numbers: int, error: str, message: str, frames=(), module="builtins", **more) -> Cause:
    return Cause(
        processes=these(*numbers), kind="exception",
        error=ErrorFacts(type=error, module=module, message=message), frames=frames, **more,
    )  # fmt: skip


def differing(after_s: float, what: str, sides, *, others=(), advice: str, **more) -> JobFailure:
    sides = tuple(
        DivergenceSide(processes=these(*who), said=said, place=at_) for who, said, at_ in sides
    )
    difference = Difference(what=what, sides=sides, **more)
    cause = Cause(processes=these(0, 1, 2), kind="diverged", exit_code=70, difference=difference)
    advices = tuple(advice.split("\n"))
    return failed("diverged", 70, after_s, cause, advice=advices, others=others)


def exceptions() -> dict[str, JobFailure]:
    shard = "data/shard-00001.npy"
    return {
        "01": failed(
            "exception", 1, 1.1,
            raised(
                1, error="FileNotFoundError",
                message=f"[Errno 2] No such file or directory: '{shard}'",
                frames=(
                    frame(5, "<module>", f'if step == 2 and p == 1: load("{shard}")'),
                    frame(2, "load", "def load(path): return np.load(path)"),
                ),
                left_out={"numpy": 1}, step=2, log="p0001.log",
            ),
            others=(waiting(0, 2, place=at(6, "barrier", "step")),),
        ),
        "02": failed(
            "exception", 1, 1.1,
            raised(
                0, 1, 2, error="KeyError", message="'adamw'", log="p0002.log", first=2,
                frames=(frame(3, "<module>", 'shoal.barrier("start"); rate = rates["adamw"]'),),
            ),
        ),
        "03": failed(
            "exception", 1, 1.1,
            raised(
                0, error="ValueError", message="rate must be positive, got 0.0", log="p0000.log",
                frames=(frame(
                    2, "<module>", 'if p == 0: raise ValueError("rate must be positive, got 0.0")'
                ),),
            ),
            raised(
                1, error="FileNotFoundError", message=NO_FILE, log="p0001.log",
                frames=(frame(3, "<module>", 'if p == 1: open("data/b.bin")'),),
            ),
            others=(waiting(2, place=at(4, "barrier", "ready")),),
        ),
        "05": failed(
            "exception", 1, 1.4,
            raised(
                1, error="TypeError", left_out={"jax": 3}, log="p0001.log",
                message="dot_general requires contracting dimensions to have the same shape, "
                "got (5,) and (4,).",
                frames=(
                    frame(6, "<module>",
                          'train(jnp.ones((8, 5 if p == 1 else 4))); shoal.barrier("end")'),
                    frame(5, "train", "def train(x): return loss(jnp.ones((4, 2)), x)"),
                    frame(4, "loss", "def loss(w, x): return jnp.sum((x @ w) ** 2)"),
                ),
            ),
            others=(waiting(0, 2, place=at(6, "barrier", "end")),),
        ),
    }  # fmt: skip


def deaths() -> dict[str, JobFailure]:
    killed = {"kind": "signal", "signal": "SIGKILL", "sent_by_launcher": False, "exit_code": 137}
    step = at(6, "barrier", "step", age_s=0.1)
    return {
        "06": failed(
            "signal", 137, 4.0,
            Cause(
                processes=these(1), place=at(3, "allgather", age_s=0.0), step=56,
                memory=Memory(peak_bytes=163 * MIB, cgroup_oom_kills=0),
                last_output=("loss 2.1",), log="p0001.log", **killed,
            ),
            others=(BystanderState(processes=these(0, 2), state="stopped", step=57, place=at(3)),),
        ),
        "07": failed(
            "signal", 137, 2.5,
            Cause(
                processes=these(1), place=step, step=10, log="p0001.log",
                memory=Memory(
                    peak_bytes=908865536, cgroup_oom_kills=1, cgroup_peak_bytes=943718400,
                    cgroup_limit_bytes=943718400,
                ),
                **killed,
            ),
            others=(waiting(0, place=at(6, "barrier", "step"), peak_bytes=161 * MIB),), n=2,
        ),
        "08": failed(
            "signal", 139, 1.1,
            Cause(
                processes=these(1), kind="signal", signal="SIGSEGV", sent_by_launcher=False,
                frames=(frame(5, "<module>", "if p == 1: ctypes.string_at(0)"),),
                left_out={"ctypes": 1}, log="p0001.log",
            ),
            others=(waiting(0, 2, place=at(6, "barrier", "end")),),
        ),
        "09": failed(
            "signal", 137, 3.4,
            Cause(
                processes=these(1), place=at(1, "initialize", age_s=2.3), log="p0001.log",
                memory=Memory(cgroup_oom_kills=0), **killed,
            ),
            others=(
                BystanderState(
                    processes=these(0), state="stopped",
                    words="then raised ValueError (train.py:7): UNKNOWN: Gloo collective permute "
                    "failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error "
                    "[127.0.0.1]:48256: Connection reset by peer",
                ),
                BystanderState(processes=these(2), state="running", ended_by="SIGTERM"),
            ),
        ),
    }  # fmt: skip


def exits() -> dict[str, JobFailure]:
    return {
        "10": failed(
            "exit", 3, 1.1,
            Cause(
                processes=these(1), kind="exit", exit_code=3, step=4, last_met=at(1, "initialize"),
                words=(
                    "It raised nothing, called no sys.exit and did not leave the job: os._exit, "
                    "or exit() in native code.",
                ),
                log="p0001.log",
            ),
            others=(waiting(0, 2, place=at(4, "barrier", "step")),),
        ),
    }  # fmt: skip


def differences() -> dict[str, JobFailure]:
    name = at(3, "barrier", source='shoal.barrier(f"epoch {epoch}")')
    shape = at(3, "broadcast", source="shoal.broadcast(x)")
    dtype = at(3, "broadcast", source='shoal.broadcast({"x": x, "n": 3})')
    same = at(3, "assert_same", source='shoal.assert_same(config, name="config")')
    pair = at(3, "barrier", source='if p in who: shoal.barrier("pair", processes=who)')
    program = at(5, source="shoal.assert_same_program(step, jnp.ones(8))")
    put = at(4, "put", source='x = shoal.put(rows, shoal.Layout(mesh, "data"))')
    one, other = (
        at(2, "allgather", source="if p == 0: shoal.allgather(1.5)"),
        at(3, "barrier", source='else: shoal.barrier("epoch")'),
    )
    cst = "%cst_0 = stablehlo.constant dense<{}> : …"
    return {
        "11": differing(
            1.1, "call", [((1, 2), "barrier('epoch')", other), ((0,), "allgather", one)],
            advice=SAME_CALLS,
        ),
        "12": differing(
            1.1, "name", [((2,), "'epoch 5'", name), ((0, 1), "'epoch 4'", name)], call="barrier",
            advice="A barrier needs the same name on every process.",
        ),
        "13": differing(
            1.1, "shape", [((0,), "float64[8]", shape), ((1, 2), "float64[4]", shape)],
            call="broadcast", advice=EQUAL_TREES,
        ),
        "14": differing(
            1.1, "dtype", [((2,), "float64[4,2]", dtype), ((0, 1), "float32[4,2]", dtype)],
            call="broadcast", path="['x']", advice=EQUAL_TREES,
        ),
        "15": differing(
            1.0, "value", [((1,), "0.0001", same), ((0, 2), "0.001", same)],
            call="assert_same", name="config", path="['opt']['lr']",
            advice="It is the first leaf that differs; later ones were not compared.",
        ),
        "16": differing(
            1.0, "group",
            [((0,), "processes=[0, 1]", pair), ((1,), "processes=[0, 1, 2]", pair)],
            call="barrier", name="pair", others=(waiting(2, place=at(4, "barrier", "all")),),
            advice="Every process of a group must pass the same processes=.",
        ),
        "17": differing(
            1.2, "program",
            [((0,), cst.format("1.000000e-03"), program),
             ((1, 2), cst.format("9.99999974E-5"), program)],
            path="line 5 of the StableHLO text",
            advice="Numbers of Python are compiled in: make them equal, or pass them as arguments.",
        ),
        "18": differing(
            1.3, "shape",
            [((0,), "float32[12] as (data)", put), ((1, 2), "float32[24] as (data)", put)],
            call="put", found_at=at(5, "barrier", "step"),
            advice="put needs equal values on every process.",
        ),
    }  # fmt: skip


def waits() -> dict[str, JobFailure]:
    arrow = GET.index("shoal.")
    met = at(1, "initialize", age_s=5.0)
    return {
        "04": failed(
            "deadline", 73, 6.2,
            Cause(
                processes=these(1), kind="deadline", log="p0001.log", thread="loader",
                thread_age_s=5.0, error=ErrorFacts(type="FileNotFoundError", message=NO_FILE),
                frames=(frame(3, "load", LOAD),),
                wait=Wait(
                    call="barrier", name="batch", limit_s=5.0,
                    arrived=(Waiting(
                        processes=these(0, 2), place=at(5, source=GET, columns=(arrow, len(GET))),
                    ),),
                    missing=(Waiting(
                        processes=these(1), place=at(5, source=GET, columns=(8, 21)), last_met=met,
                    ),),
                ),
            ),
        ),
        "19": failed(
            "deadline", 73, 7.1,
            Cause(
                processes=these(1), kind="deadline", log="p0001.log",
                words=("Process 1 was alive, and not stopped.",),
                wait=Wait(
                    call="barrier", name="ready", limit_s=6.0,
                    arrived=(Waiting(
                        processes=these(0, 2),
                        place=at(4, source='shoal.barrier("ready", timeout_s=6)'),
                    ),),
                    missing=(Waiting(
                        processes=these(1), last_met=at(1, "initialize", age_s=6.0),
                        frames=(
                            frame(3, "<module>", "if p == 1: download()"),
                            frame(2, "download", "def download(): time.sleep(60)"),
                        ),
                    ),),
                ),
            ),
            advice=("If it is only slow, raise timeout_s= of this call.",),
        ),
    }  # fmt: skip


def stalls() -> dict[str, JobFailure]:
    joined = "shoal.initialize(timeout_s=6)"
    jit = "x = jax.jit(lambda v: v / jnp.sum(v))(x).block_until_ready()"
    return {
        "20": failed(
            "stalled", 77, 11.4,
            Cause(
                processes=these(1), kind="stalled", log="p0001.log", step=3,
                words=(
                    "All 3 are alive, in step 3.",
                    "Stacks of all threads: logs/stacks.txt. --stalled-after 10s ended the job.",
                ),
                wait=Wait(
                    call="", limit_s=10.0,
                    arrived=(Waiting(processes=these(0, 2), place=at(7, source=jit)),),
                    missing=(Waiting(
                        processes=these(1),
                        place=at(6, source="if step == 3 and p == 1: queue.Queue().get()"),
                    ),),
                ),
            ),
        ),
        "22a": failed(
            "not_joined", 74, 6.3,
            Cause(
                processes=these(2), kind="not_joined", log="p0002.log",
                wait=Wait(
                    call="initialize", limit_s=6.0,
                    arrived=(Waiting(processes=these(0, 1), place=at(3, source=joined)),),
                    missing=(Waiting(
                        processes=these(2),
                        words="runs (pid 24012); it has not called initialize",
                    ),),
                ),
            ),
            advice=("Every process must call shoal.initialize or jax.distributed.initialize.",),
        ),
    }  # fmt: skip


def ends() -> dict[str, JobFailure]:
    damage = CheckpointFacts(
        path="ck", file="data-5616a6d45664-00001-of-00003.safetensors", leaf="w", offset_bytes=0,
        damage="its hash is not the one saved",
    )  # fmt: skip
    damaged = at(5, "restore", source='shoal.barrier("damaged"); shoal.restore("ck")')
    step = at(3, "barrier", "step")
    put_back = "No value of it was returned. Restore another step, or put back a good copy."
    return {
        "21": JobFailure(
            kind="preempted", exit_code=75, failed_after_s=4.1,
            headline="preempted: step 54 is saved in ck; start it again",
        ),
        "23": failed(
            "checkpoint", 76, 1.4,
            Cause(processes=these(0, 1, 2), kind="checkpoint", checkpoint=damage, place=damaged),
            advice=(put_back,),
        ),
        "23, seen by one": failed(
            "checkpoint", 76, 1.4,
            Cause(
                processes=these(1), kind="checkpoint", place=damaged,
                checkpoint=CheckpointFacts(
                    path="ck", file=damage.file, leaf="w", offset_bytes=0, damage=damage.damage,
                    read_well=these(0, 2),
                ),
            ),
            advice=(put_back,),
        ),
        "24": failed(
            "host_lost", 71, 5.0,
            Cause(
                processes=these(2, 3), kind="host_lost", step=89, place=step,
                words=("Its launcher gave no sign of life for 5 s (SHOAL_LOST_AFTER_S).",),
            ),
            others=(waiting(0, 1, place=step),), n=4,
            hosts={"node2": these(0, 1), "node3": these(2, 3)},
        ),
    }  # fmt: skip


def attempts() -> dict[str, JobFailure]:
    step = at(3, "barrier", "step")
    nan = raised(
        1, error="RuntimeError", message="loss is NaN", log="p0001.log", step=5,
        frames=(frame(
            4, "<module>", 'if step == 4 and p == 1: raise RuntimeError("loss is NaN")'
        ),),
    )  # fmt: skip
    loop = "A crash loop ends the job: 3 attempts in a row went no further than step 5."
    return {
        "25": failed(
            "interrupted", 130, 4.0, signal="SIGINT", step=61, ended_after_s=4.2,
            others=(BystanderState(processes=these(0, 1, 2), state="ended"),),
        ),
        "26": failed(
            "exception", 1, 0.7, nan, n=2, attempts=6, logs="logs/attempt0",
            others=(waiting(0, place=step, step=5),),
        ),
        "26, attempt 2": failed(
            "exception", 1, 0.7, nan, n=2, attempt=2, attempts=6, logs="logs/attempt1",
            as_before=True, others=(waiting(0, place=step, step=5),),
        ),
        "26, attempt 4": failed(
            "exception", 1, 0.7, nan, n=2, attempt=4, attempts=6, logs="logs/attempt3",
            as_before=True, others=(waiting(0, place=step, step=5),), advice=(loop,),
        ),
    }  # fmt: skip


def many() -> dict[str, JobFailure]:
    """Jobs of 64 processes, and of 1,024 on 128 hosts."""
    hosts = {f"node{i}": ProcessSet(range(8 * i, 8 * i + 8)) for i in range(8)}
    row = raised(
        63, error="ValueError", message="row of 4097 tokens, 4096 allowed", step=5120,
        log="node7:p0063.log",
        frames=(
            frame(88, "<module>", "main()"),
            frame(31, "pack", 'raise ValueError(f"row of {len(row)} tokens, {limit} allowed")',
                  "pipeline/tokens.py"),
        ),
    )  # fmt: skip
    config = at(12, "assert_same", source='shoal.assert_same(config, name="config")')
    groups = [
        ProcessSet([17]), ProcessSet([400]), ProcessSet(range(18, 27)), ProcessSet(range(30, 40)),
        ProcessSet(range(50, 61)), ProcessSet(range(128, 256)),
    ]  # fmt: skip
    rest = ProcessSet(set(range(1024)) - {process for group in groups for process in group})
    values = [17, 400, 2, 3, 4, 1, 0]
    sides = tuple(
        DivergenceSide(processes=group, said=str(value), place=config)
        for group, value in zip([*groups, rest], values, strict=True)
    )
    seeds = Cause(
        processes=ProcessSet(range(1024)), kind="diverged",
        difference=Difference(
            what="value", call="assert_same", name="config", path="['seed']", sides=sides
        ),
    )  # fmt: skip
    return {
        "64 processes": failed(
            "exception", 1, 812.0, row, n=64, hosts=hosts,
            others=(BystanderState(
                processes=ProcessSet(range(63)), state="waiting",
                place=CallPlace(call="allgather", file="train.py", line=71),
            ),),
        ),
        "1,024 processes": failed(
            "diverged", 70, 9.4, seeds, n=1024,
            hosts={f"node{i}": ProcessSet(range(8 * i, 8 * i + 8)) for i in range(128)},
            advice=("It is the first leaf that differs; later ones were not compared.",),
        ),
    }  # fmt: skip


def example_failures() -> dict[str, JobFailure]:
    """Return every example by the heading of its report."""
    examples = exceptions() | deaths() | exits() | differences() | waits() | stalls() | ends()
    examples |= attempts() | many()
    return dict(sorted(examples.items()))
