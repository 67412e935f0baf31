"""Sphinx configuration of the book. The pages themselves are staged by `tools/site.py`, which also calls Sphinx."""
from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "scalelab"
author = "The scalelab authors"
copyright = "2026 onwards, the scalelab authors"
release = version = re.search(r'__version__ = "(.+?)"', (ROOT / "scalelab/__init__.py").read_text(encoding="utf-8"))[1]

extensions = ["myst_nb"]
nb_execution_mode = "off"  # the outputs are committed, and the tests say whether they belong to their code
nb_code_prompt_show = "Show the code behind this"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath", "html_image"]
myst_dmath_double_inline = True
myst_heading_anchors = 3
highlight_language = "none"  # a fence without a language is plain text
suppress_warnings = ["ref.python"]  # two modules may export the same name; our own links are always full names

add_module_names = False
python_maximum_signature_line_length = 110

html_theme = "furo"
html_title = "scalelab"
html_static_path = ["_staged/_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_use_opensearch = ""
html_last_updated_fmt = None
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "navigation_with_keys": True,
    "top_of_page_buttons": [],
}

# One file, served from the book itself: SVG output needs no fonts, and the "full" build loads nothing later.
mathjax_path = "mathjax/tex-svg-full.js"
