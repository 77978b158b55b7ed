"""The figures by name, and the one place where a figure becomes a file."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

from matplotlib.figure import Figure

from scalinglab.errors import ConfigError
from scalinglab.report.style import styled
from scalinglab.tables import write_atomically

P = ParamSpec("P")

FIGURES: dict[str, Callable[..., Figure]] = {}

_METADATA: dict[str, dict[str, Any]] = {  # dates and versions left out: the same figure is the same file
    ".pdf": {"Creator": "scalinglab", "Producer": None, "CreationDate": None},
    ".png": {"Software": None},
    ".svg": {"Creator": "scalinglab", "Date": None},
}


def figure(name: str) -> Callable[[Callable[P, Figure]], Callable[P, Figure]]:
    """Register a function of results as the figure `name`; it is drawn inside the house style.

    Raises
    ------
    ConfigError
        The name is taken.
    """

    def register(function: Callable[P, Figure]) -> Callable[P, Figure]:
        if name in FIGURES:
            raise ConfigError(f"figure {name!r} is registered twice; give the second one another name")

        @functools.wraps(function)
        def draw(*args: P.args, **kwargs: P.kwargs) -> Figure:
            with styled():
                made = function(*args, **kwargs)
                _lay_out(made)
                made.set_layout_engine("none")  # places stay as they are: one figure, one file
            return made

        FIGURES[name] = draw
        return draw

    return register


def _lay_out(made: Figure) -> None:
    """Make ticks, which take their style from here, and find places: laying out does both, without the draw that would follow."""
    engine = made.get_layout_engine()
    if engine is None:
        made.draw_without_rendering()
    else:
        engine.execute(made)


def save_figure(fig: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PDF, PNG or SVG, atomically and without dates; returns the path.

    Raises
    ------
    ConfigError
        Another ending, or a folder that is not there.
    """
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in _METADATA:
        raise ConfigError(
            f"{target}: a figure is saved as {', '.join(_METADATA)}, not {kind or 'a name without ending'!r}"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: the folder {target.parent} does not exist; create it first")
    drawn = io.BytesIO()
    with styled():
        fig.savefig(drawn, format=kind[1:], metadata=_METADATA[kind])
    return write_atomically(target, drawn.getvalue())
