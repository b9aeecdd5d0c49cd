"""`shoal plan`, as a person runs it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from shoal.cli.main import build
from shoal.errors import UsageError
from shoal.plan.cost import COLLECTIVES, cost
from shoal.plan.mesh import Mesh
from shoal.plan.placement import place
from shoal.plan.topology import parse

RUNNER = CliRunner()
GRID = ("v5e:4x4", "data=4 model=4")


def plan(*arguments, stdin=None):
    result = RUNNER.invoke(build(["plan", "mesh"]), ["plan", *arguments], input=stdin)
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_json_output_matches_the_library():
    facts = json.loads(plan("v5e:4x8 x 2 slices", "data=16 model=4", "--bytes", "1MiB", "--json"))
    topology = parse("v5e:4x8 x 2 slices")
    mesh = place(topology, {"data": 16, "model": 4})
    assert Mesh.parse(facts["mesh"]) == mesh
    wanted = [
        cost(topology, mesh, c, axis, 1 << 20) for axis in mesh.axis_names for c in COLLECTIVES
    ]
    assert facts["costs"] == [{**one._asdict(), "axes": [*one.axes]} for one in wanted]
    assert [(row["axis"], row["link"]) for row in facts["axes"]] == [
        ("data", "DCN"), ("model", "ICI xy")]  # fmt: skip
    assert facts["links"]["network"]["bytes_per_s"] == 12.5e9


def test_the_report():
    lines = plan("v5p:4x4x8", "data=16 model=8", "--bytes", "64MiB").splitlines()
    assert lines[0] == "v5p:4x4x8 as data=16 model=8; 128 of 128 devices"
    assert lines[1] == "ICI: 100 GB/s each way, 1 us a step (Cloud TPU: v5p)"
    assert lines[3:6] == [
        "axis   size  to the next device",
        "data     16  1 hop",
        "model     8  1 hop",
    ]
    row = next(line for line in lines if line.startswith("model") and "all_reduce" in line)
    *words, bar = row.split()
    assert words == ["model", "all_reduce", "8", "56", "MiB", "595", "us", "ICI", "z"]
    bars = {line.split()[-1] for line in lines if "ICI" in line and "us" in line.split()}
    assert bar in bars
    assert "█" * 12 in bars  # the slowest
    assert max(map(len, lines)) <= 80


def test_pictures_and_other_placings(tmp_path):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    said = plan("v5e:4x4 x 2 slices", "data=4 model=8", "--across", "model=2", "--svg", str(svg),
                "--html", str(html), "w: 64x64 float32 data, model")  # fmt: skip
    assert said.endswith(f"wrote {svg}\nwrote {html}\n")
    drawn = ET.parse(svg).getroot()
    assert len([one for one in drawn.iter() if one.get("class") == "bar"]) == 2 * len(COLLECTIVES)
    words = html.read_text(encoding="utf-8")
    assert words.count("<svg") == 2
    assert all(f"<td>{name}</td>" in words for name in (*COLLECTIVES, "float32", "DCN"))
    busy = json.loads(plan(*GRID, "--weights", "data=1GiB model=1MiB", "--json"))
    mesh = place(
        parse(GRID[0]), {"data": 4, "model": 4}, weights={"data": 1 << 30, "model": 1 << 20}
    )
    assert Mesh.parse(busy["mesh"]) == mesh


def test_speeds_are_yours():
    facts = json.loads(plan("cpu:4 hosts x 2", "data=4 model=2", "--json",
                            "--link", "8Gbit/s", "--network", "2GB/s"))  # fmt: skip
    assert [facts["links"][name]["bytes_per_s"] for name in ("near", "network")] == [1e9, 2e9]
    assert {row["link"] for row in facts["costs"]} == {"in host", "network"}


def test_orders_are_ours_jaxs_or_yours():
    hops = {}
    for order in ("shoal", "jax", "torch_xla", "dtensor", "given"):
        facts = json.loads(plan("v5e:2x4", "x=8", "--order", order, "--json"))
        hops[order] = facts["axes"][0]["steps_to_next"]
    assert hops["shoal"] == 1
    assert all(hops[order] > 1 for order in hops if order != "shoal")
    listed = json.loads(plan("v5e:2x4", "x=8 | ids 7..0", "--json"))
    assert listed["mesh"] == "x=8 | ids 7..0"
    part = plan("v5e:2x4", "x=4 | ids 2,3,5,4")
    assert "4 of 8 devices" in part


def test_a_mesh_of_one_device_sends_nothing():
    assert "nothing is sent" in plan("v5e:1x1", "x=1", "w: 3 int8 x")


TREE = {
    "dense": {
        "w": {"shape": [64, 10], "dtype": "bfloat16", "layout": "data, model"},
        "b": {"shape": [10], "dtype": "float32"},
    },
    "scale": {"shape": [], "dtype": "float32", "layout": None},
}


def test_params_show_the_bytes_on_each_device(tmp_path):
    file = tmp_path / "params.json"
    file.write_text(json.dumps(TREE))
    by_file = json.loads(plan(*GRID, "--params", str(file), "--json"))
    by_text = json.loads(plan(*GRID, "dense/w: 64x10 bfloat16 data, model", "dense/b: 10 float32",
                              "scale: () float32", "--json"))  # fmt: skip
    by_stdin = json.loads(plan(*GRID, "--params", "-", "--json", stdin=json.dumps(TREE)))
    assert by_file == by_text == by_stdin
    rows = {row["name"]: row for row in by_file["params"]}
    assert [rows[n]["bytes_per_device"] for n in rows] == [16 * 3 * 2, 40, 4]
    assert [rows[n]["copies"] for n in rows] == [1, 16, 16]
    assert rows["dense/w"]["uneven"] == ["dim 1 of 10 does not divide into 4 shards (model)"]
    assert by_file["bytes_per_device"] == 140
    assert by_file["bytes"] == 1280 + 44
    shown = plan(*GRID, "--params", str(file))
    assert "140 B on each device; 1.293 KiB in all, 1.692 copies on average" in shown
    assert "dense/w: dim 1 of 10 does not divide into 4 shards (model)" in shown
    assert " in all, 1 copy on average" in plan(*GRID, "w: 64x64 bfloat16 data, model")


def test_axes_that_split_nothing_hold_copies():
    texts = (
        "a: 8x8 float32 model+data, -",
        "b: 8x8 float32 -, model",
        "c: 8 int8 - | sum over data",
    )
    rows = json.loads(plan(*GRID, *texts, "--json"))["params"]
    assert [row["copies"] for row in rows] == [1, 4, 4]
    assert [row["shard_shape"] for row in rows] == [[1, 8], [8, 2], [8]]


def test_params_are_read_from_the_json_of_a_checkpoint():
    shown = {"mesh": "data=2 model=2", "leaves": [
        {"name": "step", "kind": "int", "dtype": "", "shape": [], "layout": ""},
        {"name": "w", "kind": "array", "dtype": "float32", "shape": [8, 4],
         "layout": "data, model @ data=2 model=2"},
    ]}  # fmt: skip
    facts = json.loads(plan(*GRID, "--params", "-", "--json", stdin=json.dumps(shown)))
    assert [(row["name"], row["shard_shape"]) for row in facts["params"]] == [("w", [2, 1])]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("v5x:4x4", "x=16"), "did you mean"),
        (("v5e:4x4", "x=8"), "8 devices, and v5e:4x4 has 16"),
        (("v5e:4x4", "x=16 | ids 1..16"), "devices that v5e:4x4 lacks: 16"),
        (("flat:8", "x=8"), "speed of the links of flat:8 is not known.*--link"),
        (("v5e:4x4", "x=16", "--bytes", "64Mb"), "must be bytes"),
        (("v5e:4x4", "x=16", "--bytes", "64MiB/s"), "must be bytes"),
        (("v5e:4x4", "x=16", "--link", "50Gb/s"), "must be a speed"),
        (("v5e:4x4", "x=16", "--link", "50GB"), "must be a speed"),
        (("v5e:4x4", "x=16", "--link", "0GB/s"), "must be above 0"),
        (("v5e:4x4", "x=16", "--order", "jaxx"), "did you mean 'jax'"),
        ((*GRID, "w"), "'NAME: SHAPE DTYPE LAYOUT'"),
        ((*GRID, "w: 8x8 float23 data, -"), "w: the dtype 'float23'"),
        ((*GRID, "w: 8xa float32 data, -"), "w: the shape '8xa'"),
        ((*GRID, "w: 8 float32 dat"), "w: .*did you mean 'data'"),
        ((*GRID, "w: 8 float32 data, -"), "w: shape .* has rank 1"),
        ((*GRID, "w: 8 float32 -", "w: 9 float32 -"), "w is given twice"),
        ((*GRID, "v: 8 float32 a", "w: 8 float32 b"), "(?s)v: .*w: "),
        ((*GRID, "--params", "no-such.json"), "No such file"),
    ],
)
def test_invalid_arguments_raise_with_the_reason(arguments, words):
    with pytest.raises(UsageError, match=words):
        plan(*arguments)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object of parameters"),
        ('{"w": 3}', "w is 3, not a parameter"),
        ('{"w": {"shape": [8], "layot": "data"}}', "w has 'layot'"),
        ('{"w": {"shape": [8.5]}}', "a list of integers"),
        ('{"w": {"shape": [8], "layout": ["data"]}}', "must be strings"),
        ('{"w": {"shape": [-8]}}', "negative size"),
        ('{"w":' * 20_000, "is not JSON"),
    ],
)
def test_wrong_trees_are_named(tree, words):
    with pytest.raises(UsageError, match=words):
        plan(*GRID, "--params", "-", stdin=tree)


def test_one_line_and_code_2_where_jax_does_not_import():
    block = "import sys; sys.modules['jax'] = None; from shoal.cli.main import main; main()"
    for arguments, code in (((*GRID,), 0), (("v5e:4x4", "data=3"), 2)):
        command = [sys.executable, "-c", block, "plan", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "\x1b" not in done.stdout
        assert (done.stdout == "") == (code == 2)
        assert done.stderr.startswith("shoal: place: ") == (code == 2)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--bytes", "1e400"), "must be a whole number of bytes"),
        (("--bytes", "1.5"), "must be a whole number of bytes"),
        (("--weights", "data=1e400"), "must be a whole number of bytes"),
        (("--network", "5GB/s"), "uses no network"),
        (("--across", ""), "--across '' must be axes"),
    ],
)
def test_amounts_that_are_none(options, words):
    with pytest.raises(UsageError, match=words):
        plan(*GRID, *options)
