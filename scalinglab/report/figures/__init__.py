"""One module per family of figures; every figure is a pure function of results that returns a matplotlib Figure."""

from scalinglab.report.figures.budgets import isoflop
from scalinglab.report.figures.coordinates import coords
from scalinglab.report.figures.curves import loss_vs_scale
from scalinglab.report.figures.depth import depth_profile, layer_removal
from scalinglab.report.figures.estimates import forest
from scalinglab.report.figures.optimum import frontier
from scalinglab.report.figures.profiles import profile
from scalinglab.report.figures.remainder import residuals
from scalinglab.report.figures.valley import shape_valley
from scalinglab.report.registry import FIGURES, figure, save_figure

__all__ = [
    "FIGURES",
    "coords",
    "depth_profile",
    "figure",
    "forest",
    "frontier",
    "isoflop",
    "layer_removal",
    "loss_vs_scale",
    "profile",
    "residuals",
    "save_figure",
    "shape_valley",
]
