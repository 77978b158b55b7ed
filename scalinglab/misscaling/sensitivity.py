"""Learning-rate sensitivity (Wortsman et al. 2023, arXiv:2309.14322): what a wrong learning rate costs on average.

    S = mean over learning rates of [min(loss, loss before training) - best loss]

Absolute: over one grid for all shapes, so that a drifting optimum costs. Relative: over a grid centred on each shape's own
optimum, the width of its basin alone. Absolute growing with depth while relative does not is drift; relative growing is
fragility.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from scalinglab.misscaling.curves import Array, Curves, interpolate
from scalinglab.misscaling.intake import Grids

REACH = math.log(4.0)  # of the relative grid, in ln lr: a factor 4 each way
_POINTS = 17


def sensitivity(grids: Grids, curves: Curves, *, reach: float = REACH) -> pd.DataFrame:
    """Absolute and relative sensitivity of each shape (nats).

    Returns
    -------
    DataFrame
        Columns of `grids.cells` and: absolute, relative (NaN where the grid does not reach so far), rates (learning rates
        of the absolute grid, those common to all shapes of the arm), cap ("before training", or "worst finite loss" where
        the table has no loss before training: then a divergence counts for less than it should).
    """
    mean = grids.mean
    finite = np.where(np.isfinite(mean), mean, -np.inf)
    initial = grids.cells["initial"].to_numpy(np.float64)
    cap = np.where(np.isfinite(initial), initial, finite.max(-1))
    best = np.where(curves.usable, curves.minimum, np.nan)
    absolute, rates = np.full(len(best), np.nan), np.zeros(len(best), int)
    for arm in range(len(grids.arms)):
        rows = np.flatnonzero(grids.arm == arm)
        sets = [set(np.round(grids.z[i][np.isfinite(grids.z[i])], 6)) for i in rows]
        common = np.array(sorted(set.intersection(*sets))) if sets else np.zeros(0)
        for i in rows:
            keep = np.isin(np.round(grids.z[i], 6), common)
            if keep.sum() >= 2:
                absolute[i], rates[i] = np.minimum(mean[i][keep], cap[i]).mean() - best[i], int(keep.sum())
    steps = np.linspace(-reach, reach, _POINTS)
    relative: Array = np.mean(
        [np.minimum(_read(grids, mean, curves, curves.optimum + d), cap) - best for d in steps], axis=0
    )
    told = np.where(np.isfinite(initial), "before training", "worst finite loss")
    kept = [c for c in ("architecture", "parametrization", "ladder", "depth", "width") if c in grids.cells]
    return grids.cells[kept].assign(absolute=absolute, relative=relative, rates=rates, cap=told)


def _read(grids: Grids, mean: Array, curves: Curves, at: Array) -> Array:
    """Loss at ln learning rates: the curve inside its window, the grid outside; NaN beyond the grid."""
    inside = (at >= curves.low) & (at <= curves.high)
    outside = interpolate(grids.z, np.where(np.isnan(mean), np.inf, mean), np.where(np.isfinite(at), at, -1e9))
    return np.where(inside, curves.at(np.where(np.isfinite(at), at, 0.0)), outside)
