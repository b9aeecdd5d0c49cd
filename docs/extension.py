"""What the site has of its own: docstrings as pages, names as links, exit codes and variables.

* A docstring of shoal is plain text with sections (Args, Returns, Raises, Example) and a line that
  says who must call (`shoal.colour`). It becomes reStructuredText here, with a link to its source.
* `code` that is a public name becomes a link to its entry, on pages and in docstrings.
* The headings of three pages are entries of the index and of objects.inv: variables (settings.md),
  exit codes (exit-codes.md) and error classes (errors.md).
* A link to a file of the tree leads to a page that shows it. No page needs the network.
* Errors are in objects.inv as `shoal.DivergenceError`, too: programs use both names.
* The search knows how much a page says of a word: scorer.js puts the pages in order.
* llms.txt lists all pages, as https://llmstxt.org describes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

import shoal
from shoal import errors, planning, preemption, retention, types
from shoal.colour import colour_of
from shoal.runtime.system import fault_points

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "docs"

# Names of types in signatures that are shown as what they stand for, and those that have no page.
TYPES = {
    "AnyMesh": "jax.sharding.Mesh | shoal.Mesh",
    "ArrayLike": "numpy.typing.ArrayLike",
    "Axes": "Mapping[str, int] | Iterable[tuple[str, int]]",
    "AxisTypes": "str | AxisType | Sequence[str | AxisType] | Mapping[str, str | AxisType]",
    "Dim": "None | str | tuple[str, ...]",
    "Dtype": 'Literal["exact", "safe", "any"]',
    "Form": 'Literal["tree", "dicts", "flat"]',
    "IntArray": "NDArray[int64]",
    "Mode": 'Literal["auto", "direct", "exchange"]',
    "NamedSharding": "jax.sharding.NamedSharding",
    "OrderFunction": "Callable[..., NDArray[int64]]",
    "Key": "Any",
    "Path": "str | PathLike[str] | Bucket",
    "Uneven": 'Literal["ceil", "axis_by_axis"]',
    "np.ndarray": "numpy.ndarray",
    "st.SearchStrategy": "SearchStrategy",
}
WEIGHTS = "weights.js"
WITHOUT_A_PAGE = r"AxisType|Box|JobClient|(hypothesis\..*)?SearchStrategy|T"

# Classes that users make, and that have no colour.
MADE = (
    "shoal.planning.Rings", "shoal.retention.Saved", "shoal.testing.clock.Clock",
    "shoal.testing.cluster.Cluster",
)  # fmt: skip


# ---- Public names.


@lru_cache(maxsize=1)
def public() -> dict[str, str]:
    """Return how pages may call each name, and its entry: "barrier" → "shoal.barrier"."""
    found: dict[str, str] = {}
    for name in errors.__all__:
        if inspect.isclass(getattr(errors, name)):
            entry = f"shoal.errors.{name}"
            found |= dict.fromkeys((name, f"errors.{name}", f"shoal.{name}", entry), entry)
    for name in shoal.__all__:
        found.setdefault(name, f"shoal.{name}")
        found.setdefault(f"shoal.{name}", f"shoal.{name}")
        if inspect.isclass(kind := getattr(shoal, name)):
            for member in vars(kind):
                entry = f"shoal.{name}.{member}"
                if not member.startswith("_"):
                    found[f"{name}.{member}"] = found[entry] = entry
    for module in (planning, preemption, retention, types):
        for name in module.__all__:
            entry = f"{module.__name__}.{name}"
            found[entry] = found[entry.removeprefix("shoal.")] = entry
            if name[0].isupper():
                found.setdefault(name, entry)
    return found


# ---- Docstrings.

LITERAL = re.compile(r"(?<!`)`([^`]+)`(?!`)")
MARKUP = re.compile(r"\*\w[^*\n]*\w\*(?!\w)|[|*]")  # the first is *emphasis*
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
SECTION = re.compile(r"(Args|Returns|Yields|Raises|Example|Examples):")
ITEM = re.compile(r"  (?=\S)(?:([^:]*?): )?(.*)")
COLOUR = re.compile(r"(Local|Traced|Logically collective: .*|Collective over .*)\.")
LABELS = {"Args": "Arguments", "Examples": "Example"}


def as_rest(text: str, own: set[str]) -> str:
    """Return a line of a docstring as reStructuredText; `own` are names that are not linked."""
    parts = LITERAL.split(text)
    parts[::2] = [PAGE.sub(r":doc:`/\1`", MARKUP.sub(_escaped, part)) for part in parts[::2]]
    for i in range(1, len(parts), 2):
        entry = None if parts[i] in own else public().get(parts[i])
        parts[i] = f":py:obj:`{parts[i]} <{entry}>`" if entry else f"``{parts[i]}``"
        # reStructuredText wants a boundary: `leaf`s
        parts[i] = ("\\ " if parts[i - 1][-1:].isalnum() else "") + parts[i]
        parts[i] += "\\ " if parts[i + 1][:1].isalnum() else ""
    return "".join(parts)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else f"\\{match[0]}"


def converted(lines: list[str], own: set[str]) -> Iterator[str]:
    """Yield a docstring as reStructuredText."""
    section = ""
    for line in lines:
        head = SECTION.fullmatch(line)
        if head:
            section = head[1]
            yield from ("", f":{LABELS.get(section, section)}:", "")
        elif line.lstrip().startswith((">>>", "...")):
            yield line
        elif section in ("Args", "Raises") and (item := ITEM.fullmatch(line)):
            yield f"  - {_names(item[1], section, own)}{as_rest(item[2], own)}"
        elif COLOUR.fullmatch(line):
            yield from (".. container:: colour", "", f"   {as_rest(line, own)}")
        else:
            section = section if not line or line.startswith(" ") else ""
            yield as_rest(line, own)


def _names(names: str | None, section: str, own: set[str]) -> str:
    """Return what an item is about: arguments, errors (which are linked), or a condition."""
    if not names:
        return ""
    each = [name.strip("`") for name in names.split(", ")]
    if all(re.fullmatch(r"\*{0,2}\w+", name) for name in each):
        names = ", ".join(f"`{name}`" for name in each)
        own = own | set(each) if section == "Args" else set()
    return f"{as_rest(names, own)}: "


def process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """See autodoc's event "autodoc-process-docstring"."""
    own = {name.rpartition(".")[2]}
    with contextlib.suppress(TypeError, ValueError):
        own |= set(inspect.signature(obj).parameters)
    text = LITERAL.sub(lambda match: " ".join(match[0].split()), "\n".join(lines))
    if text.startswith("Alias for field number"):
        text = _comment_of(name)
    lines[:] = converted(text.split("\n"), own)


