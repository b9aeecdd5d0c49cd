"""The index of the built site has all names; `make site` builds it, and runs this."""

from __future__ import annotations

import json
import shutil
import subprocess
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


def lines_of(inventory: bytes) -> list[list[str]]:
    """Return the lines of an objects.inv: name, kind, priority, address, title."""
    lines = zlib.decompress(b"".join(inventory.split(b"\n", 4)[4:])).decode().splitlines()
    return [line.rsplit(" ", 4) for line in lines]


def objects(inventory: bytes) -> dict[str, set[str]]:
    """Return what an objects.inv has: kind → names; not where Python defines them (aliases)."""
    found: dict[str, set[str]] = {}
    for name, kind, priority, *_ in lines_of(inventory):
        if kind.startswith(("py:", "std:")) and priority != "-1":
            found.setdefault(kind, set()).add(name)
    return found


def text_of(page: str) -> str:
    """Return the text of a page of the site."""
    shown = Text()
    shown.feed((SITE / page).read_text("utf-8"))
    return " ".join(shown.text.split())


SITE = ROOT / "build" / "site"
REACH = ("shoal.runtime.system.fault_points.reach",)  # programs call it, by this path


@pytest.mark.site
def test_the_site_has_all_names_exit_codes_variables_and_errors():
    found = objects((SITE / "objects.inv").read_bytes())
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
    index = text_of("genindex.html")
    for name in ("SHOAL_TIMEOUT_S (environment variable)", "exit code 71", "barrier() (in module"):
        assert name in index
    listed = (SITE / "llms.txt").read_text("utf-8")
    assert "](api/job.html)" in listed
    titles = [page.read_text("utf-8").split("<title>")[1] for page in SITE.glob("*.html")]
    assert all("shoal 0." in title.split("</title>")[0] for title in titles)


@pytest.mark.site
def test_errors_are_found_by_both_names_that_programs_use():
    lines = lines_of((SITE / "objects.inv").read_bytes())
    exceptions = {name: address for name, kind, _, address, _ in lines if kind == "py:exception"}
    names = [name.removeprefix("shoal.errors.") for name in exceptions if ".errors." in name]
    assert len(names) > 20
    for name in names:
        address = exceptions[f"shoal.errors.{name}"].replace("$", f"shoal.errors.{name}")
        assert exceptions[f"shoal.{name}"] == address


@pytest.mark.site
def test_entries_are_named_as_programs_write_them():
    page = text_of("api/checkpoints.html")
    for words in ("shoal.save( path: str | PathLike[str] | Bucket", "s3://bucket/model"):
        assert words in page
    assert "shoal.barrier(" in text_of("api/job.html")
    assert "exception shoal.errors.DivergenceError" in text_of("api/errors.html")


# query → the page that must be among the first results
FIRST = {
    "PartitionSpec": "coming-from/jax_sharding",
    "NamedSharding": "coming-from/jax_sharding",
    "torchrun": "clusters/torchrun",
    "restart after failure": "stopping",
    "object storage bucket": "buckets",
    "replicated": "training",
    "barrier": "api/job",
    "SHOAL_TIMEOUT_S": "settings",
    "exit code 75": "exit-codes",
}


@pytest.mark.site
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_search_finds_the_page_that_says_most():
    command = ["node", str(ROOT / "tests/site/search.js"), str(SITE), *FIRST]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    for query, results in zip(FIRST, json.loads(done.stdout), strict=True):
        pages = [*dict.fromkeys(address.partition("#")[0] for address in results)]
        assert FIRST[query] in pages[:3], (query, pages[:8])


@pytest.mark.site
def test_the_search_has_excerpts():
    """Over http; scorer.js turns them off where the browser would refuse to read the pages."""
    options = (SITE / "_static/documentation_options.js").read_text("utf-8")
    assert "SHOW_SEARCH_SUMMARY: true" in options
    assert 'window.location.protocol !== "file:"' in (SITE / "_static/language_data.js").read_text(
        "utf-8"
    )
    assert "weights.js" in (SITE / "search.html").read_text("utf-8")
