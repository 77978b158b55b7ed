"""A shape for a budget, with its uncertainty and the loss given up around it.

A valley of loss over aspect ratio is flat, so a recommendation is a range: the optimum with its interval, the shapes that
give up less than a tolerance, and what rounding to a shape that can be built costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.depth_benefit.estimands import depth_of
from scalinglab.depth_benefit.valley import POINTS, kappa_of, loss_over_aspect, sampled_aspects, shaped_surface, vertex
from scalinglab.errors import ConfigError
from scalinglab.frontier import optimal
from scalinglab.profiles import optimal_aspect
from scalinglab.shapes import FlopConvention
from scalinglab.uncertainty import t_quantile

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ShapeRecommendation:
    """A shape for a budget, and how much it matters.

    depth, width : whole numbers near the optimum. aspect [aspect_low, aspect_high] : optimum and its interval (0, inf where it
    isn't located). params, tokens : N and D. loss : predicted there [loss_low, loss_high]. rounding : loss given up by the
    whole shape (nats). valley : smallest and largest aspect ratio that give up less than `tolerance` at the point estimate;
    safe : those that do with 95 % confidence (one-sided), None where there is none.
    curve : aspect, given_up and its upper bound over the sampled range. located : whether the runs locate an optimum.
    extrapolated : the optimum or the size lies outside the runs. notes : in words.
    """

    depth: int
    width: int
    aspect: float
    aspect_low: float
    aspect_high: float
    params: float
    tokens: float
    loss: float
    loss_low: float
    loss_high: float
    rounding: float
    tolerance: float
    valley: tuple[float, float]
    safe: tuple[float, float] | None
    curve: pd.DataFrame
    located: bool
    extrapolated: bool
    notes: tuple[str, ...]

    def summary(self) -> str:
        """The recommendation in words."""
        lines = [
            f"{self.depth} blocks x width {self.width} (N = {self.params:.3g}, D = {self.tokens:.3g}): predicted loss "
            f"{self.loss:.4f} [{self.loss_low:.4f}, {self.loss_high:.4f}] nats",
            f"  best width / depth {self.aspect:.3g} [{self.aspect_low:.3g}, {self.aspect_high:.3g}]",
            f"  between {self.valley[0]:.3g} and {self.valley[1]:.3g} less than {self.tolerance:.2g} nats are given up",
        ]
        if self.safe is None:
            lines.append("  no shape is shown to give up less than that with 95 % confidence")
        else:
            lines.append(f"  with 95 % confidence between {self.safe[0]:.3g} and {self.safe[1]:.3g}")
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


def recommend_shape(
    fit: Fit,
    *,
    budget: float,
    by: Literal["params", "flops"] = "params",
    tokens: float | None = None,
    tokens_per_param: float = 20.0,
    tolerance: float = 0.002,
    group: str | None = None,
    kappa: float | None = None,
    width_multiple: int = 64,
    convention: FlopConvention = "6n",
    vocab: int | None = None,
    context: int | None = None,
    level: float = 0.95,
) -> ShapeRecommendation:
    """The shape that a fitted law recommends for a budget, with its uncertainty and the loss given up around it.

    Parameters
    ----------
    fit : of a law that reads shape ("shape", "width_depth", ...).
    budget, by : parameters N, or training FLOPs of `convention`; at FLOPs N and D are the compute-optimal ones.
    tokens, tokens_per_param : D at equal N.
    tolerance : nats that may be given up; .002 is about what one seed's luck is worth.
    width_multiple : the recommended width is a multiple of it.

    Raises
    ------
    ConfigError
        A budget or tolerance that isn't positive, a law without shape, or a crossed fit without group.

    Notes
    -----
    The valley is searched inside the aspect ratios of the runs only: a minimum at their edge is a statement about the runs,
    not an optimum, and is flagged.
    """
    if not (math.isfinite(budget) and budget > 0) or not tolerance > 0:
        raise ConfigError(f"budget={budget} and tolerance={tolerance} must be positive")
    if by not in ("params", "flops"):
        raise ConfigError(f"by={by!r} is not known: a budget is in 'params' or 'flops'")
    surface = shaped_surface(fit, group)
    kappa = kappa_of(fit) if kappa is None else kappa
    low_r, high_r = sampled_aspects(fit)
    notes: list[str] = []
    if by == "flops":
        found = optimal(
            fit, flops=budget, flops_convention=convention, group=group, kappa=kappa, vocab=vocab, context=context
        ).table.iloc[0]
        if not found["valid"]:
            raise ConfigError(
                f"no compute-optimal size and shape at {budget:.3g} FLOPs: {found['reason']}; give by='params'"
            )
        n, d = float(found["params"]), float(found["tokens"])
    else:
        n, d = float(budget), tokens or tokens_per_param * float(budget)
    grid = np.exp(np.linspace(math.log(low_r), math.log(high_r), POINTS))
    point = loss_over_aspect(surface, fit.params.to_frame().T.astype(float), n, d, grid, kappa)[0]
    moved = loss_over_aspect(surface, fit.jackknife.params, n, d, grid, kappa)
    best = int(point.argmin())
    edge = best in (0, POINTS - 1)
    aspect = float(grid[best]) if edge else vertex(np.log(grid), point, best)
    low, high, located = _limits(fit, group, grid, moved, edge, level)
    if edge:
        notes.append("the loss is lowest at the edge of the aspect ratios that were run: train shapes beyond it")
    if not located:
        notes.append("the runs don't locate an optimum: any shape of the valley is as good a choice")
    at_best = loss_over_aspect(surface, fit.params.to_frame().T.astype(float), n, d, np.array([aspect]), kappa)[0, 0]
    depth = max(1, round(depth_of(n, aspect, kappa)))
    width = max(width_multiple, width_multiple * round(math.sqrt(n / (kappa * depth)) / width_multiple))
    built = loss_over_aspect(surface, fit.params.to_frame().T.astype(float), n, d, np.array([width / depth]), kappa)[
        0, 0
    ]
    given = point - at_best
    # against the best shape of the point estimate, held fixed: its own choice is not re-made in each refit
    reference = loss_over_aspect(surface, fit.jackknife.params, n, d, np.array([aspect]), kappa)
    gap = moved - reference
    g = len(gap)
    se = np.sqrt((g - 1) / g * ((gap - given) ** 2).sum(0))
    upper = given + t_quantile(level, fit.jackknife.df) * se
    spread = np.sqrt((g - 1) / g * ((reference[:, 0] - at_best) ** 2).sum())
    half = t_quantile(0.5 + level / 2, fit.jackknife.df) * spread
    sizes = fit.runs["params"].astype(float)
    outside = not sizes.min() * 0.999 <= n <= sizes.max() * 1.001
    if outside:
        notes.append(f"N = {n:.3g} lies outside the runs ({sizes.min():.3g} to {sizes.max():.3g}): extrapolated")
    return ShapeRecommendation(
        depth, width, aspect, low, high, n, d, float(at_best), float(at_best - half), float(at_best + half),
        float(built - at_best), tolerance, _stretch(grid, given, best, tolerance) or (aspect, aspect),
        _stretch(grid, upper, best, tolerance), pd.DataFrame({"aspect": grid, "given_up": given, "upper": upper}), located,
        bool(edge or outside), tuple(notes),
    )  # fmt: skip


def _limits(
    fit: Fit, group: str | None, grid: Array, moved: Array, edge: bool, level: float
) -> tuple[float, float, bool]:
    """Interval of the best aspect ratio: Fieller where the law is "shape", else the jackknife of ln r*."""
    if fit.law.key == "shape":
        found = optimal_aspect(fit, level=level, group=group)
        if found.kind == "interval":
            return found.low, found.high, True
        return 0.0, math.inf, False
    best = moved.argmin(1)
    if edge or ((best == 0) | (best == len(grid) - 1)).any():
        return 0.0, math.inf, False
    x = np.log(grid)
    at = np.array([math.log(vertex(x, row, int(k))) for row, k in zip(moved, best, strict=True)])
    g = len(at)
    centre = float(at.mean())
    half = t_quantile(0.5 + level / 2, fit.jackknife.df) * math.sqrt((g - 1) / g * float(((at - centre) ** 2).sum()))
    return math.exp(centre - half), math.exp(centre + half), True


def _stretch(grid: Array, values: Array, best: int, tolerance: float) -> tuple[float, float] | None:
    """Aspect ratios around the best one where `values` stay below the tolerance, ends by linear interpolation in ln r."""
    if not values[best] < tolerance:
        return None
    x = np.log(grid)
    ends = []
    for step in (-1, 1):
        k = best
        while 0 <= k + step < len(grid) and values[k + step] < tolerance:
            k += step
        if 0 <= k + step < len(grid):
            share = (tolerance - values[k]) / (values[k + step] - values[k])
            ends.append(math.exp(float(x[k] + share * (x[k + step] - x[k]))))
        else:
            ends.append(float(grid[k]))
    return ends[0], ends[1]
