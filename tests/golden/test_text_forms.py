"""Text that others may have stored or sent stays readable, byte for byte."""

from pathlib import Path

import pytest

from shoal.plan.hlo import hlo_text
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh
from shoal.runtime.wire.frames import pack_frame

LINES = (Path(__file__).parent / "layouts.txt").read_text(encoding="utf-8").splitlines()
CASES = list(zip(LINES[0::3], LINES[1::3], LINES[2::3], strict=True))


@pytest.mark.parametrize(("text", "by_id", "by_position"), CASES)
def test_layouts(text, by_id, by_position):
    layout = Layout.parse(text)
    assert layout.text == text
    assert Mesh.parse(text.rpartition(" @ ")[2]) == layout.mesh
    assert hlo_text(layout, version=1) == by_id
    assert hlo_text(layout, version=2) == by_position


def test_frame_of_the_coordinator_has_the_golden_bytes():
    wanted = b"SHL1\x00\x00\x00\x0c\x00\x00\x00\x00\x00\x00\x00\x04" + b'{"do":"bye"}body'
    assert pack_frame({"do": "bye"}, b"body") == wanted
