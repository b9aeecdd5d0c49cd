"""Every pattern, prefix and name takes something, or the call names it: against brute force."""

from __future__ import annotations

import ast
import itertools
import random
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from checkpoint import hand_written
from plan.test_patterns import by_hand
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import plan_restore, restore
from shoal.cli.main import build
from shoal.errors import RestoreMismatchError, UsageTypeError
from shoal.runtime.client.in_process import LocalJob

PARTS = ("params", "opt", "mu", "w", "b", "w[0]", "w0", "*", "step", "!b")


def host(name, x):
    """Stand for a subtree, on the host."""


def tree_of(flat):
    if set(flat) == {"~"}:
        return flat["~"]
    tree: dict = {}
    for name, value in flat.items():
        *above, last = name.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def flat_of(tree, before=""):
    if type(tree) is not dict:
        return {before or "~": tree}
    found = {}
    for key, child in tree.items():
        found |= flat_of(child, f"{before}/{key}" if before else key)
    return found


def random_names(draw, count):
    """Return names of leaves, none of which is a folder of another."""
    names: list[str] = []
    for _ in range(count):
        name = "/".join(draw.choices(PARTS, k=draw.randint(1, 3)))
        if not any(f"{a}/".startswith(f"{b}/") for a, b in [*_pairs(name, names)]):
            names.append(name)
    return names


def _pairs(name, names):
    return itertools.chain(((name, one) for one in names), ((one, name) for one in names))


def random_target(draw, saved):
    """Return names of a target → its value there, or `host` for all that is below."""
    rename = {}
    target = {name: object() for name in saved if draw.random() < 0.9}
    if draw.random() < 0.5 and target:
        top = draw.choice([*target]).split("/")[0]
        new = draw.choice(["enc", "model/enc"])
        rename = {new: top}
        target = {
            new + name[len(top) :] if f"{name}/".startswith(f"{top}/") else name: value
            for name, value in target.items()
        }
    for name in [*target]:
        above = "/".join(name.split("/")[:-1])
        if above and draw.random() < 0.2 and name in target:
            target = {n: v for n, v in target.items() if not n.startswith(f"{above}/")}
            target[above] = host
    if draw.random() < 0.2:
        target["more"] = object()
    return target, rename


def stored_name(rename, name):
    fitting = [p for p in rename if f"{name}/".startswith(f"{p}/")]
    if not fitting:
        return name
    prefix = max(fitting, key=len)
    return rename[prefix] + name[len(prefix) :]


def expected(saved, target, rename, only):
    """Return the flat result, the names that must be in the error, or both empty."""
    units = {}  # of each leaf of the target: its names → those in the checkpoint
    for name, value in target.items():
        stored = stored_name(rename, name)
        if stored in saved:
            units[name] = {name: stored}
        elif value is host:
            below = {name + s[len(stored) :]: s for s in saved if s.startswith(f"{stored}/")}
            units[name] = below
        else:
            units[name] = {}
    known = {n for name, unit in units.items() for n in (unit or [name])}
    used = {s for unit in units.values() for s in unit.values()}
    spare = {s for s in saved if s not in used and not (only is not None and s in target)}
    spare -= {stored_name(rename, name) for name in target}
    universe = known | spare
    patterns = ["**"] if only in (None, "target") else only
    out = [p for p in patterns if p.startswith("!") and p not in universe]
    gone = set().union(*(by_hand(p[1:], universe) for p in out))
    into = [p for p in patterns if p not in out]
    taken = set().union(*(by_hand(p, universe) for p in into)) if into else universe
    taken = known if only == "target" else taken - gone
    bad = {s for s in spare if s in taken}
    bad |= {name for name, unit in units.items() if not unit and name in taken}
    if only not in (None, "target"):
        bad |= {p for p in out if not by_hand(p[1:], universe)}
        bad |= {p for p in into if not by_hand(p, universe) - gone}
    bad |= {p for p in rename if not any(f"{n}/".startswith(f"{p}/") for n in target)}
    result = {}
    for name, value in target.items():
        chosen = {n: s for n, s in units[name].items() if n in taken}
        if not chosen:
            result[name] = value
        result |= {n: saved[s] for n, s in chosen.items()}
    return result, bad


ADVICE = re.compile(r"^only=((?!.*'!).*?)(?: or only='target')? restores what", re.MULTILINE)


