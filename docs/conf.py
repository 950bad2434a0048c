"""Sphinx configuration: build the site with `sphinx-build -W docs docs/_build/html`."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import generate  # noqa: E402

import smallvit  # noqa: E402

project = "smallvit"
author = "the smallvit authors"
copyright = "2026, the smallvit authors"
release = version = smallvit.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = f"smallvit {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
templates_path = []
exclude_patterns = ["_build", "jupyter_execute"]  # the second: left by a build into a folder directly in docs/

smartquotes = False  # settings such as Distill(kind="hard") stand in the text of reports
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_merge_streams = True  # lines of progress in one box
nb_execution_mode = "off"  # notebooks are stored with their outputs; code blocks of pages are run by the tests
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]  # cells with !commands are not Python

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True


def setup(app):
    """Write the generated pages before Sphinx reads the sources, and convert docstrings to reStructuredText."""
    generate.write_pages()
    app.connect("source-read", generate.change_links)
    app.connect("autodoc-process-docstring", generate.process_docstring)
    app.connect("autodoc-process-signature", generate.process_signature)
    app.connect("autodoc-skip-member", generate.skip_member)
