"""`shoal mesh TOPOLOGY AXES`, `--svg` and `--html`, as a person runs them."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from shoal.cli.main import build
from shoal.plan.placement import place
from shoal.plan.topology import parse

RUNNER = CliRunner()
LINE = "data=8 model=64"


def shoal(*arguments):
    return RUNNER.invoke(build(["mesh", "layout"]), arguments)


def test_a_mesh_on_a_topology_needs_no_jax(tmp_path):
    block = "import sys; sys.modules['jax'] = None; from shoal.cli.main import main; main()"
    arguments = ["mesh", "v5p:8x8x8", LINE, "--svg", "out.svg", "--html", "out.html"]
    done = subprocess.run(
        [sys.executable, "-c", block, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("wrote out.svg\nwrote out.html\n")
    assert "model=64  64 hops of 1 link" in done.stdout
    assert "\x1b" not in done.stdout  # it is no terminal
    assert max(map(len, done.stdout.splitlines())) <= 80
    ET.parse(tmp_path / "out.svg")
    assert (tmp_path / "out.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_mesh_on_a_topology_as_json():
    facts = json.loads(shoal("mesh", "v5e:2x4 x 2 slices", "data=4 model=4", "--json").output)
    mesh = place(parse("v5e:2x4 x 2 slices"), {"data": 4, "model": 4})
    assert facts["mesh"] == mesh.text
    assert facts["topology"] == {"topology": "v5e:2x4 x 2 slices"}
    assert facts["slices"] == (mesh.device_ids // 8).tolist()
    at = [[x + 2 * y for x, y in row] for row in facts["coords"]]
    assert at == (mesh.device_ids % 8).tolist()
    assert facts["rings"]["data"] == {"longest": 2, "total": 4, "crossings": 2}


def test_placing_otherwise():
    ours = shoal("mesh", "v5e:2x4", "data=8").output
    theirs = shoal("mesh", "v5e:2x4", "data=8", "--order", "jax").output
    assert "data=8  8 hops of 1 link" in ours
    assert ours != theirs
    far = shoal("mesh", "v5e:2x4 x 2 slices", '{"data": 4, "model": 4}', "--across", "model=2")
    assert "between slices" in far.output.partition("model=4")[2].partition("model=4")[2]


def test_json_stays_json_beside_files(tmp_path):
    result = shoal("mesh", "data=2", "--json", "--svg", str(tmp_path / "a.svg"))
    assert json.loads(result.stdout)["mesh"] == "data=2"
    assert result.stderr == f"wrote {tmp_path / 'a.svg'}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["mesh", "data=4 model=2"],
        ["mesh", "gpu:2 hosts x 8", "data=2 model=8"],
        ["layout", "data, model @ data=4 model=2", "--shape", "8,4"],
    ],
)
def test_files_are_written_and_named(arguments, tmp_path):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    result = shoal(*arguments, "--svg", str(svg), "--html", str(html))
    assert result.exit_code == 0
    assert result.stdout.endswith(f"wrote {svg}\nwrote {html}\n")
    assert ET.parse(svg).getroot().get("role") == "img"
    assert "<svg" in html.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--svg", "--html"])
@pytest.mark.parametrize(
    ("name", "part"),
    [("no/such/a", "there is no directory"), (".", "cannot be written: Is a directory"),
     ("-", "is not a file"), ("", "is not a file"), ("a\0b", "cannot be written")],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_one_clear_line(option, name, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = shoal("mesh", "data=2", option, name)
    assert part in str(result.exception)
    assert f"{option} {name!r}" in str(result.exception)
    assert "\n" not in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["v5e:2x4", "data=8", "-n", "2"], "-n does not go with a topology"),
        (["v5e:2x4", "data=8", "-n", "1"], "-n does not go with a topology"),
        (
            ["v5e:2x4", "data=2", "model"],
            "'v5e:2x4 data=2 model' is not a topology and axes: write",
        ),
        (
            ["torus:2x4", "cores=2", "x=8"],
            "pass shoal mesh 'torus:2x4' 'cores=2 x=8' or shoal mesh 'torus:2x4 cores=2' 'x=8'",
        ),
        (["v5e:2x4", "data=2", "model=2"], "has 4 devices, and v5e:2x4 has 8"),
        (["v5e:2x4"], "is a topology: also pass the axes of the mesh"),
        (["data=8", "v5e:2x4"], "the topology comes first: shoal mesh 'v5e:2x4' 'data=8'"),
        (["v5e:2x4", "data=7"], "has 7 devices, and v5e:2x4 has 8"),
        (["v5x:2x4", "data=8"], "'v5x:2x4' is not a topology"),
        (["v5e:2x4", "data=8 | ids 7..0", "--order", "jax"], "pass its axes only"),
        (["v5e:2x4", "data=8 | ids 7..0", "--across", "data=2"], "lists its device ids"),
        (["v5e:2x4", "data=8", "--weights", "data"], "must be axes with bytes"),
        (["v5e:2x4", "data=8", "--weights", "dat=1GiB"], "did you mean 'data'?"),
        (["v5e:2x4", "data=8", "--weights", "data=1Gbit"], "must be bytes"),
        (["v5e:2x4", '{"a": 2, "a": 4}'], "axis 'a' is repeated"),
        (["v5e:2x4", "data=8", "--order", "torch"], "did you mean 'torch_xla'?"),
        (["v5e:2x4 x 2 slices", "data=16", "--across", "dat=2"], "did you mean 'data'?"),
        (["data=8", "--across", "data=2"], "--across requires a topology"),
        (["data=8", "--order", "jax"], "--order requires a topology"),
        (["data=8", "--weights", "data=1"], "--weights requires a topology"),
        (["flat:99999999", "x=99999999"], "at most 4194304"),
    ],
)
def test_invalid_picture_arguments_are_refused(arguments, part):
    result = shoal("mesh", *arguments)
    assert result.exit_code != 0
    assert part in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ["mesh", "data=4 model=40"],
        ["mesh", "a=2 b=3 c=70", "-n", "7"],
        ["layout", "data, model @ data=4 model=16", "--shape", "80000,160000"],
        ["layout", "data, model @ data=4 model=16", "--shape", "80,160", "-n", "8"],
    ],
)
def test_columns_that_do_not_fit_are_left_out_and_counted(arguments):
    output = {
        width: RUNNER.invoke(build(["mesh", "layout"]), arguments, env={"COLUMNS": width}).output
        for width in ("80", "400")
    }
    assert max(map(len, output["80"].splitlines())) <= 80 < max(map(len, output["400"].split("\n")))
    assert re.search(r"\d+ of (16|40|70) columns are shown", output["80"])
    words = [set(re.findall(r"[\w:]+", text)) for text in output.values()]
    assert words[0] - words[1] <= set(re.findall(r"\d+", output["80"].splitlines()[-1]))
