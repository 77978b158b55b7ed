"""The loss of a fitted law over aspect ratio at one size: what strategies and recommendations are read from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.optimum import Surface

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]
POINTS = 201  # aspect ratios, evenly spaced in ln; the best one is then refined by a parabola


def shaped_surface(fit: Fit, group: str | None) -> Surface:
    """The loss surface of a group's law; raises ConfigError where the law has no shape in it."""
    surface = Surface.of(fit, group=group, at={})
    if not surface.has_shape:
        raise ConfigError(f"law {fit.law.key!r} has no shape in it: fit 'shape' or 'width_depth'")
    return surface


def loss_over_aspect(surface: Surface, params: pd.DataFrame, n: float, d: float, aspect: Array, kappa: float) -> Array:
    """Loss [R, m] of shapes of N parameters with aspect ratios [m]."""
    depth = np.cbrt(n / (kappa * aspect * aspect))
    columns = {
        "params": np.full_like(aspect, n), "tokens": np.full_like(aspect, d), "aspect": aspect, "depth": depth,
        "width": aspect * depth, "flops": np.full_like(aspect, 6 * n * d),
    }  # fmt: skip
    r0 = dict(surface.fit.law.constants).get("r0")
    if r0 is not None:
        columns["u"] = np.log(aspect / float(r0))
    return surface.loss(params, {k: v[None] for k, v in columns.items()})


def sampled_aspects(fit: Fit) -> tuple[float, float]:
    """Smallest and largest width / depth among the fit's runs; raises ConfigError where they aren't known."""
    if not {"depth", "width"} <= set(fit.runs):
        raise ConfigError("the fit's runs have no depth and width: the range of shapes isn't known")
    r = (fit.runs["width"] / fit.runs["depth"]).astype(float)
    return float(r.min()), float(r.max())


def kappa_of(fit: Fit) -> float:
    """Median of N / (L d²) over the fit's runs; 12, the textbook value, where they don't say."""
    if {"params", "depth", "width"} <= set(fit.runs):
        made = fit.runs["params"].astype(float) / (
            fit.runs["depth"].astype(float) * fit.runs["width"].astype(float) ** 2
        )
        return float(made.median())
    return 12.0


def vertex(x: Array, y: Array, k: int) -> float:
    """exp of the vertex of the parabola through three neighbouring points."""
    a, b, c = y[k - 1 : k + 2]
    curvature = a - 2 * b + c
    shift = 0.5 * (a - c) / curvature if curvature > 0 else 0.0
    return math.exp(float(x[k] + shift * (x[1] - x[0])))
