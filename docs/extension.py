"""What the site has of its own: docstrings as pages, names as links, exit codes and variables.

* A docstring of shoal is plain text with sections (Args, Returns, Raises, Example) and a line that
  says who must call (`shoal.colour`). It becomes reStructuredText here.
* `code` that is a public name becomes a link to its entry, on pages and in docstrings.
* A heading `SHOAL_TIMEOUT_S`, "Exit code 70" or `DivergenceError` on a page is an entry of the
  index and of objects.inv.
* A link to a file of the tree leads to a page that shows it; pages of source need no network.
* llms.txt lists all pages, as https://llmstxt.org describes.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
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
from shoal import errors, planning, preemption, retention
from shoal.runtime.system import fault_points

ROOT = Path(__file__).resolve().parents[1]
DOORS = {"preemption": preemption, "planning": planning, "retention": retention, "errors": errors}
LITERAL = re.compile(r"(?<!`)`([^`]+)`(?!`)")
MARKUP = re.compile(r"\*\w[^*\n]*\w\*(?!\w)|[|*]")  # the first is *emphasis*
DOCTEST = (">>>", "...")
SECTION = re.compile(r"(Args|Returns|Yields|Raises|Example|Examples):")
ITEM = re.compile(r"  (\S[^:]*?): (.*)|  (\S.*)")
COLOUR = re.compile(r"(Local|Traced|Logically collective: .*|Collective over .*)\.")
VARIABLE = re.compile(r"(?:SHOAL|JAX)_[A-Z0-9_]+")
EXIT_CODE = re.compile(r"Exit code (\d+)")
LABELS = {"Args": "Arguments", "Examples": "Example"}
# Bare names mean those of the predecessors there.
OF_OTHERS = ("coming-from/", "changes")
WITHOUT_A_PAGE = ("Coordinator", "SearchStrategy", "T", "Words", "Box", r"hypothesis\..*")
# Names of types in signatures that are shown as what they stand for.
TYPES = {
    "ArrayLike": "numpy.typing.ArrayLike",
    "Axes": "Mapping[str, int] | Iterable[tuple[str, int]]",
    "Dim": "None | str | tuple[str, ...]",
    "Dtype": 'Literal["exact", "safe", "any"]',
    "Form": 'Literal["tree", "dicts", "flat"]',
    "IntArray": "NDArray[int64]",
    "JaxMesh": "jax.sharding.Mesh",
    "Mode": 'Literal["auto", "direct", "exchange"]',
    "NamedSharding": "jax.sharding.NamedSharding",
    "OrderFunction": "Callable[..., NDArray[int64]]",
    "Path": "str | PathLike[str]",
    "Uneven": 'Literal["ceil", "axis_by_axis"]',
    "np.ndarray": "numpy.ndarray",
    "st.SearchStrategy": "SearchStrategy",
}


# ---- Public names.


@lru_cache(maxsize=1)
def public() -> dict[str, str]:
    """Return how a page may call each public name: "barrier", "shoal.barrier" → "shoal.barrier"."""
    found: dict[str, str] = {}
    for name in shoal.__all__:
        target = getattr(shoal, name)
        home = "shoal.errors" if inspect.isclass(target) and issubclass(target, Warning | Exception) else "shoal"
        found[name] = found[f"shoal.{name}"] = f"{home}.{name}"
    for door, module in DOORS.items():
        found[f"shoal.{door}"] = f"shoal.{door}"
        for name in module.__all__:
            found[f"shoal.{door}.{name}"] = found[f"{door}.{name}"] = f"shoal.{door}.{name}"
            found.setdefault(f"shoal.{name}" if door == "errors" else f"{door}.{name}", f"shoal.{door}.{name}")
            if name[0].isupper():
                found.setdefault(name, f"shoal.{door}.{name}")
    for name in ("Checkpoints", "Layout", "Mesh"):
        for member in vars(getattr(shoal, name)):
            if not member.startswith("_"):
                found[f"{name}.{member}"] = found[f"shoal.{name}.{member}"] = f"shoal.{name}.{member}"
    return found


# ---- Docstrings.


def as_rest(text: str, own: Iterable[str]) -> str:
    """Return a line of a docstring as reStructuredText; `own` are names that are not linked."""
    parts = LITERAL.split(text)
    parts[::2] = [MARKUP.sub(_escaped, part) for part in parts[::2]]
    for i in range(1, len(parts), 2):
        target = public().get(parts[i])
        linked = target is not None and parts[i] not in own
        parts[i] = f":py:obj:`{parts[i]} <{target}>`" if linked else f"``{parts[i]}``"
        # reStructuredText wants a boundary: `leaf`s
        parts[i] = ("\\ " if parts[i - 1][-1:].isalnum() else "") + parts[i]
        parts[i] += "\\ " if parts[i + 1][:1].isalnum() else ""
    return "".join(parts)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else f"\\{match[0]}"


def convert(lines: list[str], own: set[str]) -> Iterator[str]:
    """Yield a docstring as reStructuredText."""
    section = ""
    for line in lines:
        head = SECTION.fullmatch(line)
        if head:
            section = head[1]
            yield from ("", f":{LABELS.get(section, section)}:", "")
        elif section and line and not line.startswith(" "):
            section = ""
            yield from ("", as_rest(line, own))
        elif section in ("Args", "Raises"):
            yield from _item(section, line, own)
        elif section:
            yield f"  {line if '>>>' in line else as_rest(line, own)}"
        elif COLOUR.fullmatch(line):
            yield from (".. container:: colour", "", f"   {as_rest(line, own)}")
        else:
            yield line if line.lstrip().startswith(DOCTEST) else as_rest(line, own)


def _item(section: str, line: str, own: set[str]) -> Iterator[str]:
    match = ITEM.fullmatch(line)
    if match and not line.startswith("   "):
        names, text = match[1], match[2] if match[1] else match[3]
        if names and all(re.fullmatch(r"`?\*{0,2}\w+`?", name) for name in names.split(", ")):
            each = [name.strip("`") for name in names.split(", ")]
            kept = own if section == "Args" else set()
            shown = [as_rest(f"`{name}`", kept | set(each) if section == "Args" else kept) for name in each]
            yield f"  - {', '.join(shown)}: {as_rest(text, own)}"
        elif names:
            yield f"  - {as_rest(names, own)}: {as_rest(text, own)}"
        else:
            yield f"  - {as_rest(text, own)}"
    else:
        yield f"  {as_rest(line, own)}" if line.strip() else line


def process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """See autodoc's event of this name."""
    own = {name.rpartition(".")[2]}
    try:
        own |= set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        pass
    text = LITERAL.sub(lambda match: " ".join(match[0].split()), "\n".join(lines))
    lines[:] = convert(text.split("\n"), own)


