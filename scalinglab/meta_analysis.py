"""Random-effects meta-analysis: one estimate from several studies, with what differs between them.

    y_i = mu + b_i + e_i,   b_i ~ N(0, tau^2),   e_i ~ N(0, se_i^2)

mu is the mean of the population of studies, tau its standard deviation. The prediction interval is for the true effect of
a new study: where tau is large it says more than the interval of mu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalinglab.errors import ConfigError
from scalinglab.uncertainty import t_quantile

Array = NDArray[np.float64]
Heterogeneity = Literal["reml", "paule-mandel", "dersimonian-laird", "common"]
Width = Literal["hartung-knapp", "hartung-knapp, untruncated", "normal", "studies left out"]

_DRAWS = 8_000
_WIDTHS = ("hartung-knapp", "hartung-knapp, untruncated", "normal", "studies left out")


@dataclass(frozen=True)
class Pooled:
    """A pooled estimate.

    Attributes
    ----------
    estimate, se, low, high, df, level
        Mean of the population of studies with its interval (df infinite for "normal").
    tau, tau_low, tau_high
        Standard deviation between studies, with its Q-profile interval (Viechtbauer 2007).
    prediction
        Interval of the true effect of a new study, with the uncertainty of tau in it (see `predict`); NaN below three rows and for "common".
    Q, p_homogeneous, I2
        Cochran's Q with its p, and the share of the total variance that lies between studies (Higgins & Thompson 2002).
    weights
        Share of each row in the mean; sums to 1.
    shrunken, shrunken_se
        Best linear prediction of each row's own true effect: drawn towards the mean as far as its own error is large.
    k, studies
        Rows and studies pooled.
    """

    estimate: float
    se: float
    low: float
    high: float
    df: float
    level: float
    tau: float
    tau_low: float
    tau_high: float
    prediction: tuple[float, float]
    Q: float
    p_homogeneous: float
    I2: float
    weights: Array
    shrunken: Array
    shrunken_se: Array
    k: int
    studies: int
    heterogeneity: str
    width: str


def pool(
    effects: ArrayLike,
    ses: ArrayLike,
    *,
    heterogeneity: Heterogeneity = "reml",
    width: Width = "hartung-knapp",
    studies: Sequence[object] | None = None,
    level: float = 0.95,
) -> Pooled:
    """Pool k estimates with their standard errors under a random-effects model.

    Parameters
    ----------
    effects, ses
        One estimate per row [k] and its standard error [k]. An se on few degrees of freedom belongs widened first, see `widened`.
    heterogeneity
        Estimator of tau^2: restricted maximum likelihood (Raudenbush 2009), Paule & Mandel (1982), DerSimonian & Laird (1986),
        or none ("common").
    width
        Interval of the mean: Hartung & Knapp (2001) with t(k - 1), by default never narrower than the usual variance would make
        it (Roever, Knapp & Friede 2015); "normal" (Wald); or "studies left out": delete-one-study jackknife with t(studies - 1)
        for several rows per study (`studies`), whose errors may be correlated in any way. Rows of a study then share the weight
        of one (Hedges, Tipton & Johnson 2010).
    studies
        The study of each row; needed where a study has several rows.

    Raises
    ------
    ConfigError
        Fewer than two rows (three studies for "studies left out"), lengths that differ, values that are not finite, an se that
        is not positive, several rows per study without the interval that allows for them, or an unknown option.
    """
    y, s = np.asarray(effects, dtype=np.float64), np.asarray(ses, dtype=np.float64)
    if y.ndim != 1 or y.shape != s.shape:
        raise ConfigError(f"effects {y.shape} and ses {s.shape} must be one-dimensional and of one length")
    if len(y) < 2:
        raise ConfigError(f"{len(y)} estimate: pooling needs at least two")
    if not (np.isfinite(y).all() and np.isfinite(s).all() and (s > 0).all()):
        bad = int(np.flatnonzero(~(np.isfinite(y) & np.isfinite(s) & (s > 0)))[0])
        raise ConfigError(
            f"row {bad} has estimate {y[bad]:g} and se {s[bad]:g}: leave out what a study does not identify"
        )
    if width not in _WIDTHS:
        raise ConfigError(f"width {width!r} is not known: use {', '.join(_WIDTHS)}")
    if not 0 < level < 1:
        raise ConfigError(f"level is {level!r}: give a confidence level between 0 and 1, e.g. 0.95")
    names: list[object] = list(range(len(y))) if studies is None else list(studies)
    if len(names) != len(y):
        raise ConfigError(f"{len(names)} study names for {len(y)} estimates: give one each")
    many = len(set(names)) < len(y)
    if many and width != "studies left out":
        raise ConfigError("a study has several rows, whose errors are related: use width='studies left out'")
    k, v = len(y), s * s
    tau2 = between(y, v, heterogeneity)
    share = 1 / np.array([names.count(n) for n in names], dtype=np.float64)
    w = share / (v + tau2)
    mean = float(w @ y / w.sum())
    plain_se = math.sqrt(1 / w.sum())
    if width == "studies left out":
        se, df = _left_out(y, v, names, share, heterogeneity, mean)
    elif width == "normal":
        se, df = plain_se, math.inf
    else:
        q = float((w * (y - mean) ** 2).sum()) / (k - 1)
        se, df = plain_se * math.sqrt(max(1.0, q) if width == "hartung-knapp" else q), k - 1.0
    half = _quantile(0.5 + level / 2, df) * se
    ahead_too = k > 2 and heterogeneity != "common"
    ahead = predict(y, v, se=se, df=df, level=level, share=share) if ahead_too else (math.nan, math.nan)
    Q, p_homogeneous, I2 = _heterogeneity(y, v, tau2)
    tau_low, tau_high = tau_interval(y, v, level)
    pull = v / (v + tau2)
    shrunken = (1 - pull) * y + pull * mean
    shrunken_se = np.sqrt((1 - pull) ** 2 * v + pull**2 * (tau2 + se * se)) if tau2 > 0 else np.full(k, se)
    return Pooled(
        mean, se, mean - half, mean + half, df, level, math.sqrt(tau2), tau_low, tau_high, ahead, Q, p_homogeneous, I2,
        w / w.sum(), shrunken, shrunken_se, k, len(set(names)), heterogeneity, width,
    )  # fmt: skip


def widened(se: float, df: float, level: float = 0.95) -> float:
    """An se such that estimate +- z se is the estimate's own t interval: a normal model may then take it.

    Raises
    ------
    ConfigError
        se not positive or df below 1.

    Examples
    --------
    >>> round(widened(1.0, 5), 3)
    1.312
    """
    if not (se > 0 and math.isfinite(se) and df >= 1):
        raise ConfigError(f"se {se:g} on {df:g} degrees of freedom makes no interval")
    return se * _quantile(0.5 + level / 2, df) / _quantile(0.5 + level / 2, math.inf)


def between(y: Array, v: Array, heterogeneity: Heterogeneity = "reml") -> float:
    """Variance between studies tau^2 >= 0 from estimates y [k] and their sampling variances v [k].

    Raises
    ------
    ConfigError
        An unknown estimator.
    """
    k = len(y)
    if heterogeneity == "common":
        return 0.0
    w = 1 / v
    if heterogeneity == "dersimonian-laird":
        q = float((w * (y - w @ y / w.sum()) ** 2).sum())
        return max(0.0, (q - (k - 1)) / float(w.sum() - (w @ w) / w.sum()))
    if heterogeneity == "paule-mandel":
        return _root(partial(_excess, y, v, k - 1.0), _top(y, v))
    if heterogeneity == "reml":
        return _reml(y, v)
    raise ConfigError(
        f"heterogeneity {heterogeneity!r} is not known: use reml, paule-mandel, dersimonian-laird or common"
    )


def tau_interval(y: Array, v: Array, level: float = 0.95) -> tuple[float, float]:
    """Q-profile interval of tau: where the generalised Q passes the chi-square quantiles (Viechtbauer 2007)."""
    from scipy.special import chdtri

    k = len(y)
    ends: list[float] = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        target = float(chdtri(k - 1, tail))
        top = _top(y, v)
        while _q(y, v, top) > target:
            top *= 4
        ends.append(math.sqrt(_root(partial(_excess, y, v, target), top)))
    return ends[0], ends[1]


def predict(
    y: Array, v: Array, *, se: float, df: float, level: float = 0.95, share: Array | float = 1.0
) -> tuple[float, float]:
    """Prediction interval of a new study's true effect, tau^2 drawn from its confidence distribution.

    The usual mean +- t(k - 2) sqrt(tau^2 + se^2) takes tau as known and covers .86 where tau lies below the standard errors.
    Here tau^2 follows the distribution whose quantiles are the ends of the Q-profile intervals, as in Nagashima, Noma & Furukawa
    (2019); given tau^2 the mean is Hartung & Knapp's, but no surer than `se` on `df` degrees of freedom.
    """
    from scipy.special import chdtri

    k = len(y)
    top = _top(y, v)
    while _q(y, v, top) > chdtri(k - 1, 1 - 1e-4):
        top *= 4
    grid = np.concatenate([[0.0], np.geomspace(1e-9 * top, top, 400)])
    w = 1 / (v + grid[:, None])
    q = (w * (y - (w @ y / w.sum(1))[:, None]) ** 2).sum(1)  # falls as tau^2 grows
    mean = (share * w) @ y / (share * w).sum(1)
    own = np.sqrt(np.maximum(1.0, q / (k - 1)) / w.sum(1))
    chi2, z, t = _quadrature(k - 1, df)
    tau2 = np.interp(chi2, q[::-1], grid[::-1])
    made = np.interp(tau2, grid, mean) + np.sqrt(tau2) * z + np.maximum(np.interp(tau2, grid, own), se) * t
    low, high = np.quantile(made, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@cache
def _quadrature(chi2_df: int, t_df: float) -> tuple[Array, Array, Array]:
    """Points of a chi-square, a normal and a t distribution, always the same: no chance in the result."""
    from scipy.special import chdtri, ndtri, stdtrit

    u, z, t = np.random.default_rng(0).random((3, _DRAWS)) * (1 - 2e-9) + 1e-9
    return chdtri(chi2_df, u), ndtri(z), ndtri(t) if math.isinf(t_df) else stdtrit(t_df, t)


def leave_one_out(effects: pd.Series, ses: pd.Series, *, heterogeneity: Heterogeneity = "reml") -> pd.DataFrame:
    """The pooled estimate without each row in turn: index as `effects`, columns estimate, low, high, tau.

    Raises
    ------
    ConfigError
        Fewer than three rows.
    """
    if len(effects) < 3:
        raise ConfigError(f"{len(effects)} estimates: leaving one out needs at least three")
    rows = {}
    for name in effects.index:
        made = pool(effects.drop(name), ses.drop(name), heterogeneity=heterogeneity)
        rows[name] = {"estimate": made.estimate, "low": made.low, "high": made.high, "tau": made.tau}
    return pd.DataFrame.from_dict(rows, orient="index")


# ---- parts -------------------------------------------------------------------------------------------------------------
def _q(y: Array, v: Array, tau2: float) -> float:
    w = 1 / (v + tau2)
    return float((w * (y - w @ y / w.sum()) ** 2).sum())


def _excess(y: Array, v: Array, target: float, tau2: float) -> float:
    return _q(y, v, tau2) - target


def _top(y: Array, v: Array) -> float:
    """A tau^2 beyond any estimate: the spread alone would explain the estimates many times over."""
    return float(10 * (np.ptp(y) ** 2 + v.max()))


def _root(f: Callable[[float], float], top: float) -> float:
    """Where a falling function of tau^2 crosses 0 in [0, top]; 0 where it starts below."""
    from scipy.optimize import brentq

    if f(0.0) <= 0:
        return 0.0
    return float(brentq(f, 0.0, top, xtol=1e-14 * top, rtol=1e-12))


def _reml(y: Array, v: Array) -> float:
    """Largest restricted likelihood over a grid of tau^2 (0 included), then refined around it.

    A grid first: with few studies of unequal precision the restricted likelihood can have two maxima.
    """
    from scipy.optimize import minimize_scalar

    def cost(tau2: Array) -> Array:  # [T] of tau^2 [T]
        w = 1 / (v + tau2[:, None])
        mean = w @ y / w.sum(1)
        made: Array = 0.5 * (-np.log(w).sum(1) + np.log(w.sum(1)) + (w * (y - mean[:, None]) ** 2).sum(1))
        return made

    top = _top(y, v)
    grid = np.concatenate([[0.0], np.geomspace(1e-8 * top, top, 97)])
    values = cost(grid)
    i = int(values.argmin())
    ends = math.sqrt(grid[max(0, i - 1)]), math.sqrt(grid[min(len(grid) - 1, i + 1)])
    # the square root makes the cost smooth where tau^2 is small
    found = minimize_scalar(
        lambda r: float(cost(np.array([r * r]))[0]),
        bounds=ends,
        method="bounded",
        options={"xatol": 1e-9 * math.sqrt(top)},
    )
    return float(found.x**2) if found.fun < values[0] - 1e-12 else 0.0


def _heterogeneity(y: Array, v: Array, tau2: float) -> tuple[float, float, float]:
    from scipy.special import chdtrc

    k, w = len(y), 1 / v
    Q = _q(y, v, 0.0)
    typical = (k - 1) * w.sum() / (w.sum() ** 2 - w @ w)
    return Q, float(chdtrc(k - 1, Q)), float(tau2 / (tau2 + typical))


def _left_out(
    y: Array, v: Array, names: list[object], share: Array, heterogeneity: Heterogeneity, mean: float
) -> tuple[float, float]:
    """Delete-one-study jackknife of the mean (CR3): (G - 1) / G sum of squares about the estimate, with t(G - 1)."""
    known = list(dict.fromkeys(names))
    if len(known) < 3:
        raise ConfigError(f"{len(known)} studies: leaving studies out needs at least three")
    code = np.array([known.index(n) for n in names])
    means = []
    for g in range(len(known)):
        keep = code != g
        w = share[keep] / (v[keep] + (between(y[keep], v[keep], heterogeneity) if keep.sum() > 1 else 0.0))
        means.append(float(w @ y[keep] / w.sum()))
    moved = np.array(means) - mean
    return math.sqrt((len(known) - 1) / len(known) * float(moved @ moved)), len(known) - 1.0


def _quantile(probability: float, df: float) -> float:
    if math.isinf(df):
        from scipy.special import ndtri

        return float(ndtri(probability))
    return t_quantile(probability, df)
