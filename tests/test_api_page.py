"""docs/api.md names what the package offers: each target exists, and nothing public is left out."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import scalinglab
from scalinglab.errors import ScalinglabError, ScalinglabWarning

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
NAMED = re.findall(r"\.\. (?:autofunction|autoclass|py:class):: (\S+)", PAGE)
MODULES = re.findall(r"\.\. automodule:: (\S+)", PAGE)


def found(name: str) -> object:
    module, _, last = (name if "." in name else f"scalinglab.{name}").rpartition(".")
    return getattr(import_module(module), last)


@pytest.mark.parametrize("name", NAMED)
def test_targets_exist_and_say_what_they_are(name: str) -> None:
    assert (found(name).__doc__ or "").strip()


def test_nothing_public_is_left_out() -> None:
    shown = {name.rpartition(".")[2] for name in NAMED}
    for name in scalinglab.__all__:
        there = getattr(scalinglab, name)
        error = isinstance(there, type) and issubclass(there, ScalinglabError | ScalinglabWarning)
        if callable(there) and not error:
            assert name in shown, name
    assert {"recommend_shape", "misscaling", "pool", "pooled_shape"} <= shown
    assert MODULES == ["scalinglab.hypotheses"]