def is_named(error, name):
    """Is a leaf, a pattern or a prefix in an error? Leaves of a subtree may be one line."""
    if any(name in line for line in error.problems):
        return True
    tops = [line.partition(":")[0] for line in error.problems if "leaves are in the" in line]
    return name in error.unexpected and any(name.startswith(f"{top}/") for top in tops)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("names")


@pytest.mark.parametrize("seed", range(25))
def test_restore_matches_brute_force(folder, seed):
    """25 checkpoints, 8 targets and lists of patterns of each."""
    draw = random.Random(seed)
    saved = {name: n for n, name in enumerate(random_names(draw, draw.randint(1, 8)))}
    path = folder / str(seed)
    hand_written.write(path, tree_of(saved))
    for _ in range(8):
        target, rename = random_target(draw, saved)
        if draw.random() < 0.2:
            rename = {**rename, draw.choice(["encc", "params", "opt/mu"]): "params"}
        only = None
        if draw.random() < 0.7:
            names = [*saved, *target, *random_names(draw, 2)]
            globs = [name.rpartition("/")[0] + "/**" for name in names if "/" in name]
            choice = draw.choices([*names, *globs, "**", "*", "**/w"], k=draw.randint(1, 3))
            only = sorted({draw.choice(["", "", "!"]) + pattern for pattern in choice})
            only = draw.choice([only, only, only, "target"])
        result, bad = expected(saved, target, rename, only)
        options = {"only": only, "rename": rename or None}
        if bad:
            with pytest.raises(RestoreMismatchError) as caught:
                restore(path, tree_of(target), **options)
            assert all(is_named(caught.value, name) for name in bad), (bad, caught.value)
            for advice in ADVICE.findall(str(caught.value)):
                only = ast.literal_eval(advice)
                only = [only] if isinstance(only, str) and only != "target" else only
                assert expected(saved, target, rename, only)[1] <= set(rename), advice
            continue
        back = flat_of(restore(path, tree_of(target), **options))
        assert back == result
        plan_restore(path, tree_of(target), **options)


STATE = {"params": {"w": np.ones(2), "b": np.zeros(2)}, "opt": {"mu": np.ones(2)}, "step": 7}
IDLE = {
    "a directory": (
        {"only": ["params", "step"]},
        ("'params/**'? 'params' is a directory of 2 leaves"),
    ),
    "a typo": ({"only": ["params/**", "stp"]}, "only='stp' takes no leaf; did you mean 'step'?"),
    "left out": ({"only": ["!op/**"]}, "only='!op/**' leaves out no leaf; did you mean '!opt/**'?"),
    "taken back": ({"only": ["step", "!step"]}, "'step' takes nothing but what '!step' leaves out"),
    "a prefix": ({"rename": {"parms": "params"}}, "no leaf of the target is 'parms', or below it"),
}


@pytest.mark.parametrize("case", IDLE)
def test_a_name_beside_others_is_an_error_in_every_way_to_restore(tmp_path, case):
    options, told = IDLE[case]
    zeros = {"params": {"w": np.zeros(2), "b": np.zeros(2)}, "opt": {"mu": np.zeros(2)}, "step": 0}
    with Checkpoints(tmp_path, client=LocalJob(1).clients[0]) as ckpts:
        with pytest.raises(RestoreMismatchError, match="could not be restored") as caught:
            ckpts.resume(zeros, STATE, **options)  # nothing is saved yet
        assert told in str(caught.value)
        ckpts.save(7, STATE)
        ckpts.wait()
        path = ckpts.path_of(7)
        for call in (
            lambda: restore(path, zeros, **options),
            lambda: plan_restore(path, zeros, **options),
            lambda: ckpts.restore(7, zeros, **options),
            lambda: ckpts.restore(None, zeros, **options),
            lambda: ckpts.resume(zeros, None, **options),
        ):
            with pytest.raises(RestoreMismatchError) as caught:
                call()
            assert told in str(caught.value)
            assert "nothing was restored" in str(caught.value)
        back = restore(path, zeros, **options, missing_ok=True)
        assert back["step"] == (0 if case in ("taken back", "a typo") else 7)


def test_without_a_target_as_well(tmp_path):
    hand_written.write(tmp_path / "saved", STATE)
    with pytest.raises(RestoreMismatchError, match="'params' is a directory of 2 leaves"):
        restore(tmp_path / "saved", only=["params", "step"])
    assert restore(tmp_path / "saved", only=["nothing", "step"], missing_ok=True) == {"step": 7}
    assert restore(tmp_path / "saved", only="!params/**").keys() == {"opt", "step"}


