"""How Sphinx makes the site (`make site`). What is shoal's own is in extension.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import extension  # noqa: E402 - found by the path above

import shoal  # noqa: E402

project = "shoal"
author = "the shoal developers"
copyright = f"{author}, Apache-2.0"
release = version = shoal.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "extension",
]
exclude_patterns: list[str] = []
nitpicky = True  # every reference must lead somewhere
nitpick_ignore_regex = [("py:class", extension.WITHOUT_A_PAGE)]
myst_heading_anchors = 4  # as code hosts make them

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
# No build needs the network: inventories/ has the names that pages refer to.
intersphinx_mapping = extension.inventories(
    python="https://docs.python.org/3",
    numpy="https://numpy.org/doc/stable",
    jax="https://docs.jax.dev/en/latest",
)

html_theme = "furo"
html_title = f"shoal {release}"
html_short_title = "A multi-host layer for JAX."
html_static_path = ["_static"]
html_css_files = ["shoal.css"]
html_copy_source = False
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
