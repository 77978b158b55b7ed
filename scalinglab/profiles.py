"""Intervals of one quantity at a time: profile likelihood, Fieller sets of ratios, the delta method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.encoding import encode
from scalinglab.errors import ConfigError
from scalinglab.solver import COLLAPSED, solve
from scalinglab.uncertainty import Interval, t_quantile

if TYPE_CHECKING:
    from scalinglab.fitting import Fit

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """Profile of the objective in one parameter: `values`, `statistic` (0 at the optimum), threshold and interval.

    A side that never crosses the threshold inside the searched range is open: low or high is then infinite (0 for the low
    end of an amplitude).
    """

    name: str
    values: Array
    statistic: Array
    threshold: float
    low: float
    high: float
    level: float

    @property
    def bounded(self) -> bool:
        """Whether both sides cross the threshold: the parameter is identified. An amplitude's low of 0 is an open side."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high) and self.low != 0.0)


def profile(fit: Fit, name: str, *, level: float = 0.95, points: int = 41) -> Profile:
    """Profile likelihood interval: where n ln(RSS(theta) / RSS_min) crosses the F-calibrated threshold.

    With several rows per run the likelihood of independent rows is scaled so that its curvature at the optimum is the
    by-run jackknife's precision of this parameter (Chandler & Bate 2007), with t(G - 1): the shape of the profile, the
    width of the clusters. Amplitudes are searched on the log scale.

    Raises
    ------
    ConfigError
        The name is no free parameter, or the estimator is no likelihood (Huber, Robust).
    """
    from scipy.special import fdtri

    if not fit.law.in_algebra:
        raise ConfigError(f"profile: law {fit.law.key!r} is outside the algebra; use bootstrap")
    if not fit.estimator.likelihood:
        raise ConfigError(
            f"profile: {fit.estimator.label} is no likelihood; use jackknife or bootstrap, or fit with Gaussian()"
        )
    encoding = encode(fit.law, fit.runs, centred=False)
    slot = encoding.slots.get(name)
    if slot is None or slot.position is None:
        raise ConfigError(f"profile: {name!r} is no free parameter; the fit has {', '.join(encoding.names)}")
    theta = encoding.internal(dict(fit.params))
    at = slot.position
    y, w = fit.log_loss, fit.weights
    se = max(float(fit.jackknife.se[name]), 1e-6)
    if slot.kind == "amplitude":
        se = min(2.0, se / max(float(fit.params[name]), 1e-12)) if fit.params[name] > 0 else 1.0
    centre = theta[at] if theta[at] > COLLAPSED else -8.0
    frozen = np.zeros(encoding.problem.size, bool)
    frozen[at] = True
    G, n, p = fit.n_runs, len(y), encoding.problem.size
    clustered = n > G
    if clustered:
        threshold = float(fdtri(1, G - 1, level))
    else:
        threshold = n * float(np.log1p(fdtri(1, max(1, n - p), level) / max(1, n - p)))
    reach = 4.0
    for _ in range(4):  # widen until both sides cross
        grid = centre + se * reach * np.linspace(-1, 1, points | 1)
        starts = np.repeat(theta[None], len(grid), 0)
        starts[:, at] = grid
        found = solve(
            encoding.problem, starts, y, w, fit.estimator, frozen=frozen, scale=np.full((len(grid), 1), fit.scale)
        )
        objective = found.objective
        if fit.estimator.needs_scale:
            statistic = 2 * (objective - fit.objective)
        else:
            statistic = n * np.log(np.maximum(objective, 1e-300) / max(fit.objective, 1e-300))
        if clustered:
            statistic = statistic * _clustering(statistic, grid, se, at_zero=theta[at] <= COLLAPSED, floor=G / n)
        if statistic[0] > threshold and statistic[-1] > threshold:
            break
        reach *= 2.5
    values = np.exp(grid) if slot.kind in ("amplitude", "exponent") else grid
    mid = len(grid) // 2
    low = _crossing(grid[: mid + 1][::-1], statistic[: mid + 1][::-1], threshold)
    high = _crossing(grid[mid:], statistic[mid:], threshold)
    if slot.kind in ("amplitude", "exponent"):
        low, high = (
            (0.0 if not np.isfinite(low) else float(np.exp(low))),
            (float(np.exp(high)) if np.isfinite(high) else np.inf),
        )
    else:
        low, high = (-np.inf if not np.isfinite(low) else low), high
    return Profile(name, values, np.maximum(statistic, 0.0), float(threshold), low, high, level)


def _clustering(statistic: Array, grid: Array, se: float, *, at_zero: bool, floor: float) -> float:
    """Factor that gives the statistic the curvature 1 / se^2 at the optimum; runs / rows where it has none there."""
    mid = len(grid) // 2
    curvature = (statistic[mid - 1] + statistic[mid + 1]) / 2 / (grid[mid + 1] - grid[mid]) ** 2
    if at_zero or not curvature > 0:
        return floor
    return float(1.0 / (se * se * curvature))


def _crossing(x: Array, s: Array, threshold: float) -> float:
    """First x (moving outwards) where s passes the threshold, linear between points; inf when it never does."""
    above = np.flatnonzero(s > threshold)
    if not len(above) or above[0] == 0:
        return np.inf
    k = above[0]
    root = np.sqrt(np.maximum(s[[k - 1, k]], 0.0))  # nearly linear in x around the optimum, as s is nearly quadratic
    t = (np.sqrt(threshold) - root[0]) / max(root[1] - root[0], 1e-300)
    return float(x[k - 1] + t * (x[k] - x[k - 1]))