def test_all_names_of_a_checkpoint_take_their_leaves(tmp_path):
    """Also those that are patterns, ranges that are none among them."""
    names = ["w[0]", "w0", "w[z-a]", "[9-0]", "*", "?", "**", "!w0", "[!a]", "a.b", "a b"]
    saved = {name: number for number, name in enumerate(names)}
    hand_written.write(tmp_path / "saved", saved)
    for name in names:
        assert restore(tmp_path / "saved", only=name) == {name: saved[name]}
        rest = restore(tmp_path / "saved", only=f"!{name}" if name != "w0" else "![w]0")
        assert rest == {other: n for other, n in saved.items() if other != name}
        target = dict.fromkeys(names, -1)
        back = restore(tmp_path / "saved", target, only=[name])
        assert back == {**target, name: saved[name]}


def test_a_leaf_of_the_name_of_all_is_one_of_them(tmp_path):
    saved = {"w": 1, "**": 2}
    hand_written.write(tmp_path / "saved", saved)
    assert restore(tmp_path / "saved") == saved
    assert restore(tmp_path / "saved", {"w": 0, "**": 0}) == saved
    with pytest.raises(RestoreMismatchError, match="w: is in the checkpoint, not in the target"):
        restore(tmp_path / "saved", {"**": 0})
    hand_written.write(tmp_path / "other", {**saved, "w": 9})
    command = ["ckpt", "diff", *map(str, tmp_path.iterdir())]
    found = CliRunner().invoke(build(["ckpt"]), command)
    assert found.exit_code == 1, found.output


def test_a_prefix_below_which_others_take_all_is_an_error(tmp_path):
    hand_written.write(tmp_path / "saved", {"y": {"w": 1}})
    target, rename = {"a": {"b": {"w": 0}}}, {"a": "zzz", "a/b": "y"}
    for prefix in ("a", ""):
        mapping = {prefix: "zzz", "a/b": "y"}
        with pytest.raises(
            RestoreMismatchError, match=f"longer prefixes take all leaves below '{prefix}'"
        ):
            restore(tmp_path / "saved", target, rename=mapping)
    assert restore(tmp_path / "saved", target, rename=rename, missing_ok=True)["a"]["b"]["w"] == 1


def test_suggestions_are_looked_for_a_few_times_alone(tmp_path):
    saved = {f"leaf{number:05}": number for number in range(2000)}
    hand_written.write(tmp_path / "saved", saved)
    wrong = [f"laef{number}" for number in range(2000)]
    with pytest.raises(RestoreMismatchError) as caught:
        restore(tmp_path / "saved", only=wrong)
    assert len(caught.value.problems) == 2000
    assert sum("did you mean" in line for line in caught.value.problems) <= 10


def test_a_missing_leaf_names_the_way_to_keep_the_targets_own(tmp_path):
    hand_written.write(tmp_path / "saved", {"w": 1, "opt": {"mu": 2}})
    own = {"w": 0, "opt": {"mu": 0, "nu[1]": 5}, "last_batch": {"x": 3, "y": [4, 4]}}
    with pytest.raises(RestoreMismatchError) as caught:
        restore(tmp_path / "saved", own)
    only = ["!last_batch/**", "!opt/nu[1]"]
    assert f"only={only} keeps what the target has there" in str(caught.value)
    back = restore(tmp_path / "saved", own, only=only)
    assert back == {"w": 1, "opt": {"mu": 2, "nu[1]": 5}, "last_batch": {"x": 3, "y": [4, 4]}}
    with pytest.raises(RestoreMismatchError, match=r"only=\['w', '!last_batch/x'\] keeps"):
        restore(tmp_path / "saved", own, only=["w", "last_batch/x"])


