"""One module per family of figures; every figure is a pure function of results that returns a matplotlib Figure."""

from scalinglab.report.figures.benefit import depth_equivalence, depth_forest, depth_interaction
from scalinglab.report.figures.budgets import isoflop
from scalinglab.report.figures.coordinates import coords
from scalinglab.report.figures.curves import loss_vs_scale
from scalinglab.report.figures.depth import depth_profile, layer_removal
from scalinglab.report.figures.estimates import forest
from scalinglab.report.figures.optimum import frontier
from scalinglab.report.figures.power import depth_power
from scalinglab.report.figures.profiles import profile
from scalinglab.report.figures.rates import decomposition, lr_drift, lr_envelope
from scalinglab.report.figures.remainder import residuals
from scalinglab.report.figures.replications import pooled_forest
from scalinglab.report.figures.specification import depth_specifications
from scalinglab.report.figures.valley import shape_valley
from scalinglab.report.registry import FIGURES, figure, save_figure

__all__ = [
    "FIGURES",
    "coords",
    "decomposition",
    "depth_equivalence",
    "depth_forest",
    "depth_interaction",
    "depth_power",
    "depth_profile",
    "depth_specifications",
    "figure",
    "forest",
    "frontier",
    "isoflop",
    "layer_removal",
    "loss_vs_scale",
    "lr_drift",
    "lr_envelope",
    "pooled_forest",
    "profile",
    "residuals",
    "save_figure",
    "shape_valley",
]
