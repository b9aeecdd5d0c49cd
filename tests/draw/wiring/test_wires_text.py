"""Topologies as text: nothing wider than the terminal, every id there, colour never needed."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from draw.wired_topologies import LARGE, SAMPLE
from shoal.draw.media.terminal import plain
from shoal.draw.wiring.wires_text import render_wires
from shoal.plan.placement import place
from shoal.plan.topology import parse

ALL = {**SAMPLE, **LARGE}


def drawn(text, width=80, axes=None):
    topology = parse(text)
    mesh = place(topology, ALL[text] if axes is None else axes)
    return plain(render_wires(topology, mesh, width, has_colours=False), width)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("text", ALL)
def test_no_line_is_wider_than_the_terminal(text, width):
    lines = drawn(text, width).splitlines()
    assert max(map(len, lines)) <= width
    topology = parse(text)  # and nothing was cut to be so: a wider console shows the same frames
    rendered = render_wires(topology, place(topology, ALL[text]), width, has_colours=False)
    framed = re.compile(r" *[╭│┆├╰]|  \d")
    whole = [line for line in plain(rendered, 1000).splitlines() if framed.match(line)]
    assert whole == [line for line in lines if framed.match(line)]
    assert len(lines) < 250
    for name, size in ALL[text].items():
        assert any(line.startswith(f"{name}={size}  ") for line in lines)


@pytest.mark.parametrize("text", SAMPLE)
def test_every_device_is_drawn_once_in_its_panel(text):
    output = drawn(text, 80)
    frames = "\n".join(line for line in output.splitlines() if re.match(r" *[╭│┆├╰]", line))
    assert sorted(map(int, re.findall(r"\d+", frames))) == list(range(parse(text).num_devices))


def test_hosts_are_framed_and_linked_ends_dashed():
    assert drawn("torus:4x6 wrap=y host=2x2") == (
        "torus:4x6 wrap=y host=2x2\n"
        "a=6 b=4 one=1, 24 chips, 6 hosts\n"
        "╭╌╌╌╌╌╌┬╌╌╌╌╌╌╮\n"
        "│  0  1│  2  3│\n"
        "│  4  5│  6  7│\n"
        "├──────┼──────┤\n"
        "│  8  9│ 10 11│\n"
        "│ 12 13│ 14 15│\n"
        "├──────┼──────┤\n"
        "│ 16 17│ 18 19│\n"
        "│ 20 21│ 22 23│\n"
        "╰╌╌╌╌╌╌┴╌╌╌╌╌╌╯\n"
        "a=6  6 hops, the longest 2 links, 12 in all\n"
        "  0 → 8 → 16 → 18 → 10 → 2 → 0\n"
        "b=4  4 hops of 1 link\n"
        "  0 → 4 → 5 → 1 → 0\n"
        "one=1  no hops\n"
        "frame: the chips of one host\n"
        "dashed edge: the ends of these lines are linked"
    )


def test_places_without_a_device_are_empty():
    assert "├──────┼──────┤\n│ 6 7 8│      │\n╰──────┴──────╯" in drawn("cpu:3 hosts x 3")


def test_slices_stand_apart_and_say_which_they_are():
    lines = drawn("v5e:4x8 x 2 slices").splitlines()
    assert lines[2] == "slice 0          slice 1"
    assert lines[4] == "│  0  1│  2  3│  │ 32 33│ 34 35│"


def test_letters_stand_for_4096_chips():
    text = "v4:16x16x16"
    output, mesh = drawn(text), place(parse(text), LARGE[text])
    frames = "".join(line for line in output.splitlines() if line.startswith("┆"))
    letters = re.sub(r"[┆\s]", "", frames)
    assert len(letters) == 4096
    assert "same letter: same ring of model, 64 in all; letters repeat after 62" in output
    first = re.findall(r"(?<=┆)\w{16}(?=┆)", output)[0]
    at_start = mesh.device_ids[0] < 16  # of the first ring, the chips of the first line
    assert first.count("a") == at_start.sum()


def test_colours_are_spoken_of_only_where_there_are_some():
    topology = parse("v5p:4x4x4")
    mesh = place(topology, SAMPLE["v5p:4x4x4"])
    for colours in ("truecolor", None):
        console = Console(
            file=io.StringIO(), width=80, color_system=colours, force_terminal=bool(colours)
        )
        console.print(render_wires(topology, mesh, 80, has_colours=bool(colours)))
        output = console.file.getvalue()
        assert ("same colour: same ring of model, 4 in all" in output) == bool(colours)
        assert ("\x1b[" in output) == bool(colours)


def test_wires_alone():
    topology = parse("v5e:2x4")
    output = plain(render_wires(topology, None, 80), 80)
    assert output.splitlines()[:4] == ["v5e:2x4", "8 chips, 2 hosts", "╭────╮", "│ 0 1│"]
    assert "·" in plain(render_wires(topology, None, 5), 5)
