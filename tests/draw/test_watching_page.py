"""docs/watching.md shows what is drawn, and what it says of the facts is true."""

from __future__ import annotations

import json
import re

from draw import gallery
from shoal.cli.watch import facts_of


def test_the_sample_is_that_of_the_recorded_job():
    assert gallery.watching_page() == gallery.WATCHING_PAGE.read_text("utf-8"), "run make pictures"


def test_all_facts_are_on_the_page_and_no_others():
    facts = facts_of(gallery.recorded())
    told = json.loads((gallery.DOCS / "watching.json").read_text(encoding="utf-8"))
    assert {**facts, "time": ""} == {**told, "time": ""}
    rows = {**facts, **facts["processes"][0], **facts["services"][0]}
    fields = gallery.WATCHING_PAGE.read_text(encoding="utf-8").partition("| field |")[2]
    table = re.findall(r"^\| `([a-z_]+)`", fields, re.MULTILINE)
    assert sorted(set(table)) == sorted(rows)