class Text(str):
    """A text that is shown as it is."""

    __repr__ = str.__str__


def written(annotation: Any) -> Any:
    """Return a type as it is written, aliases as what they stand for."""
    if not isinstance(annotation, str):
        return annotation
    return Text(re.sub(r"(?<!\.)\b[A-Za-z]\w*(?:\.\w+)?", lambda m: TYPES.get(m[0], m[0]), annotation))


def process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, shown: str, result: str
) -> tuple[str, str] | None:
    """See autodoc's event of this name: types are shown as they are written."""
    if what == "class" and name not in public().values():
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
    ]
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    returned = "" if what == "class" else found.return_annotation
    if inspect.isgeneratorfunction(inspect.unwrap(obj)) and obj is not inspect.unwrap(obj):
        returned = returned.replace("Iterator[", "AbstractContextManager[", 1)
    empty = inspect.Signature.empty
    return str(inspect.Signature(parameters)), "" if returned in ("", empty) else str(written(returned))


# ---- Pages.


class Entries(SphinxTransform):
    """Make objects of headings that name a variable, an exit code or an error class."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """See `docutils.transforms.Transform.apply`."""
        docname = self.env.docname
        standard, python = self.env.domains.standard_domain, self.env.domains.python_domain
        for section in self.document.findall(nodes.section):
            title = section.next_node(nodes.title)
            if title is None or not section["ids"]:
                continue
            text, node_id = title.astext(), section["ids"][0]
            if docname == "settings" and VARIABLE.fullmatch(text):
                standard.note_object("envvar", text, node_id, location=section)
                self._index(section, f"{text} (environment variable)", node_id)
            elif docname == "exit-codes" and (code := EXIT_CODE.match(text)):
                standard.note_object("exitcode", code[1], node_id, location=section)
                self._index(section, f"exit code {code[1]}", node_id)
            elif docname == "errors" and text in errors.__all__:
                standard.note_object("error", text, node_id, location=section)
                self._index(section, f"{text} (error)", node_id)

    def _index(self, section: nodes.section, words: str, node_id: str) -> None:
        section.insert(1, addnodes.index(entries=[("single", words, node_id, "", None)]))


class Links(SphinxPostTransform):
    """Make links of public names in code."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        """See `SphinxPostTransform.run`."""
        docname = self.env.docname
        for literal in [*self.document.findall(nodes.literal)]:
            parents = [literal.parent, *_ancestors(literal.parent)]
            if any(isinstance(p, nodes.title | nodes.reference | addnodes.pending_xref | addnodes.desc_signature) for p in parents):
                continue
            text = re.sub(r"\(.*\)$", "", literal.astext())
            target = public().get(text)
            if target and (text.startswith("shoal.") or not docname.startswith(OF_OTHERS)):
                if docname.startswith("api/") :
                    continue
                found = self.env.domains.python_domain.objects.get(target)
                if found:
                    link = make_refnode(self.app.builder, docname, found.docname, found.node_id, literal.deepcopy())
                    literal.replace_self(link)


def _ancestors(node: Any) -> Iterator[Any]:
    while node.parent is not None:
        node = node.parent
        yield node


LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
PAGES = {
    "CHANGELOG": "changes",
    "CONTRIBUTING": "contributing",
    "README": "index",
    "RELEASE": "releasing",
    "SECURITY": "security",
}


def relinked(text: str, folder: Path, docname: str) -> str:
    """Return a page whose links to the pages beside docs/ lead to their copies in it."""

    def link(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path.parent == ROOT and path.suffix == ".md" and path.stem in PAGES:
            path = ROOT / "docs" / f"{PAGES[path.stem]}.md"
        elif folder != ROOT:
            return match[0]
        return f"]({os.path.relpath(path, (ROOT / 'docs' / docname).parent)}{match[2] or ''})"

    return LINK.sub(link, text)


def read_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """See Sphinx's event "source-read"."""
    content[0] = relinked(content[0], (ROOT / "docs" / docname).parent, docname)
    content[0] = content[0].replace("<!-- fault points -->", fault_tables())


