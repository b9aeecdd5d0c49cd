"""How Sphinx makes the site. `make site`; what is shoal's own is in extension.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import extension  # noqa: E402
import shoal  # noqa: E402

project = "shoal"
author = "the shoal developers"
copyright = "the shoal developers, Apache-2.0"
release = version = shoal.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "extension",
]

# Every reference must lead somewhere. Only these types of others have no page of their own.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", name) for name in extension.WITHOUT_A_PAGE]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
modindex_common_prefix = ["shoal."]

# The names that shoal's signatures and pages refer to; no build needs the network.
intersphinx_mapping = extension.inventories(
    python="https://docs.python.org/3",
    numpy="https://numpy.org/doc/stable",
    jax="https://docs.jax.dev/en/latest",
)

html_theme = "furo"
html_title = f"shoal {release}"
html_static_path = ["_static"]
html_css_files = ["shoal.css"]
html_show_search_summary = False  # it would read other pages, which browsers refuse for file://
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/shoal-jax/shoal/",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
exclude_patterns = ["_build"]
