"""An empty figure in the house style, for recipes that draw their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from matplotlib.figure import Figure

from scalinglab.report import style


@contextmanager
def canvas(width: style.Width, height: float) -> Iterator[Figure]:
    """A figure to draw on inside the block; afterwards its places are fixed: one figure, one file."""
    with style.styled():
        figure = style.new_figure(width, height)
        yield figure
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
