"""Wrong arguments are a UsageError of every public function, and never an error of Python's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from meta.public_names import public_modules
from public.calls import Call, all_calls
from public.wrong import ANY, WRONG
from shoal.compat import multihost_utils
from shoal.errors import ShoalError, UsageError

NUMBERS = {
    "keep": 2,
    "max_host_bytes": 1 << 26,
    "n": 2,
    "prefetch": 1,
    "version": 1,
}  # where 0 is wrong


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[dict[str, Call]]:
    """Return calls of their own: one of them deletes."""
    yield all_calls(str(tmp_path))
    shoal.preemption.watch(signals=())


def outcome(call: Call, argument: str, value: object) -> BaseException | None:
    """Return how a call ends in which one argument is another."""
    try:
        call.function(**{**call.arguments, argument: value})
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    return None


def told(call: Call, argument: str, value: object, error: BaseException | None) -> str:
    return f"{call.name}({argument}={value!r}): {error!r}"[:300]


def test_wrong_arguments_are_refused(calls):
    wrong = []
    for call in calls.values():
        for argument, kind in call.kinds.items():
            for value in WRONG.get(kind, ()):
                error = outcome(call, argument, value)
                if not isinstance(error, UsageError):
                    wrong.append(told(call, argument, value, error))
    assert not wrong, "\n".join(wrong)


def test_numbers_of_numpy_and_jax_are_numbers(calls):
    """Scalars, and arrays without dims."""
    wrong = []
    for call in calls.values():
        for argument, kind in call.kinds.items():
            plain = call.arguments.get(argument, NUMBERS.get(argument, 0))
            if kind.rstrip("?") in ("seconds", "wait"):
                plain = float(plain or 30)
                forms = [np.float32(plain), np.int64(plain), np.array(plain), jnp.asarray(plain)]
            elif kind.rstrip("?") in ("count", "int") and isinstance(plain, int):
                forms = [np.int64(plain), np.uint32(plain), np.array(plain), jnp.asarray(plain)]
            else:
                continue
            if call.name == "delete":
                continue
            error = outcome(call, argument, plain)
            if isinstance(error, UsageError):
                wrong.append(told(call, argument, plain, error))
            for value in forms:
                error = outcome(call, argument, value)
                if isinstance(error, UsageError):
                    wrong.append(told(call, argument, value, error))
    assert not wrong, "\n".join(wrong)


def test_whatever_is_given_no_error_is_one_of_pythons_own(calls):
    wrong = []
    for call in calls.values():
        for argument in (name for name, kind in call.kinds.items() if kind == "any"):
            for value in ANY:
                error = outcome(call, argument, value)
                if error is not None and not isinstance(error, ShoalError):
                    wrong.append(told(call, argument, value, error))
    assert not wrong, "\n".join(wrong)


def test_the_calls_of_the_table_work(calls):
    for call in calls.values():
        if call.name != "delete":  # at the end, for what it deletes is gone
            call.function(**call.arguments)
    calls["delete"].function(**calls["delete"].arguments)


def test_the_table_has_every_public_function(calls):
    public = {
        name
        for _, names in public_modules()
        for name, value in names.items()
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception))
    }
    without_arguments = {"Pinned", "exit_code", "is_initialized", "notice"}
    without_arguments |= {"process_count", "process_index"}
    elsewhere = {"initialize", "shutdown"}  # tests/runtime: they change the process
    tested = {name.split()[0].removeprefix("preemption.").partition(".")[0] for name in calls}
    assert public - tested - without_arguments - elsewhere == set()


def test_the_table_has_every_argument(calls):
    """Over all rows of one function; some call it through a function of their own."""
    public = {name: value for _, names in public_modules() for name, value in names.items()}
    tried: dict[str, set[str]] = {}
    for call in calls.values():
        tried.setdefault(call.name.split()[0], set()).update(call.kinds, call.arguments)
    missing = {
        f"{name}({parameter.name})"
        for name, arguments in tried.items()
        if name in public
        for parameter in inspect.signature(public[name]).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in arguments
    }
    assert missing == {"Checkpoints(client)"}  # for tests


@pytest.mark.parametrize(
    ("call", "problem", "signature"),
    [
        (lambda: shoal.barrier("a", "b"), "shoal.barrier: takes 1 positional argument, but 2 were "
         "given; pass options by name",
         "shoal.barrier(name, *, processes=None, timeout_s=None, lane='main')"),
        (lambda: shoal.barrier("a", tmeout_s=3),
         "shoal.barrier: has no argument tmeout_s=; did you mean 'timeout_s'?",
         "shoal.barrier(name, *, processes=None, timeout_s=None, lane='main')"),
        (lambda: shoal.process_index(3), "shoal.process_index: takes 0 positional arguments, but "
         "1 was given", "shoal.process_index()"),
        (lambda: shoal.manual(1, fn=2), "shoal.manual: fn= is also given by position; needs "
         "in_layouts and out_layouts", "shoal.manual(fn, in_layouts, out_layouts, *, axes=None)"),
        (lambda: shoal.Mesh.parse(), "shoal.Mesh.parse: needs text", "shoal.Mesh.parse(text)"),
        (lambda: shoal.PerProcess(), "shoal.PerProcess: needs value", "shoal.PerProcess(value)"),
        (lambda: shoal.preemption.watch("SIGTERM"), "shoal.preemption.watch: takes 0 positional "
         "arguments, but 1 was given; pass options by name",
         "shoal.preemption.watch(*, signals=('SIGTERM',), files=(), poll=(), every_s=5.0, "
         "grace_s=None)"),
        (lambda: multihost_utils.broadcast_one_to_all(1, True, 3),
         "shoal.compat.multihost_utils.broadcast_one_to_all: takes 2 positional arguments, but 3 "
         "were given",
         "shoal.compat.multihost_utils.broadcast_one_to_all(in_tree, is_source=None)"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit_shows_the_signature(call, problem, signature):
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value) == f"{problem}\ncall it as {signature}"
    assert [entry.path.name for entry in caught.traceback] == [Path(__file__).name] * 2


def test_an_error_of_pythons_own_in_a_function_of_the_program_stays():
    def init():
        return np.ones(1, 2, 3, 4)

    with pytest.raises(TypeError) as caught:
        shoal.create(init, layouts=shoal.Layout(shoal.make_mesh({"x": -1}), None))
    assert not isinstance(caught.value, ShoalError)


@pytest.mark.parametrize(
    ("kind", "ours", "call"),
    [
        (TypeError, "keep=2 and every=100", lambda path, _: shoal.Checkpoints(
            path, max_to_keep=2, save_interval_steps=100)),
        (TypeError, r"save\(step, tree\)", lambda _, ckpts: ckpts.save(1, args=np.ones(1))),
        (TypeError, r"restore\(step, target\)", lambda _, ckpts: ckpts.restore({"w": np.ones(1)})),
        (TypeError, 'barrier\\("data is ready"\\)', lambda *_: shoal.barrier()),
        (AttributeError, r"latest\(\)", lambda _, ckpts: ckpts.latest_step),
        (AttributeError, r"wait\(\)", lambda _, ckpts: ckpts.wait_until_finished),
        (AttributeError, r"shoal\.preempted\(", lambda _, ckpts: ckpts.reached_preemption),
        (AttributeError, r"jax\.device_count\(\)", lambda *_: shoal.device_count),
        (AttributeError, r"jax\.P: shoal takes it as it takes shoal\.Layout", lambda *_: shoal.P),
        (AttributeError, r"jax\.sharding\.PartitionSpec: ", lambda *_: shoal.PartitionSpec),
        (AttributeError, r"jax\.sharding\.NamedSharding: ", lambda *_: shoal.NamedSharding),
        (AttributeError, r"jax\.sharding\.AxisType, as ", lambda *_: shoal.AxisType),
        (AttributeError, r"jax\.sharding\.AbstractMesh, or ", lambda *_: shoal.AbstractMesh),
    ],
)  # fmt: skip
def test_names_of_other_libraries_lead_to_ours(tmp_path, kind, ours, call):
    with shoal.Checkpoints(tmp_path) as ckpts, pytest.raises(kind, match=f"write {ours}"):
        call(tmp_path, ckpts)