def fault_tables() -> str:
    """Return the points and kinds of SHOAL_FAULTS as tables."""
    lines = []
    for head, rows in (("point | where", fault_points.POINTS), ("kind | what", fault_points.KINDS)):
        lines += ["", f"| {head} |", "|---|---|", *(f"| `{n}` | {words} |" for n, words in rows.items())]
    return "\n".join(lines)


def read_included(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    """See Sphinx's event "include-read"."""
    content[0] = relinked(content[0], ROOT, docname)


class Files(SphinxTransform):
    """Let links to files of the tree lead to pages that show them."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        """See `docutils.transforms.Transform.apply`."""
        for node in [*self.document.findall(addnodes.download_reference)]:
            path = (Path(self.env.doc2path(self.env.docname)).parent / node["reftarget"]).resolve()
            if node["reftarget"].startswith("/"):
                path = Path(self.env.srcdir, node["reftarget"][1:]).resolve()
            if path.is_relative_to(ROOT) and path.suffix not in (".svg", ".png"):
                name = path.relative_to(ROOT).as_posix()
                shown(self.env)[name] = None
                link = nodes.reference("", "", *node.children, internal=True)
                link["refuri"] = self.env.app.builder.get_relative_uri(self.env.docname, f"source/{name}")
                node.replace_self(link)


def shown(env: Any) -> dict[str, None]:
    """Return the files of the tree that pages link to."""
    if not hasattr(env, "shoal_files"):
        env.shoal_files = {}
    return env.shoal_files


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each file that is linked to."""
    highlight = PygmentsBridge("html", "sphinx")
    as_html: Any = highlight.highlight_block
    for name in sorted(shown(app.env)):
        path = ROOT / name
        language = {".py": "python", ".md": "markdown", ".json": "json", ".yml": "yaml"}.get(path.suffix, "text")
        code = as_html(path.read_text("utf-8"), language, lineanchors="L")
        yield f"source/{name}", {"title": name, "body": f"<h1><code>{name}</code></h1>{code}"}, "page.html"


def is_module(name: str) -> bool:
    """Return whether there is such a module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what is above it is none
        return False


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
        elif is_module(at):
            target = importlib.import_module(at)
        else:
            return None  # a field, or a name of these pages
    target = getattr(target, "fget", getattr(target, "func", target))
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(target)) or "")
        line = inspect.getsourcelines(inspect.unwrap(target))[1]
    except (TypeError, OSError):
        return None  # a field or a value
    name = path.relative_to(ROOT).as_posix()
    shown(env)[name] = None
    return f"{env.app.builder.get_relative_uri(env.docname, f'source/{name}')}#L-{line}"


def resolve(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """Find what docstrings and types call by another name than their entry has."""
    target = node.get("reftarget", "")
    name = public().get(target) or public().get(target.rpartition(".")[2] if target.startswith("shoal.") else "")
    found = env.domains.python_domain.objects.get(name or "")
    if found:
        return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, contnode)
    return None


def inventories(**sites: str) -> dict[str, tuple[str, str]]:
    """Return what intersphinx needs: the names in inventories/*.txt, as objects.inv files."""
    folder, found = Path(tempfile.mkdtemp(prefix="inventories")), {}
    for name, site in sites.items():
        names = (Path(__file__).parent / "inventories" / f"{name}.txt").read_bytes()
        head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The remainder of this file is compressed using zlib.\n"
        (folder / name).write_bytes(head.encode() + zlib.compress(names))
        found[name] = (site, str(folder / name))
    return found


# ---- llms.txt.


def write_llms(app: Sphinx, exception: Exception | None) -> None:
    """Write the list of all pages for programs that read them."""
    if exception or app.builder.name != "html":
        return
    lines = [f"# shoal {shoal.__version__}", "", f"> {inspect.getdoc(shoal).splitlines()[0]}", ""]
    for name in [app.config.root_doc, *app.env.toctree_includes.get(app.config.root_doc, [])]:
        lines += [*_listed(app, name, "")]
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _listed(app: Sphinx, name: str, indent: str) -> Iterator[str]:
    title = app.env.titles[name].astext()
    yield f"{indent}- [{title}]({app.builder.get_target_uri(name)})"
    if name != app.config.root_doc:
        for inner in app.env.toctree_includes.get(name, []):
            yield from _listed(app, inner, indent + "  ")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it."""
    app.add_object_type("exitcode", "exitcode", objname="exit code")
    app.add_object_type("error", "error", objname="error")
    app.add_transform(Entries)
    app.add_transform(Files)
    app.add_post_transform(Links)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect(
        "env-before-read-docs",
        lambda app, env, names: setattr(env.config, "linkcode_resolve", partial(source_of, env)),
    )
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("missing-reference", resolve)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
