"""A paper from its tables: every figure, table and number by one command, and what is stale by hash.

    from scalinglab.report.paper import build, check
    build("paper/paper.toml")  # rebuilds what is stale
    print(check("paper/paper.toml").text())

`paper.toml` declares the artefacts (`plan`), each made by a recipe (`registry`, `recipes`) from its inputs. `paper/manifest.json`
holds the sha256 of all that an artefact rests on: its inputs, its entry, and the code of its recipe (`manifest`, `hashing`).
The text is `main.tex`: a PDF where LaTeX is installed, and one page of HTML always (`documents`).
"""

from __future__ import annotations

from scalinglab.report.paper.building import Built, build
from scalinglab.report.paper.manifest import Checked, check
from scalinglab.report.paper.plan import Artefact, Paper, read_paper
from scalinglab.report.paper.products import Number, Table
from scalinglab.report.paper.registry import RECIPES, Analysis, Options, Recipe, recipe

__all__ = [
    "RECIPES",
    "Analysis",
    "Artefact",
    "Built",
    "Checked",
    "Number",
    "Options",
    "Paper",
    "Recipe",
    "Table",
    "build",
    "check",
    "read_paper",
    "recipe",
]
