"""Topologies, meshes on them, and a reader of SVG, for tests of pictures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from shoal.draw.media.svg import text_width
from shoal.draw.wiring.mesh_scene import draw_wires
from shoal.plan.placement import place
from shoal.plan.topology import parse

SAMPLE = {  # topology → axes
    "v5e:2x4": {"data": 2, "model": 4},
    "v5e:16x16": {"data": 16, "model": 16},
    "v3:4x4": {"x": 4, "y": 8},
    "v4:2x2x4": {"x": 16},
    "v5p:4x4x4": {"data": 4, "model": 16},
    "v5p:8x8x8": {"data": 8, "model": 64},
    "tpu7x:4x4x4": {"data": 8, "model": 16},
    "torus:7": {"x": 7},
    "torus:2x2 wrap=xy": {"x": 2, "y": 2},
    "torus:3x3x3": {"a": 3, "b": 9},
    "torus:4x6 wrap=y host=2x2": {"a": 6, "b": 4, "one": 1},
    "v5e:4x8 x 2 slices": {"data": 4, "model": 16},
    "v5e:4x4 + v5e:2x8": {"data": 2, "model": 16},
    "gpu:4 hosts x 8": {"data": 4, "model": 8},
    "gpu:16 hosts x 8 switch=4": {"pipe": 2, "data": 8, "model": 8},
    "cpu:16 hosts x 1": {"x": 16},
    "cpu:3 hosts x 3": {"x": 9},
    "flat:24": {"x": 24},
}
LARGE = {
    "v4:16x16x16": {"data": 64, "model": 64},
    "v5e:16x16 x 50 slices": {"data": 50, "model": 256},
    "torus:100x100": {"x": 100, "y": 100},
    "cpu:4096 hosts x 1": {"x": 4096},
    "gpu:512 hosts x 8 switch=32": {"data": 512, "model": 8},
    "flat:5000": {"x": 5000},
}
NAMESPACE = "{http://www.w3.org/2000/svg}"


def scene_of(text, axes, **settings):
    """Return the scene of a topology's text and a mesh on it."""
    topology = parse(text)
    return draw_wires(topology, place(topology, axes, **settings))


def elements(svg, name, kind=None):
    """Return the elements of a name, and of a class if one is given."""
    named = ET.fromstring(svg).iter(NAMESPACE + name)
    return [
        element for element in named if kind is None or kind in element.get("class", "").split()
    ]


def texts_outside(svg):
    """Return the texts that reach beyond the picture."""
    root = ET.fromstring(svg)
    left, top, wide, high = map(float, root.get("viewBox").split())
    outside = []
    for element in root.iter(NAMESPACE + "text"):
        x, y, size = (float(element.get(name)) for name in ("x", "y", "font-size"))
        width = text_width(element.text, size)
        anchor = element.get("text-anchor") or (
            "middle" if element.get("class") == "id" else "start"
        )
        begin = x - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        inside = left <= begin and begin + width <= left + wide
        if not inside or not top <= y - size <= y <= top + high:
            outside.append(element.text)
    return outside


def points_outside(svg):
    """Return the lines that reach beyond the picture."""
    root = ET.fromstring(svg)
    left, top, wide, high = map(float, root.get("viewBox").split())
    outside = []
    for element in root.iter(NAMESPACE + "path"):
        numbers = list(map(float, re.findall(r"-?[\d.]+", element.get("d"))))
        xs, ys = numbers[::2], numbers[1::2]
        if min(xs) < left or max(xs) > left + wide or min(ys) < top or max(ys) > top + high:
            outside.append(element.get("d"))
    return outside
