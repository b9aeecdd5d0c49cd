"""`python tests/site/read_site.py SITE PICTURES`: read the built site in headless Chromium.

Each page is opened from its file, as a telephone (400 pixels) and as a desktop (1,400) show it. A
link that leads nowhere, a line in the console, a page that scrolls sideways, and text that is cut
are errors. Then the search is used, and pages are opened without JavaScript. PICTURES gets pictures
of the main pages at both widths, light and dark. CHROMIUM names the browser, if it is not on PATH.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Page, sync_playwright

WIDTHS = (400, 1400)
PICTURED = (
    "index",
    "gallery",
    "why",
    "first-job",
    "errors",
    "api/job",
    "how-it-works/tours",
    "search",
)
NAMES = (
    "barrier", "broadcast", "relayout", "plan_restore", "make_mesh", "Checkpoints", "preempted",
    "live_processes", "explain_program", "SHOAL_TIMEOUT_S",
)  # fmt: skip
MESSAGES = ("its token is wrong", "did not join within", "has changed since it was saved")
EXIT_CODES = ("exit code 71", "exit code 75")

# What runs in the page: problems as texts. Text is cut where a box hides what is wider than it.
PROBLEMS = """
() => {
  const found = [];
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  if (wide > 0) found.push(`scrolls sideways by ${wide} pixels`);
  for (const box of document.querySelectorAll('article *')) {
    const style = getComputedStyle(box);
    const hides = ['hidden', 'clip'].includes(style.overflowX) || style.textOverflow === 'ellipsis';
    if (hides && box.scrollWidth > box.clientWidth + 1 && box.clientWidth > 1)
      found.push(`cuts ${box.tagName} "${box.textContent.trim().slice(0, 40)}"`);
    if (style.overflowX === 'visible' && box.children.length === 0 && box.textContent.trim()) {
      const area = box.getBoundingClientRect();
      let outer = box.parentElement, scrolls = false;
      for (; outer; outer = outer.parentElement)
        if (['auto', 'scroll'].includes(getComputedStyle(outer).overflowX)) scrolls = true;
      if (!scrolls && area.width && area.right > window.innerWidth + 1)
        found.push(`leaves the page: "${box.textContent.trim().slice(0, 40)}"`);
    }
  }
  return found;
}
"""
FOUND = """
() => /found|did not match/.test(document.querySelector('#search-results')?.textContent ?? '')
"""
LINKS = "() => [...document.querySelectorAll('a[href]')].map(a => a.href)"
IDS = "() => [...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name)"


class Reader:
    """Pages of a site, read one after the other."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.problems: list[str] = []
        self.links: dict[str, set[str]] = {}  # address → the pages that link to it
        self.ids: dict[str, set[str]] = {}  # address → its anchors
        self.lines: list[str] = []  # of the console, while a page is open

    def names(self) -> list[str]:
        """Return all pages, by their paths without the suffix."""
        paths = sorted(self.site.rglob("*.html"))
        return [path.relative_to(self.site).as_posix().removesuffix(".html") for path in paths]

    def listen(self, page: Page) -> None:
        """Note what pages that are opened there write to the console."""
        page.on("console", lambda message: self.lines.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.lines.append(f"error: {error}"))

    def read(self, page: Page, name: str, what: str) -> None:
        """Open a page, and note its problems."""
        self.lines.clear()
        page.goto((self.site / f"{name}.html").as_uri())
        lines = [*self.lines, *page.evaluate(PROBLEMS)]
        self.problems += [f"{name} ({what}): {line}" for line in dict.fromkeys(lines)]
        for link in page.evaluate(LINKS):
            self.links.setdefault(link, set()).add(name)
        self.ids[page.url] = set(page.evaluate(IDS))

    def dead_links(self) -> Iterator[str]:
        """Yield links within the site that lead nowhere."""
        root = self.site.as_uri()
        for link, pages in self.links.items():
            address, _, fragment = link.partition("#")
            if not address.startswith("file:"):
                continue
            path, fragment = Path(unquote(urlsplit(address).path)), unquote(fragment)
            if not address.startswith(root) or not path.is_file():
                yield f"{min(pages)}: links to {address}, which does not exist"
            elif fragment and address in self.ids and fragment not in self.ids[address]:
                anchor = f"{address.removeprefix(root)}#{fragment}"
                yield f"{min(pages)}: links to {anchor}: no such anchor"

    def search(self, page: Page, words: str) -> list[str]:
        """Return the titles that the search finds."""
        page.goto(f"{(self.site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
        page.wait_for_function(FOUND)
        return page.eval_on_selector_all("#search-results li", "all => all.map(e => e.textContent)")


def searches(reader: Reader, page: Page) -> Iterator[str]:
    """Yield what the search does not find among its first results."""
    for words in (*NAMES, *MESSAGES, *EXIT_CODES):
        found = reader.search(page, words)[:5]
        last = words.removeprefix("exit code ")
        print(f"search {words!r}: {[one.strip()[:50] for one in found[:3]]}")
        if not found:
            yield f"search {words!r}: nothing"
        elif not any((last if words not in MESSAGES else "Messages") in one for one in found):
            yield f"search {words!r}: only {found}"


def pictures(site: Path, browser: Any, folder: Path) -> None:
    """Take pictures of the main pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for name in PICTURED:
                page.goto((site / f"{name}.html").as_uri())
                page.screenshot(path=folder / f"{name.replace('/', '-')}-{width}-{scheme}.png")
            page.close()


def main(site: str, folder: str) -> int:
    """Read it all; return the exit code."""
    reader = Reader(Path(site).resolve())
    browser_path = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    if browser_path is None:
        print("no Chromium found: install it, or set CHROMIUM to its path", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        names = reader.names()
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            reader.listen(page)
            for name in names:
                reader.read(page, name, f"{width} pixels")
            page.close()
        bare = browser.new_context(java_script_enabled=False)
        page = bare.new_page()
        for name in ("index", "api/job"):
            page.goto((reader.site / f"{name}.html").as_uri())
            if not page.locator("article h1").is_visible():
                reader.problems.append(f"{name}: is not shown without JavaScript")
        bare.close()
        page = browser.new_page()
        reader.problems += [*reader.dead_links(), *searches(reader, page)]
        pictures(reader.site, browser, Path(folder))
        browser.close()
    print(
        f"{len(names)} pages at {' and '.join(map(str, WIDTHS))} pixels, {len(reader.links)} links"
    )
    print("\n".join(reader.problems))
    return bool(reader.problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