@dataclass(frozen=True)
class FiellerSet:
    """Confidence set of a ratio: an interval, the outside of an interval, or everything. `kind` says which."""

    estimate: float
    kind: Literal["interval", "exclusive", "everything"]
    low: float
    high: float
    level: float


def fieller(
    a: float, b: float, var_a: float, var_b: float, cov: float, *, df: float, level: float = 0.95
) -> FiellerSet:
    """Confidence set of a / b (Fieller 1954): exact for normal a, b, and unbounded where b may be 0.

    "exclusive": the set is everything outside (low, high).
    """
    q2 = t_quantile(0.5 + level / 2, df) ** 2
    A, B, C = b * b - q2 * var_b, a * b - q2 * cov, a * a - q2 * var_a
    disc = B * B - A * C
    estimate = a / b if b != 0 else np.inf
    if disc < 0:
        return FiellerSet(estimate, "everything", -np.inf, np.inf, level)
    r1, r2 = sorted(((B - np.sqrt(disc)) / A, (B + np.sqrt(disc)) / A)) if A != 0 else (-np.inf, np.inf)
    return FiellerSet(estimate, "interval" if A > 0 else "exclusive", float(r1), float(r2), level)


def optimal_aspect(fit: Fit, *, level: float = 0.95, group: str | None = None) -> FiellerSet:
    """Fieller set of r* = r0 exp(-gamma1 / (2 gamma2)) from the jackknife covariance.

    group : level of the column that the fit is crossed with. kind "interval" means low < r* < high; "exclusive" or "everything" mean that the optimum is not located.
    """
    names = [n if n in fit.params else f"{n}[{group}]" for n in ("gamma1", "gamma2")]
    g1, g2 = names
    if fit.law.levels and not {g1, g2} <= set(fit.params.index):
        raise ConfigError(f"the fit has one optimum per {fit.law.by}: give group=, one of {', '.join(fit.law.levels)}")
    if g1 not in fit.params or g2 not in fit.params:
        raise ConfigError(
            f"law {fit.law.key!r} has no {g1}, {g2}: the optimal aspect ratio is a parameter of the shape laws"
        )
    made = fit.jackknife
    V = made.cov
    s = fieller(fit.params[g1], fit.params[g2], V.loc[g1, g1], V.loc[g2, g2], V.loc[g1, g2], df=made.df, level=level)
    r0 = fit.law.constants["r0"]
    ends = sorted((float(r0 * np.exp(-s.low / 2)), float(r0 * np.exp(-s.high / 2))))
    return FiellerSet(float(r0 * np.exp(-s.estimate / 2)), s.kind, ends[0], ends[1], level)


def delta(fit: Fit, fn: Callable[[pd.DataFrame], Array], *, level: float = 0.95) -> Interval:
    """Delta-method interval of a smooth function of the parameters, with the jackknife covariance."""
    replicates, back = _coordinates(fit)
    p = replicates(fit.params.to_frame().T)[0]
    h = np.maximum(np.abs(p), 1e-2) * 1e-6
    up, down = back(p + np.diag(h)), back(p - np.diag(h))
    gradient = ((np.asarray(fn(up)) - np.asarray(fn(down))).T / (2 * h)).T
    point = np.asarray(fn(fit.params.to_frame().T), dtype=np.float64)[0]
    moves = replicates(fit.jackknife.params) - p
    V = (len(moves) - 1) / len(moves) * moves.T @ moves
    se = np.sqrt(np.einsum("p...,pq,q...->...", gradient, V, gradient))
    q = t_quantile(0.5 + level / 2, fit.jackknife.df)
    return Interval(
        point,
        se,
        point - q * se,
        point + q * se,
        fit.jackknife.df,
        level,
        "delta method, jackknife covariance",
        np.isfinite(se),
    )


def _coordinates(fit: Fit) -> tuple[Callable[[pd.DataFrame], Array], Callable[[Array], pd.DataFrame]]:
    """Parameter frames to coordinates in which a law is nearly linear, and back.

    Amplitudes count by the logarithm of their term at the centre of the data: A and alpha trade off along a curve, which no
    covariance on natural scales can describe. The floor stays in nats, since it may be 0.
    """
    names = list(fit.params.index)
    if not fit.law.in_algebra:
        return (lambda p: p[names].to_numpy(np.float64)), (lambda z: pd.DataFrame(z, columns=names))
    encoding = fit.encoding
    floors = [i for i, c in enumerate(encoding.coordinates) if c.split("[")[0] == fit.law.floor]

    def forth(params: pd.DataFrame) -> Array:
        z = np.stack([encoding.internal(row) for row in params.to_dict("records")])
        z[:, floors] = params[[encoding.coordinates[i] for i in floors]].to_numpy(np.float64)
        return z

    def back(z: Array) -> pd.DataFrame:
        theta = z.copy()
        theta[:, floors] = 0.0
        made = encoding.frame(theta)
        for i in floors:
            made[encoding.coordinates[i]] = z[:, i]
        return made

    return forth, back
