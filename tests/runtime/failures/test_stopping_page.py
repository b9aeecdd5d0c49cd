"""docs/stopping.md: its reports are those of the examples; it names what `failure.json` holds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from shoal.runtime.failures import facts

PAGE = (Path(__file__).parents[3] / "docs" / "stopping.md").read_text()
REPORTS = (Path(__file__).parent / "reports.txt").read_text()


def test_its_reports_are_those_of_the_examples():
    shown = re.findall(r"```\n(shoal run: .*?)```", PAGE, re.DOTALL)
    assert len(shown) >= 3
    assert [report for report in shown if report not in REPORTS] == []


@pytest.mark.parametrize(
    "kind",
    [
        facts.JobFailure,
        facts.Cause,
        facts.ErrorFacts,
        facts.StackFrame,
        facts.CallPlace,
        facts.Difference,
        facts.DivergenceSide,
        facts.Wait,
        facts.Waiting,
        facts.CheckpointFacts,
        facts.BystanderState,
    ],
)
def test_stopping_page_names_every_field_of_failure_json(kind):
    table = PAGE[PAGE.index("## `failure.json`") :]
    names = {field.name for field in dataclasses.fields(kind)}
    assert [name for name in sorted(names) if f"`{name}`" not in table] == []
