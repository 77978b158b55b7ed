"""Parabolas through loss curves: their vertices, and how far noise-free vertices are from the optimum.

A sum of two powers is a parabola in the log of a size only near its minimum. On a real grid the least-squares parabola
has its vertex elsewhere, by a factor that depends on the two exponents and on the grid alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalinglab.errors import ConfigError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Approach2Bias:
    """What approach 2 gets wrong on noise-free data, as relative errors (0.01 = 1 % too large)."""

    budgets: pd.DataFrame  # flops, params_bias, tokens_bias of the vertex
    target: float  # FLOPs of the extrapolation
    params: float  # relative error of N* at the target
    tokens: float  # relative error of D* at the target
    exponent: float  # error of the exponent of N* (absolute)

    def to_frame(self) -> pd.DataFrame:
        """The budgets, one row each (a copy)."""
        return self.budgets.copy()


def parabola_bias(alpha: float, beta: float, grid_width: float, *, points: int = 15, offset: float = 1.0) -> float:
    """Relative error of the vertex of a parabola through noise-free points of A X^-alpha + B (C/X)^-beta in ln X.

    The grid is `points` log-spaced values from offset * X* / grid_width to offset * X* * grid_width. The error depends
    on neither A, B nor C, only on the exponents and on the grid: with x = ln(X / X*) the excess is proportional to
    beta e^(-alpha x) + alpha e^(beta x).

    Returns
    -------
    float
        vertex / X* - 1. For N of a Chinchilla surface call it with (alpha, beta), for D with (beta, alpha), for the
        depth of A d^-a + B L^-b at fixed N with (b, a/2).

    Raises
    ------
    ConfigError
        Exponents or offset not positive, grid_width not above 1, fewer than 3 points.
    """
    _check_grid(alpha, beta, grid_width, points, offset)
    x = np.linspace(-1, 1, points) * np.log(grid_width) + np.log(offset)
    return float(np.expm1(vertex_shift(x, alpha, beta)))


def depth_parabola_bias(a: float, b: float, grid_width: float, *, points: int = 5, offset: float = 1.0) -> float:
    """Relative error in L* of a parabola in ln L through A d^-a + B L^-b at fixed N = kappa L d^2 (`parabola_bias`)."""
    return parabola_bias(b, a / 2, grid_width, points=points, offset=offset)


def approach2_bias(
    alpha: float,
    beta: float,
    grid_width: float,
    *,
    points: int = 15,
    budgets: Sequence[float] = (1e17, 1e18, 1e19, 1e20, 1e21),
    target: float = 1e24,
    tokens_offset: float = 1.0,
    tokens_offset_last: float | None = None,
) -> Approach2Bias:
    """Approach 2 on noise-free Chinchilla runs, extrapolated: how wrong is it?

    Each budget has `points` runs log-spaced from 1/grid_width to grid_width around tokens_offset * D* (so around N* /
    tokens_offset); with `tokens_offset_last` the offset moves, linearly in ln C on the log scale, from `tokens_offset`
    at the first budget to that at the last. The vertices are then fitted by a power law and extrapolated to `target`.

    A constant grid shifts every vertex by the same factor: the exponent is right and the size is wrong by that factor
    at every scale. A drifting grid bends the exponent too. Source: Czech et al. 2026, arXiv 2603.22339.

    Raises
    ------
    ConfigError
        As `parabola_bias`; fewer than two distinct budgets.
    """
    at = as_budgets(budgets)
    if len(np.unique(at)) < 2:
        raise ConfigError("approach2_bias needs at least two distinct budgets to fit a power law")
    require_positive(target, "target")
    last = tokens_offset if tokens_offset_last is None else tokens_offset_last
    for offset in (tokens_offset, last):
        _check_grid(alpha, beta, grid_width, points, offset)
    log_c = np.log(at)
    position = (log_c - log_c.min()) / np.ptp(log_c)
    log_offset = (1 - position) * np.log(tokens_offset) + position * np.log(last)
    x = np.linspace(-1, 1, points) * np.log(grid_width)
    shift = np.array([vertex_shift(x - o, alpha, beta) for o in log_offset])  # of ln N; ln D moves the other way
    slope, level = line(log_c, shift)
    at_target = level + slope * np.log(target)
    frame = pd.DataFrame({"flops": at, "params_bias": np.expm1(shift), "tokens_bias": np.expm1(-shift)})
    return Approach2Bias(frame, float(target), float(np.expm1(at_target)), float(np.expm1(-at_target)), slope)


def vertex_shift(x: Array, alpha: float, beta: float) -> float:
    """ln of vertex over optimum for a grid x = ln(X / X*)."""
    # expm1 and the difference from the (flat) optimum keep the digits on narrow grids
    excess = beta * np.expm1(-alpha * x) + alpha * np.expm1(beta * x)
    return vertex(x, excess)[0]


def vertex(x: Array, y: Array) -> tuple[float, float, float, float]:
    """Vertex (x, y), its standard error in x (delta method, NaN below four points) and the curvature of a parabola."""
    centre, scale = x.mean(), max(float(np.ptp(x)) / 2, np.finfo(float).tiny)
    z = (x - centre) / scale
    design = np.stack([np.ones_like(z), z, z * z], axis=1)
    q, r = np.linalg.qr(design)
    if abs(r[2, 2]) < 1e-10:
        return np.nan, np.nan, np.nan, np.nan  # fewer than three distinct sizes
    c0, c1, c2 = np.linalg.solve(r, q.T @ y)
    with np.errstate(all="ignore"):
        at = -c1 / (2 * c2)
        error = np.nan
        if len(z) > 3:
            variance = np.sum((y - design @ np.array([c0, c1, c2])) ** 2) / (len(z) - 3)
            gradient = np.array([0.0, -1 / (2 * c2), c1 / (2 * c2 * c2)])
            inverse = np.linalg.inv(r)
            error = float(np.sqrt(variance) * np.linalg.norm(inverse.T @ gradient))
        return centre + scale * at, c0 + c1 * at / 2, scale * error, 2 * c2 / scale**2


def line(x: Array, y: Array) -> tuple[float, float]:
    """Slope and value at x = 0 of the least-squares line."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return slope, float(y.mean() - slope * x.mean())


def as_budgets(flops: ArrayLike) -> Array:
    """FLOP budgets as a float array [K]; raises ConfigError unless all are positive and finite."""
    at = np.atleast_1d(np.asarray(flops, dtype=np.float64))
    if at.ndim != 1 or not at.size or not np.all(np.isfinite(at) & (at > 0)):
        raise ConfigError(f"budgets must be positive FLOPs, not {flops!r}")
    return at


def require_positive(value: float, name: str) -> float:
    """The value as a float; raises ConfigError, with its name, unless it is positive and finite."""
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be positive and finite, not {value}")
    return float(value)


def _check_grid(alpha: float, beta: float, grid_width: float, points: int, offset: float) -> None:
    for name, value in (("alpha", alpha), ("beta", beta), ("offset", offset)):
        require_positive(value, name)
    if not (np.isfinite(grid_width) and grid_width > 1):
        raise ConfigError(f"grid_width must be above 1 (the grid runs from 1/width to width), not {grid_width}")
    if points < 3:
        raise ConfigError(f"a parabola needs at least 3 points, not {points}")
