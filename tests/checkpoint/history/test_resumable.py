"""A run that could not be resumed is refused before it begins."""

import numpy as np
import pytest

import shoal
from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.errors import DivergenceError, RestoreMismatchError, UsageTypeError
from shoal.runtime.barrier import barrier
from shoal.runtime.client.in_process import LocalJob


@pytest.fixture
def ckpts(tmp_path):
    with Checkpoints(tmp_path, client=LocalJob(1).clients[0]) as history:
        yield history


@pytest.fixture(scope="module")
def mesh():
    return shoal.make_mesh({"x": 4, "y": 2})


def begun(mesh, **more):
    rows = shoal.Layout(mesh, "x", None)
    return {"w": shoal.put(np.ones((8, 3), np.float32), rows), "epoch": 0, **more}


def test_a_target_that_fits_is_no_matter(ckpts, mesh):
    turned = shoal.Layout(mesh, "y", None)
    for target in ({"w": turned, "epoch": 0}, turned, begun(mesh), None):
        state, first = ckpts.resume(target, lambda: begun(mesh))
        assert (first, state["epoch"]) == (0, 0)
    ckpts.save(0, state)
    ckpts.wait()
    state, first = ckpts.resume({"w": turned, "epoch": 0}, None)
    assert first == 1
    assert state["w"].sharding.spec[0] == "y"


def test_layouts_for_non_arrays_are_refused(ckpts, mesh):
    place, rows = shoal.Layout(mesh), shoal.Layout(mesh, "x", None)
    ckpts.save(0, begun(mesh, none=None, name="run"))
    ckpts.wait()
    target = {"w": rows, "epoch": 0, "none": place, "name": ""}
    assert ckpts.restore(0, target)["epoch"] == 0
    assert ckpts.restore(0, rows)["epoch"] == 0  # for all arrays
    with pytest.raises(RestoreMismatchError) as info:
        ckpts.restore(0, {**target, "epoch": place, "name": shoal.named_sharding(place)})
    assert info.value.wrong_dtype == ("epoch", "name")
    told = "epoch: was saved as int, which is not an array; pass any int in place of the layout"
    assert told in str(info.value)


@pytest.mark.parametrize(
    ("change", "attribute"),
    [
        (lambda target: target.pop("w"), "unexpected"),
        (lambda target: target.update(v=target["w"]), "missing"),
        (lambda target: target.update(w=np.ones((8, 4), np.float32)), "wrong_shape"),
        (lambda target: target.update(w=np.ones((8, 3), np.int32)), "wrong_dtype"),
    ],
)
def test_target_that_does_not_match_init_raises_at_the_start(ckpts, mesh, change, attribute):
    target = {"w": shoal.Layout(mesh, "x", None), "epoch": 0}
    change(target)
    with pytest.raises(RestoreMismatchError, match="what `init` made") as caught:
        ckpts.resume(target, lambda: begun(mesh))
    assert getattr(caught.value, attribute)


def test_a_state_of_which_only_a_part_would_come_back_is_refused(ckpts, mesh):
    target = {"w": shoal.Layout(mesh, "x", None)}
    with pytest.raises(RestoreMismatchError, match=r"what `init` made .*\n  - ~: .*: 'epoch'"):
        ckpts.resume(target, begun(mesh), only="w")
    with pytest.raises(UsageTypeError, match="resume: cannot_be_saved: is an object"):
        ckpts.resume(target, begun(mesh, cannot_be_saved=object()))
    own = {**target, "epoch": shoal.Layout(mesh)}
    with pytest.raises(
        RestoreMismatchError, match="epoch: only= leaves it out; the target has a Layout"
    ):
        ckpts.resume(own, begun(mesh), only="w")
    assert ckpts.resume({**target, "epoch": 7}, begun(mesh), only="!epoch")[1] == 0


def test_names_that_the_next_start_would_not_find_are_refused(ckpts, mesh):
    """`rename=` reads what another program saved; this one saves under its own names."""
    target = {"v": shoal.Layout(mesh, "x", None), "epoch": 0}
    ckpts.save(0, begun(mesh))
    ckpts.wait()
    with pytest.raises(
        RestoreMismatchError, match="restore an older step once with rename=, save it"
    ):
        ckpts.resume(target, None, rename={"v": "w"})
    ckpts.save(1, ckpts.restore(0, target, rename={"v": "w"}))
    ckpts.wait()
    assert ckpts.resume(target, None)[1] == 2


def test_names_that_would_be_swapped_again_are_refused(tmp_path):
    state = {"a": np.zeros(2), "b": np.ones(2)}
    with Checkpoints(tmp_path, client=LocalJob(1).clients[0]) as ckpts:
        ckpts.save(0, state)
        ckpts.wait()
        with pytest.raises(RestoreMismatchError, match="a: would have the value of b"):
            ckpts.resume(state, None, rename={"a": "b", "b": "a"})


def test_targets_and_options_are_compared_while_nothing_is_saved(tmp_path, mesh):
    init = {"w": np.ones((8, 4), np.float32), "v": np.ones(8, np.float32)}
    rows, columns = shoal.Layout(mesh, "x"), shoal.Layout(mesh, None, "y")
    differing = [
        ((rows, {}), (columns, {})),
        ((None, {}), (rows, {})),
        (({"w": rows, "v": mesh}, {}), ({"w": rows, "v": rows}, {})),
        ((init, {"only": "*"}), (init, {"only": "w"})),
        ((init, {"dtype": "any"}), (init, {"dtype": "safe"})),
        ((init, {"check_init": True}), (init, {"check_init": False})),
    ]

    def run(client):
        said = []
        one = Checkpoints(tmp_path, timeout_s=PATIENCE_S / 2, client=client)
        for sides in differing:
            target, options = sides[client.process]
            try:
                one.resume(target, init, **options)
                said.append(None)
            except DivergenceError as error:
                said.append(len(error.sides))
            barrier.on(client, "in step", timeout_s=PATIENCE_S / 2)
        assert one.resume(rows, init)[1] == 0
        one.close()
        return said

    assert run_all(LocalJob(2), run) == [[2] * len(differing)] * 2
