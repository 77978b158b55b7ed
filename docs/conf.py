"""Sphinx configuration: `python -m sphinx -W docs docs/_build`."""

import sys
from pathlib import Path

import scalinglab

sys.path.insert(0, str(Path(__file__).parent))  # for executed.py

project = "scalinglab"
author = "The scalinglab developers"
version = release = scalinglab.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx.ext.mathjax", "executed"]
executed_pages = ["gallery", "gallery-trained"]
numpydoc_show_class_members = False
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3  # links to headings, as GitHub makes them
html_theme = "furo"
html_title = "scalinglab"
html_show_copyright = False
exclude_patterns = ["_build"]
