"""Sphinx configuration: `python -m sphinx -W docs docs/_build`."""

import scalinglab

project = "scalinglab"
author = "The scalinglab developers"
version = release = scalinglab.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx.ext.mathjax"]
numpydoc_show_class_members = False
myst_enable_extensions = ["colon_fence", "deflist"]
html_theme = "furo"
html_title = "scalinglab"
exclude_patterns = ["_build"]
