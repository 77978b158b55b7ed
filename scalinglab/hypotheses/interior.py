"""Is there an optimum inside the range of shapes? A quadratic alone always has one: three conditions and a second opinion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.hypotheses.cells import Cells
from scalinglab.hypotheses.result import HypothesisTest, check_level, decide, numbers
from scalinglab.profiles import FiellerSet, fieller
from scalinglab.uncertainty import t_quantile

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratic:
    """Slope b1 + 2 b2 x of a quadratic in x with the covariance [2, 2] of (b1, b2) and its degrees of freedom."""

    b1: float
    b2: float
    cov: Array
    df: float
    n_runs: int = 0

    def slope(self, x: float) -> tuple[float, float]:
        """Slope at x and its standard error."""
        c = np.array([1.0, 2.0 * x])
        return self.b1 + 2 * self.b2 * x, math.sqrt(max(0.0, float(c @ self.cov @ c)))


def quadratic(cells: Cells) -> Quadratic:
    """Quadratic through cell means with an intercept per group: the profile that all groups share.

    Raises
    ------
    ConfigError
        Fewer than three x, or no degrees of freedom left.
    """
    centre = float(cells.x.mean())
    x = cells.x - centre
    own = (cells.group[:, None] == np.arange(len(cells.levels))).astype(np.float64)
    X = np.hstack([x[:, None], (x * x)[:, None], own])
    df = len(x) - X.shape[1]
    if df < 1 or len(np.unique(np.round(x, 9))) < 3:
        raise ConfigError(
            f"{len(x)} cells at {len(np.unique(x))} depths leave no error for a quadratic: train more depths"
        )
    b = np.linalg.lstsq(X, cells.mean, rcond=None)[0]
    e = cells.mean - X @ b
    V = np.linalg.inv(X.T @ X)[:2, :2] * float(e @ e) / df
    M = np.array([[1.0, -2 * centre], [0.0, 1.0]])  # back to x as given
    b1, b2 = (M @ b[:2]).tolist()
    return Quadratic(b1, b2, M @ V @ M.T, float(df), cells.n_runs)


def u_shape(curve: Quadratic, low: float, high: float, *, alpha: float = 0.05) -> HypothesisTest:
    """Lind & Mehlum (2010) test of a minimum inside (low, high): falling at the lower end and rising at the upper one.

    p is the larger of two one-sided p (intersection-union); the null is that the curve is monotone or has a maximum.

    Raises
    ------
    ConfigError
        low >= high, or a curve without error.
    """
    from scipy.special import stdtr

    if not low < high:
        raise ConfigError(f"the range is ({low}, {high}): low must lie below high")
    (s0, se0), (s1, se1) = curve.slope(low), curve.slope(high)
    if not (se0 > 0 and se1 > 0):
        raise ConfigError("the slopes have no standard error: the quadratic needs cells beyond its parameters")
    p0, p1 = float(stdtr(curve.df, s0 / se0)), float(stdtr(curve.df, -s1 / se1))
    p = max(p0, p1)
    return HypothesisTest(
        "interior minimum (Lind-Mehlum)", "the loss is monotone, or has a maximum, in the range", p,
        decide(p, alpha, found="the loss falls at the lower and rises at the upper end of the range",
               unresolved="a minimum inside the range is not shown"),
        alpha, min(-s0 / se0, s1 / se1), (curve.df,), level=1 - alpha, method="intersection-union of two one-sided t",
        n_runs=curve.n_runs, assumptions=("the profile is a quadratic over the whole range", "estimates follow t"),
        diagnostics={"slope at low": s0, "p low": p0, "slope at high": s1, "p high": p1},
    )  # fmt: skip


@dataclass(frozen=True)
class Optimum:
    """Whether an optimum inside the range is established, and where.

    label : INTERIOR_OPTIMUM, MONOTONE_IN_RANGE or OPTIMUM_UNRESOLVED. location : Fieller set of the vertex, in x.
    curvature_p : one-sided p of b2 > 0. conditions : which of the three hold.
    """

    label: str
    location: FiellerSet
    u_shape: HypothesisTest
    curvature_p: float
    conditions: dict[str, bool]
    decision: str


def interior_optimum(curve: Quadratic, low: float, high: float, *, level: float = 0.95) -> Optimum:
    """Three conditions for an optimum in (low, high): convex (one-sided p < .025), Lind-Mehlum (.05), Fieller set inside.

    MONOTONE_IN_RANGE when the slopes at both ends have one sign, each one-sided at .05: a quadratic is then monotone between
    them. Both labels lean on the quadratic: on a loss that falls steeply and then levels off all three conditions hold in a fifth
    of simulated cases. Ask `two_lines` too, which does not.

    Raises
    ------
    ConfigError
        See `u_shape`.
    """
    from scipy.special import stdtr

    check_level(level)
    test = u_shape(curve, low, high)
    se = math.sqrt(float(curve.cov[1, 1]))
    p = float(stdtr(curve.df, -curve.b2 / se))
    V = curve.cov
    where = fieller(-curve.b1, 2 * curve.b2, V[0, 0], 4 * V[1, 1], -2 * V[0, 1], df=curve.df, level=level)
    inside = where.kind == "interval" and low < where.low and where.high < high
    conditions = {"convex": p < 0.025, "falls then rises": bool(test.rejected), "located inside the range": inside}
    t = [s / e for s, e in (curve.slope(low), curve.slope(high))]
    q = t_quantile(0.95, curve.df)
    if all(conditions.values()):
        label, said = (
            "INTERIOR_OPTIMUM",
            f"the optimum is at x = {where.estimate:.4g} [{where.low:.4g}, {where.high:.4g}]",
        )
    elif min(t) > q or max(t) < -q:
        label, said = "MONOTONE_IN_RANGE", f"the loss {'rises' if t[0] > 0 else 'falls'} with x over the whole range"
    else:
        missing = ", ".join(name for name, fine in conditions.items() if not fine)
        label, said = "OPTIMUM_UNRESOLVED", f"unresolved: not shown: {missing}"
    return Optimum(label, where, test, p, conditions, said)


def two_lines(x: Array, y: Array, *, alpha: float = 0.05) -> HypothesisTest:
    """Two-lines test of a minimum (Simonsohn 2018): a falling line left and a rising line right of a break.

    No quadratic is assumed. The break is set by the "Robin Hood" rule: the flat stretch around the lowest point of a smooth
    curve (a cubic here, a quadratic below 7 points), then more of the flat stretch for the side with the weaker slope.
    Standard errors are HC3. Give cell means: one y per x and group, group means removed.

    Raises
    ------
    ConfigError
        Fewer than 6 points, or fewer than 3 different x on a side.
    """
    from scipy.special import stdtr

    x, y = numbers(x, "x", least=6), numbers(y, "y", least=6)
    if len(x) != len(y):
        raise ConfigError(f"x has {len(x)} and y {len(y)} values")
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    different = np.unique(x)
    if len(different) < 6:
        raise ConfigError(f"two lines need at least 6 different x; there are {len(different)}")
    flat = _flat_stretch(x, y)
    inner = (different[2], different[-3])  # three different x on each side
    t0, t1 = (abs(t) for t in _broken(x, y, float(np.clip(np.median(flat), *inner)))[0])
    cut = float(np.clip(np.quantile(flat, t1 / max(t0 + t1, 1e-300)), *inner))
    (t_left, t_right), (b_left, b_right), df = _broken(x, y, cut)
    p0, p1 = float(stdtr(df, t_left)), float(stdtr(df, -t_right))
    p = max(p0, p1)
    return HypothesisTest(
        "interior minimum (two lines)", "the loss is monotone, or has a maximum, in the range", p,
        decide(p, alpha, found=f"the loss falls up to x = {cut:.4g} and rises beyond",
               unresolved="a minimum inside the range is not shown"),
        alpha, min(-t_left, t_right), (float(df),), level=1 - alpha, method="two lines, HC3, Robin Hood break",
        n_runs=len(x), assumptions=("independent errors", "average slopes on either side of the break are what is asked for"),
        diagnostics={"break": cut, "slope left": b_left, "p left": p0, "slope right": b_right, "p right": p1},
    )  # fmt: skip


def _flat_stretch(x: Array, y: Array) -> Array:
    """x of the interior points whose smoothed value is within one standard error of the lowest smoothed one."""
    z = (x - x.mean()) / np.ptp(x)
    X = np.stack([z**k for k in range(4 if len(np.unique(x)) >= 7 else 3)], 1)
    H = X @ np.linalg.pinv(X)
    f = H @ y
    s2 = float(((y - f) ** 2).sum()) / max(1, len(y) - X.shape[1])
    inside = (x > x.min()) & (x < x.max())
    k = int(np.flatnonzero(inside)[f[inside].argmin()])
    return np.asarray(x[inside & (f <= f[k] + math.sqrt(s2 * H[k, k]))])


def _broken(x: Array, y: Array, cut: float) -> tuple[tuple[float, float], tuple[float, float], int]:
    """t and slope (HC3) of a line up to a break and of one from it, each with an intercept of its own."""
    made = [_robust_slope(x[side], y[side]) for side in (x <= cut, x >= cut)]
    (b0, s0), (b1, s1) = made
    return (b0 / max(s0, 1e-300), b1 / max(s1, 1e-300)), (b0, b1), len(x) - 4


def _robust_slope(x: Array, y: Array) -> tuple[float, float]:
    z = x - x.mean()
    sxx = float(z @ z)
    b = float(z @ y) / sxx
    e = y - y.mean() - b * z
    h = 1 / len(x) + z * z / sxx
    return b, float(np.sqrt(((z * e / np.maximum(1 - h, 1e-6)) ** 2).sum())) / sxx
