"""Figures of one fit as files: the named ones, or all that suit its law."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalinglab.errors import ConfigError, ScalinglabError
from scalinglab.report.figures import FIGURES, save_figure

if TYPE_CHECKING:
    from scalinglab.fitting import Fit


def draw(
    fit: Fit, folder: Path, *, names: Sequence[str] = (), formats: Sequence[str] = ("png", "pdf")
) -> tuple[list[Path], dict[str, str]]:
    """Write figures of a fit into a folder.

    Returns the files, and for each figure that does not suit this fit the reason. A figure that was asked for by name and
    does not suit is an error.

    Raises
    ------
    ConfigError
        An unknown name; the message lists the figures.
    """
    unknown = [n for n in names if n not in FIGURES]
    if unknown:
        raise ConfigError(f"figure {unknown[0]!r} is not known; there are {', '.join(sorted(FIGURES))}")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    skipped: dict[str, str] = {}
    for name in names or _of_fits():
        try:
            drawn = FIGURES[name](fit)
        except ScalinglabError as error:
            if names:
                raise
            skipped[name] = str(error)
            continue
        written += [save_figure(drawn, folder / f"{name}.{kind}") for kind in formats]
    return written, skipped


def _of_fits() -> list[str]:
    """Figures whose first argument is a fit; the others draw reports, probes and checks."""
    first = {name: next(iter(inspect.signature(make).parameters.values())) for name, make in FIGURES.items()}
    return [name for name, parameter in first.items() if "Fit" in str(parameter.annotation)]
