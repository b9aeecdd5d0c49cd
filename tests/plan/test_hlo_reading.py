"""HLO text is read as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.plan.hlo import hlo_text
from shoal.plan.hlo_reading import layout_of_text
from shoal.testing.strategies import layouts, meshes


@given(layouts(meshes(max_devices=24)))
def test_a_text_reads_as_the_same_tiles(layout):
    text = hlo_text(layout)
    assert hlo_text(layout_of_text(text)) == text


@given(layouts(meshes(max_devices=24, reordered=False)))
def test_both_versions_say_the_same_of_devices_in_order(layout):
    read = [layout_of_text(hlo_text(layout, version=v)) for v in (1, 2)]
    assert hlo_text(read[0]) == hlo_text(read[1]) == hlo_text(layout)


@pytest.mark.parametrize(
    "text",
    ["", "{manual}", "{unreduced}", "{devices=[2,2]0,1,2}", "{devices=[2]0,0}",
     "{devices=[2]<=[2]T(1)}", "{devices=[2]<=[3]}",
     "{devices=[2,2]<=[2,2]T(0,0)}", "{devices=[]}", "{devices=[0]<=[0]}",
     f"{{maximal device={'9' * 5000}}}", f"{{maximal device={1 << 70}}}",
     f"{{devices=[2]0,{1 << 70}}}", f"{{devices=[2]0,{'9' * 5000}}}",
     f"{{devices=[{'9' * 5000}]<=[1]}}", f"{{devices=[1]<=[{'9' * 5000}]}}",
     f"{{devices=[1]<=[1]T({'9' * 5000})}}", f"{{devices=[1]<=[{','.join('1' * 100)}]}}",
     "{devices=[\u0663]<=[\u0663]}",
     "{devices=[2]<=[99999999999]}", "{devices=[2]0,1", "{maximal device=x}"],
)  # fmt: skip
def test_texts_that_lay_nothing_out_are_refused(text):
    with pytest.raises(UsageError):
        layout_of_text(text)


@given(st.from_regex(r"\{devices=\[[0-9,]*\](<=\[)?[0-9,]*\]?(T\([0-9,]*\))?\}", fullmatch=True))
def test_any_text_is_a_layout_or_a_usage_error(text):
    try:
        layout = layout_of_text(text)
    except UsageError:
        return
    assert layout_of_text(hlo_text(layout)) == layout


def test_layout_of_text_refuses_values_that_are_not_strings():
    with pytest.raises(TypeError, match="must be a string"):
        layout_of_text(3)
