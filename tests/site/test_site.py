"""The index of the built site has all names; `make site` builds it, and runs this."""

from __future__ import annotations

import zlib
from html.parser import HTMLParser

import pytest

from meta import public_names
from meta.source import ROOT
from shoal.settings import SETTINGS

EXIT_CODES = ("0", "1", "2", *map(str, range(70, 78)))


class Text(HTMLParser):
    """The text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def handle_data(self, data: str) -> None:
        self.text += data


def objects(inventory: bytes) -> dict[str, set[str]]:
    """Return what an objects.inv has: kind → names; not where Python defines them (aliases)."""
    found: dict[str, set[str]] = {}
    for line in zlib.decompress(b"".join(inventory.split(b"\n", 4)[4:])).decode().splitlines():
        name, kind, priority, *_ = line.rsplit(" ", 4)
        if kind.startswith(("py:", "std:")) and priority != "-1":
            found.setdefault(kind, set()).add(name)
    return found


REACH = ("shoal.runtime.system.fault_points.reach",)  # programs call it, by this path


@pytest.mark.site
def test_the_site_has_all_names_exit_codes_variables_and_errors():
    site = ROOT / "build" / "site"
    found = objects((site / "objects.inv").read_bytes())
    paths = public_names.classes()
    names = set(public_names.documented())
    names |= {paths[kind] for kind in public_names.used(public_names.documented())}
    python = set().union(*(names for kind, names in found.items() if kind.startswith("py:")))
    assert names - python == set()
    doors = tuple(f"shoal.{name}." for name in (*public_names.DOORS, "errors", "testing"))
    deep = {name for name in python if name.count(".") > 2}
    members = {name for name in deep if name.rpartition(".")[0] in python}
    assert {name for name in deep - members if not name.startswith(doors)} == set(REACH)
    assert set(SETTINGS) - found["std:envvar"] == set()
    assert set(EXIT_CODES) - found["std:exitcode"] == set()
    errors = {name.rpartition(".")[2] for name in names if name.startswith("shoal.errors.")}
    assert errors - found["std:error"] - {"DtypeWarning"} == set()
    index = Text()
    index.feed((site / "genindex.html").read_text("utf-8"))
    for name in ("SHOAL_TIMEOUT_S (environment variable)", "exit code 71", "barrier() (in module"):
        assert name in index.text
    listed = (site / "llms.txt").read_text("utf-8")
    assert "](api/job.html)" in listed
    titles = [page.read_text("utf-8").split("<title>")[1] for page in site.glob("*.html")]
    assert all("shoal 0." in title.split("</title>")[0] for title in titles)
