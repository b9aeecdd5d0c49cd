"""The pictures of docs/ are those that `make pictures` draws."""

from __future__ import annotations

import re

import pytest

from draw import gallery
from draw.gallery import DOCS

KEPT = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.svg"))}
KNOWN = ("http://www.w3.org/2000/svg", "https://www.textualize.io")  # names: nothing is fetched


@pytest.fixture(scope="module")
def drawn():
    return gallery.pictures()


def test_every_picture_is_drawn_by_a_program(drawn):
    assert {*KEPT} == {*drawn}


@pytest.mark.parametrize("name", KEPT)
def test_a_picture_is_as_drawn(name, drawn):
    assert gallery.structure(KEPT[name]) == gallery.structure(drawn[name]), "run make pictures"
    assert {*re.findall(r"https?://[^\s\"]+", KEPT[name])} <= {*KNOWN}


@pytest.mark.parametrize(
    ("old", "new", "is_same"), [("SIGKILL", "SIGTERM", False), ("fill: #", "fill: #0", True)]
)
def test_pictures_that_show_something_else_differ(old, new, is_same):
    kept = KEPT["failed.svg"]
    other = kept.replace(old, new)
    assert other != kept
    assert (gallery.structure(other) == gallery.structure(kept)) == is_same


def test_the_gallery_shows_them_all():
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert {*re.findall(r"\]\((.+\.svg)\)", page)} == {*KEPT}


def test_the_picture_of_the_front_page_can_be_read_on_a_telephone():
    """Its page leaves 368 of 400 pixels; letters are 20 pixels high in the picture."""
    (name,) = re.findall(r"\]\((.+\.svg)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', KEPT[name])
    assert 20 / float(width) * 368 >= 12
