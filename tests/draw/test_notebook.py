"""Notebooks show pictures, and nothing is loaded or broken where there is none."""

from __future__ import annotations

import builtins
import json
import pickle
import subprocess
import sys
import types
import xml.etree.ElementTree as ET

import pytest

from shoal.draw.describe import describe
from shoal.draw.notebook import register
from shoal.plan.cost import cost
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.plan.topology import parse
from shoal.plan.transfer.plan import plan_transfer
from shoal.plan.transfer.traffic import traffic_of

SHOWN = (
    Mesh({"x": 2}),
    Layout(Mesh({"x": 2}), "x"),
    cost(parse("v5e:2x4"), Mesh({"x": 8}), "all_reduce", "x", 1 << 20),
    traffic_of(plan_transfer(Layout(Mesh({"x": 2}), "x"), Layout(Mesh({"x": 2}), None), (2,), 4)),
    *map(parse, ("v5e:2x4", "v5e:2x4 x 2 slices", "gpu:2 hosts x 4", "flat:3")),
)


class Formatter:
    """As much of IPython's formatter as is used."""

    def __init__(self):
        self.drawers = {}

    def for_type_by_name(self, module, name, draw):
        self.drawers[module, name] = draw

    def __call__(self, value):
        kind = type(value)
        return self.drawers[kind.__module__, kind.__name__](value)


def shell(**formatters):
    display = types.SimpleNamespace(formatters=formatters)
    return types.SimpleNamespace(display_formatter=display)


@pytest.mark.parametrize("value", SHOWN, ids=lambda value: type(value).__name__)
def test_registered_values_are_shown_as_pictures(value):
    formatter = Formatter()
    register(shell(**{"text/html": formatter}))
    assert ET.fromstring(formatter(value)).get("role") == "img"


@pytest.mark.parametrize("value", [SHOWN[0], SHOWN[1], SHOWN[3]], ids=["mesh", "layout", "moves"])
def test_description_has_html_text_and_pickled_forms(value):
    told = describe(value)
    assert ET.fromstring(told._repr_html_()).get("role") == "img"
    printed = []
    told._repr_pretty_(types.SimpleNamespace(text=printed.append), cycle=False)
    assert printed == [told]  # lines, where a string would be quoted
    again = pickle.loads(pickle.dumps(told))
    assert again == told
    assert again._repr_html_() == told._repr_html_()


def test_describing_in_a_notebook_displays_nothing_by_itself(monkeypatch):
    displayed = []
    module = types.ModuleType("IPython.display")
    module.display = lambda *values, **_: displayed.append(values)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: kernel, raising=False)
    describe(Mesh({"x": 2}))
    assert displayed == []


def test_too_large_values_have_no_html_form():
    formatter = Formatter()
    register(shell(**{"text/html": formatter}))
    assert formatter(Layout(Mesh({"x": 1 << 40}), "x")) is None
    assert formatter(parse("flat:99999999")) is None


@pytest.mark.parametrize("ip", [None, object(), shell(), shell(**{"text/plain": Formatter()})])
def test_other_shells_stay_as_they_are(ip):
    register(ip)


PROGRAM = """
import json, sys, types
formatter = types.SimpleNamespace(names=[])
formatter.for_type_by_name = lambda module, name, draw: formatter.names.append(name)
display = types.SimpleNamespace(formatters={"text/html": formatter})
shells = {
    "notebook": lambda: types.SimpleNamespace(display_formatter=display),
    "module": lambda: None,
}
if SHELL in shells:
    sys.modules["IPython"] = types.SimpleNamespace(get_ipython=shells[SHELL])
elif SHELL == "strange":
    sys.modules["IPython"] = types.ModuleType("IPython")
import shoal
loaded = [name for name in ("numpy", "rich", "shoal.draw.notebook") if name in sys.modules]
print(json.dumps([formatter.names, loaded]))
"""


@pytest.mark.parametrize("kind", ["notebook", "module", "strange", "none"])
def test_importing_registers_in_a_shell_alone_and_loads_nothing(kind):
    program = f"SHELL = {kind!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names, loaded = json.loads(done.stdout)
    expected = ["Mesh", "Layout", "Torus", "Slices", "Hosts", "Flat", "Cost", "Traffic"]
    assert names == (expected if kind == "notebook" else [])
    assert loaded == (["shoal.draw.notebook"] if kind == "notebook" else [])


def test_in_a_real_shell():
    pytest.importorskip("IPython")
    from IPython.core.formatters import DisplayFormatter

    display = DisplayFormatter()
    register(types.SimpleNamespace(display_formatter=display))
    for value in (*SHOWN, describe(SHOWN[0])):
        data, _ = display.format(value)
        assert data["text/html"].startswith("<svg")
        assert data["text/plain"]
        assert not data["text/plain"].startswith("'")
        assert data["text/plain"]