def _comment_of(field: str) -> str:
    """Return the comment behind a field of a NamedTuple in the source, as a sentence."""
    owner, _, name = field.rpartition(".")
    module, _, kind = owner.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    match = re.search(rf"^    {name}: .*?  # (.+)$", inspect.getsource(found), re.MULTILINE)
    return f"{match[1][0].upper()}{match[1][1:]}." if match else ""


class Text(str):
    """A text that is shown as it is."""

    __repr__ = str.__str__


def written(annotation: Any) -> Any:
    """Return a type as it is written in the source, aliases as what they stand for."""
    if not isinstance(annotation, str):
        return annotation
    return Text(
        re.sub(r"(?<!\.)\b[A-Za-z]\w*(?:\.\w+)?", lambda m: TYPES.get(m[0], m[0]), annotation)
    )


def process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, shown: str, result: str
) -> tuple[str, str] | None:
    """See autodoc's event "autodoc-process-signature"."""
    if what == "class" and not colour_of(obj) and name not in MADE:
        return "", ""  # calls return it; users do not make it
    if what not in ("function", "method", "class"):
        return None
    found = inspect.signature(obj)
    parameters = [
        each.replace(
            annotation=written(each.annotation),
            default=Text("…") if " at 0x" in repr(each.default) else each.default,
        )
        for each in found.parameters.values()
        if each.name not in ("self", "cls")
    ]
    returned = "" if what == "class" else written(found.return_annotation)
    if inspect.isgeneratorfunction(inspect.unwrap(obj)) and obj is not inspect.unwrap(obj):
        returned = returned.replace("Iterator[", "AbstractContextManager[", 1)
    returned = "" if returned is inspect.Signature.empty else str(returned)
    return str(inspect.Signature(parameters)), returned


def resolve(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """Find the entries of types, which signatures call by their short names."""
    entry = public().get(node.get("reftarget", "").rpartition(".")[2])
    found = env.domains.python_domain.objects.get(entry or "")
    if found is None:
        return None
    return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, contnode)


# ---- Pages.

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
OUTSIDE = {  # pages of the repository that the site has, too
    "CHANGELOG": "changes",
    "CONTRIBUTING": "contributing",
    "README": "index",
    "RELEASE": "releasing",
    "SECURITY": "security",
}
VARIABLE = re.compile(r"SHOAL_[A-Z0-9_]+")
EXIT_CODE = re.compile(r"Exit code (\d+)$")
OF_OTHERS = ("coming-from/", "changes")  # bare names are the predecessors' there


