"""docs/watching.md shows what is drawn, and what it says of the facts is true."""

from __future__ import annotations

import json
import re

from draw import watching_pictures
from shoal.cli.watch import facts_of


def test_the_pictures_are_those_of_the_recorded_job():
    again = "run python tests/draw/watching_pictures.py"
    assert watching_pictures.picture() == watching_pictures.PICTURE.read_text(encoding="utf-8"), (
        again
    )
    assert watching_pictures.page() == watching_pictures.PAGE.read_text(encoding="utf-8"), again
    assert "http" not in watching_pictures.picture().replace(
        "http://www.w3.org/2000/svg", ""
    ).replace("https://www.textualize.io", "")


def test_all_facts_are_on_the_page_and_no_others():
    facts = facts_of(watching_pictures.recorded())
    told = json.loads((watching_pictures.DOCS / "watching.json").read_text(encoding="utf-8"))
    assert {**facts, "time": ""} == {**told, "time": ""}
    rows = {**facts, **facts["processes"][0], **facts["services"][0]}
    fields = watching_pictures.PAGE.read_text(encoding="utf-8").partition("| field |")[2]
    table = re.findall(r"^\| `([a-z_]+)`", fields, re.MULTILINE)
    assert sorted(set(table)) == sorted(rows)
