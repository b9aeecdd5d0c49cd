"""`shoal mesh` and `shoal layout`, as a person runs them."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from shoal.cli.main import build

RUNNER = CliRunner()


def shoal(*arguments):
    return RUNNER.invoke(build(["mesh", "layout"]), arguments)


@pytest.mark.parametrize(
    "axes", ['{"data": 4, "model": 2}', "data=4 model=2", "data=4,model=2", "data=4, model=2"]
)
def test_mesh_draws(axes):
    result = shoal("mesh", axes, "-n", "2")
    assert result.exit_code == 0
    assert "data=4, model=2; 8 cpu devices, 2 processes" in result.output
    assert "7 p1" in result.output


@pytest.mark.parametrize(
    ("words", "quoted"),
    [
        ("v5e:4x4 data=4 model=4", ("v5e:4x4", "data=4 model=4")),
        ("v5e:4x4 data=4, model=4", ("v5e:4x4", "data=4 model=4")),
        ("v5e:4x8 x 2 slices data=4 model=16", ("v5e:4x8 x 2 slices", "data=4 model=16")),
        ("v5e:4x4 + v5e:2x2 data=20", ("v5e:4x4 + v5e:2x2", "data=20")),
        ("torus:4x4 wrap=xy data=16", ("torus:4x4 wrap=xy", "data=16")),
        ("gpu:2 hosts x 8 data=16", ("gpu:2 hosts x 8", "data=16")),
        ("v5e:2x2 x=2 y=2 | ids 3..0", ("v5e:2x2", "x=2 y=2 | ids 3..0")),
        ("data=4 model=2", ("data=4 model=2",)),
        ("a=2 b=2 c=2", ("a=2 b=2 c=2",)),
    ],
)
def test_words_need_no_quotes(words, quoted):
    found = shoal("mesh", *words.split(), "--json")
    assert found.exit_code == 0, found.exception
    assert found.output == shoal("mesh", *quoted, "--json").output


def test_mesh_as_json():
    facts = json.loads(shoal("mesh", "x=2 y=2 | ids 3..0", "--json").output)
    assert facts["mesh"] == "x=2 y=2 | ids 3..0"
    assert facts["device_ids"] == [[3, 2], [1, 0]]


@pytest.mark.parametrize(
    "arguments",
    [
        ("data, model @ data=4 model=2", "--shape", "8,4", "--dtype", "bfloat16"),
        ("data, model", "--mesh", '{"data": 4, "model": 2}', "--shape", "8x4", "--dtype", "int16"),
    ],
)
def test_layout_draws(arguments):
    result = shoal("layout", *arguments)
    assert result.exit_code == 0
    assert "dim 0 (data) ↓" in result.output
    assert "8 B per device, 64 B in all" in result.output


def test_commas_stand_where_blanks_may():
    facts = [
        json.loads(shoal("layout", f"x, - @ {mesh} | ids 3..0", "--json").output)
        for mesh in ("x=2 y=2", "x=2,y=2", "x=2, y=2")
    ]
    assert facts[0] == facts[1] == facts[2]
    words = ("mesh", "v5e:2x4", "data=4,model=2", "--json", "--weights")
    weighed = [
        shoal(*words, text).output for text in ("data=1KiB model=4KiB", "data=1KiB,model=4KiB")
    ]
    assert json.loads(weighed[0]) == json.loads(weighed[1])
    for text in ("x=2,,y=2", ", x=2", ","):
        assert shoal("mesh", text).exit_code != 0


def test_names_may_hold_an_at_sign():
    result = shoal("layout", '"a@b" @ "a@b"=2', "--json")
    assert json.loads(result.output)["layout"] == '"a@b" @ "a@b"=2'


def test_pending_sums_as_json():
    facts = json.loads(shoal("layout", " - | sum over x @ x=2", "--json").output)
    assert facts["boxes"] == [{"start": [0], "stop": [1], "devices": [0, 1], "writer": 0}]


def test_layout_as_json():
    facts = json.loads(shoal("layout", "y, - @ x=2 y=2", "--shape", "4,3", "--json").output)
    assert facts["hlo"] == "{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}"
    assert facts["boxes"][1] == {"start": [2, 0], "stop": [4, 3], "devices": [1, 3], "writer": 0}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["mesh", '{"data": 4, "data": 2}'], "axis 'data' is repeated"),
        (["mesh", '{"data": '], "is not JSON"),
        (["mesh", '{"data": [4]}'], "size [4] must be an integer"),
        (["mesh", "data=4", "-n", "3"], "cannot be spread evenly over 3"),
        (["mesh", '{"a":' * 20_000], "is not JSON"),
        (["mesh", "x=1099511627776", "-n", "2"], "at most 16777216 devices"),
        (["layout", "x @ x=1099511627776"], "it has more than 16777216 devices"),
        (["layout", "data, - @ data=4", "--shape", "4,,4"], "must be numbers"),
        (["layout", "data @ data=4", "--shape", "4", "--dtype", "f4,("], "not a dtype"),
        (["mesh", "data=4", "-n", "0"], "cannot be spread evenly over 0"),
        (["layout", "dat @ data=4"], "did you mean 'data'?"),
        (["layout", "data"], "pass the mesh once"),
        (["layout", "data @ data=4", "--mesh", "data=4"], "pass the mesh once"),
        (["layout", "data @ data=4", "--shape", "4,a"], "must be numbers"),
        (["layout", "data @ data=4", "--shape", "4", "--dtype", "float33"], "not a dtype"),
        (["layout", "data @ data=4", "--shape", "4,4"], "rank 2"),
    ],
)
def test_errors_are_one_sentence_and_code_2(arguments, part):
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("text", ["-, n @ n=2", "-,n@ n=2", "- @ h=2", "-|sum over n @ n=2"])
def test_a_first_dim_that_is_whole_is_no_option(text):
    command = [sys.executable, "-m", "shoal", "layout", text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "dim 0 (whole)" in done.stdout


def test_layout_command_works_without_jax():
    block = "import sys; sys.modules['jax'] = None; from shoal.cli.main import main; main()"
    command = [sys.executable, "-c", block, "layout", "x @ x=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_locale_without_utf_8_gets_escapes():
    command = [sys.executable, "-m", "shoal", "layout", "data,model", "--mesh", "data=4,model=2"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--shape", "8,8"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "each block on 1 device" in done.stdout