def relinked(text: str, folder: Path, docname: str) -> str:
    """Return a page whose links to pages outside of docs/ lead to their copies in the site."""

    def link(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path.parent == ROOT and path.stem in OUTSIDE:
            path = HERE / f"{OUTSIDE[path.stem]}.md"
        elif folder != ROOT:
            return match[0]
        return f"]({os.path.relpath(path, (HERE / docname).parent)}{match[2] or ''})"

    return LINK.sub(link, text)


def read_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """See Sphinx's event "source-read"."""
    text = relinked(content[0], (HERE / docname).parent, docname)
    content[0] = text.replace("<!-- fault points -->", fault_tables())


def read_included(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    """See Sphinx's event "include-read"."""
    content[0] = relinked(content[0], ROOT, docname)


def fault_tables() -> str:
    """Return the points and kinds of SHOAL_FAULTS as tables."""
    lines: list[str] = []
    for head, rows in (("point | where", fault_points.POINTS), ("kind | what", fault_points.KINDS)):
        lines += ["", f"| {head} |", "|---|---|"]
        lines += [f"| `{name}` | {words} |" for name, words in rows.items()]
    return "\n".join(lines)


class Entries(SphinxTransform):
    """Make objects of headings that name a variable, an exit code or an error class."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """See `docutils.transforms.Transform.apply`."""
        for section in self.document.findall(nodes.section):
            title = section.next_node(nodes.title)
            if title is None:
                continue
            text = title.astext()
            if self.env.docname == "settings" and VARIABLE.fullmatch(text):
                self._add(section, "envvar", text, f"{text} (environment variable)")
            elif self.env.docname == "exit-codes" and (code := EXIT_CODE.match(text)):
                self._add(section, "exitcode", code[1], f"exit code {code[1]}")
            elif self.env.docname == "errors" and text in errors.__all__:
                self._add(section, "error", text, f"{text} (error)")

    def _add(self, section: nodes.section, kind: str, name: str, words: str) -> None:
        node_id = section["ids"][0]
        standard = self.env.domains.standard_domain
        standard.note_object(kind, name, node_id, location=section)
        section.insert(1, addnodes.index(entries=[("single", words, node_id, "", None)]))


class Links(SphinxPostTransform):
    """Make links of public names in code, except in headings and where there is a link already."""

    default_priority = 5
    WITHIN = nodes.title | nodes.reference | addnodes.pending_xref | addnodes.desc_signature

    def run(self, **_: Any) -> None:
        """See `SphinxPostTransform.run`."""
        docname, objects = self.env.docname, self.env.domains.python_domain.objects
        if docname.startswith("api/"):
            return  # docstrings have their links
        for literal in [*self.document.findall(nodes.literal)]:
            text = re.sub(r"\(.*\)$", "", literal.astext())
            entry = objects.get(public().get(text, ""))
            is_meant = text.startswith("shoal.") or not docname.startswith(OF_OTHERS)
            if entry and is_meant and not self._is_within(literal):
                to = entry.docname, entry.node_id
                literal.replace_self(
                    make_refnode(self.app.builder, docname, *to, literal.deepcopy())
                )

    def _is_within(self, node: Any) -> bool:
        while node.parent is not None:
            node = node.parent
            if isinstance(node, self.WITHIN):
                return True
        return False


def add_short_names(app: Sphinx, env: Any) -> list[str]:
    """Let each error be found as `shoal.NAME`; see Sphinx's event "env-updated"."""
    objects = env.domains.python_domain.objects
    for name in errors.__all__:
        if entry := objects.get(f"shoal.errors.{name}"):
            objects[f"shoal.{name}"] = entry._replace(aliased=True)
    return []  # no page changes


# ---- The search.


def write_weights(app: Sphinx, exception: Exception | None) -> None:
    """Write how much each page says of each word: BM25 (Robertson and Zaragoza, 2009) with its
    usual constants, but without the rarity of the word. Words that a page has once weigh nothing.
    """
    if exception is not None or app.builder.name != "html":
        return
    language = app.builder.indexer.lang
    stem = lru_cache(maxsize=None)(lambda word: language.stem(word).lower())
    pages = {
        page: Counter(map(stem, language.split(app.env.get_doctree(page).astext())))
        for page in sorted(app.env.found_docs)
    }
    mean = sum(words.total() for words in pages.values()) / len(pages)
    found: dict[str, dict[str, float]] = {}
    for page, words in pages.items():
        length = 0.25 + 0.75 * words.total() / mean
        for word, count in words.items():
            if count > 1 and language.word_filter(word):
                found.setdefault(word, {})[page] = round(2.2 * count / (count + 1.2 * length), 2)
    text = f"const WEIGHTS = {json.dumps(found, separators=(',', ':'))};\n"
    Path(app.outdir, "_static", WEIGHTS).write_text(text, "utf-8")


def add_weights(app: Sphinx, page: str, template: str, context: Any, doctree: Any) -> None:
    """Let the page of the search read them; see Sphinx's event "html-page-context"."""
    if page == "search":
        app.add_js_file(WEIGHTS)


# ---- Source.


def sources(env: Any) -> dict[str, None]:
    """Return the files of the tree that pages link to."""
    if not hasattr(env, "shoal_sources"):
        env.shoal_sources = {}
    return env.shoal_sources  # type: ignore[no-any-return]


def source_link(env: Any, path: Path) -> str:
    """Return the address of the page of a file, from the page that is being read."""
    name = path.relative_to(ROOT).as_posix()
    sources(env)[name] = None
    return str(env.app.builder.get_relative_uri(env.docname, f"source/{name}"))


class Files(SphinxTransform):
    """Let links to files of the tree lead to pages that show them."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        """See `docutils.transforms.Transform.apply`."""
        folder = (HERE / self.env.docname).parent
        for node in [*self.document.findall(addnodes.download_reference)]:
            target = node["reftarget"]
            path = HERE / target[1:] if target.startswith("/") else folder / target
            if path.suffix not in (".svg", ".png"):
                link = nodes.reference("", "", *node.children, internal=True)
                link["refuri"] = source_link(self.env, path.resolve())
                node.replace_self(link)


def source_of(env: Any, domain: str, info: Mapping[str, str]) -> str | None:
    """Return the address of the source of a documented name, as the extension linkcode asks."""
    if domain != "py" or not info["module"]:
        return None
    target: Any = shoal
    at = "shoal"
    for part in f"{info['module']}.{info['fullname']}".split(".")[1:]:
        at += f".{part}"
        if hasattr(target, part):
            target = getattr(target, part)
        elif _is_module(at):
            target = importlib.import_module(at)
        else:
            return None  # a field, or a name of these pages
    target = inspect.unwrap(getattr(target, "fget", getattr(target, "func", target)))
    try:
        path, line = Path(inspect.getsourcefile(target) or ""), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):
        return None  # a value
    return f"{source_link(env, path)}#L-{line}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what is above it is none
        return False


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each file that is linked to."""
    highlight: Any = PygmentsBridge("html", "sphinx").highlight_block
    languages = {".py": "python", ".md": "markdown", ".json": "json", ".yml": "yaml"}
    for name in sorted(sources(app.env)):
        path = ROOT / name
        language = languages.get(path.suffix, "text")
        code = highlight(path.read_text("utf-8"), language, lineanchors="L")
        body = f"<h1><code>{name}</code></h1>{code}"
        yield f"source/{name}", {"title": name, "body": body}, "page.html"


# ---- Other files.


def inventories(**sites: str) -> dict[str, tuple[str, str]]:
    """Return what intersphinx needs: the names in inventories/*.txt, as objects.inv files."""
    folder = ROOT / "build" / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, site in sites.items():
        names = (HERE / "inventories" / f"{name}.txt").read_bytes()
        head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# zlib\n"
        (folder / name).write_bytes(head.encode() + zlib.compress(names))
        found[name] = (site, str(folder / name))
    return found


def write_llms(app: Sphinx, exception: Exception | None) -> None:
    """Write the list of all pages for programs that read them."""
    if exception is None and app.builder.name == "html":
        lines = [f"# shoal {shoal.__version__}", "", f"> {app.config.html_short_title}", ""]
        for caption, names in _parts(app):
            lines += [f"## {caption}", "", *(_listed(app, name) for name in names), ""]
        Path(app.outdir, "llms.txt").write_text("\n".join(lines), "utf-8")


def _parts(app: Sphinx) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of the table of contents, with all pages below each."""
    for tree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        names = [name for _, name in tree["entries"]]
        for name in names:
            names.extend(app.env.toctree_includes.get(name, []))
        yield tree["caption"] or "Pages", names


def _listed(app: Sphinx, name: str) -> str:
    """Return a page's line: its title, address and first sentence."""
    paragraph = app.env.get_doctree(name).next_node(nodes.paragraph)
    words = "" if paragraph is None else re.split(r"(?<=[.!?])\s", paragraph.astext())[0]
    title, address = app.env.titles[name].astext(), app.builder.get_target_uri(name)
    return f"- [{title}]({address}): {' '.join(words.split())}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it."""
    app.add_object_type("exitcode", "exitcode", objname="exit code")
    app.add_object_type("error", "error", objname="error")
    app.add_transform(Entries)
    app.add_transform(Files)
    app.add_post_transform(Links)
    for event, handler in (
        ("autodoc-process-docstring", process_docstring),
        ("autodoc-process-signature", process_signature),
        ("build-finished", write_llms),
        ("build-finished", write_weights),
        ("env-updated", add_short_names),
        ("env-before-read-docs", _let_linkcode_find_sources),
        ("html-collect-pages", source_pages),
        ("html-page-context", add_weights),
        ("include-read", read_included),
        ("missing-reference", resolve),
        ("source-read", read_page),
    ):
        app.connect(event, handler)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def _let_linkcode_find_sources(app: Sphinx, env: Any, names: list[str]) -> None:
    env.config.linkcode_resolve = partial(source_of, env)