def test_a_leaf_that_is_too_many_names_the_way_to_leave_it_out(tmp_path):
    hand_written.write(tmp_path / "saved", {"w": 1, "n": 2})
    with pytest.raises(
        RestoreMismatchError, match="n: is in the checkpoint, not in the target; only='!n' "
    ):
        restore(tmp_path / "saved", {"w": 0})
    assert restore(tmp_path / "saved", {"w": 0}, only="!n") == {"w": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A state of which a target has the parameters: 3 of 603 leaves."""
    path = tmp_path_factory.mktemp("trained") / "saved"
    opt = {f"l{n}": {"mu": n, "nu": n} for n in range(299)}
    hand_written.write(
        path, {"params": {"a": 1, "b": {"c": 2, "d": 3}}, "opt": opt, "x": 1, "y": 2}
    )
    return path


def test_a_target_with_the_parameters_alone_names_the_one_pattern(trained):
    target = {"params": {"a": 0, "b": {"c": 0, "d": 0}}}
    with pytest.raises(RestoreMismatchError) as caught:
        restore(trained, target)
    assert str(caught.value).splitlines() == [
        "restore: the target does not match the checkpoint: 3 problems",
        "  - opt: 598 leaves are in the checkpoint, not in the target",
        "  - x: is in the checkpoint, not in the target",
        "  - y: is in the checkpoint, not in the target",
        "only='params/**' or only='target' restores what the target has",
        "nothing was restored",
    ]
    assert len(caught.value.unexpected) == 600
    for only in ("params/**", "target", ["target"]):
        assert restore(trained, target, only=only) == {"params": {"a": 1, "b": {"c": 2, "d": 3}}}
        assert plan_restore(trained, target, only=only).needed_bytes == 0


def test_error_suggests_only_for_the_common_leaves(trained):
    target = {"params": {"a": 0, "b": {"c": 0, "e": 5}}, "opt": {"l7": {"mu": 0, "nu": 0}}, "x": 0}
    only = ["opt/l7/**", "params/a", "params/b/c", "x"]
    for option in (None, "target"):
        with pytest.raises(
            RestoreMismatchError, match="params/b/e: is not in the checkp"
        ) as caught:
            restore(trained, target, only=option)
        assert f"\nonly={only} restores what both have\n" in str(caught.value)
    back = restore(trained, target, only=only)
    assert back["params"] == {"a": 1, "b": {"c": 2, "e": 5}}
    assert back["opt"] == {"l7": {"mu": 7, "nu": 7}}


def test_error_suggests_only_target_for_many_subtrees(trained):
    target = {"opt": {f"l{n}": {"mu": 0} for n in range(9)}}
    with pytest.raises(RestoreMismatchError, match=r"\nonly='target' restores what the target has"):
        restore(trained, target)
    assert restore(trained, target, only="target")["opt"]["l8"] == {"mu": 8}


def test_a_leaf_that_is_called_target_is_no_word(tmp_path):
    hand_written.write(tmp_path / "saved", {"online": 1, "target": 2, "step": 3})
    target = {"online": 0, "target": 0}
    assert restore(tmp_path / "saved", target, only="target") == {"online": 0, "target": 2}
    with pytest.raises(RestoreMismatchError, match="only='!step' leaves it out"):
        restore(tmp_path / "saved", target)


def test_the_word_is_of_a_target_and_stands_in_no_list(trained):
    with pytest.raises(RestoreMismatchError, match=r"only='target' takes .*no target was given"):
        restore(trained, only="target")
    with pytest.raises(RestoreMismatchError, match=r"only='target' takes no leaf"):
        restore(trained, {"x": 0}, only=["target", "x"])


def test_the_way_to_leave_a_leaf_out_holds_beside_one_that_is_called_like_it(tmp_path):
    hand_written.write(tmp_path / "saved", {"!w": 1, "n": 2, "!n": 3})
    with pytest.raises(RestoreMismatchError) as caught:
        restore(tmp_path / "saved", {"!w": 0, "w": 5, "!n": 0})
    assert "only='![n]' leaves it out" in str(caught.value)
    only = "![w]"
    assert f"only={only!r} keeps what the target has there" in str(caught.value)
    back = restore(tmp_path / "saved", {"!w": 0, "w": 5, "!n": 0}, only=[only, "![n]"])
    assert back == {"!w": 1, "w": 5, "!n": 3}


def test_a_function_that_renames_returns_names(tmp_path):
    hand_written.write(tmp_path / "saved", {"w": 1})
    with pytest.raises(UsageTypeError, match=r"rename\('w'\) returned None, not a name"):
        restore(tmp_path / "saved", {"w": 0}, rename=lambda name: None)


def test_many_names_are_as_quick_as_few(tmp_path):
    """10,000 literal names are looked up, not tried as patterns one after the other."""
    saved = {f"leaf{number}": number for number in range(10_000)}
    hand_written.write(tmp_path / "saved", saved)
    assert restore(tmp_path / "saved", dict.fromkeys(saved, -1), only=[*saved]) == saved
